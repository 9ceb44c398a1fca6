"""What leaves a run: Prometheus's text format while it goes on, tables of all samples afterwards."""
