"""Slurm and its stand-in on one machine: submit, cancel, requeue and query jobs."""
