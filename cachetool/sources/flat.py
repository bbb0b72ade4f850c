"""Arrays of samples that differ in size, stored one after another in one long array, as other programs write them::

    values   (N,) or (N, 3)    offsets  (n + 1,)   sample i is values[offsets[i]:offsets[i + 1]]
    data     (N,)              indptr   (n + 1,)   the same: rows of a sparse matrix, with ``indices`` beside ``data``
    values   (N,)              lengths  (n,)       the length of each sample, one after another

Read row by row such an array would be a million samples of one number. The array with the offsets is recognised by
its name and by its values. These must lead from 0 to the end of the long arrays beside it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column, Ragged
from cachetool.core.errors import BadObject
from cachetool.sources.groups import wants_in_groups
from cachetool.sources.limits import quoted
from cachetool.sources.options import SourceOptions
from cachetool.sources.rows import StoredColumn

__all__ = ["is_offsets", "unflattened", "wants_arrays"]

_BEFORE = r"(?i:(?:^|[/_.-])"
_OFFSETS = re.compile(rf"{_BEFORE}(?:offsets?|indptr|ptr|rowptr|splits|cu_seqlens|boundaries))$")
_LENGTHS = re.compile(rf"{_BEFORE}(?:lengths?|sizes|counts|points))$")
_TOGETHER = 2**16
"""Bytes of samples that are fetched, and so drawn, together."""
_CHECKED = 2**20
"""Number of offsets that are read at a time."""

Int64s = npt.NDArray[np.int64]


def is_offsets(name: str) -> bool:
    """Return True if an array of this name may hold the offsets or lengths of samples."""
    return _OFFSETS.search(name) is not None or _LENGTHS.search(name) is not None


def wants_arrays(options: SourceOptions) -> Callable[[str], bool]:
    """Return a function that says if an array must be read.

    An array must be read if it is asked for, by its name or by its name in a group. It must also be read if it may
    hold the offsets of such an array.
    """
    asked = wants_in_groups(options)
    return lambda name: asked(name) or is_offsets(name)


def unflattened(
    path: object, arrays: Sequence[StoredColumn], skipped: list[tuple[str, str]], options: SourceOptions
) -> list[StoredColumn]:
    """Return the arrays, with samples of differing size where another array holds their offsets.

    The array of offsets is added to ``skipped``. With ``--read-as rows`` all arrays stay as they are. Raise
    :class:`BadObject` for offsets that do not end at the end of an array, or that go down.
    """
    if options.read_as == "rows":
        return list(arrays)
    columns = {column.name: column for column in arrays}
    for marks in arrays:
        # An array that the user asks for by name is a field, even if its name looks like offsets.
        if not is_offsets(marks.name) or not _is_whole(marks) or marks.name in (options.chosen or ()):
            continue
        folder = marks.name.rpartition("/")[0]
        beside = [column for column in arrays if column.name.rpartition("/")[0] == folder and column is not marks]
        total = _total(marks)
        flat = [c for c in beside if total is not None and c.shape[:1] == (total,) and _is_flat(c, marks)]
        if not flat:
            # Without a choice of fields, wrong offsets mean that single numbers would be read as samples. With a choice
            # the user has named the arrays to read.
            if options.chosen is None:
                _refuse_misfits(path, marks, total, beside)
            continue
        starts = _Starts(path, marks)
        for column in flat:
            columns[column.name] = _ragged(path, column, starts)
        names = ", ".join(quoted(column.name) for column in flat)
        why = (
            f"it says where each sample of {names} begins, because they differ in size; for plain rows: --read-as rows"
        )
        skipped.append((marks.name, why))
        del columns[marks.name]
    return list(columns.values())


def _is_whole(column: StoredColumn) -> bool:
    return column.dtype not in ("bytes", "str") and np.dtype(column.dtype).kind in "iu" and len(column.shape) == 1


def _is_flat(column: StoredColumn, marks: StoredColumn) -> bool:
    numbers = column.dtype not in ("bytes", "str") and not column.ragged
    return numbers and column.shape[0] != _count(marks)


def _count(marks: StoredColumn) -> int:
    return marks.shape[0] - (_OFFSETS.search(marks.name) is not None)


def _total(marks: StoredColumn) -> int | None:
    """Return where the last sample ends, or None if the values show that these are no offsets."""
    if marks.shape[0] == 0:
        return None
    if _OFFSETS.search(marks.name) is None:
        # Summed in float64 and in parts of 2^20: a hostile file's lengths could overflow int64, and an array of any
        # length would have to fit into memory.
        parts = (marks.read(at, min(at + _CHECKED, marks.shape[0])) for at in range(0, marks.shape[0], _CHECKED))
        return sum(int(np.asarray(part).sum(dtype=np.float64)) for part in parts)
    # Two values are enough here. All offsets are compared in _Starts.of when their samples are read.
    first, last = (int(np.asarray(marks.read(at, at + 1))[0]) for at in (0, marks.shape[0] - 1))
    return last if first == 0 else None


def _refuse_misfits(path: object, marks: StoredColumn, total: int | None, beside: Sequence[StoredColumn]) -> None:
    """Raise :class:`BadObject` for offsets that do not fit the arrays of single numbers beside them.

    Otherwise each number would be read as a sample.
    """
    if _OFFSETS.search(marks.name) is None:
        # Arrays named lengths or counts are often fields of their own, so values that do not fit are no sign of damage.
        return
    others = [column for column in beside if _is_flat(column, marks) and column.shape[0] != marks.shape[0]]
    single = [column for column in others if len(column.shape) == 1]
    if not single or len(single) < len(others) or any(column.shape[0] == _count(marks) for column in beside):
        return
    count = single[0].shape[0]
    ends = "does not begin with 0" if total is None else f"ends at {total}, and there are {count} values"
    raise BadObject(
        f"{path}: {quoted(marks.name)} looks like offsets of samples in {quoted(single[0].name)}, but {ends};\n"
        f"to read each value as a sample: --fields {shlex.quote(single[0].name)}"
    )


class _Starts:
    """The position of the first value of each sample, and the position behind the last sample."""

    def __init__(self, path: object, marks: StoredColumn) -> None:
        self._path, self._marks = path, marks
        self.count = _count(marks)
        # Lengths must be summed from the first on, so their sums are kept in memory. Offsets are read for each run.
        self._all = None if _OFFSETS.search(marks.name) else self._summed()

    def _summed(self) -> Int64s:
        starts = np.zeros(self.count + 1, dtype=np.int64)
        np.cumsum(np.asarray(self._marks.read(0, self.count)), out=starts[1:])
        return starts

    def of(self, start: int, stop: int, total: int) -> Int64s:
        """Return the positions of samples ``start`` to ``stop``, int64 (stop - start + 1,). All are within ``total``
        values."""
        if self._all is not None:
            at = self._all[start : stop + 1]
        else:
            at = np.asarray(self._marks.read(start, stop + 1)).astype(np.int64)
        # Offsets of a damaged file could go down in the middle, between a right first and a right last one.
        if int(at[0]) < 0 or int(at[-1]) > total or (np.diff(at) < 0).any():
            raise BadObject(
                f"{self._path}: {quoted(self._marks.name)} has offsets that decrease or point outside of the array"
            )
        return at


def _ragged(path: object, column: StoredColumn, starts: _Starts) -> StoredColumn:
    inner, total = column.shape[1:], column.shape[0]
    step = int(np.prod(inner, dtype=np.int64))
    # Requests below 64 KiB cost as much as 64 KiB, so short samples share a unit of that size. A chunk is fetched
    # completely in any case.
    together = max(column.chunk, _TOGETHER * total // max(1, column.nbytes))

    def read(start: int, stop: int) -> Column:
        at = starts.of(start, stop, total)
        first, last = int(at[0]), int(at[-1])
        flat = np.asarray(column.read(first, last)) if last > first else np.empty((0, *inner), dtype=column.dtype)
        shapes = np.empty((stop - start, 1 + len(inner)), dtype=np.int64)
        shapes[:, 0], shapes[:, 1:] = np.diff(at), inner
        return Ragged(np.ascontiguousarray(flat).reshape(-1), (at - first) * step, shapes)

    return replace(
        column,
        shape=(starts.count,),
        read=read,
        ragged=1 + len(inner),
        offset=-1,
        stored="",
        chunk=max(1, together * starts.count // max(1, total)),
        parts=None,
        # The dimension of samples has no name in the file.
        dims=("sample", *column.dims) if column.dims else (),
    )
