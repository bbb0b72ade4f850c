"""LMDB files by others, of both engines: every value is a sample, its key the sample's ``__key__``.

What the values are is not in the file:

==================  ==================================================================================
``value_format``    field ``value``
==================  ==================================================================================
None, ``bytes``     bytes. Values that look pickled are refused, unless ``bytes`` is asked for
``npy``             the array in each value, as :func:`numpy.save` writes it: fixed, or ragged when sizes differ
``image``           the decoded image, uint8 (height, width, 3), likewise
``raw:DTYPE,SHAPE`` numbers as they lie in memory: ``raw:float32,3x64x64``
==================  ==================================================================================

Entries like ``__len__`` are notes on the file and left out. The file is opened by a process of its own
(:mod:`cachetool.sources.lmdb_child`), which it may kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cachetool.block import BLOCK_BYTES, Block, Column, Ragged
from cachetool.errors import BadObject, UsageError
from cachetool.schema import KEY, Field
from cachetool.sources.decode import npy_layout, parse_npy
from cachetool.sources.filebase import ClosingFile, FileOptions, bounded, field_names, make_schema, reading
from cachetool.sources.images import decode_image, image_shape
from cachetool.sources.limits import FREE_VALUE, check_allocation, disk_bytes
from cachetool.sources.rows import of_sizes

__all__ = ["LMDBFile", "check_value_format"]

VALUE = "value"
SILENCE = 60.0
"""Seconds without a byte after which the child is taken to be lost in the file."""
_LOOK = 100
"""Values that are looked at for pickles."""
_HEAD = 1024
_COUNT = 2**14
_GRACE = 5.0
_RAW = re.compile(r"raw:([^,]+)(?:,([0-9]+(?:[,x][0-9]+)*))?")
_PICKLED = re.compile(rb"\x80[\x02-\x05](?:[\x8a\x95]|.*\.\Z)", re.DOTALL)


def check_value_format(text: str | None) -> Field | None:
    """The field that ``raw:DTYPE,SHAPE`` describes; None for the other formats. Raises :class:`UsageError`."""
    if text in (None, "bytes", "npy", "image"):
        return None
    match = _RAW.fullmatch(str(text))
    if match is None:
        raise UsageError(
            f"unknown value format {text!r}; there are bytes, npy, image and raw:DTYPE,SHAPE (raw:float32,3x64x64)"
        )
    shape = tuple(int(size) for size in re.split("[,x]", match.group(2))) if match.group(2) else ()
    return Field(VALUE, match.group(1), shape)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Some entries of the file, one after another."""

    keys: Ragged
    values: Ragged

    def key(self, index: int) -> str:
        """For messages."""
        return repr(self.keys[index].tobytes()[:60].decode("utf-8", "backslashreplace"))


