"""Draws samples of a source into a cache."""
