"""Arrays of samples that differ in size, one behind the other in one long array, as others write them::

    values   (N,) or (N, 3)    offsets  (n + 1,)   sample i is values[offsets[i]:offsets[i + 1]]
    data     (N,)              indptr   (n + 1,)   the same: rows of a sparse matrix, with ``indices`` beside ``data``
    values   (N,)              lengths  (n,)       each is so long, one after the other

Taken row by row they would be a million samples of one number. The array that says where samples begin is known by its
name, and by its values, which must lead from 0 to the end of the long arrays beside it.
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
"""Offsets that are read at a time."""

Int64s = npt.NDArray[np.int64]


def is_offsets(name: str) -> bool:
    """Whether an array of this name may say where the samples of others begin."""
    return _OFFSETS.search(name) is not None or _LENGTHS.search(name) is not None


def wants_arrays(options: SourceOptions) -> Callable[[str], bool]:
    """Whether an array is asked for, by its name or the one that it has in a group, or may say where the samples of one
    begin that is."""
    asked = wants_in_groups(options)
    return lambda name: asked(name) or is_offsets(name)


def unflattened(
    path: object, arrays: Sequence[StoredColumn], skipped: list[tuple[str, str]], options: SourceOptions
) -> list[StoredColumn]:
    """The arrays, but those whose samples differ in size as such, where another array says where each begins. That one
    is added to ``skipped``. With ``--read-as rows`` they stay as they are. Raises :class:`BadObject` for offsets that
    lead neither to the end of an array, nor upwards."""
    if options.read_as == "rows":
        return list(arrays)
    columns = {column.name: column for column in arrays}
    for marks in arrays:
        if not is_offsets(marks.name) or not _is_whole(marks) or marks.name in (options.chosen or ()):
            continue
        folder = marks.name.rpartition("/")[0]
        beside = [column for column in arrays if column.name.rpartition("/")[0] == folder and column is not marks]
        total = _total(marks)
        flat = [c for c in beside if total is not None and c.shape[:1] == (total,) and _is_flat(c, marks)]
        if not flat:
            if options.chosen is None:
                _refuse_misfits(path, marks, total, beside)
            continue
        starts = _Starts(path, marks)
        for column in flat:
            columns[column.name] = _ragged(path, column, starts)
        names = ", ".join(quoted(column.name) for column in flat)
        why = (
            f"it says where each sample of {names} begins, whose samples differ in size; for plain rows: --read-as rows"
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
    """Where the last sample ends; None where the values say that these are no offsets."""
    if marks.shape[0] == 0:
        return None
    if _OFFSETS.search(marks.name) is None:
        parts = (marks.read(at, min(at + _CHECKED, marks.shape[0])) for at in range(0, marks.shape[0], _CHECKED))
        return sum(int(np.asarray(part).sum(dtype=np.float64)) for part in parts)
    first, last = (int(np.asarray(marks.read(at, at + 1))[0]) for at in (0, marks.shape[0] - 1))
    return last if first == 0 else None


def _refuse_misfits(path: object, marks: StoredColumn, total: int | None, beside: Sequence[StoredColumn]) -> None:
    """Raise :class:`BadObject` for offsets beside arrays of single numbers that they do not fit, which would be taken
    for samples of one number each."""
    if _OFFSETS.search(marks.name) is None:
        return  # lengths and counts are often fields of their own
    others = [column for column in beside if _is_flat(column, marks) and column.shape[0] != marks.shape[0]]
    single = [column for column in others if len(column.shape) == 1]
    if not single or len(single) < len(others) or any(column.shape[0] == _count(marks) for column in beside):
        return
    raise BadObject(
        f"{path}: {quoted(marks.name)} would say where samples of {quoted(single[0].name)} begin, but leads to"
        f" {total if total is not None else 'no'} values instead of {single[0].shape[0]};\nto take the values one by"
        f" one all the same: --fields {shlex.quote(single[0].name)}"
    )


class _Starts:
    """Where each sample begins, and behind them where the last one ends."""

    def __init__(self, path: object, marks: StoredColumn) -> None:
        self._path, self._marks = path, marks
        self.count = _count(marks)
        self._all = None if _OFFSETS.search(marks.name) else self._summed()

    def _summed(self) -> Int64s:
        starts = np.zeros(self.count + 1, dtype=np.int64)
        np.cumsum(np.asarray(self._marks.read(0, self.count)), out=starts[1:])
        return starts

    def of(self, start: int, stop: int, total: int) -> Int64s:
        """Of samples ``start`` to ``stop``, (stop - start + 1,), all inside of ``total`` values."""
        if self._all is not None:
            at = self._all[start : stop + 1]
        else:
            at = np.asarray(self._marks.read(start, stop + 1)).astype(np.int64)
        if int(at[0]) < 0 or int(at[-1]) > total or (np.diff(at) < 0).any():
            raise BadObject(f"{self._path}: {quoted(self._marks.name)} leads out of its array, or back")
        return at


def _ragged(path: object, column: StoredColumn, starts: _Starts) -> StoredColumn:
    inner, total = column.shape[1:], column.shape[0]
    step = int(np.prod(inner, dtype=np.int64))
    together = max(column.chunk, _TOGETHER * total // max(1, column.nbytes))  # long rows, fetched at once

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
    )
