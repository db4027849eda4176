"""Annex: runs on a cluster. Planner, preflight, rehearsal and Slurm.

The core never imports it. Its commands and start checks are entry points of the package (pyproject.toml).
"""
