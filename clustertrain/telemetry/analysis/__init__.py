"""Figures from the samples of a job."""
