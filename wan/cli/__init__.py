"""The command line: flags and environment in, files out."""
