"""What saving and loading share."""
