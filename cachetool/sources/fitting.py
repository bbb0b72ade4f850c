"""Blocks of files that differ a little, under the one schema of the dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import BadObject
from cachetool.core.schema import Field, Schema
from cachetool.sources.joined import common, conform
from cachetool.sources.rows import of_sizes

__all__ = ["common_of", "fitted"]


def common_of(found: Iterable[tuple[str, Schema]], *, sparse: bool = False) -> Schema:
    """The schema that holds samples of all files, given by name; ``sparse``: whether a list that a file lacks is empty
    in all its samples, as in records. Raises :class:`BadObject` naming two of them."""
    (first, schema), *others = found
    for then, other in others:
        if sparse:
            schema, other = _with_lists(schema, other), _with_lists(other, schema)
        schema = common(_widened(schema, other), _widened(other, schema), first=Path(first), then=Path(then))
    return schema


def _with_lists(mine: Schema, other: Schema) -> Schema:
    lists = [
        Field(field.name, field.dtype, (None,))
        for field in other
        if field.name not in mine and field.kind in ("fixed", "ragged") and field.rank <= 1
    ]
    return Schema((*mine, *lists))


def _widened(mine: Schema, other: Schema) -> Schema:
    """Lists that always had one value in some records have several in others: numbers become lists of one."""
    fields = [
        Field(field.name, field.dtype, (1,))
        if field.shape == () and field.name in other and other[field.name].rank == 1 and field.kind == "fixed"
        else field
        for field in mine
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
    for mine in block.schema:
        wanted = schema[mine.name]
        same = mine.dtype == wanted.dtype and mine.rank == wanted.rank
        if not same or (mine != wanted and wanted.kind != "ragged"):
            column = block.columns[mine.name]
            if same and isinstance(column, Ragged) and column.shapes is not None and _all(column, wanted.shape):
                continue
            raise BadObject(
                f"{where!r}: field {mine.name!r} is {mine.describe()}, but the dataset has {wanted.describe()};\n"
                "leave it out with --fields"
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
    for mine in block.schema:
        wanted, column = schema[mine.name], columns[mine.name]
        if wanted.kind == "fixed" and isinstance(column, Ragged):
            columns[mine.name] = column.compact().values.reshape(len(column), *wanted.sizes)
            fields.append(wanted)
        else:
            fields.append(mine)
    return Block(Schema(tuple(fields)), columns)
