"""Metrics of a run: sums and their definitions, metric files, the console table, report, summary."""
