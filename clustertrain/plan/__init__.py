"""Choice of the layout, the batch split and the environment of a job."""
