"""The schema that samples or files share: the type of each field in one sample, and the type that holds all samples.

The same shape becomes a fixed field; the same rank and dtype become a ragged field; whole and other numbers under one
JSON key become float64. Anything else is an error that names two samples.

:func:`fitted` converts blocks of files that differ a little to the one schema of the dataset.
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
from cachetool.core.schema import KEY, Field, Schema, noted
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
"""A function that returns the keys of a sample's objects by the sample's key."""


_FEW = 8
"""Most fields for which a message shows how to leave them out."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The type of one field in one sample."""

    dtype: str
    """The dtype as in :class:`Field`."""
    shape: tuple[int | None, ...]
    plain: bool = False
    """True for a number that was written without a type, so it may become a float."""

    def describe(self) -> str:
        """Return the type in words, for messages."""
        return Field("x", self.dtype, self.shape).describe()


def shape_of(value: Value) -> Shape:
    """Return the type of a decoded value."""
    if isinstance(value, np.ndarray):
        return Shape(value.dtype.newbyteorder("<").str, value.shape)
    if isinstance(value, str):
        return Shape("str", ())
    if isinstance(value, bytes | memoryview):
        return Shape("bytes", ())
    return Shape({bool: "|b1", int: "<i8"}.get(type(value), "<f8"), (), plain=True)


def nbytes_of(value: Value) -> int:
    """Return the approximate bytes that a decoded value takes in a shard."""
    if isinstance(value, np.ndarray | memoryview):
        return value.nbytes
    return len(value) if isinstance(value, str | bytes) else 8


def common_schema(
    samples: Iterable[tuple[str, Mapping[str, Shape]]],
    order: Sequence[str] | None = None,
    *,
    objects: Objects | None = None,
) -> Schema:
    """Return the schema of ``samples``, pairs of a key and the types of its fields; ``__key__`` comes last.

    ``order`` is the order of the fields, by default that of the first sample. ``objects`` returns the objects of a
    sample if the samples are objects of a place, which may be files of many samples. Raises :class:`BadObject` naming
    two samples that have no common schema.
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
    """Return the samples that can share a schema with most of the others; of two groups of one size the first."""
    alike = [frozenset((name, *_family(shape)) for name, shape in shapes.items()) for _, shapes in samples]
    most = Counter(alike).most_common(1)
    return [sample for sample, family in zip(samples, alike, strict=True) if family == most[0][0]]


def _family(shape: Shape) -> tuple[str, int]:
    number = shape.plain and shape.dtype in ("<i8", "<f8")
    return "number" if number else shape.dtype, len(shape.shape)


def _merge(name: str, key_a: str, a: Shape, key_b: str, b: Shape) -> Shape:
    """Return the type that holds both. Raises :class:`BadObject` if there is none."""
    if a.dtype == b.dtype and len(a.shape) == len(b.shape):
        return a if a.shape == b.shape else Shape(a.dtype, (None,) * len(a.shape))
    if a.plain and b.plain and {a.dtype, b.dtype} == {"<i8", "<f8"}:
        return Shape("<f8", (), plain=True)
    raise BadObject(
        f"field {name!r} is {a.describe()} in {key_a!r} but {b.describe()} in {key_b!r};\n"
        f"leave the field out with --fields -{name}, or skip the samples that differ with --on-error skip"
    )


def _differing(key_a: str, a: list[str], key_b: str, b: list[str], objects: Objects | None) -> str:
    """Return the message about two samples whose fields differ, with the options that accept them."""
    # Imported here, because only this message needs the registry of kinds.
    from cachetool.sources.kinds import kind_of

    a, b = ([name for name in names if name != KEY] for names in (a, b))
    only_a, only_b = [name for name in a if name not in b], [name for name in b if name not in a]
    common = [name for name in a if name in b]
    text = f"samples differ in their fields: {key_a!r} has {names_of(a)}; {key_b!r} has {names_of(b)};\n"
    of_objects = objects is not None
    many = [
        name for name in (*only_a, *only_b) if of_objects and (kind := kind_of(f"x.{name}")) and not kind.one_sample
    ]
    ways = [f"read the samples in the {names_of(many)} files with --read-as files"] if many else []
    if common:
        ways.append(f"choose the fields that all have with --fields {shlex.quote(','.join(common))[:200]}")
    if len(only_a) == len(only_b) == 1 and family(only_a[0]) is not None and family(only_a[0]) == family(only_b[0]):
        ways.append(f"make both one field with --rename {only_a[0]}=X --rename {only_b[0]}=X")
    if objects is not None:
        globs = [_glob(key, objects(key)) for key in (key_a, key_b)]
        if all(globs) and globs[0] != globs[1]:
            ways.append(
                f"choose one of them with --include {shlex.quote(globs[0])} or --include {shlex.quote(globs[1])}"
            )
        folders = [key.partition("/")[::2] for key in (key_a, key_b)]
        if not common and all(name for _, name in folders) and folders[0][0] != folders[1][0]:
            ways.append("join the objects of several folders with --stem '[^/]*/(.*?)[.]'")
    return text + "; or ".join([*ways, "cut names differently with --stem"])


def _glob(sample: str, keys: Sequence[str]) -> str:
    """Return a glob for the name of a sample's only object; empty if it has none, or several."""
    tail = keys[0][len(sample) :] if len(keys) == 1 and keys[0].startswith(sample) else ""
    # Brackets keep a `*`, `?` or `[` in a name from acting as a wildcard.
    return "*" + re.sub(r"([*?[])", r"[\1]", tail) if tail.startswith(".") and tail.isprintable() else ""


