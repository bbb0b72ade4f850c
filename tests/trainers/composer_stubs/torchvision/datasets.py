"""A class that composer imports by name, and asks batches' datasets for."""


class VisionDataset:
    """Never made."""
