"""``clustertrain watch``: telemetry of a running Slurm job that was started without clustertrain."""
