"""Answers of servers as trajectories: parsed in this process (``here``), or in one beside it (``process``)."""
