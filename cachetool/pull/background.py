"""``BackgroundPull``: ``pull --follow`` beside a training script, in processes of its own.

::

    trainer              puller, one child of the trainer                   its workers
    BackgroundPull() --> my turn? -- no: wait, look again every second
                          | yes
                         list, probe, then start and watch  ------------->  claim, fetch, write, commit
    progress(), stats  <------------------ catalog ------------------------------------+

The trainer's part ends when its puller has begun: no thread, no callback, nothing to read until it is closed. The
puller is a plain child process that imports nothing of the script, and ends with the trainer however that ends. Of
several processes that ask for one source of one cache the first pulls, the others have a puller that waits its turn: it
takes over when the first is closed or killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from cachetool.cache import CacheDir, open_cache
from cachetool.cache.own_parts import refuse_beside
from cachetool.cache.stats import (
    FAILED,
    STOPPED,
    PullState,
    failure_since,
    leave,
    note,
    pull_state,
    take_over,
)
from cachetool.cache.unmaking import leaving_nothing
from cachetool.core.errors import CacheToolError, Interrupted, SourceError, UsageError
from cachetool.core.options import takes
from cachetool.core.progress import Progress
from cachetool.proc.disk import parse_location
from cachetool.proc.parent import Child, stop
from cachetool.proc.task import Channel, Message, Task
from cachetool.pull.options import DrawOptions, PullOptions
from cachetool.pull.prepare import source_id
from cachetool.pull.run import pull_on
from cachetool.stores import redact

__all__ = ["BackgroundPull", "follow"]

PATIENCE = 10.0
"""Seconds that the start waits for the schema once the source has answered: a long listing goes on by itself."""
TURN = 1.0
"""Seconds between two looks whether it is a waiting puller's turn."""

_running: set[BackgroundPull] = set()
"""Those that were not closed: they go on though nobody keeps them, until the program ends."""


class BackgroundPull:
    """Draws samples into ``cache`` while this program goes on; a context manager.

    ``cache`` is an open cache or its folder, ``url`` a source as for :meth:`cachetool.Cache.pull`. It fills the cache,
    then evicts as needed and keeps going, pass after pass; it pauses when all that is there is leased or was never
    read, and goes on at the next epoch. ``part="auto"`` is the share of this machine among those of a Slurm job or of
    torchrun: the processes of one machine have one cache, and one of them pulls.

    It returns once samples are being fetched, 10 s after the source has answered at the latest, or when another process
    pulls this source into this cache already: then it waits its turn. Raises :class:`UsageError` for options
    that do not fit, and :class:`SourceError` when the source cannot be used, with the message of ``cachetool pull``.

    What goes wrong later does not stop the training: a line on stderr says so, :meth:`check` raises it, :attr:`error`
    tells it, and loaders that wait for samples raise it. A store that cannot be reached any more, or does not take the
    credentials any more, is tried again for as long as it takes; meanwhile :attr:`error` says why.
    """

    @takes(DrawOptions)
    def __init__(self, cache: CacheDir | str | Path, url: str | os.PathLike[str], options: DrawOptions) -> None:
        url, asked = PullOptions(**vars(options), follow=True).at(parse_location(url, what="url="))
        self.url = redact(url)
        self._source = source_id(url, asked)
        self._pid = os.getpid()
        self._failed: CacheToolError | None = None
        with ExitStack() as stack:
            opened = cache if isinstance(cache, CacheDir) else stack.enter_context(open_cache(cache))
            stack.enter_context(leaving_nothing(opened))
            _ = opened.holder  # on disk, with the cap it was opened with in force
            root = opened.root.resolve()
            self._cache = CacheDir(root)
            with self._cache.catalog.write() as connection:
                self._cache.holder.register(connection)
            asked = replace(asked, trainer=self._cache.holder.id)
            arguments = {"root": str(root), "url": url, "options": asked.to_json()}
            self._child: Child | None = Child(Task("cachetool.pull.background:follow", arguments))
            try:
                self._await_start(self._child)
            except BaseException:
                self._end()
                raise
        if not _running:
            atexit.register(_close_all)
        _running.add(self)

    def _await_start(self, child: Child) -> None:
        deadline: float | None = None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not child.says(left):
                return
            more, messages = child.receive()
            child.check(ended=not more)
            if any(message["phase"] in ("pull", "waits") for message in messages):
                return
            deadline = deadline or time.monotonic() + PATIENCE

    @property
    def error(self) -> str | None:
        """Why the pull failed, or what it is trying again after; None while all is well."""
        self._look()
        return str(self._failed) if self._failed is not None else self.progress().error

    def check(self) -> None:
        """Raise what ended the pull, if something did."""
        self._look()
        if self._failed is not None:
            raise self._failed

    def progress(self) -> PullState:
        """How far the pull of this source is, whichever process does it. Reads the catalog."""
        if self._cache.closed:  # the pull has ended; what became of it can still be asked
            with CacheDir(self._cache.root) as reopened:
                return self._progress(reopened)
        return self._progress(self._cache)

    def _progress(self, cache: CacheDir) -> PullState:
        with cache.catalog.read() as connection:
            state = pull_state(connection, cache.layout, self._source)
        if state is not None:
            return state
        return PullState(
            source=self._source, url=self.url, dataset="", pid=0, phase=STOPPED,
            listed=0, samples=0, skipped=0, fetched=0, drawn=0, units=0, pass_number=1,
            used=0, max_size=cache.max_size, evicted=0, seconds=0.0, error=None,
        )  # fmt: skip

    def _look(self) -> None:
        """Take in what the puller may have said at its end. A forked child has no puller: it sees the catalog alone."""
        child = self._child
        if child is None or self._failed is not None or os.getpid() != self._pid:
            return
        state, more = self.progress(), True
        # Once the catalog knows of its failure, it is about to say so itself.
        ending = state.phase == FAILED and state.pid == child.process.pid
        while more and child.says(None if ending else 0):
            more, _ = child.receive()
            try:
                child.check(ended=not more)
            except CacheToolError as error:
                self._failed = error
                return

    def close(self) -> None:
        """Stop pulling, within 5 s; what was fetched is kept, and what is under way drawn again later. May be called
        twice.

        An error that nobody asked for is told as a warning: a training that has ended well is not to fail here.
        """
        self._close()

    def _close(self) -> None:
        if self._child is None or os.getpid() != self._pid:
            return
        unseen = self._failed is None
        try:
            self._look()
        except CacheToolError as error:  # the catalog cannot be read; the puller ends all the same
            self._failed = error
        self._end()
        if self._failed is not None and unseen:
            warnings.warn(f"the background pull of {self.url} had failed: {self._failed}", RuntimeWarning, stacklevel=3)

    def _end(self) -> None:
        child, self._child = self._child, None
        _running.discard(self)
        if child is not None:
            stop([child])
            if child.process.returncode == -signal.SIGKILL:  # it gave back nothing, and still stands in the catalog
                with contextlib.suppress(CacheToolError):
                    self._cache.recover()
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def _close_all() -> None:
    for running in list(_running):
        running.close()


