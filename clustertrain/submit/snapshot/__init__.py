"""The copy of the user's code that a run executes."""
