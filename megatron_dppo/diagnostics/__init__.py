"""Annex: programs that look at a run, at data or at a machine.

The core never imports this annex. The annex's commands, and its report of a run, are entry points of the package
(pyproject.toml).
"""
