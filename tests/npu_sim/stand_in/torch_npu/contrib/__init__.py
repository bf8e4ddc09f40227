"""Extras of torch_npu."""
