"""Ranks in containers: what a container sees, and the command line of each runtime."""
