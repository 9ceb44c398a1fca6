"""Reasons and warnings of a plan."""
