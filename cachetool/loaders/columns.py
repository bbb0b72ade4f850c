"""The str and bytes columns of a batch as plain lists, which every trainer can move, nest and rebuild."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from cachetool.core.block import Ragged

__all__ = ["texts"]


def texts(column: Ragged, *, text: bool) -> list[Any]:
    """Return the k values of a str column (``text=True``) or of a bytes column as a list of str or of bytes.

    The values are copies, so the memory of the batch can be used again as soon as the arrays of the batch are gone.
    """
    offsets = column.offsets.tolist()
    data = column.values[offsets[0] : offsets[-1]].tobytes()
    # The column may be a view that begins in the middle of its values. Only the bytes of these samples are copied, so
    # the offsets must be counted from the first of them.
    if offsets[0]:
        offsets = [offset - offsets[0] for offset in offsets]
    # One decoding of the whole column takes a tenth of the time of one for each value. It is right for ASCII only,
    # where the offsets in bytes are also offsets in characters.
    if text and data.isascii():
        line = data.decode("ascii")
        return [line[start:stop] for start, stop in pairwise(offsets)]
    pieces = [data[start:stop] for start, stop in pairwise(offsets)]
    return [piece.decode("utf-8", "surrogateescape") for piece in pieces] if text else pieces
