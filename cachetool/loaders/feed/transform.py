"""The user's function over samples or batches, and the columns made of its results.

Feeders get the function by cloudpickle, so lambdas, closures and functions of a notebook work too. Its first result
fixes the fields of all later results.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cachetool.core.block import Block, Column, Ragged, masked
from cachetool.core.errors import UsageError
from cachetool.core.schema import KEY, Field, Schema, storage_dtype
from cachetool.loaders.crop import Corner
from cachetool.loaders.order import Int64s
from cachetool.loaders.sample_weights import SampleWeights
from cachetool.loaders.settings import Settings
from cachetool.proc.lines import TransformError

__all__ = ["Function", "Functions", "Transform", "dumps", "loads"]

Function = Callable[..., Mapping[str, Any]]


class Functions(NamedTuple):
    """The functions of the user that feeders call; None for one that was not given."""

    transform: Function | None = None
    corner: Corner | None = None
    weights: SampleWeights | None = None
    """The weights of single samples: no function, but too many to be among the settings."""


def dumps(functions: Functions) -> bytes:
    """Return the functions as bytes, no bytes if there are none.

    Raises :class:`UsageError` when one holds something that cannot be sent.
    """
    import cloudpickle

    if functions == Functions():
        return b""
    name = ""
    try:
        # One after the other, so that the message names the one that cannot be sent.
        for which, function in zip(Functions._fields, functions, strict=True):
            name = which
            cloudpickle.dumps(function)
        return bytes(cloudpickle.dumps(tuple(functions)))
    except Exception as error:
        raise UsageError(
            f"{name}= cannot be sent to the feeders: {type(error).__name__}: {' '.join(str(error).split())};"
            " create objects that cannot be pickled inside the function, or use workers=0"
        ) from error


def loads(data: bytes | bytearray) -> Functions:
    """Return the functions that another process gave to :func:`dumps`."""
    import cloudpickle

    if not data:
        return Functions()
    try:
        return Functions(*cloudpickle.loads(data))
    # Any error, because imports of the user's program run here. It is raised when the function is
    # called: the training process hears of errors with its first batch only.
    except BaseException as error:  # noqa: BLE001
        return Functions(functools.partial(_raise, error))


def _raise(error: BaseException, _: object) -> NoReturn:
    raise error


class Transform:
    """The user's function, called with a dict for each sample, or with a dict of arrays and lists for a whole batch.

    A function with a parameter ``rng`` gets a ``numpy.random.Generator``. Seed, epoch and the number of the sample (of
    the first sample for a batch) decide its numbers.
    """

    def __init__(self, function: Function, settings: Settings) -> None:
        self._function, self._batch, self._seed = function, settings.transform_each == "batch", settings.seed
        # The user says that these differ in shape, so a first batch of equal shapes fixes nothing.
        self._ragged = settings.laid_out
        self._random = _takes_rng(function)
        self._schema: Schema | None = None

    def __call__(self, block: Block, *, epoch: int, indices: Int64s, samples: Int64s) -> Block:
        """Return the function's results for the items ``indices`` of an epoch, which are of ``samples``.

        Raises :class:`TransformError` for an error that the function raises, and :class:`UsageError` for a result that
        differs in its fields from the first one.
        """
        if self._batch:
            given = _values(block)
            # Copied to a list: the function may change the dict that it is given.
            kept = {field.name: list(given[field.name]) for field in block.schema if field.kind == "ragged"}
            return self._block(self._call(given, epoch, int(indices[0]), int(samples[0])), block.schema, kept)
        ragged = [field.name for field in block.schema if field.kind == "ragged"] if self._schema is None else []
        before: dict[str, list[Any]] = {name: [] for name in ragged}
        results = []
        for i, (number, index) in enumerate(zip(indices.tolist(), samples.tolist(), strict=True)):
            sample = block.sample(i)
            # Kept before the call, because the function may change the dict that it is given.
            for name in ragged:
                before[name].append(sample[name])
            results.append(self._call(sample, epoch, number, index))
        if self._schema is None:
            self._schema = _schema(results, before, self._ragged)
        return _checked(self._schema, results, block.schema)

    def nothing(self) -> Block | None:
        """Return the result for no samples; None as long as the fields of the results are not known."""
        return None if self._schema is None else Block.from_samples(self._schema, [])

    def _call(self, argument: dict[str, Any], epoch: int, number: int, sample: int) -> Mapping[str, Any]:
        # Made again for each sample from its number, so that a sample gets the same random numbers
        # with any number of feeders, and after a resume.
        extra = {"rng": np.random.default_rng((self._seed % 2**64, epoch, number))} if self._random else {}
        try:
            result = self._function(argument, **extra)
        # Ctrl-C with workers=0. Feeders ignore the signal.
        except KeyboardInterrupt:
            raise
        # Also SystemExit, and what panics of Rust libraries become: nothing else would report them.
        except BaseException as error:
            raise TransformError(self._which(argument, sample)) from error
        if not isinstance(result, Mapping) or not result:
            less = "; to leave samples out use transform_each='batch', which may return fewer" if result is None else ""
            gave = "an empty dict" if isinstance(result, Mapping) else type(result).__name__
            where = self._which(argument, sample)
            raise UsageError(f"transform= must return a dict of fields, but it returned {gave}{where}{less}")
        if others := [name for name in result if not isinstance(name, str)]:
            raise UsageError(f"transform= must return field names that are str, but it returned {others[0]!r}")
        return result

    def _which(self, argument: Mapping[str, Any], number: int) -> str:
        """Return text that names the sample, or the first sample of the batch: by its key if the function got the
        key."""
        key = argument.get(KEY)
        if self._batch and isinstance(key, Sequence) and not isinstance(key, str) and key:
            key = key[0]
        name = f"{key!r:.80}" if isinstance(key, str) else str(number)
        return f" (batch that begins with sample {name})" if self._batch else f" (sample {name})"

    def _block(self, result: Mapping[str, Any], given: Schema, kept: Mapping[str, list[Any]]) -> Block:
        fields = {field.name: field for field in self._schema or ()}
        names = list(fields) if fields.keys() == result.keys() else result
        # An empty list has no dtype. Its field is that of the batch before, else that of the cache:
        # guessing float64 made runs fail at the next batch.
        likely = {field.name: field for field in given} if self._schema is None else fields
        columns = {}
        for name in names:
            if _says_nothing(result[name], listed=self._schema is None):
                columns[name] = _nothing(name, likely.get(name))
            else:
                ragged = name in self._ragged or (name in fields and fields[name].kind == "ragged")
                columns[name] = _column(name, result[name], kept, ragged=ragged)
        schema = _together([field for field, _ in columns.values()])
        self._schema = self._schema or schema
        if schema != self._schema:
            raise UsageError(
                f"transform= returned {schema.describe()}; the first time it returned {self._schema.describe()}"
            )
        lengths = {name: len(column) for name, (_, column) in columns.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"transform= of a batch returned columns of different lengths: {lengths}")
        return Block(self._schema, {name: column for name, (_, column) in columns.items()})


def _takes_rng(function: Function) -> bool:
    if isinstance(function, functools.partial) and "rng" in function.keywords:
        # The user has bound it already. The signature of a partial still shows it, as a default.
        return False
    try:
        return "rng" in inspect.signature(function).parameters
    # Some builtin functions have no signature.
    except (TypeError, ValueError):
        return False


def _values(block: Block) -> dict[str, Any]:
    """Return the columns as a user's function takes them: arrays, and lists of str, bytes and arrays of differing
    shapes."""
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
            # surrogateescape keeps bytes that are not UTF-8, so that a function that returns them
            # changes nothing.
            out[field.name] = [value.decode("utf-8", "surrogateescape") for value in raw] if text else raw
    return out


@contextlib.contextmanager
def _of(what: str) -> Iterator[None]:
    """Say in the error of a field that the function returned it, and leave out the hint at ``--rename``."""
    try:
        yield
    except UsageError as error:
        # A field of a transform has no option, so the advice that names one is left out.
        text = re.sub(r"; [^;]*--rename\b.*", "", str(error))
        raise UsageError(f"transform= returned {what}: {text}") from error


def _together(fields: Sequence[Field]) -> Schema:
    with _of("fields that cannot be combined"):
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
        raise UsageError(f"transform= returned masked values for field {name!r}; fill them: .filled(VALUE)")
    try:
        array = np.asarray(value)
    # NumPy raises for lists of unequal lengths, and arrays of other libraries raise anything.
    except Exception as error:
        what = f"transform= returned {type(value).__name__} for field {name!r}, which NumPy cannot convert to an array"
        raise UsageError(f"{what}: {' '.join(str(error).split())}") from error
    if array.dtype.kind in "OUSV":
        raise UsageError(
            f"transform= returned {type(value).__name__} for field {name!r}; return arrays, numbers, str or bytes"
        )
    return array


def _schema(results: Sequence[Mapping[str, Any]], given: Mapping[str, list[Any]], ragged: frozenset[str]) -> Schema:
    """Return the schema of the first batch's results; ``given`` has the ragged values of its samples.

    The fields ``ragged`` are ragged in any case. Another field stays ragged when its first value was passed through,
    when its values still differ in shape, or when its only value has the shape it had. Under another name a field stays
    ragged when all values were passed through.
    """

    def of(name: str, value: Any) -> Field:
        field = _field(name, value)
        if not field.shape:
            return field
        if name in ragged:
            return _ragged(field)
        values = [result.get(name) for result in results]
        if name in given:
            return _ragged(field) if value is given[name][0] or _still(values, given[name]) else field
        return _ragged(field) if _passed(values, given) else field

    return _together([of(name, value) for name, value in results[0].items()])


def _passed(values: Sequence[Any], given: Mapping[str, list[Any]]) -> bool:
    """Return True if all of these values are values of a ragged field, passed through unchanged."""
    # By identity: an equal array that the function made is a new value.
    given_ids = {id(value) for column in given.values() for value in column}
    return all(id(value) in given_ids for value in values)


def _ragged(field: Field) -> Field:
    return replace(field, shape=(None,) * len(field.shape))


def _still(values: Sequence[Any], given: Sequence[Any]) -> bool:
    """Return True if values made of a ragged field's values are ragged again.

    Arrays of one rank that differ in shape are ragged, and so is a single array that has the shape it was made of.
    """
    if len(values) == len(given) == 1:
        return bool(np.shape(values[0]) == np.shape(given[0]))
    shapes = {value.shape if isinstance(value, np.ndarray) else () for value in values}
    return len(shapes) > 1 and len({len(shape) for shape in shapes}) == 1


def _checked(schema: Schema, results: Sequence[Mapping[str, Any]], given: Schema) -> Block:
    for result in results:
        if result.keys() != set(schema.names):
            raise UsageError(
                f"transform= returned the fields {', '.join(result)}; the first time it returned"
                f" {', '.join(schema.names)}"
            )
    try:
        return Block.from_samples(schema, results)
    except UsageError as error:
        pad = _pad(schema, results, given)
        raise UsageError(f"transform= must return the same types and shapes as the first time: {error}{pad}") from error


def _pad(schema: Schema, results: Sequence[Mapping[str, Any]], given: Schema) -> str:
    """Return the hint for a field whose values differ in shape."""
    ragged = {field.name for field in given if field.kind == "ragged"}
    for field in schema:
        if None not in field.shape and any(np.shape(result[field.name]) != field.shape for result in results):
            if field.name in ragged:
                return f"; in the first batch {field.name!r} had one shape: pad the others too, or use larger batches"
            return (
                f"; pad {field.name!r} to one shape, or name it in pad= or varlen= of the loader: of the others only"
                " fields that are ragged in the cache may vary"
            )
    return ""


def _says_nothing(value: Any, *, listed: bool) -> bool:
    """Return True if a column has no value that tells its field: an empty list, or an empty array unless ``listed``."""
    if isinstance(value, list | tuple):
        return not value
    # NumPy makes a float64 array of an empty list, so its dtype says nothing either.
    return not listed and isinstance(value, np.ndarray) and value.shape == (0,)


def _nothing(name: str, field: Field | None) -> tuple[Field, Column]:
    """Return a column without rows, for a batch of which all samples were left out."""
    if field is None:
        raise UsageError(
            f"transform= returned an empty list for field {name!r} the first time, so its type is unknown;\n"
            "return an empty array of its dtype, or give it the name of the cached field that it is made from"
        )
    return field, Block.from_samples(Schema((field,)), []).columns[name]


def _column(name: str, value: Any, given: Mapping[str, list[Any]], *, ragged: bool) -> tuple[Field, Column]:
    """Return a whole column that the function returned, and its field.

    A list is a ragged column in three cases. The field was ragged before. All its values are values of the batch
    (``given``). Or it has the name of a ragged field, and its values are :func:`_still` ragged.
    """
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
        raise UsageError(f"transform= of a batch must return columns, but field {name!r} is a single {array.dtype}")
    with _of(f"field {name!r}"):
        dtype = storage_dtype(array.dtype)
        field = Field(name, dtype.str, array.shape[1:])
    return field, np.ascontiguousarray(array, dtype=dtype)
