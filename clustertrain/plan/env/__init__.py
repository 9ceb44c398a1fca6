"""Chooses NCCL settings, network interfaces and CPU affinity."""
