"""Foreign files that their library may stumble over, read by a process of its own.

LMDB maps a file and believes it; HDF5 and the codecs of Zarr unpack whatever it says. A damaged or hostile file can so
kill the process that opens it, keep it busy for ever, or have it fill the memory. The process started here has limits
on memory and time, is told no credentials, and hands blocks through a pipe; :mod:`cachetool.sources.guarded` is the
task that it runs. Whatever happens to it is a :class:`BadObject` here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.block import Block, Column, Ragged
from cachetool.core.closing import Closing
from cachetool.core.errors import BadObject, CacheToolError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.proc.lines import ready
from cachetool.proc.parent import Child, how_ended, stop
from cachetool.proc.task import Message, Task
from cachetool.sources.byte_source import SILENCE, RangeServer
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import MisfitRows

__all__ = ["GuardedFile", "read_block"]

CPU_SECONDS = 120
"""Of computing for one answer, after which a file is taken to have no end."""
MAX_ANSWER = 2**26
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
_PASSED = frozenset(f"{_PYTHON} {_PLACE} {_HDF5} CACHETOOL_DEBUG".split())
"""Variables that the child is given. Whole names: any beginning is that of somebody's credentials, too."""
_MISTAKES = ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, EOFError, TimeoutError
"""Raised where the child does not say what it should."""


class GuardedFile(Closing):
    """A file, or a folder of files of one kind; see :class:`cachetool.sources.readers.RandomAccess`."""

    def __init__(
        self,
        path: Path | str,
        options: SourceOptions,
        *,
        opener: str,
        about: Mapping[str, Any],
        server: RangeServer | None = None,
    ) -> None:
        """Opens ``path`` in a process of its own, which gets bytes from ``server``; raises what the function ``opener``
        (``module:name``) does there.

        That is called as :func:`cachetool.sources.opening.open_path` is.
        """
        self.path, self._server = path, server
        self._task = {"path": os.fspath(path), "options": options.to_json(), "opener": opener, "about": dict(about)}
        self._child: Child | None = None
        self._at = str(path)
        """The file that the process touched last."""
        with self._ending_on_error():
            said = self._opened().asked[0]["ask"]
            self.schema = Schema.from_json(said["schema"])
            self.samples = int(said["samples"])
            self.skipped: tuple[tuple[str, str], ...] = tuple((str(name), str(why)) for name, why in said["skipped"])

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``. Raises :class:`MisfitRows` where some of them are none."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} of {self.samples}")
        with self._ending_on_error():
            child = self._opened()
            child.answer({"read": [start, stop]})
            said = self._question(child)
            sizes = [int(size) for size in said["blocks"]]
            block = read_block(self.schema, sizes, lambda count: _received(child, count))
            misfits = {int(row): str(why) for why, rows in said["ask"]["misfits"] for row in rows}
            if (count := len(block)) != stop - start:  # of none for ever a caller would ask for ever
                raise ValueError(f"{count} samples instead of {stop - start}")
        if misfits:
            raise MisfitRows(self._at, block, misfits)
        return block

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            stop([child])
        if self._server is not None:
            self._server.close()

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Kill the process after an error, in the middle of an answer or not."""
        try:
            yield
        except BaseException as error:
            code = 0
            if self._child is not None:
                self._child.process.kill()
                code = self._child.process.wait()
            self.close()
            if isinstance(error, _MISTAKES) and not isinstance(error, CacheToolError):
                raise BadObject(f"{self._at}: {_fault(error, code)}") from error
            raise

    def _opened(self) -> Child:
        """The process, which waits for a request."""
        if self._child is None:
            with ExitStack() as stack:
                sockets = []
                if self._server is not None:
                    sockets.append(stack.enter_context(self._server.connected()).fileno())
                self._child = child = Child(
                    Task("cachetool.sources.guarded:read", {**self._task, "sockets": sockets, "seconds": CPU_SECONDS}),
                    gives_back=False,
                    named=False,
                    quiet=True,  # what a library prints may be a file's own words, and a terminal obeys them
                    flags=("-W", "ignore"),
                    env=_environment(),
                    most=MAX_ANSWER,
                    pass_fds=sockets,
                )
            if hasattr(fcntl, "F_SETPIPE_SZ"):
                with contextlib.suppress(OSError):  # all that pipes may take is in use
                    fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, _PIPE)
            self._question(child)
        return self._child

    def _question(self, child: Child) -> Message:
        """The answer of the process, which then wants the next request. Meanwhile it gets the bytes it asks for."""
        while not child.asked:
            served = [] if self._server is None else [self._server.asked]
            pipes = ready(SILENCE, *(lines.fd for lines in (child.lines, *served) if not lines.ended))
            if child.lines.fd in pipes:
                more, messages = child.receive()
                for message in messages:
                    self._at = str(message["at"])
                if child.error is not None:
                    raise child.error
                if not more:
                    raise EOFError
            elif pipes and self._server is not None:
                self._server.serve()
            else:
                raise TimeoutError
        return child.asked[0]


def _received(child: Child, count: int) -> npt.NDArray[np.uint8]:
    out = np.empty(count, dtype=np.uint8)
    child.lines.fill(out.data, SILENCE)
    return out


def _fault(error: Exception, code: int) -> str:
    """The fault of a file whose reader, which ended with this exit code, led to ``error`` here."""
    if isinstance(error, TimeoutError):
        return f"no answer from the process that reads it in {SILENCE:.0f} s"
    if not isinstance(error, EOFError):
        return f"its reader talks nonsense: {error}"
    if code == -signal.SIGPROF:
        return "reading it does not come to an end; the file is damaged"
    return f"the file is damaged: the process that read it {how_ended(code)}"


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
