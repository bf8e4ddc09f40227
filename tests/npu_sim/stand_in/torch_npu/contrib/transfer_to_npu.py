"""Importing it redirects CUDA names on a real machine; here there is nothing to do."""
