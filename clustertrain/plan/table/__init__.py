"""Predictions for each row of a table, for ``plan --table``."""
