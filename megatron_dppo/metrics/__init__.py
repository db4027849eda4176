"""What a run measures: sums and their definitions, records, console, report and summary."""
