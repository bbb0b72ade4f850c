"""Whether values that were gathered are those that were written: by the checksums that lie beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachetool.block import Block
from cachetool.errors import CorruptError
from cachetool.formats import get_format
from cachetool.formats.digest import checksums
from cachetool.formats.reading import compare_checksums
from cachetool.formats.runs import Int64s
from cachetool.formats.shard import check_content, stored_checksums
from cachetool.loaders.view import Part, View

__all__ = ["Checks"]


class Checks:
    """Keeps the checksums of the parts of one view, 8 bytes a value, those that were needed so far."""

    def __init__(self) -> None:
        self._view: View | None = None
        self._known: dict[str, npt.NDArray[np.uint64]] = {}

    def check(self, view: View, indices: Int64s, block: Block) -> None:
        """Compare the samples ``indices`` of ``view``, of some or all of its fields.

        Raises :class:`CorruptError` naming file, sample and field.
        """
        if view is not self._view:
            parts = {part.id for part in view.parts}
            self._known = {id: known for id, known in self._known.items() if id in parts}
            self._view = view
        found = checksums(block)
        rows = np.array([view.schema.names.index(name) for name in block.schema.names], dtype=np.int64)
        numbers, within = view.find(indices)
        for number in np.unique(numbers).tolist():
            part, here = view.parts[number], np.flatnonzero(numbers == number)
            expected = self._of(part, view)[np.ix_(rows, within[here])]
            compare_checksums(found[:, here], expected, block.schema, name=str(_file(part)), indices=within[here])

    def _of(self, part: Part, view: View) -> npt.NDArray[np.uint64]:
        known = self._known.get(part.id)
        if known is None:
            side = part.extents.parent
            stored = check_content(side, view.schema, part.content, links=part.links) if part.content else None
            known = np.array(stored_checksums(side, view.schema, links=part.links) if stored is None else stored)
            if known.shape[1] != part.samples:
                raise CorruptError(f"{side} has checksums of {known.shape[1]} samples, not of {part.samples}")
            self._known[part.id] = known
        return known


def _file(part: Part) -> Path:
    return part.folder / (part.file or f"data{get_format(part.format).suffix}")
