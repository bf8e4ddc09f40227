"""Randomly initialized checkpoints, for tests and demonstrations."""
