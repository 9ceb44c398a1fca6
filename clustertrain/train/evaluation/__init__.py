"""Evaluation of a model on held-out data under every layout."""
