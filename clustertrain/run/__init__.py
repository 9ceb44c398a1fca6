"""The run folder: the paths, files and states of one run."""
