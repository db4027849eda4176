"""Modules of ``tools/mismatch_report.py``: measurement by cause, and the figure."""
