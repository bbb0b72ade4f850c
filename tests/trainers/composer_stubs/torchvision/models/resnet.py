"""A class that composer imports by name."""


class Bottleneck:
    """A class without instances."""
