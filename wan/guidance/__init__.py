"""Guidance: how a prompt and a negative prompt steer the velocity of a step."""
