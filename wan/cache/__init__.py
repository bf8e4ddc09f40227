"""Step caches: what of a step is taken from an earlier one instead of being computed."""
