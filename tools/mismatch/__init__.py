"""Where the gap between the engine's and the trainer's probabilities comes from; the parts of
``mismatch_report.py``.
"""
