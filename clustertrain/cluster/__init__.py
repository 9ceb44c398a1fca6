"""``cluster detect``: find the values of a cluster profile and measure rates."""
