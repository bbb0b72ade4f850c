"""A function that composer imports by name."""


def draw_segmentation_masks(*given: object) -> None:
    """Do nothing; no test calls it."""
    raise NotImplementedError
