"""Foreign files that their library may stumble over, read by a process of its own.

LMDB maps a file and believes it; HDF5 and the codecs of Zarr unpack whatever it says. A damaged or hostile file can so
kill the process that opens it, keep it busy for ever, or have it fill the memory. The process started here has limits
on memory and time, is told no credentials, and hands blocks through a pipe; :mod:`cachetool.sources.guarded` is what it
runs. Whatever happens to it is a :class:`BadObject` here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.errors import BadObject, UsageError, from_json
from cachetool.core.schema import Field, Schema
from cachetool.proc.boot import begin
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import ClosingFile, MisfitRows

__all__ = ["GuardedFile", "read_block"]

CPU_SECONDS = 120
"""Of computing for one answer, after which a file is taken to have no end."""
SILENCE = 900.0
"""Seconds to wait for an answer, however slow the disk."""
MAX_ANSWER = 2**26
_GRACE = 5.0
_PIPE = 2**20
_PYTHON = """
    PATH HOME PYTHONHOME PYTHONPATH PYTHONPLATLIBDIR PYTHONUSERBASE PYTHONNOUSERSITE PYTHONSAFEPATH PYTHONPYCACHEPREFIX
    PYTHONDONTWRITEBYTECODE PYTHONUTF8 PYTHONCOERCECLOCALE PYTHONIOENCODING PYTHONHASHSEED PYTHONFAULTHANDLER
    LD_LIBRARY_PATH LD_PRELOAD DYLD_LIBRARY_PATH DYLD_FALLBACK_LIBRARY_PATH DYLD_INSERT_LIBRARIES GLIBC_TUNABLES
"""
_PLACE = """
    LANG LANGUAGE LC_ALL LC_CTYPE LC_NUMERIC LC_TIME LC_COLLATE LC_MESSAGES LOCPATH LOCALE_ARCHIVE TZ TZDIR TMPDIR
"""
_HDF5 = "HDF5_PLUGIN_PATH HDF5_PLUGIN_PRELOAD HDF5_USE_FILE_LOCKING HDF5_DISABLE_VERSION_CHECK"  # a user's filters
_PASSED = frozenset(f"{_PYTHON} {_PLACE} {_HDF5}".split())
"""Variables that the child is given. Whole names: any beginning is that of somebody's credentials, too."""


class GuardedFile(ClosingFile):
    """A file, or a folder of files of one kind; see :class:`cachetool.sources.readers.RandomAccess`."""

    def __init__(
        self, path: Path, options: SourceOptions, *, opener: str, about: Mapping[str, Any] | None = None
    ) -> None:
        """Opens ``path`` in a process of its own; raises what the function ``opener`` (``module:name``) does there.

        That is called as :func:`cachetool.sources.opening.open_path` is.
        """
        self.path, self._options, self._opener, self._about = path, options, opener, about or {}
        self._child: _Child | None = None
        about = self._open().about
        try:
            self.schema = Schema.from_json(about["schema"])
            self.samples = int(about["samples"])
            self.skipped: tuple[tuple[str, str], ...] = tuple((str(name), str(why)) for name, why in about["skipped"])
        except (UsageError, KeyError, TypeError, ValueError) as error:
            self.close()
            raise BadObject(f"{path}: its reader talks nonsense: {error}") from error

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``. Raises :class:`MisfitRows` where some of them are none."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} of {self.samples}")
        child = self._open()
        child.ask({"read": [start, stop]})
        with self._closing_on_error():
            block, misfits = child.block(self.schema)
            if (count := len(block)) != stop - start:  # of none for ever a caller would ask for ever
                raise BadObject(f"{self.path}: its reader talks nonsense: {count} samples instead of {stop - start}")
        if misfits:
            raise MisfitRows(child.at, block, misfits)
        return block

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.close()
            self._child = None

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _open(self) -> _Child:
        if self._child is None or self._child.busy:
            self.close()
            self._child = _Child(self.path, self._options, self._opener, self._about)
        return self._child


