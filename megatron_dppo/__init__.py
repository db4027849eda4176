"""RL training backend for mixture-of-experts language models with DPPO (arXiv 2602.04879)."""

from pathlib import Path

__version__ = "0.1.0"

EXAMPLES = Path(__file__).parent / "examples"
"""Recipes, model configurations and the demo's files: in a clone a link to ``examples/``, in a wheel a copy."""
