"""Writes the reasons and the warnings of a plan."""
