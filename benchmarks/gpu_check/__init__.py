"""Everything that waits for a GPU, by one command, with a folder of evidence: ``python -m benchmarks.gpu_check``."""
