"""Feeder processes, which make batches for the training process."""
