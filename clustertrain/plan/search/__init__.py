"""Search for layouts and micro-batches that fit."""
