"""Faults planted on purpose: flipped bits in files (``flips.py``), failures at named points (``failpoints.py``)."""
