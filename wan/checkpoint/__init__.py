"""Reads checkpoints, LoRAs and quantized weights into networks, independent of network classes.

Headers, names and configurations are read without importing torch; `load` reads the weights.
"""