class LMDBFile(ClosingFile):
    """One LMDB file or folder; see :class:`cachetool.sources.filebase.RandomAccess`."""

    def __init__(self, path: Path, options: FileOptions) -> None:
        """Counts the entries and finds the schema. Raises :class:`BadObject` naming the file, and the key."""
        self.path = path
        self._raw = check_value_format(options.value_format)
        self._format = "raw" if self._raw is not None else options.value_format
        with reading(str(path)):
            self._stored = disk_bytes(path)
        self._child: _Child | None = None
        try:
            about = self._open().about
            self.samples: int = about["samples"]
            skipped = [(str(name), "a note on the file, not a sample") for name in about["notes"]]
            if not self.samples:
                raise BadObject(f"{path}: no samples in it")
            names = field_names(path, [VALUE], [], options)
            if VALUE not in names:
                raise UsageError(f"{path}: its values are the field {VALUE!r}; name it in --fields")
            self._name = names[VALUE]
            self._refuse_pickles()
            fields = [self._find_field(self._name)]
            if options.key:
                fields.append(Field(KEY, "str"))
            self.schema = make_schema(path, fields, ())
            self.skipped = bounded(skipped)
        finally:
            self.close()

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} of {self.samples}")
        if start == stop:
            return Block.from_samples(self.schema, [])
        return Block.concat([self._block(b) for b in self._batches(start, stop, nbytes=2**62)])

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """All samples, in the order of their keys."""
        for batch in self._batches(0, self.samples, nbytes=block_bytes):
            yield self._block(batch)

    def close(self) -> None:
        """End the process that has the file open."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _open(self) -> _Child:
        if self._child is None:
            self._child = _Child(self.path)
        return self._child

    def _batches(self, start: int, stop: int, *, nbytes: int, head: int | None = None) -> Iterator[_Batch]:
        total = 0
        while start < stop:
            batch = self._open().entries(start, min(_COUNT, stop - start), nbytes, head=head, stored=self._stored)
            if not len(batch.keys):
                raise BadObject(f"{self.path}: it ends after {start} of {stop} samples; it was changed meanwhile")
            total += batch.values.nbytes
            if total > FREE_VALUE + 4 * self._stored:
                raise BadObject(f"{self.path}: its values overlap: they are more than the file holds")
            yield batch
            start += len(batch.keys)

    def _refuse_pickles(self) -> None:
        if self._format == "bytes":
            return
        for batch in self._batches(0, min(_LOOK, self.samples), nbytes=BLOCK_BYTES):
            for index in range(len(batch.values)):
                if _PICKLED.match(batch.values[index].tobytes()):
                    raise BadObject(
                        f"{self.path}: the value of {batch.key(index)} is a Python pickle, which can run any program"
                        " when it is read, so it is not;\nwrite the values again as arrays (numpy.save, tobytes), or"
                        " take them unread with --value-format bytes"
                    )
            return  # what one batch holds is enough

    def _find_field(self, name: str) -> Field:
        """The field of the values: for arrays and images by looking at the beginning of every one."""
        if self._raw is not None:
            return Field(name, self._raw.dtype, self._raw.shape)
        if self._format in (None, "bytes"):
            return Field(name, "bytes")
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        head = _HEAD if self._format == "npy" else None
        fixed = True
        for batch in self._batches(0, self.samples, nbytes=BLOCK_BYTES, head=head):
            for index in range(len(batch.values)):
                dtype, shape = self._look(batch, index)
                if not found:
                    found[batch.key(index)] = dtype, shape
                    continue
                ((first, (first_dtype, first_shape)),) = found.items()
                if dtype != first_dtype or len(shape) != len(first_shape):
                    raise BadObject(
                        f"{self.path}: the value of {first} is {first_dtype} {first_shape}, that of {batch.key(index)}"
                        f" {dtype} {shape}: no field can hold both"
                    )
                fixed = fixed and shape == first_shape
        ((dtype, shape),) = found.values()
        return Field(name, dtype, shape if fixed else (None,) * len(shape))

    def _look(self, batch: _Batch, index: int) -> tuple[str, tuple[int, ...]]:
        data = batch.values[index].data
        with reading(f"{self.path}: the value of {batch.key(index)}"):
            try:
                if self._format == "image":
                    return "|u1", image_shape(data)
                dtype, _, shape, _ = npy_layout(data)
                return dtype.newbyteorder("<").str, shape
            except BadObject as error:
                raise BadObject(f"{self.path}: the value of {batch.key(index)}: {error}") from error

    def _block(self, batch: _Batch) -> Block:
        columns: dict[str, Column] = {self._name: self._values(batch)}
        if KEY in self.schema:
            columns[KEY] = batch.keys
        return Block(self.schema, columns)

    def _values(self, batch: _Batch) -> Column:
        field = self.schema[self._name]
        if field.kind == "bytes":
            return batch.values
        if self._format == "raw":
            wrong = np.flatnonzero(batch.values.sizes != field.nbytes)
            if len(wrong):
                index = int(wrong[0])
                raise BadObject(
                    f"{self.path}: the value of {batch.key(index)} has {batch.values.sizes[index]} bytes, not the"
                    f" {field.nbytes} of {field.describe()}"
                )
            return batch.values.values.view(field.numpy).reshape(len(batch.values), *field.sizes)
        samples = [self._decode(batch, index) for index in range(len(batch.values))]
        try:
            return Block.from_samples(self.schema.select([self._name]), samples).columns[self._name]
        except UsageError as error:
            raise BadObject(f"{self.path}: it was changed while it was read: {error}") from error

    def _decode(self, batch: _Batch, index: int) -> dict[str, Any]:
        data = batch.values[index].data
        try:
            array = decode_image(data) if self._format == "image" else parse_npy(data)
        except BadObject as error:
            raise BadObject(f"{self.path}: the value of {batch.key(index)}: {error}") from error
        return {self._name: array}


class _Child:
    """The process that has the file open."""

    def __init__(self, path: Path) -> None:
        boot = f"import sys; sys.path[:] = {sys.path!r}; from cachetool.sources.lmdb_child import main; main()"
        self._path = path
        self._process = subprocess.Popen(
            [sys.executable, "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches the starter alone
        )
        try:
            self._ask({"path": os.fspath(path)})
            self.about = self._answer()
            while "busy" in self.about:
                self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def entries(self, start: int, count: int, nbytes: int, *, head: int | None, stored: int) -> _Batch:
        """Up to ``count`` entries and about ``nbytes`` of them; with ``head`` only so much of each value."""
        self._ask({"start": start, "count": count, "bytes": nbytes, "head": head})
        about = self._answer()
        found, keys, values = int(about["count"]), int(about["keys"]), int(about["values"])
        check_allocation(f"{self._path}: {found} values", keys + values, stored=stored)
        sizes = np.frombuffer(self._receive(16 * found), dtype="<i8").reshape(2, found)
        if (sizes < 0).any() or sizes.sum(axis=1).tolist() != [keys, values]:
            raise BadObject(f"{self._path}: its values have no sound sizes")
        parts = [np.frombuffer(self._receive(size), dtype=np.uint8) for size in (keys, values)]
        return _Batch(of_sizes(parts[0], sizes[0]), of_sizes(parts[1], sizes[1]))

    def close(self) -> None:
        """End it, and wait for that."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # it is gone
            process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ask(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died()

    def _answer(self) -> dict[str, Any]:
        (length,) = struct.unpack("<I", self._receive(4))
        about: dict[str, Any] = json.loads(bytes(self._receive(length)))
        if "error" in about:
            raise BadObject(f"{self._path}: {about['error']}")
        return about

    def _receive(self, count: int) -> memoryview:
        """Exactly ``count`` bytes."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        out = memoryview(bytearray(count))
        done = 0
        while done < count:
            if not select.select([fd], [], [], SILENCE)[0]:
                self._process.kill()
                raise BadObject(f"{self._path}: reading it does not come to an end; the file is damaged")
            got = os.readv(fd, [out[done:]])
            if not got:
                self._died()
            done += got
        return out.toreadonly()

    def _died(self) -> None:
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise BadObject(f"{self._path}: the file is damaged: the process that read it {how}")
