"""Compute the memory, traffic and time of a run from its recipe and config.json, without weights, GPU or torch.

Each file has pure functions for one part of the plan, and ``cluster/plan.py`` prints the parts. docs/planner.md lists
the source of each formula and how it was checked.
"""
