"""Attention kernels and methods of all devices, and quantised linear layers."""
