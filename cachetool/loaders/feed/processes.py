"""The training process's end of a loader: starts feeders, asks the first of them for epochs, takes batches.

::

    Feed -- begin, delivered --> leader -- plans --> other feeders
         <-- ring of each ------------------------------'

Feeders are forked from a plain child process: the interpreter and a module of ours. It starts the same way from scripts
without a main guard, notebooks and ``python -``, inherits nothing of the training process, and ends with it.
No thread runs here; :meth:`Feed.take` gets batches that are ready without letting go of the GIL.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from cachetool.cache.layout import cache_option
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.core.schema import Schema
from cachetool.loaders.feed.protocol import EpochTimes
from cachetool.loaders.ring.memory import supported
from cachetool.loaders.ring.ring import Lock, Ring
from cachetool.loaders.ring.slot import Batch, SlotReader
from cachetool.loaders.settings import Begun, Settings
from cachetool.proc.lines import Lines, closed, keep_standard_streams, ready, rebuilt, shared, write_line
from cachetool.proc.parent import begin, how_ended

__all__ = ["Processes"]

_LOOK = 0.1
"""Seconds between two looks at whether the feeders live, while a batch is waited for."""
_LULL = 0.001
"""Seconds in which batches gather once none is ready, where rings have many slots. A consumer faster than the feeders
would else wake for each batch, and beside a busy thread wait for the GIL each time."""
_GRACE = 2.0
"""Seconds that feeders have to give their leases back when they are stopped."""
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Cores are used by having more feeders."""
_COPIES = "glibc.cpu.x86_non_temporal_threshold=0x80000"
"""A sample of 512 KiB or more is written past the caches, since a feeder never reads it again: a quarter faster at
1 MiB. By itself glibc does so from three quarters of a shared cache on."""


def _environment() -> dict[str, str]:
    """What a feeder is started with; what the user has set comes before it."""
    tunables = ":".join(filter(None, (_COPIES, os.environ.get("GLIBC_TUNABLES"))))  # the last of two holds
    return {**dict.fromkeys(_ONE_THREAD, "1"), **os.environ, "GLIBC_TUNABLES": tunables}


_HINTS: dict[int, str] = {
    signal.SIGKILL: "; the machine may be out of memory",
    signal.SIGBUS: "; a shard was cut short while it was read, or its disk failed, which this shows: cachetool"
    " verify{}; or the machine is out of memory",
}
"""Why a feeder may have been killed by a signal."""

_LIMITS = {errno.EMFILE: " (ulimit -n)", errno.ENOMEM: " (ulimit -v)", errno.EFBIG: " (ulimit -f)"}
"""The limit that forbids the memory of a feeder."""


