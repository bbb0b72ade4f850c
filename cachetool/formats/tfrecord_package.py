"""Reads TFRecord shards back through the ``tfrecord`` package, as a program without TensorFlow would.

The other formats are checked through the library that everybody reads them with; our own TFRecord reader knows only
records that we wrote, so it would not notice a record that nobody else can read. The package runs in a child process:
it cannot be imported beside TensorFlow (https://github.com/vahidk/tfrecord/issues/103). It skips the checksums of the
frames; :class:`cachetool.formats.tfrecord.TFRecordReader` checks these.
"""

from __future__ import annotations

import base64
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats.digest import checksums
from cachetool.formats.example import shape_name, storage_kind
from cachetool.formats.reading import compare_checksums
from cachetool.formats.runs import ends
from cachetool.formats.tfrecord import is_gzip
from cachetool.proc.disk import limit_error
from cachetool.proc.parent import LocalEngine
from cachetool.proc.task import Channel, Message, Task

__all__ = ["PackageReader", "worker_reader"]

_BLOCK_BYTES = 8 * 2**20
_LISTS = {"bytes": "bytes_list", "float": "float_list", "int64": "int64_list"}


class PackageReader:
    """A child process that has loaded the package, for one file after the other."""

    def __init__(self) -> None:
        self._engine = LocalEngine()

    def __enter__(self) -> Self:
        self._engine.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.__exit__(kind, error, trace)

    def check(self, path: Path, schema: Schema, expected: npt.NDArray[np.uint64]) -> None:
        """Compare every value that the package reads from ``path`` with its checksum, (fields, samples).

        Raises :class:`CorruptError` naming file, sample and field.
        """
        samples = 0

        def compare(_: int, message: Message) -> None:
            nonlocal samples
            actual = np.frombuffer(base64.b64decode(message["checksums"]), dtype=np.uint64).reshape(len(schema), -1)
            numbers = np.arange(samples, samples + actual.shape[1])
            samples += actual.shape[1]
            if samples <= expected.shape[1]:
                name = f"{path}, read by the tfrecord package"
                compare_checksums(actual, expected[:, numbers], schema, name=name, indices=numbers)

        arguments = {"path": str(path.absolute()), "schema": schema.to_json()}
        self._engine.run([Task("cachetool.formats.tfrecord_package:read_records", arguments)], compare)
        if samples != expected.shape[1]:
            raise CorruptError(f"{path}: the tfrecord package reads {samples} samples, not {expected.shape[1]}")


@functools.cache
def worker_reader() -> PackageReader:
    """The one of this process, a worker that writes many shards: its child ends with it."""
    return PackageReader().__enter__()


def read_records(channel: Channel, *, path: str, schema: list[Any]) -> Message:
    """The task of the child: read the file at ``path``, and send the checksums of its values block by block.

    Raises :class:`CorruptError` for what the package, or this schema, cannot make sense of, and :class:`UsageError`
    where there is no package.
    """
    fields = Schema.from_json(schema)
    columns: dict[str, list[Any]] = {}
    nbytes = 0

    def send() -> None:
        sums = checksums(Block(fields, {field.name: _column(field, columns) for field in fields}))
        channel.send({"checksums": base64.b64encode(np.ascontiguousarray(sums).data).decode()})

    package = _package()
    try:
        for number, (example, size) in enumerate(_examples(package, path)):
            if nbytes == 0:
                columns = {name: [] for f in fields for name in (f.name, shape_name(f))}
            for field in fields:
                _read(example.features.feature, field, columns, number)
            nbytes += size
            if nbytes >= _BLOCK_BYTES:
                send()
                nbytes = 0
        if nbytes:
            send()
    except CorruptError as error:
        raise CorruptError(f"{path}: {error}") from error
    except Exception as error:  # the package's own, protobuf's, gzip's: whatever it is, a reader of this file meets it
        if limit_error(error) is not None or isinstance(error, PermissionError):  # says nothing of the file
            raise
        raise CorruptError(f"{path}: the tfrecord package cannot read it: {error}") from error
    return {}


def _package() -> Any:
    # It imports torch where that is installed, which takes a second and is of no use here.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    try:
        import tfrecord
    except Exception as error:
        raise UsageError(
            f"the tfrecord package cannot be loaded: {error}; install it anew: pip install --force-reinstall tfrecord"
        ) from error
    return tfrecord


def _examples(package: Any, path: str) -> Iterator[tuple[Any, int]]:
    """The records, parsed, with their bytes."""
    for view in package.tfrecord_iterator(path, compression_type="gzip" if is_gzip(Path(path)) else None):
        example = package.example_pb2.Example()
        example.ParseFromString(view)
        yield example, len(view)


def _read(features: Any, field: Field, columns: dict[str, list[Any]], number: int) -> None:
    kind = storage_kind(field)
    name = _LISTS[kind]
    feature = features[field.name]  # one that is absent comes as an empty one
    values = getattr(feature, name).value
    if feature.WhichOneof("kind") != name or len(values) != 1:
        raise CorruptError(f"sample {number} has not one value in {name} of field {field.name!r}")
    if kind == "float" and values[0] != values[0]:
        # Python turns a signalling NaN into a quiet one: its bits are the last four of the list as it is stored.
        columns[field.name].append(np.frombuffer(feature.float_list.SerializeToString()[-4:], dtype="<f4")[0])
    else:
        columns[field.name].append(values[0])
    if field.kind == "ragged":
        columns[shape_name(field)].append(list(features[shape_name(field)].int64_list.value))


def _column(field: Field, columns: dict[str, list[Any]]) -> Column:
    values = columns[field.name]
    kind = storage_kind(field)
    if kind != "bytes":
        numbers = np.array(values, dtype=np.int64 if kind == "int64" else np.float32)
        return numbers.astype(field.numpy)
    raw = np.frombuffer(bytearray().join(values), dtype=field.numpy)
    if field.kind == "fixed":
        return raw.reshape(len(values), *field.sizes)
    itemsize = field.numpy.itemsize
    offsets = ends(np.array([len(value) for value in values], dtype=np.int64)) // itemsize
    if field.kind != "ragged":
        return Ragged(raw, offsets)
    return Ragged(raw, offsets, np.array(columns[shape_name(field)], dtype=np.int64).reshape(len(values), field.rank))
