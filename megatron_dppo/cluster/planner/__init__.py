"""What a run takes and how long it lasts, computed from its recipe and config.json alone: no weights, no GPU, no torch.

Every part of the answer is a pure function in a file of its own; ``cluster/plan.py`` prints them, docs/planner.md
says where each formula is from and how it was checked.
"""
