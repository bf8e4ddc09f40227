"""The names of tensors, networks and experts in files of all programs."""
