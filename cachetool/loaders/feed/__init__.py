"""The processes that make batches."""
