"""Stand-ins for Slurm's commands, for tests that must be quick. What Slurm really says is tested in tests/slurm."""
