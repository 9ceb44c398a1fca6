"""Parts that the whole trainer uses: the rank's context, seeds, the stop agreement and the result."""
