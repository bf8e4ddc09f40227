"""Reads quantized weights: scales and formats of layers, exports, values."""
