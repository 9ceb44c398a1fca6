"""Reads what a node consists of from /sys and ``ip``."""
