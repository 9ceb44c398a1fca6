"""Detects what a cluster profile can be filled with."""
