"""Just enough of torchvision for ``import composer``: names that nothing here calls."""

__version__ = "0"
