"""A class that composer imports by name."""


class Bottleneck:
    """Never made."""
