"""Shared memory between the feeder processes and the training process."""
