"""The schema that samples or files share: what each field is in one sample, and what it must be to hold all of them.

Same shape -> fixed; same rank and dtype -> ragged; whole and other numbers under one JSON key -> float64; anything else
is an error that names two samples.

:func:`fitted` brings blocks of files that differ a little under the one schema of the dataset.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import KEY, Field, Schema
from cachetool.sources.decode import Value
from cachetool.sources.grouping import family
from cachetool.sources.rows import of_sizes

__all__ = [
    "Shape",
    "common",
    "common_of",
    "common_schema",
    "conform",
    "fitted",
    "majority",
    "names_of",
    "nbytes_of",
    "shape_of",
]

Objects = Callable[[str], Sequence[str]]
"""Gives the keys of the objects of a sample by its key."""


_FEW = 8
"""Most fields that a message says how to leave out."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one field is in one sample."""

    dtype: str
    """As in :class:`Field`."""
    shape: tuple[int | None, ...]
    plain: bool = False
    """A number that was written without a type, so that it may become a float."""

    def describe(self) -> str:
        """For messages."""
        return Field("x", self.dtype, self.shape).describe()


def shape_of(value: Value) -> Shape:
    """What a decoded value is."""
    if isinstance(value, np.ndarray):
        return Shape(value.dtype.newbyteorder("<").str, value.shape)
    if isinstance(value, str):
        return Shape("str", ())
    if isinstance(value, bytes | memoryview):
        return Shape("bytes", ())
    return Shape({bool: "|b1", int: "<i8"}.get(type(value), "<f8"), (), plain=True)


def nbytes_of(value: Value) -> int:
    """Bytes that a decoded value takes in a shard, about."""
    if isinstance(value, np.ndarray | memoryview):
        return value.nbytes
    return len(value) if isinstance(value, str | bytes) else 8


def common_schema(
    samples: Iterable[tuple[str, Mapping[str, Shape]]],
    order: Sequence[str] | None = None,
    *,
    objects: Objects | None = None,
) -> Schema:
    """The schema of ``samples``, pairs of a key and what its fields are; ``__key__`` comes last.

    ``order`` gives the fields' order, default: that of the first sample. ``objects``: the names of the objects of
    a sample, where they are those of a place, which may be files of many samples. Raises :class:`BadObject` naming two
    samples that have no schema in common.
    """
    first_key = ""
    merged: dict[str, Shape] = {}
    from_key: dict[str, str] = {}
    for key, shapes in samples:
        if not merged:
            first_key, merged = key, dict(shapes)
            from_key = dict.fromkeys(merged, key)
        elif shapes.keys() != merged.keys():
            raise BadObject(_differing(first_key, list(merged), key, list(shapes), objects))
        for name, shape in shapes.items():
            if shape != merged[name]:
                merged[name] = _merge(name, from_key[name], merged[name], key, shape)
    names = [name for name in (order or ()) if name in merged]
    names += [name for name in merged if name not in names and name != KEY]
    try:
        fields = [Field(name, merged[name].dtype, merged[name].shape) for name in names]
        return Schema((*fields, Field(KEY, "str")) if KEY in merged else tuple(fields))
    except UsageError as error:
        raise BadObject(f"sample {first_key!r}: {error}") from None


def majority(samples: Sequence[tuple[str, Mapping[str, Shape]]]) -> list[tuple[str, Mapping[str, Shape]]]:
    """Those of ``samples`` that can share a schema with most of the others; of two groups of one size the first."""
    alike = [frozenset((name, *_family(shape)) for name, shape in shapes.items()) for _, shapes in samples]
    most = Counter(alike).most_common(1)
    return [sample for sample, family in zip(samples, alike, strict=True) if family == most[0][0]]


def _family(shape: Shape) -> tuple[str, int]:
    number = shape.plain and shape.dtype in ("<i8", "<f8")
    return "number" if number else shape.dtype, len(shape.shape)


def _merge(name: str, key_a: str, a: Shape, key_b: str, b: Shape) -> Shape:
    if a.dtype == b.dtype and len(a.shape) == len(b.shape):
        return a if a.shape == b.shape else Shape(a.dtype, (None,) * len(a.shape))
    if a.plain and b.plain and {a.dtype, b.dtype} == {"<i8", "<f8"}:
        return Shape("<f8", (), plain=True)
    raise BadObject(
        f"field {name!r} is {a.describe()} in {key_a!r} but {b.describe()} in {key_b!r};\n"
        f"leave it out with --fields -{name}, or leave out the misfits with --on-error skip"
    )


