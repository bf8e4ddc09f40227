"""A checkpoint folder, read downwards: what is in it, names, weights into networks."""
