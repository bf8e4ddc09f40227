"""Dense attention kernels of the devices."""
