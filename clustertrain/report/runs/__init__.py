"""Compares the runs of a sweep."""
