"""RL training backend for mixture-of-experts language models with DPPO (arXiv 2602.04879)."""

__version__ = "0.1.0"
