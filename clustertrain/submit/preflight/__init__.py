"""Checks that a job can start, before it is queued."""
