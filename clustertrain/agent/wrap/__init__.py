"""``clustertrain wrap``: the batch process and the agents of a run inside a job step of the user's own."""
