"""Read the hardware of a node from /sys and ``ip``."""
