"""The session that scripts use, its step loop, and its checkpoints."""
