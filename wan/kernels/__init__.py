"""Attention kernels and backends of all devices, and quantized linear layers."""
