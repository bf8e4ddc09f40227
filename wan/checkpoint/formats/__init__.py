"""Reads the headers and the values of weight files: safetensors, GGUF, PyTorch."""
