"""A module with any attribute: composer and torchmetrics import functions on boxes by name, and call none here."""


def __getattr__(name: str) -> type[object]:
    if name.startswith("__"):
        raise AttributeError(name)
    return object