# -- in the puller -----------------------------------------------------------------------------------------------------


def follow(channel: Channel, *, root: str, url: str, options: Message) -> Message:
    """Wait for the turn of this process, then pull until it is stopped or the pull fails."""
    asked = PullOptions.from_json(options)
    with CacheDir(Path(root)) as cache:
        desk = _Desk(cache, source_id(url, asked), channel)
        failure: str | None = None
        try:
            desk.await_turn(url, asked)
        except UsageError as error:
            desk.warn(url, error)
            raise
        try:
            pull_on(
                cache, url, asked,
                report=desk.report, may_wait=lambda: not desk.starting, waits=desk.retry,
            )  # fmt: skip
        except Interrupted:
            raise
        except Exception as error:
            failure = desk.warn(url, error)
            raise
        finally:
            desk.leave(failure)
    return {}


class _Desk:
    """Where a puller says what it is at: to the catalog, and to its trainer as long as that waits for the start."""

    def __init__(self, cache: CacheDir, source: str, channel: Channel) -> None:
        self._cache, self._source, self._channel = cache, source, channel
        self._phase = ""
        self._noted = 0.0
        self._answered: float | None = None
        self._left = False
        """Whether the trainer was told that it need not wait any more."""
        self._retries = False
        """Whether the last try failed, and this one has not got on yet."""

    @property
    def starting(self) -> bool:
        """Whether the trainer still waits: then an error is raised there, and nowhere else."""
        answered = self._answered
        return not self._left and (answered is None or time.monotonic() - answered < PATIENCE)

    def warn(self, url: str, error: Exception) -> str | None:
        """Say on stderr what ends the pull, unless the trainer still waits and raises that; return what was said."""
        if self.starting:
            return None
        sys.stderr.write(f"warning: the background pull of {redact(url)} ended: {error}\n")
        return str(error)

    def await_turn(self, url: str, asked: PullOptions) -> None:
        """Come back when this process is the one that pulls. Raises :class:`UsageError` when the one that does draws
        another share of the source: its turn does not end."""
        cache, since = self._cache, time.time()
        while True:
            cache.recover()
            with cache.catalog.write() as connection:
                failed = failure_since(connection, self._source, since)
                if failed is None and take_over(
                    connection, self._source, url=redact(url), dataset=asked.dataset, holder=cache.holder
                ):
                    return
                if failed is None and asked.share is not None:
                    refuse_beside(connection, cache.root, self._source, asked.share)
            if failed is not None:
                raise SourceError(f"the pull of another process failed: {failed}")
            self._enter("waits")
            time.sleep(TURN)

    def report(self, step: Progress) -> None:
        """Take in the progress of a pull; the catalog is told of new phases, and now and then how far a listing is."""
        self._answered = self._answered or time.monotonic()
        entered = self._enter(step.phase)
        listing = step.phase == "list"
        if self._retries and not (step.phase == "pull" or (listing and step.done)):
            return  # until something comes, what is known is the error
        self._retries = False
        if step.phase == "pull":
            if entered:
                self.note("pulling")
        elif entered or time.monotonic() - self._noted > 2:
            self._noted = time.monotonic()
            self.note("listing" if listing else "looking at samples", listed=step.done if listing else 0)

    def _enter(self, phase: str) -> bool:
        changed = phase != self._phase
        if changed:
            self._phase = phase
            if self.starting:  # afterwards nobody reads, and a full pipe would stop the pull
                self._channel.send({"phase": phase})
            self._left = self._left or phase in ("pull", "waits")
        return changed

    def retry(self, error: CacheToolError) -> None:
        """The store is tried again after a while, because of ``error``."""
        self._retries, self._phase = True, "retrying"
        self.note("retrying", error=str(error))

    def note(self, phase: str, *, listed: int = 0, error: str | None = None) -> None:
        """Tell the catalog."""
        with self._cache.catalog.write() as connection:
            note(connection, self._source, self._cache.holder, phase, listed=listed, error=error)

    def leave(self, error: str | None) -> None:
        """Make way for another process, or leave the error for those who wait."""
        with self._cache.catalog.write() as connection:
            leave(connection, self._source, self._cache.holder, error=error)
