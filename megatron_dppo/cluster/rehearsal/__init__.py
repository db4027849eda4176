"""Run a recipe on one machine with a tiny model: the same layout, algorithm, data and environment, on CPUs."""

RESULT = "rehearsal.json"
"""File of the verdict, in the rehearsal's folder."""