def _differing(key_a: str, a: list[str], key_b: str, b: list[str], objects: Objects | None) -> str:
    """The message about two samples whose fields differ, with the options that take them."""
    from cachetool.sources.kinds import kind_of

    a, b = ([name for name in names if name != KEY] for names in (a, b))
    only_a, only_b = [name for name in a if name not in b], [name for name in b if name not in a]
    common = [name for name in a if name in b]
    text = f"samples differ in their fields: {key_a!r} has {names_of(a)}; {key_b!r} has {names_of(b)};\n"
    of_objects = objects is not None
    many = [
        name for name in (*only_a, *only_b) if of_objects and (kind := kind_of(f"x.{name}")) and not kind.one_sample
    ]
    ways = [f"for the samples in the {names_of(many)} files use --read-as files"] if many else []
    if common:
        ways.append(f"take what all have with --fields {shlex.quote(','.join(common))[:200]}")
    if len(only_a) == len(only_b) == 1 and family(only_a[0]) is not None and family(only_a[0]) == family(only_b[0]):
        ways.append(f"take both as one field with --rename {only_a[0]}=X --rename {only_b[0]}=X")
    if objects is not None:
        globs = [_glob(key, objects(key)) for key in (key_a, key_b)]
        if all(globs) and globs[0] != globs[1]:
            ways.append(
                f"take one of them, with --include {shlex.quote(globs[0])} or --include {shlex.quote(globs[1])}"
            )
        folders = [key.partition("/")[::2] for key in (key_a, key_b)]
        if not common and all(name for _, name in folders) and folders[0][0] != folders[1][0]:
            ways.append("join the objects of several folders with --stem '[^/]*/(.*?)[.]'")
    return text + "; or ".join([*ways, "see --stem for how names are cut"])


def _glob(sample: str, keys: Sequence[str]) -> str:
    """A glob of the names that the one object of a sample has; empty where there is none, or more objects."""
    tail = keys[0][len(sample) :] if len(keys) == 1 and keys[0].startswith(sample) else ""
    return "*" + re.sub(r"([*?[])", r"[\1]", tail) if tail.startswith(".") and tail.isprintable() else ""


def names_of(names: Sequence[Any], most: int = 8) -> str:
    """Field names for a message, ``__key__`` left out."""
    shown = [str(name)[:60] if str(name).isprintable() else repr(name)[:60] for name in names if name != KEY]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "") or "none"


def common_of(schemas: Iterable[tuple[str, Schema]], *, sparse: bool = False) -> Schema:
    """The schema that holds samples of all files, given by name; ``sparse``: whether a list that a file lacks is empty
    in all its samples, as in records. Raises :class:`BadObject` naming two of them."""
    (first, schema), *others = schemas
    for then, other in others:
        if sparse:
            schema, other = _with_lists(schema, other), _with_lists(other, schema)
        schema = common(_widened(schema, other), _widened(other, schema), first=Path(first), then=Path(then))
    return schema


def _with_lists(schema: Schema, other: Schema) -> Schema:
    lists = [
        Field(field.name, field.dtype, (None,))
        for field in other
        if field.name not in schema and field.kind in ("fixed", "ragged") and field.rank <= 1
    ]
    return Schema((*schema, *lists))


def _widened(schema: Schema, other: Schema) -> Schema:
    """Lists that always had one value in some records have several in others: numbers become lists of one."""
    fields = [
        Field(field.name, field.dtype, (1,))
        if field.shape == () and field.name in other and other[field.name].rank == 1 and field.kind == "fixed"
        else field
        for field in schema
    ]
    return Schema(tuple(fields))


