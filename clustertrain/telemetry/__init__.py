"""Samples GPUs, hosts and processes, stores the samples and explains them."""
