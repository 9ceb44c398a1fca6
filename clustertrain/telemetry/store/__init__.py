"""Files of a node's samples, written by the sampler and read by reports."""
