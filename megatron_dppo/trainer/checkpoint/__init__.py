"""Checkpoints of a run: written in the background, resumed bit for bit, or under another layout."""
