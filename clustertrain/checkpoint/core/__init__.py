"""Code shared by saving and loading."""
