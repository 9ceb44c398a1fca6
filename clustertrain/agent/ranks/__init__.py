"""The ranks of a node that torchrun does not start: start, watch, stop, and what became of them."""
