"""The user's program: its command line, its file or module, and its Python."""
