"""The diffusion transformer and its attention layer."""
