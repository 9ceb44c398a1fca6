"""Chat data for training: rows of files, chat templates, and which tokens are answers."""
