"""Alert rules for a running job and their delivery."""
