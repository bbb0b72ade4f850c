"""The user's function over samples or batches, and columns made of what it gives.

It comes to the feeders by cloudpickle: lambdas, closures and functions of a notebook too. What it gives first fixes the
fields of all that follows.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from cachetool.core.block import Block, Column, Ragged, masked
from cachetool.core.errors import UsageError
from cachetool.core.schema import KEY, Field, Schema, storage_dtype
from cachetool.loaders.order import Int64s
from cachetool.proc.lines import TransformError

__all__ = ["Function", "Transform", "dumps", "loads"]

Function = Callable[..., Mapping[str, Any]]


def dumps(function: Function) -> bytes:
    """The function as bytes. Raises :class:`UsageError` when it holds something that cannot be sent."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as error:
        raise UsageError(
            f"transform= cannot be sent to the feeders: {type(error).__name__}: {' '.join(str(error).split())};"
            " make such objects inside the function, or use workers=0"
        ) from error


def loads(data: bytes | bytearray) -> Function:
    """The function that :func:`dumps` was given, by the process that started this one. One that cannot be had here
    raises why when it is called, where whoever waits for its first batch hears of it."""
    import cloudpickle

    try:
        function: Function = cloudpickle.loads(data)
    except BaseException as error:  # noqa: BLE001 - imports of the user's run here
        return functools.partial(_raise, error)
    return function


def _raise(error: BaseException, _: object) -> NoReturn:
    raise error


class Transform:
    """The function with what it is called with: a dict of each sample, or one of arrays and lists for a whole batch.

    A function with a parameter ``rng`` gets a ``numpy.random.Generator`` that seed, epoch and the sample's number (of a
    batch: that of its first sample) decide.
    """

    def __init__(self, function: Function, *, transform_each: str, seed: int) -> None:
        self._function, self._batch, self._seed = function, transform_each == "batch", seed
        self._random = _takes_rng(function)
        self._schema: Schema | None = None

    def __call__(self, block: Block, *, epoch: int, indices: Int64s) -> Block:
        """What comes out for the samples ``indices`` of an epoch.

        Raises :class:`TransformError` from what the function raises; :class:`UsageError` for a result that is not what
        the first one was.
        """
        if self._batch:
            given = _values(block)
            kept = {field.name: list(given[field.name]) for field in block.schema if field.kind == "ragged"}
            return self._block(self._call(given, epoch, int(indices[0])), block.schema, kept)
        ragged = [field.name for field in block.schema if field.kind == "ragged"] if self._schema is None else []
        before: dict[str, list[Any]] = {name: [] for name in ragged}
        results = []
        for i, number in enumerate(indices.tolist()):
            sample = block.sample(i)
            for name in ragged:  # now: the function may change the dict that it is given
                before[name].append(sample[name])
            results.append(self._call(sample, epoch, number))
        if self._schema is None:
            self._schema = _schema(results, before)
        return _checked(self._schema, results, block.schema)

    def nothing(self) -> Block | None:
        """What comes out for no samples; None as long as it is not known which fields come out."""
        return None if self._schema is None else Block.from_samples(self._schema, [])

    def _call(self, argument: dict[str, Any], epoch: int, number: int) -> Mapping[str, Any]:
        extra = {"rng": np.random.default_rng((self._seed % 2**64, epoch, number))} if self._random else {}
        try:
            result = self._function(argument, **extra)
        except KeyboardInterrupt:  # of the process that trains: feeders ignore the signal
            raise
        except BaseException as error:  # SystemExit too, or what Rust's panics become: nothing would say so
            raise TransformError(self._which(argument, number)) from error
        if not isinstance(result, Mapping) or not result:
            less = "; to leave samples out use one over batches, which may give fewer" if result is None else ""
            gave = "an empty one" if isinstance(result, Mapping) else type(result).__name__
            where = self._which(argument, number)
            raise UsageError(f"transform= must give a dict of fields, it gave {gave}{where}{less}")
        if others := [name for name in result if not isinstance(name, str)]:
            raise UsageError(f"transform= must name its fields by str, it gave {others[0]!r}")
        return result

    def _which(self, argument: Mapping[str, Any], number: int) -> str:
        """Of which sample, or that a batch begins with, it was called: by its key if it was given that."""
        key = argument.get(KEY)
        if self._batch and isinstance(key, Sequence) and not isinstance(key, str) and key:
            key = key[0]
        name = f"{key!r:.80}" if isinstance(key, str) else str(number)
        return f" (batch from sample {name} on)" if self._batch else f" (sample {name})"

    def _block(self, result: Mapping[str, Any], given: Schema, kept: Mapping[str, list[Any]]) -> Block:
        fields = {field.name: field for field in self._schema or ()}
        names = list(fields) if fields.keys() == result.keys() else result
        likely = {field.name: field for field in given} if self._schema is None else fields
        columns = {}
        for name in names:
            if _says_nothing(result[name], listed=self._schema is None):
                columns[name] = _nothing(name, likely.get(name))
            else:
                ragged = name in fields and fields[name].kind == "ragged"
                columns[name] = _column(name, result[name], kept, ragged=ragged)
        schema = _together([field for field, _ in columns.values()])
        self._schema = self._schema or schema
        if schema != self._schema:
            raise UsageError(f"transform= gave {schema.describe()}; at first it gave {self._schema.describe()}")
        lengths = {name: len(column) for name, (_, column) in columns.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"transform= of a batch gave columns that differ in length: {lengths}")
        return Block(self._schema, {name: column for name, (_, column) in columns.items()})


