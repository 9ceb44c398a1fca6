"""``clustertrain wrap``: the batch process and the agents of a run inside the user's own job step."""
