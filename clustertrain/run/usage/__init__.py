"""What a run uses: goodput, budget, contract, measured speed and memory."""
