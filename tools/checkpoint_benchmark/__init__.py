"""Modules of ``tools/bench_checkpoint.py``: what each rank runs."""
