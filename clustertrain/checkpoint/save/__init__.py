"""Plans, stages, writes and commits a checkpoint."""
