"""What every part of the trainer uses: the rank's context, seeds, the stop agreement and the result."""