class _Child:
    """The process that has the file open: one request, one answer."""

    def __init__(self, path: Path, options: SourceOptions, opener: str, about: Mapping[str, Any]) -> None:
        self.at = str(path)
        """The file that it touched last."""
        self.busy = False
        """Whether an answer is still to come."""
        self._process = begin(
            "cachetool.sources.guarded",
            gives_back=False,
            named=False,
            flags=("-W", "ignore"),
            env=_environment(),
            # What a library prints may be a file's own words, and a terminal obeys them.
            stderr=None if os.environ.get("CACHETOOL_DEBUG") else subprocess.DEVNULL,
        )
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # all that pipes may take is in use
                fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, _PIPE)  # type: ignore[arg-type]
        try:
            request = {"path": os.fspath(path), "options": options.to_json(), "opener": opener, "about": dict(about)}
            self.ask({**request, "seconds": CPU_SECONDS})
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request."""
        assert self._process.stdin is not None
        self.busy = True
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died()

    def block(self, schema: Schema) -> tuple[Block, dict[int, str]]:
        """The block that was asked for; the rows of it that are no samples, by their numbers in the file, and why."""
        about = self._answer()
        try:
            block = read_block(schema, about["arrays"], self._receive)
            return block, {int(row): str(why) for why, rows in about.get("misfits", ()) for row in rows}
        except (UsageError, ValueError, TypeError, LookupError) as error:
            raise BadObject(f"{self.at}: its reader talks nonsense: {error}") from error
        finally:
            self.busy = False

    def close(self) -> None:
        """End it, and wait for that."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        if self.busy:
            process.kill()
        with contextlib.suppress(OSError):  # it is gone
            process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _answer(self) -> dict[str, Any]:
        while True:
            (length,) = struct.unpack("<I", self._receive(4).data)
            if length > MAX_ANSWER:
                raise BadObject(f"{self.at}: its reader talks nonsense")
            try:
                about = dict[str, Any](json.loads(self._receive(length).tobytes()))
            except (ValueError, TypeError) as error:
                raise BadObject(f"{self.at}: its reader talks nonsense: {error}") from error
            if "error" in about:
                self.busy = False
                raise from_json(about)
            if "at" not in about:
                self.busy = "arrays" in about  # these follow
                return about
            self.at = str(about["at"])

    def _receive(self, count: int) -> npt.NDArray[np.uint8]:
        """Exactly ``count`` bytes."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        out = np.empty(count, dtype=np.uint8)
        view, done = out.data, 0
        ready = select.poll()  # whatever its number: select ends at 1,024
        ready.register(fd, select.POLLIN)
        while done < count:
            if not ready.poll(1000 * SILENCE):
                raise BadObject(f"{self.at}: no answer from the process that reads it in {SILENCE:.0f} s")
            got = os.readv(fd, [view[done:]])
            if not got:
                self._died()
            done += got
        return out

    def _died(self) -> NoReturn:
        code = self._process.wait()
        if code == -signal.SIGPROF:
            raise BadObject(f"{self.at}: reading it does not come to an end; the file is damaged")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise BadObject(f"{self.at}: the file is damaged: the process that read it {how}")


def _environment() -> dict[str, str]:
    """What the child is told: what is known to be no secret, and to keep threads, whose stacks count as its memory,
    few."""
    kept = {name: value for name, value in os.environ.items() if name in _PASSED}
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def read_block(schema: Schema, sizes: Sequence[int], receive: Any) -> Block:
    """The block whose arrays, of ``sizes`` bytes, ``receive(count)`` gives one after another.

    For each field: its values; where samples differ in size, their offsets before that, and the shapes of arrays.
    Raises ValueError when they do not fit together: the other side may be under a hostile file's command.
    """
    pending = iter(sizes)

    def take(dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        size = int(next(pending, -1))
        if size < 0 or size % dtype.itemsize:
            raise ValueError("an array of no sound size")
        values: npt.NDArray[Any] = receive(size).view(dtype)
        return values

    columns: dict[str, Column] = {}
    for field in schema:
        columns[field.name] = _column(field, take)
    if next(pending, None) is not None:
        raise ValueError("more arrays than fields")
    return Block(schema, columns)


def _column(field: Field, take: Any) -> Column:
    int64 = np.dtype("<i8")
    if field.kind == "fixed":
        if field.nbytes == 0:
            return np.empty((int(take(int64)[0]), *field.sizes), dtype=field.numpy)
        column: npt.NDArray[Any] = take(field.numpy).reshape(-1, *field.sizes)
        return column
    offsets = take(int64)
    shapes = take(int64).reshape(-1, field.rank) if field.kind == "ragged" else None
    values = take(field.numpy)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
        raise ValueError("offsets that do not fit their values")
    # In floating point first: a product of sizes may wrap around.
    if shapes is not None and (
        (shapes < 0).any()
        or (shapes.astype(np.float64).prod(axis=1) > 2**62).any()
        or not np.array_equal(shapes.prod(axis=1), np.diff(offsets))
    ):
        raise ValueError("shapes that do not fit their values")
    return Ragged(values, offsets, shapes)
