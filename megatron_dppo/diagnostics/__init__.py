"""Annex: programs that look at a run, at data or at a machine.

The core never imports the annex. Its commands, and the report of a run, are entry points of the package
(pyproject.toml).
"""
