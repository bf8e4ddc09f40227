"""What a run records of itself, on request: readings of power, and the order in its layers."""
