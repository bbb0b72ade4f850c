"""``BackgroundPull``: ``pull --follow`` beside a training script, in processes of its own.

::

    trainer              puller, one child of the trainer                   its workers
    BackgroundPull() --> my turn? -- no: wait, look again every second
                          | yes
                         list, probe, then start and watch  ------------->  claim, fetch, write, commit
    progress(), stats  <------------------ catalog ------------------------------------+

The constructor returns when the puller has begun. After that the trainer has no thread and no callback for the pull,
and nothing to read from the puller until :meth:`BackgroundPull.close`.

The puller is a plain child process. It imports nothing of the script, and ends with the trainer, however that ends. If
several processes ask for one source of one cache, the first one pulls. The pullers of the others wait for their turn:
one of them takes over when the first is closed or killed.
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
from cachetool.core.options import documents, takes
from cachetool.core.progress import Progress
from cachetool.proc.disk import parse_location
from cachetool.proc.parent import Child, stop
from cachetool.proc.task import Channel, Message, Task
from cachetool.pull.options import DrawOptions, PullOptions
from cachetool.pull.prepare import source_id
from cachetool.pull.run import pull_on
from cachetool.stores import redact

__all__ = ["BackgroundPull", "follow"]

# A listing may take an hour. It continues in the puller, while the script builds its model.
PATIENCE = 10.0
"""Seconds that the constructor waits for the schema once the source has answered."""
TURN = 1.0
"""Seconds between two looks of a waiting puller whether its turn has come."""

_running: set[BackgroundPull] = set()
"""The background pulls that were not closed. They continue until the program ends, even if nobody keeps a reference."""


@documents(DrawOptions)
class BackgroundPull:
    """A pull that runs beside this program.

    It fills the cache, then evicts old shards for new samples, pass after pass. The pull runs in processes of its own
    and pauses while all shards are being read or were not read yet. The constructor returns once samples are being
    fetched, at the latest 10 s after the source answered. If another process already pulls this source into this cache,
    this pull waits and takes over when the other one ends. Use it as a context manager, or call :meth:`close`.

    A later error does not stop the training: one line on stderr reports it, :meth:`check` raises it, :attr:`error` is
    its text, and loaders that wait for samples raise it. A store that was reached before is tried again without limit
    when it cannot be reached or refuses the credentials; meanwhile :attr:`error` says why. ``part="auto"`` draws the
    share of this machine among those of a Slurm job or of torchrun.

    Args:
        cache: An open cache, or its folder. A new cache made from a folder takes half of the free disk.
        url: The source, as for :meth:`cachetool.Cache.pull`.

    Attributes:
        url: The source, without user info and query.

    Raises:
        UsageError: An option cannot be used, or does not fit the cache or the dataset.
        SourceError: The source cannot be used; the message is that of ``cachetool pull``.
        CapacityError: The cap or the disk is too small for one shard.

    Example:
        >>> import cachetool
        >>> with cachetool.BackgroundPull("data/cache", "s3://bucket/volumes/") as pull:
        ...     pull.progress().alive  # train here
        True
    """

    @takes(DrawOptions)
    def __init__(self, cache: CacheDir | str | Path, url: str | os.PathLike[str], options: DrawOptions) -> None:
        url, asked = PullOptions(**vars(options), follow=True).at(parse_location(url, what="url="))
        self.url = redact(url)
        self._source = source_id(url, asked)
        # A DataLoader may fork workers that inherit this object. They must not end the puller or read its messages, so
        # each use compares the pid.
        self._pid = os.getpid()
        self._failed: CacheToolError | None = None
        with ExitStack() as stack:
            opened = cache if isinstance(cache, CacheDir) else stack.enter_context(open_cache(cache))
            stack.enter_context(leaving_nothing(opened))
            # Asked for its effect: a new cache is written to the disk, with its cap, before the puller opens it.
            _ = opened.holder
            root = opened.root.resolve()
            # A second handle: the caller may close the first one at any time, while this holder must live as long as
            # the pull.
            self._cache = CacheDir(root)
            with self._cache.catalog.write() as connection:
                self._cache.holder.register(connection)
            # The pull evicts only while this holder's lock is held. If the trainer is killed, the shards of the epoch
            # that is to be resumed stay.
            asked = replace(asked, trainer=self._cache.holder.id)
            arguments = {"root": str(root), "url": url, "options": asked.to_json()}
            self._child: Child | None = Child(Task("cachetool.pull.background:follow", arguments))
            try:
                self._await_start(self._child)
            # Also for Ctrl-C: otherwise the puller would continue without an owner.
            except BaseException:
                self._end()
                raise
        # A script that never closes its pull must not leave the puller behind when it ends.
        if not _running:
            atexit.register(_close_all)
        _running.add(self)

    def _await_start(self, child: Child) -> None:
        deadline: float | None = None
        while True:
            # No limit until the source has answered: an unreachable source ends with an error of the puller, within the
            # store's own limits.
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not child.says(left):
                return
            more, messages = child.receive()
            # Raises the error that the puller sent, with its class, so that the script sees the error of `cachetool
            # pull`.
            child.check(ended=not more)
            # Samples are being fetched, or another process does that: in both cases the script can continue to its
            # loader.
            if any(message["phase"] in ("pull", "waits") for message in messages):
                return
            deadline = deadline or time.monotonic() + PATIENCE

    @property
    def error(self) -> str | None:
        """The text of the error that ended the pull, or that makes it try again; None while the pull works."""
        self._look()
        return str(self._failed) if self._failed is not None else self.progress().error

    def check(self) -> None:
        """Raise the error that ended the pull, if there is one.

        Raises:
            CacheToolError: The error of the pull, in its own class.
        """
        self._look()
        if self._failed is not None:
            raise self._failed

    def progress(self) -> PullState:
        """Return the progress of the pull of this source, whichever process does the work.

        Returns:
            A :class:`~cachetool.cache.stats.PullState`, read from the catalog.

        Raises:
            CatalogError: The catalog cannot be read.
        """
        if self._cache.closed:
            # The pull has ended and closed its handle. A new handle, for this call alone, still reads the result.
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
        """Take in the last messages of the puller."""
        child = self._child
        # A forked child shares the pipe with its parent. If it read a message, the parent would never see it.
        if child is None or self._failed is not None or os.getpid() != self._pid:
            return
        state, more = self.progress(), True
        # The puller writes its failure to the catalog first and sends the error next, so it is worth waiting for that
        # message.
        ending = state.phase == FAILED and state.pid == child.process.pid
        while more and child.says(None if ending else 0):
            more, _ = child.receive()
            try:
                child.check(ended=not more)
            except CacheToolError as error:
                self._failed = error
                return

    def close(self) -> None:
        """Stop the pull within 5 s. May be called twice.

        Committed samples stay, and samples under way are drawn again later. An error that was not asked for becomes a
        warning, so that a training that ended well does not fail here.
        """
        self._close()

    def _close(self) -> None:
        if self._child is None or os.getpid() != self._pid:
            return
        # An error that was raised or read before needs no warning.
        unseen = self._failed is None
        try:
            self._look()
        # The catalog cannot be read, for example beside a process that was stopped in a transaction. The puller must
        # end all the same.
        except CacheToolError as error:
            self._failed = error
        self._end()
        if self._failed is not None and unseen:
            warnings.warn(f"the background pull of {self.url} had failed: {self._failed}", RuntimeWarning, stacklevel=3)

    def _end(self) -> None:
        child, self._child = self._child, None
        _running.discard(self)
        if child is not None:
            stop([child])
            # A killed puller gave back nothing: its claims, its reservations and its turn stay in the catalog until
            # they are recovered.
            if child.process.returncode == -signal.SIGKILL:
                # Safe to suppress: any later operation on the cache recovers them as well.
                with contextlib.suppress(CacheToolError):
                    self._cache.recover()
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def _close_all() -> None:
    # A copy, because close() removes itself from the set.
    for running in list(_running):
        running.close()


# -- in the puller -----------------------------------------------------------------------------------------------------


def follow(channel: Channel, *, root: str, url: str, options: Message) -> Message:
    """Wait for the turn of this process. Then pull until the process is stopped or the pull fails."""
    asked = PullOptions.from_json(options)
    with CacheDir(Path(root)) as cache:
        desk = _Desk(cache, source_id(url, asked), channel)
        failure: str | None = None
        try:
            desk.await_turn(url, asked)
        # The trainer continues as soon as this puller waits for its turn. Then only stderr can tell the error.
        except UsageError as error:
            desk.warn(url, error)
            raise
        try:
            pull_on(
                cache, url, asked,
                report=desk.report, may_wait=lambda: not desk.starting, waits=desk.retry,
            )  # fmt: skip
        # The trainer closed the pull. That is no failure, and must not be left as an error for others.
        except Interrupted:
            raise
        except Exception as error:
            failure = desk.warn(url, error)
            raise
        finally:
            desk.leave(failure)
    return {}


class _Desk:
    """The reports of a puller: to the catalog, and to its trainer while the trainer waits for the start."""

    def __init__(self, cache: CacheDir, source: str, channel: Channel) -> None:
        self._cache, self._source, self._channel = cache, source, channel
        self._phase = ""
        self._noted = 0.0
        self._answered: float | None = None
        self._left = False
        """True if the trainer was told that it need not wait any more."""
        self._retries = False
        """True if the last try failed, and the present one has not received anything yet."""

    @property
    def starting(self) -> bool:
        """True while the trainer still waits. An error is then raised in the trainer, and nowhere else."""
        answered = self._answered
        return not self._left and (answered is None or time.monotonic() - answered < PATIENCE)

    def warn(self, url: str, error: Exception) -> str | None:
        """Print to stderr the error that ends the pull, and return its text.

        Return None, and print nothing, while the trainer waits, because the trainer raises the error.
        """
        # Two places would show one error: the trainer raises it with its whole message.
        if self.starting:
            return None
        sys.stderr.write(f"warning: the background pull of {redact(url)} ended: {error}\n")
        return str(error)

    def await_turn(self, url: str, asked: PullOptions) -> None:
        """Return when it is this process that pulls.

        Raises:
            UsageError: If the process that pulls draws another share of the source: the turn would never come.
            SourceError: If the pull of the other process failed.
        """
        cache, since = self._cache, time.time()
        while True:
            # A killed puller holds the turn until its row is recovered. Without this the waiting processes would wait
            # for ever.
            cache.recover()
            with cache.catalog.write() as connection:
                # Asked in the transaction that takes the turn: between two transactions another process could fail, and
                # this one would fail after it for the same reason.
                failed = failure_since(connection, self._source, since)
                if failed is None and take_over(
                    connection, self._source, url=redact(url), dataset=asked.dataset, holder=cache.holder
                ):
                    return
                # The process that pulls does not end by itself, so a puller with another share of the source would wait
                # for ever.
                if failed is None and asked.node_parts is not None:
                    refuse_beside(connection, cache.root, self._source, asked.node_parts)
            if failed is not None:
                raise SourceError(f"the pull of another process failed: {failed}")
            self._enter("waits")
            time.sleep(TURN)

    def report(self, step: Progress) -> None:
        """Take in the progress of a pull. Write new phases to the catalog, and the progress of a listing now
        and then."""
        # The first progress shows that the source has answered. The trainer's patience begins here.
        self._answered = self._answered or time.monotonic()
        entered = self._enter(step.phase)
        listing = step.phase == "list"
        # The listing of a new try says nothing yet. Until something arrives, `error` must still name the failure.
        if self._retries and not (step.phase == "pull" or (listing and step.done)):
            return
        self._retries = False
        if step.phase == "pull":
            if entered:
                self.note("pulling")
        # Every note is a transaction with an fsync, and a listing reports after each page.
        elif entered or time.monotonic() - self._noted > 2:
            self._noted = time.monotonic()
            self.note("listing" if listing else "looking at samples", listed=step.done if listing else 0)

    def _enter(self, phase: str) -> bool:
        changed = phase != self._phase
        if changed:
            self._phase = phase
            # Afterwards nobody reads the pipe, and a full pipe would block the pull.
            if self.starting:
                self._channel.send({"phase": phase})
            self._left = self._left or phase in ("pull", "waits")
        return changed

    def retry(self, error: CacheToolError) -> None:
        """Note that the store will be tried again after a pause, because of ``error``."""
        # The phase changes, so that the next success counts as entering its phase and is noted.
        self._retries, self._phase = True, "retrying"
        self.note("retrying", error=str(error))

    def note(self, phase: str, *, listed: int = 0, error: str | None = None) -> None:
        """Write the phase to the catalog."""
        with self._cache.catalog.write() as connection:
            note(connection, self._source, self._cache.holder, phase, listed=listed, error=error)

    def leave(self, error: str | None) -> None:
        """Make way for another process, or leave the error for those who wait."""
        with self._cache.catalog.write() as connection:
            leave(connection, self._source, self._cache.holder, error=error)
