"""Kernels of Ascend NPUs, through mindiesd and torch-npu."""
