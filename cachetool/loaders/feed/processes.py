"""The end of the feeder processes in the training process: starts feeders, asks the leader for epochs, takes batches.

::

    Feed -- begin, delivered --> leader -- plans --> other feeders
         <-- ring of each ------------------------------'

Feeders are forked from a plain child process, which is an interpreter and a module of ours. So they start in the same
way from scripts without a main guard, from notebooks and from ``python -``. The child inherits nothing of the training
process, and ends with it.

No thread of ours runs in the training process. :meth:`Processes.take` gets ready batches without releasing the GIL.
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
from cachetool.loaders.feed.protocol import Ratios
from cachetool.loaders.ring.batch_times import divided
from cachetool.loaders.ring.memory import supported
from cachetool.loaders.ring.ring import Lock, Ring
from cachetool.loaders.ring.slot import Batch, SlotReader
from cachetool.loaders.settings import Begun, Settings
from cachetool.loaders.waits import EpochTimes
from cachetool.proc.lines import Lines, closed, keep_standard_streams, ready, rebuilt, shared, write_line
from cachetool.proc.parent import begin, how_ended

__all__ = ["Processes"]

_LOOK = 0.1
"""Seconds between two looks whether the feeders live, while training waits for a batch."""
# A consumer faster than the feeders would otherwise wake up for each batch, and beside a busy
# thread wait for the GIL each time. With 1 ms 5 % more batches come on idle processors, 11 % on
# busy ones.
_LULL = 0.001
"""Seconds of sleep in which batches collect, once none is ready and rings have many slots."""
_LATE = 2_000_000
"""Nanoseconds from which on a ready batch that is not taken is late: twice the time of :data:`_LULL`."""
_TOLD = 5.0
"""Seconds between two notes of the waits of an epoch that is under way."""
_GRACE = 2.0
"""Seconds that feeders have to give their leases back when they are stopped."""
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Environment variables that limit numeric libraries to one thread in a feeder: more feeders use more processors."""
# A feeder never reads a sample again. Without this glibc does so only from three quarters of a
# shared cache (240 MB): 1 MiB samples came at 8.3 and 8.9 instead of 10.4 and 11.3 GB/s.
_COPIES = "glibc.cpu.x86_non_temporal_threshold=0x80000"
"""Setting by which glibc writes samples of 512 KiB or more past the processor's caches."""


def _environment() -> dict[str, str]:
    """Return the environment of a feeder. Settings of the user come before ours."""
    # glibc takes the last of two values for the same tunable, which is the user's here.
    tunables = ":".join(filter(None, (_COPIES, os.environ.get("GLIBC_TUNABLES"))))
    return {**dict.fromkeys(_ONE_THREAD, "1"), **os.environ, "GLIBC_TUNABLES": tunables}


_HINTS: dict[int, str] = {
    signal.SIGKILL: "; the machine may be out of memory",
    signal.SIGBUS: "; a shard was cut short while it was read, its disk failed, or the machine is out of memory;"
    " check the shards with: cachetool verify{}",
}
"""Hints at why a signal may have killed a feeder."""

_LIMITS = {errno.EMFILE: " (ulimit -n)", errno.ENOMEM: " (ulimit -v)", errno.EFBIG: " (ulimit -f)"}
"""The limit of the process that forbids the memory of a feeder, by error number."""


