"""The parts of ``tools/bench_mask.py``: who is measured, how, and how it is shown."""
