"""A size-capped local cache of training samples, fed from remote stores while PyTorch or TensorFlow trains from it.

Names are loaded when first used: ``import cachetool`` alone loads no library, not even NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachetool.api import Cache, convert, open_cache
    from cachetool.core.errors import (
        AccessDenied,
        BadObject,
        CacheToolError,
        CapacityError,
        CapBlocked,
        CapTooSmall,
        CatalogError,
        CorruptError,
        Interrupted,
        MissingExtra,
        NotFound,
        SourceError,
        Unreachable,
        UsageError,
    )
    from cachetool.pull.background import BackgroundPull

    __version__: str

__all__ = [
    "AccessDenied",
    "BackgroundPull",
    "BadObject",
    "Cache",
    "CacheToolError",
    "CapBlocked",
    "CapTooSmall",
    "CapacityError",
    "CatalogError",
    "CorruptError",
    "Interrupted",
    "MissingExtra",
    "NotFound",
    "SourceError",
    "Unreachable",
    "UsageError",
    "__version__",
    "convert",
    "open_cache",
]

_HOMES = {
    **dict.fromkeys(("Cache", "convert", "open_cache"), "cachetool.api"),
    "BackgroundPull": "cachetool.pull.background",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("cachetool")
    elif name in __all__:
        value = getattr(import_module(_HOMES.get(name, "cachetool.core.errors")), name)
    else:
        raise AttributeError(f"module 'cachetool' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
