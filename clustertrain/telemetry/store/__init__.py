"""The files of a node's samples: written by the sampler, read by reports."""
