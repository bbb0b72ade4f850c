"""Foreign files that can crash their library, read by a guarded process.

LMDB maps a file and trusts it. HDF5 and the codecs of Zarr unpack whatever the file says. So a damaged or hostile
file can kill the process that opens it, keep it busy for ever, or make it fill the memory. The guarded process has
limits on memory and time, gets no credentials, and sends blocks through a pipe. :mod:`cachetool.sources.guarded` is
the task that it runs. Whatever happens to the guarded process becomes a :class:`BadObject` here.
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
"""Seconds of processor time for one answer. A file that needs more is taken to have no end."""
# The longest line of an answer. A hostile file may control the process that writes it, and could fill this process's
# memory with a line without end.
MAX_ANSWER = 2**26
# A pipe of 1 MiB instead of 64 KiB lets blocks of 8 MB pass in fewer turns between the two processes.
_PIPE = 2**20
_PYTHON = """
    PATH HOME PYTHONHOME PYTHONPATH PYTHONPLATLIBDIR PYTHONUSERBASE PYTHONNOUSERSITE PYTHONSAFEPATH PYTHONPYCACHEPREFIX
    PYTHONDONTWRITEBYTECODE PYTHONUTF8 PYTHONCOERCECLOCALE PYTHONIOENCODING PYTHONHASHSEED PYTHONFAULTHANDLER
    LD_LIBRARY_PATH LD_PRELOAD DYLD_LIBRARY_PATH DYLD_FALLBACK_LIBRARY_PATH DYLD_INSERT_LIBRARIES GLIBC_TUNABLES
"""
_PLACE = """
    LANG LANGUAGE LC_ALL LC_CTYPE LC_NUMERIC LC_TIME LC_COLLATE LC_MESSAGES LOCPATH LOCALE_ARCHIVE TZ TZDIR TMPDIR
