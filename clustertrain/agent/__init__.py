"""The processes of a job: the controller on the batch host and the agent on each node."""
