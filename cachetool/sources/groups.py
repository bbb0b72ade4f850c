"""Files with one group for each sample, as features of videos and demonstrations of robots are stored.

::

    clip000/feat (16, 4), clip000/label (1,)          sample clip000 with the fields feat and label
    data/demo_0/actions (57, 7), data/demo_0/obs/x    sample data/demo_0 with the fields actions and obs/x
    v0001 (57, 512), v0002 (61, 512)                  samples v0001 and v0002 with the field value

Groups are alike when each has the same names, types and numbers of dimensions. Files also store cameras (all rows of
one length) and splits as alike groups. So the names and lengths of the groups decide, and ``--read-as groups|rows``
decides otherwise. :func:`by_groups` refuses a file where both readings make sense.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Column, Ragged
from cachetool.core.errors import UsageError
from cachetool.core.schema import KEY
from cachetool.sources.limits import check_allocation, quoted
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import NOTE
from cachetool.sources.rows import Part, StoredColumn, joined

__all__ = ["SINGLE", "by_groups", "too_many", "wants_in_groups"]

_VALUE = "value"
"""Field of samples that are one array without a name of its own."""
_FEW = 8
"""Number of alike groups that may be cameras or sensors. More groups can hardly be the fields of one sample."""
_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing", "holdout"})
SINGLE = "a single value, without rows"

Array = npt.NDArray[Any]
Members = dict[str, StoredColumn]
"""The arrays of one group by their names in the group; "" for an array that is no group."""


def by_groups(
    path: object,
    columns: Sequence[StoredColumn],
    options: SourceOptions,
    skipped: list[tuple[str, str]],
    *,
    stored: int,
    ours: bool = False,
) -> tuple[list[StoredColumn], StoredColumn | None]:
    """Return the arrays whose rows are samples, and their keys.

    These are the arrays of the file, or one array for each field of its groups. ``stored`` is the size of the file
    in bytes. ``ours``: cachetool wrote the file, so its rows are samples. Single values are no rows; they and the
    arrays beside the groups are added to ``skipped``. Raise :class:`UsageError` if groups are asked for and there
    are none, or if both readings make sense.
    """
    groups, asked = None, options.read_as == "groups"
    # A user who names an array by its full name has decided that its rows are the samples, so groups are not searched
    # for.
    if not ours and (asked or (options.read_as != "rows" and options.rows is None and not _named(columns, options))):
        groups = _alike(columns)
    if groups is None and asked and not ours:
        raise UsageError(
            f"{path}: --read-as groups needs groups with arrays of the same names and types; the file has none"
        )
    if groups is None or not (
        asked or _asked((name or _VALUE for name in groups.members[0]), options) or _are_samples(path, groups)
    ):
        skipped += [(column.name, SINGLE) for column in columns if not column.shape]
        return [column for column in columns if column.shape], None
    inside = {column.name for members in groups.members for column in members.values()}
    about = f"{quoted(groups.names[0])} to {quoted(groups.names[-1])}"
    for name in (column.name for column in columns if column.name not in inside):
        in_group = any(name.startswith(f"{group}/") for group in groups.names)
        beside = f"outside of the groups {about}, which are the samples"
        skipped.append((name, "missing in some groups, or not of the same type in all" if in_group else beside))
    if not asked:
        count = len(groups.names)
        skipped.append(
            (NOTE, f"each of the {count} groups ({about}) is a sample; to read the rows of all groups: --read-as rows")
        )
    return _fields(path, groups, skipped, stored), groups.keys


def too_many(path: object, most: int, what: str) -> str:
    """Return the message about a file with so many groups that opening it takes too long."""
    return (
        f"{path} has more than {most} {what}, and each opening of the file must read all of them;\nwrite each sample"
        ' into its own file, with the program in docs/how-to/read-hdf5-and-zarr.md, "One group for each sample"'
    )


def wants_in_groups(options: SourceOptions) -> Callable[[str], bool]:
    """Return a function that says if an array is asked for or renamed, by its full name or by its name in a group."""

    def wants(name: str) -> bool:
        tail = name
        # Where the groups begin is unknown before all names are read, so every ending of the name may be the name in a
        # group.
        while not options.wants(tail) and tail not in options.rename:
            _, slash, tail = tail.partition("/")
            if not slash:
                return options.wants(_VALUE)
        return True

    return wants


def _named(columns: Sequence[StoredColumn], options: SourceOptions) -> bool:
    """Return True if an array is asked for by its full name."""
    return _asked((column.name for column in columns), options)


def _asked(names: Iterable[str], options: SourceOptions) -> bool:
    return any(options.rename.get(name, name) in (options.chosen or ()) for name in names)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Alike groups and their full names."""

    names: list[str]
    members: list[Members]

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        """The first dimension of each array, or an empty tuple for a single value."""
        return [column.shape[:1] for members in self.members for column in members.values()]

    @property
    def keys(self) -> StoredColumn:
        """The names of the groups as a column of keys."""
        raw = [name.encode("utf-8", "surrogateescape") for name in self.names]
        return StoredColumn(KEY, "str", (len(raw),), sum(map(len, raw)), lambda a, b: joined(raw[a:b]))


def _alike(columns: Sequence[StoredColumn]) -> _Groups | None:
    """Return the largest set of alike groups in one place, or None if there is no set of two or more.

    Groups that are numbered (``demo_0``) need only some arrays in common. Only these arrays are taken.
    """
    places: dict[str, dict[str, Members]] = {}
    for column in columns:
        parts = column.name.split("/")
        for depth in range(len(parts)):
            children = places.setdefault("".join(f"{part}/" for part in parts[:depth]), {})
            children.setdefault(parts[depth], {})["/".join(parts[depth + 1 :])] = column
    alike = [
        _Groups([place + child for child in children], members)
        for place, children in places.items()
        if len(children) > 1 and (members := _common(children))
    ]
    return max(alike, key=lambda groups: len(groups.names), default=None)


