"""Reads LoRA files as weight deltas, and merges or separates them."""
