"""Batches as NumPy arrays, without any framework.

::

    with Loader("data/cache", batch_size=64) as loader:
        for epoch in range(90):
            for batch in loader:            # epoch k + 1 has the samples that arrived in the cache during epoch k
                batch["image"]              # (64, ...), memory that stays unchanged while anything refers to it
"""

from __future__ import annotations

from typing import Any

from cachetool.core.block import Ragged
from cachetool.core.docstrings import arguments_of
from cachetool.loaders.columns import texts
from cachetool.loaders.decode import JPEG
from cachetool.loaders.loader import BaseLoader
from cachetool.loaders.padding import Pad, opened
from cachetool.loaders.ring.slot import Batch

__all__ = ["JPEG", "Loader", "Pad"]


@arguments_of(BaseLoader)
class Loader(BaseLoader[dict[str, Any]]):
    """Batches of a cache as dicts of NumPy arrays.

    ``batch[name]`` is an array of shape (k, *shape) for a field of numbers, a :class:`~cachetool.core.block.Ragged`
    column for a ragged field, and a list of k values for a field of ``str`` or ``bytes``; k is at most ``batch_size``.
    The dtype is that of the field. Arrays are views of shared memory, which is filled again only when nothing refers to
    them any more.

    Example:
        >>> from cachetool.loaders.numpy import Loader
        >>> with Loader("data/cache", batch_size=8, fields=["volume", "label"]) as loader:
        ...     for batch in loader:
        ...         volumes, labels = batch["volume"], batch["label"]
        >>> volumes.shape, volumes.dtype
        ((8, 16, 16, 16), dtype('float32'))
    """

    def _finish(self, batch: Batch) -> dict[str, Any]:
        columns = opened(batch.columns, self._settings.pad, self._settings.varlen)
        out: dict[str, Any] = dict(columns)
        for name, column in columns.items():
            # str and bytes become lists: trainers such as Lightning and Composer move and rebuild the batches that they
            # receive, and failed on columns of a class of our own.
            if isinstance(column, Ragged) and column.shapes is None:
                out[name] = texts(column, text=batch.schema[name].kind == "str")
        return out
