"""The pull: drawing samples of a source into a cache."""
