"""Modules of ``tools/explain_mask.py``: policies, per-token explanations, tables and HTML page."""
