"""Reads checkpoints, LoRAs and quantised weights into networks; only `load` imports torch.

Nothing here knows the class of a network.
"""
