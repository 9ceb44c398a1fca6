"""Datasets and the loader."""