class Processes:
    """A :class:`~cachetool.loaders.feed.protocol.Feed` of ``feeders`` child processes."""

    def __init__(self, settings: Settings, *, feeders: int, transform: bytes) -> None:
        if not supported():
            raise UsageError("feeder processes need Linux on 64 bits; use workers=0")
        keep_standard_streams()
        self.pid, self.closed, self.unsure = os.getpid(), False, False
        self._cache_option = "" if settings.paths else cache_option(Path(settings.root))
        self.pids: list[int] = []
        """Of the feeders, the leader first, once it has said so."""
        self._keeper: subprocess.Popen[bytes] | None = None
        self._rings: list[Ring] = []
        self._readers: list[SlotReader] = []
        self._schemas: dict[bytes, Schema] = {}
        self._asked = 0
        self._telling, self._left = False, 0
        self._pace = EpochTimes()
        reading, answers = os.pipe()
        self._answers = Lines(reading)
        try:
            self._make_rings(feeders)
            self._start(settings, transform, answers)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(answers)

    def _make_rings(self, feeders: int) -> None:
        try:
            for _ in range(feeders):
                self._rings.append(Ring())
                self._readers.append(SlotReader(self._rings[-1], self._schemas))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                raise UsageError(
                    f"feeder processes share memory that memfd_create() makes, which is refused here: {error.strerror};"
                    " allow that call, or use workers=0"
                ) from None
            raise CacheToolError(
                f"workers={feeders} cannot be had: {error.strerror} after {len(self._rings)}"
                f"{_LIMITS.get(error.errno or 0, '')}; two to four are enough without a transform=, 0 takes none"
            ) from None

    def _start(self, settings: Settings, transform: bytes, answers: int) -> None:
        rings = [ring.fd for ring in self._rings]
        call = "cachetool.loaders.feed.feeder:main()"
        self._keeper = begin(call, gives_back=None, pass_fds=(answers, *rings), env=_environment())
        hello = {
            "settings": settings.to_json(),
            "trainer": self.pid,
            "rings": rings,
            "answers": answers,
            "transform": len(transform),
        }
        self._write(hello, transform)

    def begin(self, epoch: int, resume: dict[str, Any] | None = None) -> Begun:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        self._pace = EpochTimes()
        begun = Begun.from_json(self._ask("begin", epoch=epoch, resume=resume))
        self.lock_pages(None)
        self._pace.begun()
        return begun

    def prepare(self, epoch: int, resume: dict[str, Any] | None = None) -> Begun:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        return Begun.from_json(self._ask("prepare", epoch=epoch, resume=resume))

    def refresh(self) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        self._ask("refresh")

    def ready(self, generation: int, step: int) -> bool:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        readers = self._readers
        return not readers or readers[step % len(readers)].ready(generation)

    def lock_pages(self, lock: Lock | None) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        for ring in self._rings:
            ring.lock = lock

    def left(self, generation: int) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        self._left = generation if self._telling else 0
        if not (self.closed or self.pid != os.getpid() or self._telling):
            self._note("left", generation)

    def half_delivered(self, generation: int) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        self._note("half_delivered", generation)

    def _note(self, what: str, generation: int) -> None:
        """Tell the leader by one write, which nothing comes in between of."""
        line = {"id": 0, "do": what, "generation": generation}
        with contextlib.suppress(OSError, ValueError, AttributeError):  # whoever needs the leader will hear of its end
            write_line(self._keeper.stdin.fileno(), line)  # type: ignore[union-attr]

    def regain(self, generation: int) -> bool:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        regained: bool = self._ask("regain", generation=generation)["regained"]
        return regained

    def state(self, generation: int, reached: int) -> dict[str, Any]:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        state: dict[str, Any] = self._ask("state", generation=generation, reached=reached)["state"]
        return state

    def delivered(self, generation: int, batches: int) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        self._tell("delivered", generation=generation, pace=self._pace.delivered(batches))

    def take(self, generation: int, step: int, most: int) -> list[Batch]:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        readers = self._readers
        if not readers:
            raise closed()
        batches: list[Batch] = []
        own = readers[step % len(readers)].ring
        while True:
            reader = readers[(step + len(batches)) % len(readers)]
            if not batches or (len(batches) < len(readers) and own.most):
                reader.ring.poll()
            try:
                batch = reader.take(generation)
            except CacheToolError:
                if not batches:
                    raise
                return batches  # it comes again, when its turn has come
            if batch is not None:
                if batch.step != step + len(batches):
                    raise shared()
                batches.append(batch)
            elif not batches:
                self._wait(own, first=step == 0)
            if batches and (batch is None or len(batches) == most):
                return batches

    def _wait(self, ring: Ring, *, first: bool) -> None:
        assert not ring.ready
        if ring.poll():
            return  # what was there were batches of an epoch that was given up
        with self._pace.waiting():
            if not first:
                ring.late()
            if not first and ring.many:
                time.sleep(_LULL)
                if ring.poll():
                    return
            while not ring.wait(_LOOK):
                self._check()

    def _check(self) -> None:
        """Raise when a feeder is dead, or the feed was closed meanwhile: by a signal's handler, or another thread."""
        keeper = self._keeper
        if self.closed or keeper is None:
            raise closed()
        if keeper.poll() is None:
            return
        assert keeper.stdout is not None
        try:
            report = Lines(keeper.stdout.fileno()).wait() or {}
        except (OSError, ValueError):  # a signal's handler closed it
            raise closed() from None
        self.close()
        if "error" in report:
            raise CacheToolError(report["error"])
        pid, code = report.get("died", (keeper.pid, keeper.returncode))
        hint = _HINTS.get(-code, "").format(self._cache_option)
        raise CacheToolError(f"a feeder (pid {pid}) {how_ended(code)}{hint}; iterate again to start new ones")

    def _tell(self, what: str, **values: Any) -> None:
        self._asked += 1
        self._write({"id": self._asked, "do": what, **values})
        if self._left:
            self.left(self._left)

    def _write(self, value: dict[str, Any], *blocks: bytes) -> None:
        keeper = self._keeper
        if self.closed or keeper is None:
            raise closed()
        assert keeper.stdin is not None
        try:
            self._telling = True
            try:
                write_line(keeper.stdin.fileno(), value, *blocks)
            finally:
                self._telling = False
        except (BrokenPipeError, ValueError):
            self._await_end()
            raise

    def _await_end(self) -> None:
        """Raise for the end of feeders, since pipes of theirs have ended."""
        if self._keeper is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(1.0)
        self._check()

    def _ask(self, what: str, **values: Any) -> dict[str, Any]:
        self._tell(what, **values)
        while True:
            answer = self._answer()
            if answer.pop("id") == self._asked:
                break  # others were asked for by somebody who was interrupted
        if "error" in answer:
            raise rebuilt(answer["error"])
        return answer

    def _answer(self) -> dict[str, Any]:
        while (answer := self._answers.next()) is None:
            try:
                if self.closed or not ready(_LOOK, self._answers.fd):
                    self._check()
                    continue
                self._answers.receive()
            except (OSError, ValueError):
                self._check()  # a signal's handler closed it
                raise
            if self._answers.ended:
                self._await_end()
                raise CacheToolError("a feeder closed its pipe")
        self.pids = answer.pop("feeders", self.pids)
        return dict(answer)

    def close(self) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        if self.pid != os.getpid():
            return  # a forked copy: the feeders are the parent's
        self.closed = True
        fd, self._answers.fd = self._answers.fd, -1
        if fd >= 0:
            os.close(fd)
        keeper, self._keeper = self._keeper, None  # a signal's handler may close in the middle of this
        rings, self._rings, self._readers = self._rings, [], []
        try:
            if keeper is not None and keeper.stdin is not None:
                # The leader died; or a handler closes in the middle of a write, whose pipe must stay open then.
                with contextlib.suppress(OSError, ValueError):
                    # A child that was forked meanwhile has the pipe too, so that its end alone would come late.
                    write_line(keeper.stdin.fileno(), {"id": 0, "do": "stop"})
                    if not self._telling:
                        keeper.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    keeper.wait(_GRACE)
        finally:  # a second Ctrl-C does not wait, and leaves nothing behind
            for ring in rings:
                ring.close()
            if keeper is not None and keeper.stdout is not None:
                keeper.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):  # a poll() that we interrupt reaps it
                    keeper.wait(_GRACE)
                keeper.kill()
                keeper.stdout.close()
