"""Estimates of the time and memory of a step."""
