"""What ``tools/explain_mask.py`` is made of: policies, per-token explanations, their summary and
the reports.
"""
