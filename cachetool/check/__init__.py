"""Checks of a cache or an exported folder: every byte, and the place where it lies."""
