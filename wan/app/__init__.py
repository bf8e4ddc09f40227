"""Carries out runs of all front ends: command line, service, Python classes, tools."""
