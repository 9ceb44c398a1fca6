"""What is watched in each step of training, and what follows when it goes wrong."""
