"""One video from request to frames, and the composition of what that needs."""
