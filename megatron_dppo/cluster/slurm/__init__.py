"""Runs on a Slurm cluster: submitting, the supervisor as the batch process, and what became of a run."""