class Processes:
    """A :class:`~cachetool.loaders.feed.protocol.Feed` of ``feeders`` child processes."""

    def __init__(self, settings: Settings, *, feeders: int, functions: bytes) -> None:
        if not supported():
            raise UsageError("feeder processes need Linux on 64 bits; use workers=0")
        # Without standard streams the pipes made below would get their numbers, and libraries would
        # write messages into them.
        keep_standard_streams()
        self.pid, self.closed, self.unsure = os.getpid(), False, False
        self._cache_option = "" if settings.paths else cache_option(Path(settings.root))
        self.pids: list[int] = []
        """The pids of the feeders, the leader first, once the leader has told them."""
        self._keeper: subprocess.Popen[bytes] | None = None
        self._rings: list[Ring] = []
        self._readers: list[SlotReader] = []
        self._schemas: dict[bytes, Schema] = {}
        self._asked = 0
        self._telling, self._left = False, 0
        self._tell_at = time.monotonic() + _TOLD
        self.times = EpochTimes(feeders)
        reading, answers = os.pipe()
        self._answers = Lines(reading)
        try:
            self._make_rings(feeders)
            self._start(settings, functions, answers)
        # No ring and no process may be left behind, even if a signal interrupted the start.
        except BaseException:
            self.close()
            raise
        finally:
            # The feeders alone write into this end. Open here, it would hide that they have ended.
            os.close(answers)

    def _make_rings(self, feeders: int) -> None:
        try:
            for _ in range(feeders):
                self._rings.append(Ring())
                self._readers.append(SlotReader(self._rings[-1], self._schemas))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                raise UsageError(
                    f"feeder processes need memfd_create(), which this system refuses: {error.strerror};"
                    " allow that call, or use workers=0"
                ) from None
            raise CacheToolError(
                f"cannot start workers={feeders} feeders: {error.strerror} after {len(self._rings)}"
                f"{_LIMITS.get(error.errno or 0, '')}; use fewer: 2 to 4 are enough without transform=, 0 starts none"
            ) from None

    def _start(self, settings: Settings, functions: bytes, answers: int) -> None:
        rings = [ring.fd for ring in self._rings]
        call = "cachetool.loaders.feed.feeder:main()"
        self._keeper = begin(call, gives_back=None, pass_fds=(answers, *rings), env=_environment())
        hello = {
            "settings": settings.to_json(),
            "trainer": self.pid,
            "rings": rings,
            "answers": answers,
            "functions": len(functions),
        }
        self._write(hello, functions)

    def begin(self, epoch: int, resume: dict[str, Any] | None = None, ratios: Ratios = ((), ())) -> Begun:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        self.times = EpochTimes(len(self._rings))
        begun = Begun.from_json(self._ask("begin", epoch=epoch, resume=resume, ratios=ratios))
        # A new epoch begins with unlocked memory; the consumer that copies to a device asks for the
        # lock.
        self.lock_pages(None)
        self.times.begun(begun.lacked)
        # The first moments of an epoch are all waiting, and say nothing.
        self._tell_at = time.monotonic() + _TOLD
        return begun

    def prepare(self, epoch: int, resume: dict[str, Any] | None = None, ratios: Ratios = ((), ())) -> Begun:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        return Begun.from_json(self._ask("prepare", epoch=epoch, resume=resume, ratios=ratios))

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
        # This is called by a finalizer, at any moment. In the middle of a write to the same pipe
        # the two lines would be mixed, so it is sent when that write is done.
        self._left = generation if self._telling else 0
        if not (self.closed or self.pid != os.getpid() or self._telling):
            self._note("left", generation)

    def half_delivered(self, generation: int) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        self._note("half_delivered", generation)

    def _note(self, what: str, generation: int) -> None:
        """Tell the leader something by one write."""
        # One write of a short line to a pipe is not mixed with others, so this may run at any
        # moment.
        line = {"id": 0, "do": what, "generation": generation}
        # The leader has ended or is being stopped. A later call that needs it raises an error.
        with contextlib.suppress(OSError, ValueError, AttributeError):
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
        self._tell("delivered", generation=generation, pace=self.times.delivered(batches))

    def take(self, generation: int, step: int, most: int) -> list[Batch]:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        readers = self._readers
        if not readers:
            raise closed()
        if (now := time.monotonic()) >= self._tell_at:
            self._tell_at = now + _TOLD
            self._tell("under_way", generation=generation, pace=self.times.delivered(step))
        batches: list[Batch] = []
        own = readers[step % len(readers)].ring
        while True:
            reader = readers[(step + len(batches)) % len(readers)]
            # A few batches are taken at once, one of each ring in turn, because the first batch
            # takes 110 us of Python and each further one 7 to 15. With rings of two slots none is
            # taken ahead.
            if not batches or (len(batches) < len(readers) and own.most):
                reader.ring.poll()
            try:
                batch = reader.take(generation)
            except CacheToolError:
                if not batches:
                    raise
                # The error stays in the queue, and is raised when its batch is the next one.
                return batches
            if batch is not None:
                # Another loop over the same loader took a batch, so steps would be skipped here.
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
            # The queue had batches of an epoch that was left, and there may be others behind them.
            return
        began, before = time.monotonic_ns(), ring.spent()
        try:
            # The wait for the first batch of an epoch is no sign that the ring has too few slots.
            if not first:
                ring.late()
            if not first and ring.many:
                time.sleep(_LULL)
                if ring.poll():
                    return
            # Looked at every 0.1 s, because a feeder that was killed never posts the semaphore.
            while not ring.wait(_LOOK):
                self._check()
        finally:
            self._count(ring, began, before, first=first)

    def _count(self, ring: Ring, began: int, before: tuple[int, ...], *, first: bool) -> None:
        """Count a wait that ends now, by what the feeder did meanwhile."""
        ended = time.monotonic_ns()
        filled = ring.filled() if ring.ready else ended
        late = ended - max(filled, began)
        # Waking takes a moment, and a wait may be longer by the lull.
        causes = {"gil": late / 1e9} if filled > began and late > _LATE else {}
        made = (ended - began) / 1e9 - sum(causes.values())
        causes |= divided(before, ring.spent(), made)
        self.times.add((ended - began) / 1e9, causes, rest="start" if first else "slots")

    def _check(self) -> None:
        """Raise if a feeder is dead, or if a signal handler or another thread closed the feed meanwhile."""
        keeper = self._keeper
        if self.closed or keeper is None:
            raise closed()
        if keeper.poll() is None:
            return
        assert keeper.stdout is not None
        try:
            report = Lines(keeper.stdout.fileno()).wait() or {}
        # A signal handler closed the pipe.
        except (OSError, ValueError):
            raise closed() from None
        # Closed first, so that the next iteration starts new feeders.
        self.close()
        if "error" in report:
            raise CacheToolError(report["error"])
        pid, code = report.get("died", (keeper.pid, keeper.returncode))
        hint = _HINTS.get(-code, "").format(self._cache_option)
        raise CacheToolError(
            f"a feeder (pid {pid}) {how_ended(code)}{hint}; iterate the loader again to start new feeders"
        )

    def _tell(self, what: str, **values: Any) -> None:
        self._asked += 1
        self._write({"id": self._asked, "do": what, **values})
        if self._left:
            # left() came in the middle of this write, and is sent now.
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
        """Raise the error for feeders whose pipes have ended."""
        if self._keeper is not None:
            # The keeper may take a moment longer to end than the pipe, and its exit tells what
            # happened.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(1.0)
        self._check()

    def _ask(self, what: str, **values: Any) -> dict[str, Any]:
        self._tell(what, **values)
        while True:
            answer = self._answer()
            if answer.pop("id") == self._asked:
                # Answers to earlier questions, whose caller was interrupted, are skipped.
                break
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
                # A signal handler closed the pipe.
                self._check()
                raise
            if self._answers.ended:
                self._await_end()
                raise CacheToolError("a feeder closed its pipe")
        self.pids = answer.pop("feeders", self.pids)
        return dict(answer)

    def close(self) -> None:
        """See :class:`~cachetool.loaders.feed.protocol.Feed`."""
        if self.pid != os.getpid():
            # This is a forked copy: the feeders belong to the parent.
            return
        self.closed = True
        # Set to -1 first: a handler that closes the feed in between must not close another file.
        fd, self._answers.fd = self._answers.fd, -1
        if fd >= 0:
            os.close(fd)
        # A signal handler may close the feed in the middle of this call, and then finds nothing to
        # stop.
        keeper, self._keeper = self._keeper, None
        rings, self._rings, self._readers = self._rings, [], []
        try:
            if keeper is not None and keeper.stdin is not None:
                # The leader may have died. Or a signal handler closes the feed in the middle of a
                # write; then the pipe must stay open for that write.
                with contextlib.suppress(OSError, ValueError):
                    # A child that was forked meanwhile has the pipe too, so the end of the pipe
                    # alone would come late.
                    write_line(keeper.stdin.fileno(), {"id": 0, "do": "stop"})
                    if not self._telling:
                        keeper.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    keeper.wait(_GRACE)
        # In any case: a second Ctrl-C interrupts the wait, but must leave no memory and no process.
        finally:
            for ring in rings:
                ring.close()
            if keeper is not None and keeper.stdout is not None:
                keeper.terminate()
                # A poll() that this call interrupts may have reaped the process already.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    keeper.wait(_GRACE)
                keeper.kill()
                keeper.stdout.close()
