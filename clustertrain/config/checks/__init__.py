"""Checks of values and of combinations of keys: ranges, paths, keys that nothing reads."""