def _takes_rng(function: Function) -> bool:
    if isinstance(function, functools.partial) and "rng" in function.keywords:
        return False  # the user's own, which the signature has as a default
    try:
        return "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none
        return False


def _values(block: Block) -> dict[str, Any]:
    """Columns as a user's function takes them: arrays; lists of str, bytes and arrays of differing shapes."""
    out: dict[str, Any] = {}
    for field in block.schema:
        column = block.columns[field.name]
        if not isinstance(column, Ragged):
            out[field.name] = column
        elif field.kind == "ragged":
            out[field.name] = [column[i] for i in range(len(column))]
        else:
            raw = [column[i].tobytes() for i in range(len(column))]
            text = field.kind == "str"
            out[field.name] = [value.decode("utf-8", "surrogateescape") for value in raw] if text else raw
    return out


@contextlib.contextmanager
def _of(what: str) -> Iterator[None]:
    """A field that cannot be stored is one that the function gave; it has no ``--rename``."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"transform= gave {what}: {str(error).partition('; rename ')[0]}") from error


def _together(fields: Sequence[Field]) -> Schema:
    with _of("fields that do not go together"):
        return Schema(tuple(fields))


def _field(name: str, value: Any) -> Field:
    if isinstance(value, str | bytes):
        with _of(f"field {name!r}"):
            return Field(name, "str" if isinstance(value, str) else "bytes")
    array = _array(name, value)
    with _of(f"field {name!r}"):
        return Field(name, storage_dtype(array.dtype).str, array.shape)


def _array(name: str, value: Any) -> np.ndarray[Any, Any]:
    if masked(value) or (isinstance(value, list | tuple) and any(map(masked, value))):
        raise UsageError(f"transform= gave masked values for field {name!r}; fill them: .filled(VALUE)")
    try:
        array = np.asarray(value)
    except Exception as error:  # NumPy's own of unequal lists, and whatever other libraries' arrays raise
        what = f"transform= gave {type(value).__name__} for field {name!r}, of which NumPy makes no array"
        raise UsageError(f"{what}: {' '.join(str(error).split())}") from error
    if array.dtype.kind in "OUSV":
        raise UsageError(
            f"transform= gave {type(value).__name__} for field {name!r}; give arrays, numbers, str or bytes"
        )
    return array


def _schema(results: Sequence[Mapping[str, Any]], given: Mapping[str, list[Any]]) -> Schema:
    """Of what came of the first batch; ``given``: the ragged values of its samples. Such a field stays ragged when its
    first value was passed through, its values still differ in shape, or the only one has the shape that it had; under
    another name, when all were passed through."""

    def of(name: str, value: Any) -> Field:
        field = _field(name, value)
        if not field.shape:
            return field
        values = [result.get(name) for result in results]
        if name in given:
            return _ragged(field) if value is given[name][0] or _still(values, given[name]) else field
        return _ragged(field) if _passed(values, given) else field

    return _together([of(name, value) for name, value in results[0].items()])


def _passed(values: Sequence[Any], given: Mapping[str, list[Any]]) -> bool:
    """Whether all of these are values of a ragged field, as they were given."""
    given_ids = {id(value) for column in given.values() for value in column}
    return all(id(value) in given_ids for value in values)


def _ragged(field: Field) -> Field:
    return replace(field, shape=(None,) * len(field.shape))


def _still(values: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether what was made of values of a ragged field is one too: arrays of one rank that differ in shape, or a
    single one that has the shape of what it was made of."""
    if len(values) == len(given) == 1:
        return bool(np.shape(values[0]) == np.shape(given[0]))
    shapes = {value.shape if isinstance(value, np.ndarray) else () for value in values}
    return len(shapes) > 1 and len({len(shape) for shape in shapes}) == 1


