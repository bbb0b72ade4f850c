"""The memory that trainer and feeders share."""
