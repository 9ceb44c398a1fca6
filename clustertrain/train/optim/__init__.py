"""Optimizers under every layout: parameter groups, what is frozen, and whose update needs whole parameters."""
