"""Run a recipe on one machine with a tiny model: the same layout, algorithm, data and environment, on CPUs."""
