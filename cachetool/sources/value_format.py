"""``--value-format``: what bytes are that do not say it themselves, values of an LMDB file or objects of bytes.

==================  ==================================================================================
``bytes``           bytes
``npy``             the array that :func:`numpy.save` wrote
``image``           the decoded image, uint8 (height, width, 3)
``raw:DTYPE,SHAPE`` numbers as they lie in memory: ``raw:float32,3x64x64``
==================  ==================================================================================

A folder of files each of which holds many samples of raw numbers is read by ``--read-as files``: rows of ``SHAPE``, one
after another (:mod:`cachetool.sources.raw`), and so is a single file.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import Field

__all__ = ["VALUE", "check_value_format", "is_raw", "raw_array"]

VALUE = "value"
"""The field of a file that holds nothing else."""
_RAW = re.compile(r"raw:([^,]+)(?:,([0-9]+(?:[,x][0-9]+)*))?")


def is_raw(text: str | None) -> bool:
    """Whether values are numbers as they lie in memory."""
    return text is not None and text.startswith("raw:")


def check_value_format(text: str | None) -> tuple[Field, np.dtype[Any]] | None:
    """The field that ``raw:DTYPE,SHAPE`` describes, and the dtype that its values lie in the file with: that of a field
    is always little-endian. None for the other formats. Raises :class:`UsageError`."""
    if text in (None, "bytes", "npy", "image"):
        return None
    match = _RAW.fullmatch(str(text))
    if match is None:
        raise UsageError(
            f"unknown value format {text!r}; there are bytes, npy, image and raw:DTYPE,SHAPE (raw:float32,3x64x64)"
        )
    shape = tuple(int(size) for size in re.split("[,x]", match.group(2))) if match.group(2) else ()
    field = Field(VALUE, match.group(1), shape)
    if field.nbytes == 0:
        raise UsageError(f"--value-format {text} describes samples of no bytes; give sizes of at least 1")
    return field, np.dtype(match.group(1))


def raw_array(text: str, data: memoryview) -> np.ndarray[Any, Any]:
    """The numbers in one object, a view of it where they are little-endian. Raises :class:`BadObject` for another
    size, with the reason alone."""
    described = check_value_format(text)
    assert described is not None
    field, dtype = described
    if len(data) != field.nbytes:
        count, over = divmod(len(data), field.nbytes)
        more = f"; it may hold {count} samples: --read-as files takes each" if count > 1 and not over else ""
        raise BadObject(f"it has {len(data)} bytes, and {text} is {field.nbytes}{more}")
    return np.frombuffer(data, dtype=dtype).reshape(field.sizes).astype(field.numpy, copy=False)
