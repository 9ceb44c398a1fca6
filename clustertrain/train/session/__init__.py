"""The session that scripts call, its step loop, and its checkpoints."""
