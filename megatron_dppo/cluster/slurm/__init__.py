"""Runs on a Slurm cluster: their submission, the supervisor as the batch process, and the history of their starts."""
