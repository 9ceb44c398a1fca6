"""Optimizers under every layout: parameter groups, freezing, and updates that need full parameters."""
