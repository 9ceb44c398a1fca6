"""Monitoring of training steps: clipping, bad steps, rollbacks, layer statistics and warnings."""
