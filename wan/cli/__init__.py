"""The command line of generate.py: parses flags, resolves the run, writes output files."""
