"""``--value-format``: the meaning of bytes that do not tell it themselves, in values of an LMDB file or in objects.

==================  ==================================================================================
``bytes``           bytes
``npy``             the array that :func:`numpy.save` wrote
``image``           the decoded image, uint8 (height, width, 3)
``raw:DTYPE,SHAPE`` numbers as they lie in memory: ``raw:float32,3x64x64``
==================  ==================================================================================

A file that holds many samples of raw numbers, alone or in a folder with ``--read-as files``, is read as rows of
``SHAPE``, one after another (:mod:`cachetool.sources.raw`).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import Field

__all__ = ["VALUE", "check_value_format", "is_raw", "raw_array"]

VALUE = "value"
"""The name of the field of a file that has only one unnamed value a sample."""
_RAW = re.compile(r"raw:([^,]+)(?:,([0-9]+(?:[,x][0-9]+)*))?")


def is_raw(text: str | None) -> bool:
    """Return True if values are numbers as they lie in memory."""
    return text is not None and text.startswith("raw:")


def check_value_format(text: str | None) -> tuple[Field, np.dtype[Any]] | None:
    """Return the field that ``raw:DTYPE,SHAPE`` describes, and the dtype of its values in the file; None for other
    formats.

    Raises :class:`UsageError`.
    """
    if text in (None, "bytes", "npy", "image"):
        return None
    match = _RAW.fullmatch(str(text))
    if match is None:
        raise UsageError(
            f"unknown --value-format {text!r}; choose one of bytes, npy, image, raw:DTYPE,SHAPE (raw:float32,3x64x64)"
        )
    shape = tuple(int(size) for size in re.split("[,x]", match.group(2))) if match.group(2) else ()
    field = Field(VALUE, match.group(1), shape)
    # A file could hold any number of samples of no bytes.
    if field.nbytes == 0:
        raise UsageError(f"--value-format {text} describes samples of 0 bytes; give sizes of at least 1")
    # Two dtypes, because a field's dtype is always little-endian and the file's may be big-endian.
    return field, np.dtype(match.group(1))


def raw_array(text: str, data: memoryview) -> np.ndarray[Any, Any]:
    """Return the numbers in one object: a view of ``data`` if they are little-endian.

    Raises :class:`BadObject` for another size, with the reason alone.
    """
    described = check_value_format(text)
    assert described is not None
    field, dtype = described
    if len(data) != field.nbytes:
        count, over = divmod(len(data), field.nbytes)
        more = f"; if it holds {count} samples, read them with --read-as files" if count > 1 and not over else ""
        raise BadObject(f"it has {len(data)} bytes, but {text} needs {field.nbytes}{more}")
    return np.frombuffer(data, dtype=dtype).reshape(field.sizes).astype(field.numpy, copy=False)
