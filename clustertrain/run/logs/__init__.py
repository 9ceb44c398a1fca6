"""Logs of the ranks, the agents and the job: which files there are, and reading of parts of them."""
