"""The part of torchvision that ``import composer`` needs: names that no test calls."""

__version__ = "0"
