"""Any name: torchmetrics imports several models by name, and calls none before a metric of images is made."""


def __getattr__(name: str) -> type[object]:
    if name.startswith("__"):
        raise AttributeError(name)
    return object
