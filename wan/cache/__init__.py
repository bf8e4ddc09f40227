"""Step caches: parts of a step are reused from an earlier step instead of being computed."""
