"""A class that composer imports by name, and compares datasets of batches with."""


class VisionDataset:
    """A class without instances."""
