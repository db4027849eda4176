"""Metrics of a run: their table, sums, files, the console table, report, summary."""
