"""Export of telemetry: Prometheus metrics during a run, tables of all samples afterwards."""
