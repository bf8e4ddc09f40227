"""Randomly initialized checkpoints and measurements, for tests, tools and benchmarks."""
