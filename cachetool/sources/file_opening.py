"""Files opened for reading: all files of rows together, or one file of records as a whole.

The store's bytes reach a library in one of three ways: by ranges (:class:`OpenedRows`), through a path to a file in
memory or on this machine, or as a stream.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.closing import Closing
from cachetool.core.errors import BadObject
from cachetool.core.schema import Schema
from cachetool.core.units import format_size
from cachetool.sources.byte_source import Files, RangeServer, SourceFile, StoreRanges, fetch_part, renamed
from cachetool.sources.fetch import Fetcher
from cachetool.sources.file_table import Layout
from cachetool.sources.guard import GuardedFile
from cachetool.sources.kinds import Kind
from cachetool.sources.opening import OpenedFiles
from cachetool.sources.options import SourceOptions
from cachetool.sources.ours import Exported
from cachetool.sources.readers import RandomAccess, RecordFile
from cachetool.sources.value_format import is_raw
from cachetool.stores import Object

__all__ = [
    "MAX_WHOLE",
    "OpenedRows",
    "WholeFile",
    "called",
    "nameless",
    "open_at",
    "records_options",
    "refuse_large",
    "rows_options",
    "run_of_blocks",
    "write_body",
]

MAX_WHOLE = 4 * 2**30
"""Largest archive in bytes that is fetched as a whole: it is in memory while it is read."""
_PART = 8 * 2**20


class OpenedRows(Closing):
    """The files of rows of a listing, opened for reading in the guarded process, or in this one for kinds that need no
    guard."""

    def __init__(
        self,
        files: Files,
        kind: Kind,
        options: SourceOptions,
        *,
        roots: tuple[str, ...] = (),
        folders: tuple[str, ...] = (),
        schema: Schema | None = None,
        rows: list[int] | None = None,
        piece: int = 0,
        in_order: bool = False,
    ) -> None:
        items = [] if roots else [files.item(number) for number in range(files.listing.objects)]
        place = files.store.url.rstrip("/").rpartition("/")[2]
        # The root of a place that is itself one Zarr has no name. It is called as the last part of the URL.
        names = [name.rstrip("/") or place for name in roots] or [item.key for item in items]
        spec: dict[str, Any] = {
            "kind": kind.name,
            "files": names,
            "sizes": [files.listing.bytes] * len(roots) or [item.size for item in items],
            "roots": roots,
            "folders": folders,
            "schema": None if schema is None else schema.to_json(),
            "rows": rows,
            "piece": piece,
            "in_order": in_order,
        }
        self.ranges, self._files = StoreRanges(files), files
        self._server, options = RangeServer(self.ranges), rows_options(options)
        self._source: OpenedFiles | GuardedFile
        if kind.guarded:
            name = names[0] if len(names) == 1 else files.store.url
            opener = "cachetool.sources.opening:open_served"
            self._source = GuardedFile(name, options, opener=opener, about=spec, server=self._server)
        else:
            self._source = OpenedFiles(self.ranges, spec, options)
        self.skipped, self.facts = self._source.skipped, self._server.facts
        """The facts about each file, as the guarded process reported them. ``skipped`` has the names that are not
        taken."""

    def read(self, start: int, stop: int) -> Any:
        """Return samples ``start`` to ``stop``, counted over all files. The samples must be in one file."""
        try:
            return self._source.read(start, stop)
        finally:
            # The guarded process read this file through a descriptor, past the comparison of ETags. The file must still
            # be the listed one after the read.
            if self._server.opened is not None:
                self._files.path(self._server.opened)

    def close(self) -> None:
        """End the process."""
        self._source.close()


def rows_options(options: SourceOptions) -> SourceOptions:
    """Return the options for the reader of a file of rows: which fields, and their names."""
    return SourceOptions(
        fields=options.fields,
        rename=options.rename,
        rows=options.rows,
        block=options.block,
        edges=options.edges,
        level=options.level,
        key=options.key,
        read_as=options.read_as,
        decode="cf" if options.decode == "cf" else None,
        value_format=options.value_format if is_raw(options.value_format) else None,
    )


def records_options(options: SourceOptions, kind: Kind) -> SourceOptions:
    """Return the options for the reader of a file of records."""
    # The reader of tar files decodes images and labels itself, by the names of its members. Values of other records are
    # decoded after the read, so these options are removed for them.
    if kind.name == "tar":
        return replace(options, concurrency=None)
    if options.value_format == "image":
        return replace(options, concurrency=None, label_from_folder=False)
    return replace(options, concurrency=None, label_from_folder=False, decode=None, resize=None)


class WholeFile(Closing):
    """A file of records that is opened as a whole: at its path, in memory, or as a stream."""

    def __init__(
        self, files: Files, number: int, kind: Kind, options: SourceOptions, ours: Exported | None,
        layout: Layout | None = None,
    ) -> None:  # fmt: skip
        """Prepare the file. ``layout`` is what the listing knows about it, or None."""
        self._files, self._number, self._kind, self._layout = files, number, kind, layout
        self._options, self._ours = records_options(options, kind), ours
        self._stack = contextlib.ExitStack()
        self._source: RandomAccess | None = None
        self._running: Iterator[Block] = iter(())
        self._at = self._sample_bytes = 0
        self._rest: Block | None = None

    def opened(self) -> RandomAccess | RecordFile:
        """Return the file. A stream is opened again from its beginning."""
        if not self._by_path:
            item = self._files.item(self._number)
            layout = self._layout
            file = SourceFile(
                Path(item.key), item.size, StoreRanges(self._files), self._number, in_order=True,
                schema=layout.schema if layout else None, names=layout.names if layout else {},
            )  # fmt: skip
            opened: RecordFile = self._kind.opened(file, self._options)
            return opened
        if self._source is None:
            path = self._files.path(self._number)
            if path is None:
                path = self._stack.enter_context(_fetched(self._files, self._number))
            with renamed(path, called(self._files, self._number, self._kind)):
                self._source = open_at(path, self._kind, self._options, self._ours)
            self._stack.callback(self._source.close)
        return self._source

    @property
    def _by_path(self) -> bool:
        return self._kind.by_path or (self._kind.name == "tfrecord" and self._ours is not None)

    def read(self, start: int, stop: int) -> Block:
        """Return samples ``start`` to ``stop``. In a compressed file this is cheapest if ``start`` is where the last
        read ended."""
        if self._by_path:
            source = cast(RandomAccess, self.opened())
            with renamed(source.path, called(self._files, self._number, self._kind)):  # type: ignore[attr-defined]
                blocks = list(run_of_blocks(source, start, stop, sample_bytes=self._sample_bytes))
            # The size of these samples sets the first step of the next run: images take more bytes than in the file, so
            # the file tells nothing about it.
            self._sample_bytes = max(1, blocks[-1].nbytes // len(blocks[-1]))
            return Block.concat(blocks)
        # A stream cannot go back. It is opened again and read from the beginning, which is why reads in order are fast.
        if start < self._at or self._rest is None:
            self._running, self._at = cast(RecordFile, self.opened()).blocks(), 0
            self._rest = next(self._running, None)
        out: list[Block] = []
        while start < stop and self._rest is not None:
            first, last = self._at, self._at + len(self._rest)
            if first <= start < last:
                end = min(stop, last)
                out.append(self._rest.slice(start - first, end - first))
                start = end
            if start >= last:
                self._at, self._rest = last, next(self._running, None)
        if start < stop:
            raise BadObject(
                f"{self._files.item(self._number).key!r} has only {start} samples, fewer than when it was listed"
            )
        return Block.concat(out)

    def close(self) -> None:
        """Close the file. It can be read again afterwards."""
        self._running, self._rest, self._source = iter(()), None, None
        self._stack.close()


def called(files: Files, number: int, kind: Kind) -> str:
    """Return the name of a file for messages. A file whose name every folder of its kind has is named with its
    folder."""
    name = files.item(number).key
    return f"{files.store.url.rstrip('/').rpartition('/')[2]}/{name}" if name in kind.marks else name


def open_at(path: Path, kind: Kind, options: SourceOptions, ours: Exported | None) -> RandomAccess:
    """Open the file of records at ``path`` so that any run of its samples can be read."""
    if kind.name == "tfrecord" and ours is not None:
        # Imported here: only exported TFRecord files need it, and it loads the formats.
        from cachetool.sources.ours import our_records

        return our_records(path, options, ours.schema)
    return GuardedFile(path, options, opener="cachetool.sources.opening:open_path", about={"kind": kind.name})


class Readable(Protocol):
    """A reader of any run of samples."""

    schema: Schema

    def read(self, start: int, stop: int) -> Block:
        """Return samples ``start`` to ``stop``."""
        ...


def run_of_blocks(
    reader: Readable, start: int, stop: int, *, block_bytes: int = BLOCK_BYTES, sample_bytes: int = 0
) -> Iterator[Block]:
    """Yield samples ``start`` to ``stop`` of a reader in blocks of about ``block_bytes``.

    The size of each block is planned by the bytes of the block before, because images take more bytes than in the
    file. ``sample_bytes`` is the size of a sample in a run before, or 0 if there was none.
    """
    if reader.schema.is_fixed:
        sample_bytes = max(1, reader.schema.fixed_nbytes)
    # Without a known size the first block is one sample: a guess that is too large could fill the memory.
    step = block_bytes // (sample_bytes or block_bytes)
    at = start
    while at < stop:
        block = reader.read(at, min(at + max(1, step), stop))
        yield block
        at += len(block)
        # Growth is limited to eight times, because a run of small samples says little about those behind it.
        step = min(8 * max(1, step), max(1, len(block) * block_bytes // max(1, block.nbytes)))


@contextlib.contextmanager
def nameless() -> Iterator[tuple[int, Path]]:
    """Yield a file in memory and a path to it that other processes can open. Where memory files do not exist, yield a
    temporary file."""
    try:
        fd = os.memfd_create("archive", os.MFD_CLOEXEC)
    # AttributeError: not Linux. OSError: a sandbox that forbids memfd_create.
    except (AttributeError, OSError):
        with tempfile.NamedTemporaryFile(prefix="cachetool-", buffering=0) as file:
            yield file.fileno(), Path(file.name)
        return
    try:
        # A path through /proc works for libraries that open by path, also in the guarded process. The memory is freed
        # with the last descriptor, even after a kill, so nothing is left on a disk.
        yield fd, Path(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


@contextlib.contextmanager
def _fetched(files: Files, number: int) -> Iterator[Path]:
    """Yield a path to the complete file, fetched into memory."""
    item = files.item(number)
    refuse_large(item)
    with nameless() as (fd, path):
        fetcher: Fetcher[int, memoryview] = Fetcher(
            lambda at, _: fetch_part(files.store, item, at, min(at + _PART, item.size)), files.store.concurrency
        )
        try:
            for body in fetcher.run(range(0, item.size, _PART), ahead=8 * _PART, size=lambda _: _PART):
                write_body(fd, body)
        finally:
            fetcher.close()
        yield path


def refuse_large(item: Object) -> None:
    """Raise :class:`BadObject` for a file that is too large to be held in memory."""
    if item.size > MAX_WHOLE:
        raise BadObject(
            f"{item.key!r} has {format_size(item.size)}, but at most {format_size(MAX_WHOLE)} can be read from a remote"
            " store in one piece; copy the file to a disk of this machine first"
        )


def write_body(fd: int, body: memoryview) -> None:
    """Write all of ``body``."""
    # One call of write may write less than asked for: Linux stops at about 2 GiB.
    while body:
        body = body[os.write(fd, body) :]
