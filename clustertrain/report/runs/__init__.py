"""Comparison of several runs and of the runs of a sweep."""
