"""Searches the layouts and the micro-batches that fit."""
