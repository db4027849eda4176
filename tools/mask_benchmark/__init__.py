"""Modules of ``tools/bench_mask.py``: implementations, measurement and output."""
