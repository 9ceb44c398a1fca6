"""Inspects, compares and exports checkpoints without a job."""
