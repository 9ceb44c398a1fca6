"""Fakes of Slurm's commands for quick tests. The output of real Slurm is tested in tests/slurm."""
