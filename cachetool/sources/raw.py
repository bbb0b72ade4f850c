"""Files of raw numbers, as ``--value-format raw:DTYPE,SHAPE`` describes them: rows of ``SHAPE``, one after another."""

from __future__ import annotations

from typing import Any

import numpy as np

from cachetool.core.errors import BadObject, UsageError
from cachetool.sources.byte_source import SourceFile
from cachetool.sources.options import SourceOptions
from cachetool.sources.rows import ColumnFile, StoredColumn
from cachetool.sources.value_format import VALUE, check_value_format

__all__ = ["open_raw"]


def open_raw(file: SourceFile, options: SourceOptions) -> ColumnFile:
    """Return the rows of one file of raw numbers. Raises :class:`BadObject` if the file does not hold whole rows."""
    described = check_value_format(options.value_format)
    if described is None:
        raise UsageError(
            f"{file}: a file of raw numbers does not store their type; give --value-format raw:DTYPE,SHAPE"
        )
    field, dtype = described
    count, over = divmod(file.size, field.nbytes)
    if over:
        raise BadObject(
            f"{file}: its {file.size} bytes are not a multiple of {field.nbytes}, the bytes of a sample of"
            f" {options.value_format}"
        )

    def read(start: int, stop: int) -> np.ndarray[Any, Any]:
        body = file.ranges.part(file.number, start * field.nbytes, (stop - start) * field.nbytes)
        return np.frombuffer(body, dtype=dtype).reshape(stop - start, *field.sizes).astype(field.numpy, copy=False)

    column = StoredColumn(
        VALUE, field.dtype, (count, *field.sizes), file.size, read, offset=0, stored=dtype.str
    )  # fmt: skip
    return ColumnFile(file, [column], options, stored=file.size)
