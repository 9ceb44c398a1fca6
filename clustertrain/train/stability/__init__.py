"""Monitoring of training steps: clipping, bad steps, roll-backs, layer statistics and warnings."""