def _common(children: Mapping[str, Members]) -> list[Members]:
    """Return the arrays that are taken of each group, or nothing if the groups are not of one kind."""
    structures = list(map(_structure, children.values()))
    common = frozenset.intersection(*structures)
    names = {name for name, _, _ in common}
    if not names or (not _are_numbered(children) and len(set(structures)) > 1):
        return []
    return [{name: column for name, column in members.items() if name in names} for members in children.values()]


def _are_numbered(names: Iterable[str]) -> bool:
    patterns = {re.sub(r"[0-9]+", "0", name) for name in names}
    return len(patterns) == 1 and "0" in patterns.pop()


def _structure(members: Members) -> frozenset[tuple[str, str, object]]:
    return frozenset(
        (name, column.dtype, column.shape[1:] if name == "" and column.shape else len(column.shape))
        for name, column in members.items()
    )


def _are_samples(path: object, groups: _Groups) -> bool:
    """Return True if each group is a sample. Raise :class:`UsageError` if this reading and rows across the groups both
    make sense."""
    count, lengths = len(groups.names), Counter(groups.lengths)
    names = [name.rpartition("/")[2] for name in groups.names]
    splits = all(name.lower() in _SPLITS for name in names)
    numbered = _are_numbered(names)
    ((length, most), *_) = lengths.most_common(1)
    across = len(lengths) == 1 and bool(length)
    if splits:
        samples, clear = False, not across
    elif across:
        # Groups of one length are either samples of a fixed length or cameras with one row a sample. More groups than
        # rows are samples; up to eight are cameras.
        samples = count > max(_FEW, length[0])
        clear = samples or count <= _FEW or not numbered
    elif "" in groups.members[0]:
        # Plain arrays instead of groups: numbered names of several lengths are samples. Many arrays of one length would
        # be fields instead.
        samples, clear = (numbered and count > 2) or (count > _FEW and 2 * most <= count), True
    else:
        samples, clear = numbered or count > _FEW, numbered or count > _FEW or count == 2
    if clear:
        return samples
    fields = shlex.quote(",".join(column.name for column in groups.members[0].values()))
    some = ", ".join(map(quoted, names[:2]))
    raise UsageError(
        f"{path}: {count} groups have the same arrays ({some}, ...); to make each group a sample: --read-as groups;\n"
        f"to make each row of all groups a sample: --read-as rows; each row of one group: --fields {fields}"
    )


def _fields(path: object, groups: _Groups, skipped: list[tuple[str, str]], stored: int) -> list[StoredColumn]:
    """Return a column for each array of the groups that can be a field."""
    columns = []
    for name in groups.members[0]:
        column = _field(path, name or _VALUE, [members[name] for members in groups.members], stored)
        if isinstance(column, str):
            skipped.append((f"{groups.names[0]}/{name}", column))
        else:
            columns.append(column)
    return columns


def _field(path: object, name: str, arrays: list[StoredColumn], stored: int) -> StoredColumn | str:
    first, text = arrays[0], arrays[0].dtype in ("bytes", "str")
    if any(array.ragged for array in arrays):
        return "lists of values of differing size"
    if text and any(math.prod(array.shape) != 1 for array in arrays):
        return "several texts in one sample"
    largest = max(arrays, key=lambda array: array.nbytes)
    # A sample of a group is read completely, so the largest array decides how much memory a hostile file can claim.
    check_allocation(f"{path}: {quoted(largest.name)}", largest.nbytes, stored=stored)
    sizes = {array.shape for array in arrays}
    rank = len(first.shape)

    def read(start: int, stop: int) -> Column:
        values = [_whole(array) for array in arrays[start:stop]]
        if text:
            return joined([value.values.tobytes() for value in values])
        if len(sizes) == 1:
            return np.stack([value.reshape(first.shape) for value in values])
        counts = [math.prod(array.shape) for array in arrays[start:stop]]
        shapes = np.array([array.shape for array in arrays[start:stop]], dtype=np.int64)
        return Ragged(np.concatenate([value.reshape(-1) for value in values]), np.cumsum([0, *counts]), shapes)

    def parts() -> Iterator[Part]:
        for row, array in enumerate(arrays):
            if array.offset >= 0:
                yield row, array.offset, array.nbytes, ""
            elif array.parts is not None:
                yield from ((row, at, nbytes, key) for _, at, nbytes, key in array.parts())

    shape = (len(arrays), *(first.shape if len(sizes) == 1 and not text else ()))
    return StoredColumn(
        name, first.dtype, shape, sum(array.nbytes for array in arrays), read,
        ragged=0 if len(sizes) == 1 or text else rank, piece=max(largest.nbytes, *(array.piece for array in arrays)),
        parts=parts, packing=next((array.packing for array in arrays if array.packing), {}),
        alike=all(array.packing == first.packing for array in arrays), dims=_dims(arrays),
    )  # fmt: skip


def _dims(arrays: list[StoredColumn]) -> tuple[str, ...]:
    """Return the names of the dimensions if all arrays agree on them, after a name for the samples."""
    dims = {array.dims for array in arrays}
    return ("sample", *arrays[0].dims) if len(dims) == 1 and arrays[0].dims else ()


def _whole(array: StoredColumn) -> Any:
    """Return all values of an array."""
    # Readers of columns expect start < stop, and an empty array has no row to read.
    if 0 in array.shape:
        return np.empty(array.shape, dtype=array.dtype)
    # Each array is read once, in one piece. The slab behind `read` would keep a copy of its last rows for nothing.
    return (array.once or array.read)(0, array.shape[0] if array.shape else 1)
