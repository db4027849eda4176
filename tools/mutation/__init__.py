"""Modules of ``tools/mutants.py``."""
