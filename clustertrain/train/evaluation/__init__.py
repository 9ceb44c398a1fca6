"""Measuring a model on data that it does not learn from, under every layout."""
