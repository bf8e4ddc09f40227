"""Reads and writes images, audio and videos."""
