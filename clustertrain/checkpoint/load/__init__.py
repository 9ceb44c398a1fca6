"""Reads a checkpoint into the state of any layout, and rolls a run back."""
