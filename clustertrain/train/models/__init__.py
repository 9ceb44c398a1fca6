"""The models and losses that a recipe can name."""
