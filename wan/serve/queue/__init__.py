"""The queue: which jobs are admitted, which are next, and what follows their end."""
