"""What a run costs and how fast it is: goodput, budget, contract, measured speed."""
