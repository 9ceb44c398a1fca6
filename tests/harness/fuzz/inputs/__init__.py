"""Input classes. Each module draws the inputs of some classes and passes them to commands."""
