"""Reading TFRecord shards back through the ``tfrecord`` package, as a program without TensorFlow does.

The other formats are verified through the library that users read them with. The reader in
:mod:`cachetool.formats.tfrecord` knows only records that cachetool wrote, so it would not notice a record that nobody
else can read. The package runs in a child process, because it cannot be imported beside TensorFlow
(https://github.com/vahidk/tfrecord/issues/103). It skips the checksums of the frames;
:class:`cachetool.formats.tfrecord.TFRecordReader` checks these.
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

# Checksums are sent for blocks of this size, so a large file needs little memory in the child.
_BLOCK_BYTES = 8 * 2**20
_LISTS = {"bytes": "bytes_list", "float": "float_list", "int64": "int64_list"}


class PackageReader:
    """A child process that has imported the package. It checks one file after the other."""

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
            # A file may hold more samples than were written. These have no checksum to compare; the count below reports
            # them.
            samples += actual.shape[1]
            if samples <= expected.shape[1]:
                name = f"{path}, read by the tfrecord package"
                compare_checksums(actual, expected[:, numbers], schema, name=name, indices=numbers)

        # Absolute, because the child may have another working directory.
        arguments = {"path": str(path.absolute()), "schema": schema.to_json()}
        self._engine.run([Task("cachetool.formats.tfrecord_package:read_records", arguments)], compare)
        if samples != expected.shape[1]:
            raise CorruptError(f"{path}: the tfrecord package reads {samples} samples, not {expected.shape[1]}")


@functools.cache
def worker_reader() -> PackageReader:
    """Return the reader of this process, a worker that writes many shards. Its child ends with the process."""
    # Starting a child and importing the package takes far longer than reading one shard, so one child serves all shards
    # of a worker.
    return PackageReader().__enter__()


def read_records(channel: Channel, *, path: str, schema: list[Any]) -> Message:
    """Read the file at ``path`` and send the checksums of its values block by block. This is the child's task.

    Raises :class:`CorruptError` for bytes that the package or this schema cannot interpret, and :class:`UsageError` if
    the package is missing.
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
    # The package, protobuf and gzip raise classes of their own for damaged bytes. Whatever it is, a reader of this file
    # meets it too.
    except Exception as error:
        # Too little memory, too many open files or missing permission say nothing about the file.
        if limit_error(error) is not None or isinstance(error, PermissionError):
            raise
        raise CorruptError(f"{path}: the tfrecord package cannot read it: {error}") from error
    return {}


def _package() -> Any:
    # The package imports torch if it is installed. That takes a second and has no use here; None makes the import fail
    # at once.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    try:
        import tfrecord
    except Exception as error:
        raise UsageError(
            f"the tfrecord package cannot be loaded: {error}; install it again: pip install --force-reinstall tfrecord"
        ) from error
    return tfrecord


def _examples(package: Any, path: str) -> Iterator[tuple[Any, int]]:
    """Yield each record, parsed, with its size in bytes."""
    # The package returns views of one buffer that it fills again for each record, so each record is parsed before the
    # next one is asked for.
    for view in package.tfrecord_iterator(path, compression_type="gzip" if is_gzip(Path(path)) else None):
        example = package.example_pb2.Example()
        example.ParseFromString(view)
        yield example, len(view)


def _read(features: Any, field: Field, columns: dict[str, list[Any]], number: int) -> None:
    """Append the value of one field of a sample, and its shape if the field is ragged, to ``columns``."""
    kind = storage_kind(field)
    name = _LISTS[kind]
    # Protobuf returns an empty feature for a missing name instead of an error, so the test below finds both.
    feature = features[field.name]
    values = getattr(feature, name).value
    if feature.WhichOneof("kind") != name or len(values) != 1:
        raise CorruptError(f"field {field.name!r} of sample {number} does not have exactly one value in {name}")
    if kind == "float" and values[0] != values[0]:
        # Python turns a signalling NaN into a quiet one when it converts the float. The stored bits are the last four
        # bytes of the serialised list.
        columns[field.name].append(np.frombuffer(feature.float_list.SerializeToString()[-4:], dtype="<f4")[0])
    else:
        columns[field.name].append(values[0])
    if field.kind == "ragged":
        columns[shape_name(field)].append(list(features[shape_name(field)].int64_list.value))


def _column(field: Field, columns: dict[str, list[Any]]) -> Column:
    """Return the values of a field as a column of a block."""
    values = columns[field.name]
    kind = storage_kind(field)
    if kind != "bytes":
        numbers = np.array(values, dtype=np.int64 if kind == "int64" else np.float32)
        return numbers.astype(field.numpy)
    # A bytearray, because arrays over immutable bytes are read-only.
    raw = np.frombuffer(bytearray().join(values), dtype=field.numpy)
    if field.kind == "fixed":
        return raw.reshape(len(values), *field.sizes)
    itemsize = field.numpy.itemsize
    offsets = ends(np.array([len(value) for value in values], dtype=np.int64)) // itemsize
    if field.kind != "ragged":
        return Ragged(raw, offsets)
    return Ragged(raw, offsets, np.array(columns[shape_name(field)], dtype=np.int64).reshape(len(values), field.rank))