def fitted(block: Block, schema: Schema, where: str, *, sparse: bool = False) -> Block:
    """The block under the dataset's schema; ``sparse`` as for :func:`common_of`. Raises :class:`BadObject` naming the
    file when it does not fit."""
    block = _lists(block, schema, sparse=sparse)
    if set(block.schema.names) != set(schema.names):
        raise BadObject(
            f"{where!r} has the fields {', '.join(block.schema.names)}, the dataset {', '.join(schema.names)};\n"
            "choose some that all have with --fields"
        )
    for field in block.schema:
        wanted = schema[field.name]
        same = field.dtype == wanted.dtype and field.rank == wanted.rank
        if not same or (field != wanted and wanted.kind != "ragged"):
            column = block.columns[field.name]
            if same and isinstance(column, Ragged) and column.shapes is not None and _all(column, wanted.shape):
                continue
            raise BadObject(
                f"{where!r}: field {field.name!r} is {field.describe()}, but the dataset has {wanted.describe()};\n"
                f"leave it out with --fields -{field.name}"
            )
    return conform(_unragged(block, schema), schema)


def _lists(block: Block, schema: Schema, *, sparse: bool) -> Block:
    """With lists of one number, and for ``sparse`` ones of none, where the dataset has lists of any."""
    columns: dict[str, Column] = dict(block.columns)
    fields = list(_widened(block.schema, schema))
    for field in fields:
        if field.shape == (1,) and block.schema[field.name].shape == ():
            columns[field.name] = np.asarray(columns[field.name]).reshape(-1, 1)
    for field in schema:
        if sparse and field.name not in block.schema and field.kind == "ragged" and field.rank == 1:
            none = np.zeros(len(block), dtype=np.int64)
            columns[field.name] = of_sizes(np.zeros(0, dtype=field.numpy), none, shapes=True)
            fields.append(field)
    return Block(Schema(tuple(fields)), columns)


def _all(column: Ragged, shape: Sequence[int | None]) -> bool:
    return column.shapes is not None and bool((column.shapes == np.array(shape, dtype=np.int64)).all())


def _unragged(block: Block, schema: Schema) -> Block:
    """Arrays that the dataset knows to be of one size, as such."""
    columns: dict[str, Column] = dict(block.columns)
    fields = []
    for field in block.schema:
        wanted, column = schema[field.name], columns[field.name]
        if wanted.kind == "fixed" and isinstance(column, Ragged):
            columns[field.name] = column.compact().values.reshape(len(column), *wanted.sizes)
            fields.append(wanted)
        else:
            fields.append(field)
    return Block(Schema(tuple(fields)), columns)


def common(a: Schema, b: Schema, *, first: Path, then: Path) -> Schema:
    """The schema that holds samples of both: arrays whose sizes differ become ragged.

    Raises :class:`BadObject` naming the two files when there is none.
    """
    if set(a.names) != set(b.names):
        only = sorted(set(a.names) ^ set(b.names))
        dropped = f"leave these out with --fields {','.join(f'-{name}' for name in only)}"
        ways = ["convert them apart"]
        if ({*a.names} & {*b.names}) - {KEY}:
            ways.insert(0, "choose some that all have with --fields" if len(only) > _FEW else dropped)
        raise BadObject(f"{first} and {then} differ in their fields: {', '.join(only)[:200]}; {', or '.join(ways)}")
    fields = []
    for field in a:
        other = b[field.name]
        if field == other:
            fields.append(field)
        elif field.dtype == other.dtype and field.rank == other.rank:
            fields.append(Field(field.name, field.dtype, (None,) * field.rank))
        else:
            raise BadObject(
                f"field {field.name!r} is {field.describe()} in {first} but {other.describe()} in {then};"
                f" leave it out with --fields -{field.name}, or convert them apart"
            )
    return Schema(tuple(fields))


def conform(block: Block, schema: Schema) -> Block:
    """The same samples under a schema that :func:`common` made; columns stay views."""
    if block.schema == schema:
        return block
    columns: dict[str, Column] = {}
    for field in schema:
        column = block.columns[field.name]
        if field.kind == "ragged" and not isinstance(column, Ragged):
            size = int(np.prod(column.shape[1:], dtype=np.int64))
            offsets = np.arange(len(column) + 1, dtype=np.int64) * size
            shapes = np.tile(np.array(column.shape[1:], dtype=np.int64), (len(column), 1))
            column = Ragged(np.ascontiguousarray(column).reshape(-1), offsets, shapes)
        columns[field.name] = column
    return Block(schema, columns)
