"""A module with any attribute: torchmetrics imports several models by name, and calls none before a metric of images
exists.
"""


def __getattr__(name: str) -> type[object]:
    if name.startswith("__"):
        raise AttributeError(name)
    return object
