"""The processes of a job: the batch process on the batch host and the agent on each node."""