"""
# A user's own filters are found by these variables. Without them the process could not read files that h5py reads in
# the user's shell.
_HDF5 = "HDF5_PLUGIN_PATH HDF5_PLUGIN_PRELOAD HDF5_USE_FILE_LOCKING HDF5_DISABLE_VERSION_CHECK"
_PASSED = frozenset(f"{_PYTHON} {_PLACE} {_HDF5} CACHETOOL_DEBUG".split())
"""Environment variables that the process gets. The names are complete, because any prefix also fits names of
credentials."""
_MISTAKES = ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, EOFError, TimeoutError
"""Errors that are raised here if the process sends something unexpected."""


class GuardedFile(Closing):
    """A file, or a folder of files of one kind, read by a process of its own. See
    :class:`cachetool.sources.readers.RandomAccess`."""

    def __init__(
        self,
        path: Path | str,
        options: SourceOptions,
        *,
        opener: str,
        about: Mapping[str, Any],
        server: RangeServer | None = None,
    ) -> None:
        """Open ``path`` in a process of its own, which gets bytes from ``server``.

        ``opener`` (``module:name``) is the function that opens the file there. It is called like
        :func:`cachetool.sources.opening.open_path`. Errors that it raises are raised here.
        """
        self.path, self._server = path, server
        self._task = {"path": os.fspath(path), "options": options.to_json(), "opener": opener, "about": dict(about)}
        self._child: Child | None = None
        self._at = str(path)
        """The file that the process reported last as the one it reads."""
        with self._ending_on_error():
            said = self._opened().asked[0]["ask"]
            self.schema = Schema.from_json(said["schema"])
            self.samples = int(said["samples"])
            self.skipped: tuple[tuple[str, str], ...] = tuple((str(name), str(why)) for name, why in said["skipped"])

    def read(self, start: int, stop: int) -> Block:
        """Return samples ``start`` to ``stop``. Raise :class:`MisfitRows` if some of them are no samples."""
        if not 0 <= start <= stop <= self.samples:
            raise UsageError(f"{self.path}: samples {start} to {stop} do not exist; the file has {self.samples}")
        with self._ending_on_error():
            child = self._opened()
            child.answer({"read": [start, stop]})
            said = self._question(child)
            sizes = [int(size) for size in said["blocks"]]
            block = read_block(self.schema, sizes, lambda count: _received(child, count))
            misfits = {int(row): str(why) for why, rows in said["ask"]["misfits"] for row in rows}
            # A hostile file could answer with no samples for ever, and a caller that advances by the samples it got
            # would never end.
            if (count := len(block)) != stop - start:
                raise ValueError(f"{count} samples instead of {stop - start}")
        if misfits:
            raise MisfitRows(self._at, block, misfits)
        return block

    def close(self) -> None:
        """End the process."""
        # Cleared first: a second close, or one after an error in `stop`, must not stop the process again.
        child, self._child = self._child, None
        if child is not None:
            stop([child])
        if self._server is not None:
            self._server.close()

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Kill the process after any error, because it may be in the middle of an answer."""
        try:
            yield
        # A half-read answer would be taken for the beginning of the next one. Also after KeyboardInterrupt, so no
        # process is left behind.
        except BaseException as error:
            code = 0
            if self._child is not None:
                self._child.process.kill()
                # The exit code tells why: SIGPROF is the limit of time, other signals are a crash of the library.
                code = self._child.process.wait()
            self.close()
            # Errors of the child, such as NotFound, keep their class. Nonsense in its answers is the fault of the file
            # that it reads.
            if isinstance(error, _MISTAKES) and not isinstance(error, CacheToolError):
                raise BadObject(f"{self._at}: {_fault(error, code)}") from error
            raise

    def _opened(self) -> Child:
        """Return the process, ready for a request. Start it if necessary."""
        if self._child is None:
            with ExitStack() as stack:
                sockets = []
                if self._server is not None:
                    sockets.append(stack.enter_context(self._server.connected()).fileno())
                self._child = child = Child(
                    Task("cachetool.sources.guarded:read", {**self._task, "sockets": sockets, "seconds": CPU_SECONDS}),
                    gives_back=False,
                    named=False,
                    # A library may print text out of the file, and a terminal obeys control characters in it.
                    quiet=True,
                    flags=("-W", "ignore"),
                    env=_environment(),
                    most=MAX_ANSWER,
                    pass_fds=sockets,
                )
            if hasattr(fcntl, "F_SETPIPE_SZ"):
                # A user's pipes together have a limit (/proc/sys/fs/pipe-user-pages-soft). Beyond it the pipe keeps its
                # 64 KiB, which is slower and works.
                with contextlib.suppress(OSError):
                    fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, _PIPE)
            self._question(child)
        return self._child

    def _question(self, child: Child) -> Message:
        """Return the answer of the process, which then waits for the next request. In the meantime serve the bytes it
        asks for."""
        while not child.asked:
            served = [] if self._server is None else [self._server.asked]
            # Both pipes are watched at once: the process may ask for bytes before it answers, and would wait for ever
            # if only its answer were read.
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
    """Return the description of the fault of a file whose reader caused ``error`` here and ended with ``code``."""
    if isinstance(error, TimeoutError):
        return f"the process that reads it has not answered for {SILENCE:.0f} s"
    if not isinstance(error, EOFError):
        return f"the process that reads it returned invalid data: {error}"
    if code == -signal.SIGPROF:
        return "reading it does not end, so the file is damaged"
    return f"the file is damaged: the process that read it {how_ended(code)}"


def _environment() -> dict[str, str]:
    """Return the environment of the process: variables known to be no secrets, and one thread for each numeric
    library."""
    kept = {name: value for name, value in os.environ.items() if name in _PASSED}
    # The stacks of threads count as memory of the process, and would use up its limit on a machine with many cores.
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def read_block(schema: Schema, sizes: Sequence[int], receive: Any) -> Block:
    """Return the block whose arrays, of ``sizes`` bytes, ``receive(count)`` returns one after another.

    For each field the arrays are: offsets if samples differ in size, shapes if samples are arrays of differing
    shape, then the values. Raise ``ValueError`` if they do not fit together, because a hostile file may control the
    other side.
    """
    pending = iter(sizes)

    def take(dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        size = int(next(pending, -1))
        if size < 0 or size % dtype.itemsize:
            raise ValueError("an array of an invalid size")
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
        # Values of no bytes do not tell how many they are, so the process sends their number as an int64.
        if field.nbytes == 0:
            return np.empty((int(take(int64)[0]), *field.sizes), dtype=field.numpy)
        column: npt.NDArray[Any] = take(field.numpy).reshape(-1, *field.sizes)
        return column
    offsets = take(int64)
    shapes = take(int64).reshape(-1, field.rank) if field.kind == "ragged" else None
    values = take(field.numpy)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
        raise ValueError("offsets that do not fit their values")
    # The product in float64 comes first: a product of hostile int64 sizes may wrap around to the expected number.
    if shapes is not None and (
        (shapes < 0).any()
        or (shapes.astype(np.float64).prod(axis=1) > 2**62).any()
        or not np.array_equal(shapes.prod(axis=1), np.diff(offsets))
    ):
        raise ValueError("shapes that do not fit their values")
    return Ragged(values, offsets, shapes)
