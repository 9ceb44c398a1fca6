"""Choice of NCCL settings, network interfaces and CPU affinity."""