def _checked(schema: Schema, results: Sequence[Mapping[str, Any]], given: Schema) -> Block:
    for result in results:
        if result.keys() != set(schema.names):
            raise UsageError(
                f"transform= gave the fields {', '.join(result)}; at first it gave {', '.join(schema.names)}"
            )
    try:
        return Block.from_samples(schema, results)
    except UsageError as error:
        pad = _pad(schema, results, given)
        raise UsageError(f"transform= must give what its first result was: {error}{pad}") from error


def _pad(schema: Schema, results: Sequence[Mapping[str, Any]], given: Schema) -> str:
    """What to do where a field's values differ in shape."""
    ragged = {field.name for field in given if field.kind == "ragged"}
    for field in schema:
        if None not in field.shape and any(np.shape(result[field.name]) != field.shape for result in results):
            if field.name in ragged:
                return f"; the first batch's {field.name!r} had one shape: pad the others too, or use larger batches"
            return f"; pad {field.name!r} to one shape: only a field that is ragged in the cache may differ"
    return ""


def _says_nothing(value: Any, *, listed: bool) -> bool:
    """Whether a column has no value to tell its field by: an empty list; but for ``listed`` an empty array too, which
    NumPy makes a float64 of an empty list."""
    if isinstance(value, list | tuple):
        return not value
    return not listed and isinstance(value, np.ndarray) and value.shape == (0,)


def _nothing(name: str, field: Field | None) -> tuple[Field, Column]:
    """A column without rows: all samples of a batch were left out."""
    if field is None:
        raise UsageError(
            f"transform= gave an empty list for field {name!r} first, which does not say what it holds;\n"
            "give an empty array of its dtype, or call the field as what it is made of"
        )
    return field, Block.from_samples(Schema((field,)), []).columns[name]


def _column(name: str, value: Any, given: Mapping[str, list[Any]], *, ragged: bool) -> tuple[Field, Column]:
    """A whole column that the function gave, and its field. A list is a ragged column where it was before, where all of
    it are values of the batch's (``given``), and where it has the name of one and values that :func:`_still` are so."""
    listed = isinstance(value, list | tuple)
    still = listed and (ragged or _passed(value, given) or (name in given and _still(value, given[name])))
    if listed and (still or isinstance(value[0], str | bytes)):
        field = _field(name, value[0])
        if field.kind == "fixed" and field.shape:
            field = _ragged(field)
        column = Block.from_samples(Schema((field,)), [{name: element} for element in value]).columns[name]
        return field, column
    array = _array(name, value)
    if not array.ndim:
        raise UsageError(f"transform= of a batch must give columns; field {name!r} is a single {array.dtype}")
    with _of(f"field {name!r}"):
        dtype = storage_dtype(array.dtype)
        field = Field(name, dtype.str, array.shape[1:])
    return field, np.ascontiguousarray(array, dtype=dtype)
