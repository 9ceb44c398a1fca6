"""Rules that look at a running job."""
