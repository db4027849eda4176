"""Modules of ``tools/bench_checkpoint.py``: the program of each rank."""
