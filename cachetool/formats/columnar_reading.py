"""Reading back what :mod:`cachetool.formats.columnar` lays out: any samples, out of arrays that are cut by rows.

A format's own library is asked for runs of rows only (:meth:`ColumnarReader._fetch`), few and long ones: the samples
asked for are sorted, neighbours are read together, and the rows then go to where they were asked for.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import CacheToolError, CorruptError
from cachetool.core.schema import Field, Schema
from cachetool.formats.columnar import ArrayPlan, array_plans
from cachetool.formats.reading import check_indices, check_range
from cachetool.formats.runs import Int64s, as_bytes, copy_runs, ends

__all__ = ["ColumnarReader", "corrupt_errors"]

_RUN_BYTES = 32 * 2**20  # most bytes read together, plus one sample
_OURS = (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.ENOMEM)  # nothing the file could do about


@contextlib.contextmanager
def corrupt_errors(what: str) -> Iterator[None]:
    """Turn whatever a library says about a damaged file into :class:`CorruptError`, "``what``: its message"."""
    try:
        yield
    except (CacheToolError, MemoryError):
        raise
    except Exception as error:  # codecs and parsers raise classes of their own for damaged bytes
        if isinstance(error, OSError) and error.errno in _OURS:
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CorruptError(f"{what}: {lines[0]}") from error


class ColumnarReader(ABC):
    """Base of the readers of HDF5 and Zarr: a format opens and checks its arrays and implements :meth:`_fetch`."""

    gap_bytes = 2**16
    """Bytes between two samples that are rather read than skipped: what a call of the library costs."""

    def __init__(self, path: Path, schema: Schema, samples: int) -> None:
        self.path = path
        self.schema = schema
        self.samples = samples
        self.plans = {plan.name: plan for plan in array_plans(schema)}
        self._indexes: dict[str, tuple[Int64s, Int64s | None]] = {}

    @abstractmethod
    def _fetch(self, plan: ArrayPlan, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows ``start`` to ``stop`` of an array, a fresh array of its dtype; ``start < stop``.

        Raises :class:`CorruptError` naming the file.
        """

    @abstractmethod
    def _length(self, plan: ArrayPlan) -> int:
        """Rows of an array."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files; blocks handed out stay valid. May be called twice."""

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        check_range(start, stop, self.samples)
        return Block(self.schema, {f.name: self._slice(f, start, stop) for f in self.schema})

    def take(self, indices: npt.NDArray[np.int64]) -> Block:
        """The samples at ``indices``, in that order, repeats allowed."""
        at = check_indices(indices, self.samples)
        order = np.argsort(at, kind="stable")
        return Block(self.schema, {f.name: self._gather(f, at, order) for f in self.schema})

    def _check_lengths(self) -> None:
        """Raise :class:`CorruptError` unless every array has the rows that the number of samples asks for."""
        for plan in self.plans.values():
            if plan.role != "values" or plan.field.kind == "fixed":
                found, wanted = self._length(plan), plan.rows(self.samples)
                if found != wanted:
                    raise CorruptError(f"{self.path}: {plan.name!r} has {found} rows, not {wanted}")

    def _rows(self, plan: ArrayPlan, start: int, stop: int) -> npt.NDArray[Any]:
        if start < stop and plan.row_nbytes:
            return self._fetch(plan, start, stop)
        return np.empty((stop - start, *plan.row), dtype=plan.dtype)

    def _slice(self, field: Field, start: int, stop: int) -> Column:
        plan = self.plans[field.name]
        if field.kind == "fixed":
            return self._rows(plan, start, stop)
        offsets, shapes = self._index(field)
        first, last = int(offsets[start]), int(offsets[stop])
        values = self._rows(plan, first, last)
        return Ragged(values, offsets[start : stop + 1] - first, None if shapes is None else shapes[start:stop].copy())

    def _gather(self, field: Field, at: Int64s, order: Int64s) -> Column:
        plan = self.plans[field.name]
        if field.kind == "fixed":
            out = np.empty((len(at), *plan.row), dtype=plan.dtype)
            starts = at[order]
            for low, high in _runs(starts * plan.row_nbytes, (starts + 1) * plan.row_nbytes, self.gap_bytes):
                first = int(starts[low])
                rows = self._rows(plan, first, int(starts[high - 1]) + 1)
                out[order[low:high]] = rows[starts[low:high] - first]
            return out
        offsets, shapes = self._index(field)
        size = plan.dtype.itemsize
        begin, sizes = offsets[:-1][at], np.diff(offsets)[at]
        out_starts = ends(sizes)
        values = np.empty(int(out_starts[-1]), dtype=plan.dtype)
        target = as_bytes(values)
        for low, high in _runs(begin[order] * size, (begin + sizes)[order] * size, self.gap_bytes):
            chosen = order[low:high]
            first = int(begin[chosen[0]])
            rows = self._rows(plan, first, int((begin + sizes)[chosen[-1]]))
            copy_runs(
                target,
                out_starts[:-1][chosen] * size,
                as_bytes(rows),
                (begin[chosen] - first) * size,
                sizes[chosen] * size,
            )
        return Ragged(values, out_starts, None if shapes is None else shapes[at])

    def _index(self, field: Field) -> tuple[Int64s, Int64s | None]:
        """Offsets and shapes of a field whose samples differ in size; read and checked once."""
        if field.name not in self._indexes:
            offsets = self._rows(self.plans[f"{field.name}.offsets"], 0, self.samples + 1)
            sizes, total = np.diff(offsets), self._length(self.plans[field.name])
            if offsets[0] != 0 or offsets[-1] != total or (sizes < 0).any():
                raise CorruptError(f"{self.path}: offsets of field {field.name!r} do not fit its {total} values")
            shapes = None
            if field.kind == "ragged":
                shapes = self._rows(self.plans[f"{field.name}.shapes"], 0, self.samples)
                wrong = (shapes < 0).any(axis=1) | (shapes.prod(axis=1) != sizes)
                if wrong.any():
                    bad = int(np.argmax(wrong))
                    raise CorruptError(
                        f"{self.path}: sample {bad}: shape of field {field.name!r} does not fit its values"
                    )
            self._indexes[field.name] = (offsets, shapes)
        return self._indexes[field.name]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _runs(starts: Int64s, stops: Int64s, gap: int) -> Iterator[tuple[int, int]]:
    """Cut samples, sorted by where their bytes start, into runs to be read together: (first, behind the last)."""
    if not len(starts):
        return
    apart = (starts[1:] - stops[:-1] > gap) | (starts[1:] // _RUN_BYTES != starts[:-1] // _RUN_BYTES)
    cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(starts)]
    yield from itertools.pairwise(cuts)
