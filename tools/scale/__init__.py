"""Modules of ``tools/scale_report.py``: sizes, quantities and the page."""