def names_of(names: Sequence[Any], most: int = 8) -> str:
    """Return field names for a message, without ``__key__``."""
    shown = [str(name)[:60] if str(name).isprintable() else repr(name)[:60] for name in names if name != KEY]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "") or "none"


def common_of(schemas: Iterable[tuple[str, Schema]], *, sparse: bool = False) -> Schema:
    """Return the schema that holds the samples of all files, given by name.

    ``sparse``: True if a list that a file lacks counts as empty in all of its samples, as in records. Raises
    :class:`BadObject` naming two files.
    """
    (first, schema), *others = schemas
    for then, other in others:
        if sparse:
            schema, other = _with_lists(schema, other), _with_lists(other, schema)
        schema = common(_widened(schema, other), _widened(other, schema), first=Path(first), then=Path(then))
    return schema


def _with_lists(schema: Schema, other: Schema) -> Schema:
    """Return the schema with the lists that only ``other`` has."""
    lists = [
        Field(field.name, field.dtype, (None,))
        for field in other
        if field.name not in schema and field.kind in ("fixed", "ragged") and field.rank <= 1
    ]
    return Schema((*schema, *lists))


def _widened(schema: Schema, other: Schema) -> Schema:
    """Return the schema, with a list of one number in place of each number for which ``other`` has a list."""
    # A list that has one value in every record of a file looks like a number there. Another file shows that it is a
    # list.
    fields = [
        Field(field.name, field.dtype, (1,))
        if field.shape == () and field.name in other and other[field.name].rank == 1 and field.kind == "fixed"
        else field
        for field in schema
    ]
    return Schema(tuple(fields))


def fitted(block: Block, schema: Schema, where: str, *, sparse: bool = False) -> Block:
    """Return the block under the dataset's schema; ``sparse`` as for :func:`common_of`.

    Raises :class:`BadObject` naming the file when the block does not fit.
    """
    block = _lists(block, schema, sparse=sparse)
    if set(block.schema.names) != set(schema.names):
        raise BadObject(
            f"{where!r} has the fields {', '.join(block.schema.names)}, but the dataset has"
            f" {', '.join(schema.names)};\nchoose fields that all have with --fields"
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
                f"leave the field out with --fields -{field.name}"
            )
    return conform(_unragged(block, schema), schema)


def _lists(block: Block, schema: Schema, *, sparse: bool) -> Block:
    """Return the block with lists where the dataset has lists: numbers become lists of one, missing lists become
    empty."""
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
    """Return the block with ragged arrays as fixed ones, where the dataset has one size."""
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
    """Return the schema that holds samples of both files: arrays whose sizes differ become ragged.

    Raises :class:`BadObject` naming the two files when there is none.
    """
    if set(a.names) != set(b.names):
        only = sorted(set(a.names) ^ set(b.names))
        dropped = f"leave these fields out with --fields {','.join(f'-{name}' for name in only)}"
        ways = ["convert the files separately"]
        if ({*a.names} & {*b.names}) - {KEY}:
            ways.insert(0, "choose fields that all have with --fields" if len(only) > _FEW else dropped)
        raise BadObject(f"{first} and {then} differ in their fields: {', '.join(only)[:200]}; {', or '.join(ways)}")
    fields = []
    for field in a:
        other = b[field.name]
        if field == other:
            fields.append(noted(field, field, other))
        elif field.dtype == other.dtype and field.rank == other.rank:
            fields.append(noted(Field(field.name, field.dtype, (None,) * field.rank), field, other))
        else:
            raise BadObject(
                f"field {field.name!r} is {field.describe()} in {first} but {other.describe()} in {then};"
                f" leave the field out with --fields -{field.name}, or convert the files separately"
            )
    return Schema(tuple(fields))


def conform(block: Block, schema: Schema) -> Block:
    """Return the same samples under a schema that :func:`common` made; columns stay views."""
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
