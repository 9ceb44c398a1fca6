"""Pack the Python environment of the ranks, so that each node unpacks it to a local disk (docs/decisions/0063)."""
