"""``convert URL``: what lies in a store becomes an input of this machine.

Files that hold many samples (``.h5``, ``.zarr``, ``.tfrecord``, ...) are read by libraries that want them on a disk, so
they are fetched whole, into a hidden folder beside the output, and go with the end of the conversion::

    .OUT.input-3f2a/  big.h5              locked while it is in use: what a killed process left is swept by the next one

A folder of objects is only listed there; workers read it as ``pull`` does. Stores are used in child processes alone.
The input's identity is its URL, sizes and ETags: an interrupted conversion goes on, and a changed object begins anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import unquote

import numpy as np

from cachetool.conversion.inputs import describe
from cachetool.core.errors import BadObject, CacheToolError, CapacityError, NotFound, UsageError, from_json, to_json
from cachetool.core.progress import Progress, Report
from cachetool.core.units import format_size, parse_location
from cachetool.proc.folders import make_missing, new_file, remove_path, shortened
from cachetool.proc.parent import LocalEngine
from cachetool.proc.scratch import scratch
from cachetool.proc.task import Channel, Message, Task
from cachetool.pull.prepare import check_place
from cachetool.sources import list_source, open_source
from cachetool.sources.doors import FileOptions, kind_of_name, kind_of_names
from cachetool.sources.fetch import Fetcher
from cachetool.sources.ours import DATASET_FILE
from cachetool.stores import Object, Store, canonical, local_path, open_store, redact, split_url
from cachetool.stores.base import Streaming

__all__ = ["bring", "described"]

MOST_FILES = 200_000
"""Objects that one input of files may have."""
PROBED = 64
"""A folder of objects gets its schema from so many of them, spread over all."""
_RANGE = 8 * 2**20
_AHEAD = 8 * _RANGE
_THREADS = 8
_REPORT_SECONDS = 0.2


@contextlib.contextmanager
def described(source: str | Path, options: FileOptions, *, beside: Path | None, report: Report) -> Iterator[Message]:
    """The description of an input, by path or URL (:func:`cachetool.conversion.inputs.describe`); good inside of the
    ``with`` block.

    ``beside`` is the output, whose disk takes what must be fetched; None for where temporary files go. Raises
    :class:`NotFound` when nothing is at a URL, :class:`CapacityError` when the disk has no room for it.
    """
    if not isinstance(source, Path):
        source = parse_location(source, what="INPUT")
        check_place(source)
    if isinstance(source, Path) or split_url(source)[0] in ("", "file"):
        yield describe(source if isinstance(source, Path) else local_path(source), options)
        return
    url = source
    with _folder(beside) as folder:

        def on_message(_: int, message: Message) -> None:
            report(Progress(**message))

        arguments = {"url": url, "folder": str(folder), "options": options.to_json()}
        try:
            description = LocalEngine().run([Task("cachetool.conversion.remote:bring", arguments)], on_message)[0]
            yield description
        except CacheToolError as error:
            # Nobody knows the folder that it was read in, and it is gone by now.
            error_json = to_json(error)
            shown = error_json["message"].replace(str(folder / _name(url)), redact(url).rstrip("/"))
            raise (error if shown == error_json["message"] else from_json(error_json | {"message": shown})) from error


@contextlib.contextmanager
def _folder(beside: Path | None) -> Iterator[Path]:
    """A new folder beside ``beside``, or where temporary files go when nothing can be made there."""
    with contextlib.ExitStack() as stack:
        try:
            if beside is None:
                raise PermissionError
            parent = beside.absolute().parent
            make_missing(parent)
            folder = stack.enter_context(scratch(parent, f".{shortened(beside.name)}.input-"))
        except PermissionError:
            folder = stack.enter_context(scratch(Path(tempfile.gettempdir()), "cachetool-input-"))
        yield folder


def bring(channel: Channel, *, url: str, folder: str, options: Message) -> Message:
    """The task: find what is at ``url`` and fetch it into ``folder``, or list it there. Gives the description."""
    parsed, place = FileOptions.from_json(options), Path(folder)
    parent, name = _parent(url)
    reporter = _Reporter(channel)
    missing: NotFound | None = None
    if kind_of_name(name) is not None:
        with contextlib.closing(open_store(parent)) as store:
            try:
                item = store.find(name)
            except NotFound as error:
                missing = error  # a folder may be called so, too
            else:
                return _fetched(store, [(item, place / _name(url))], place, url, options, reporter)
    items: list[Object] | None = []

    def notice(page: list[Object]) -> None:
        nonlocal items
        items = [*items, *page] if items is not None and len(items) + len(page) <= MOST_FILES else None

    listing, empty = place / "listing", None
    objects = dataclasses.replace(parsed, read_as="objects")
    try:
        list_source(url, listing, objects, progress=lambda count: reporter(Progress("list", count)), notice=notice)
    except NotFound as error:
        if not items:
            raise missing or error from None
        empty = error
    if items is not None and (chosen := _files_among(items, redact(url))):
        with contextlib.closing(open_store(url)) as store:
            remove_path(listing)
            return _fetched(
                store, [(i, place / _name(url) / _local_name(i.key)) for i in chosen], place, url, options, reporter
            )
    if empty is not None:
        raise empty
    return _objects(url, listing, parsed, options)


def _objects(url: str, listing: Path, parsed: FileOptions, options: Message) -> Message:
    """A folder of objects, with all that the starter must know, since it cannot look itself."""
    with contextlib.closing(open_source(url, listing, parsed)) as source:
        probe = source.probe(np.unique(np.linspace(0, source.units - 1, PROBED).astype(np.int64)))
        return {
            "kind": "remote",
            "url": url,
            "shown": source.url,
            "listing": str(listing),
            "options": options,
            "samples": source.samples,
            "schema": probe.schema.to_json(),
            "mean": probe.mean_bytes,
            "identity": _identity(url, options, source.identity),
        }


def _identity(url: str, options: Message, content: object) -> str:
    text = json.dumps([canonical(url), options, content], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _parent(url: str) -> tuple[str, str]:
    """The URL of the folder that ``url`` lies in, and its name there; no name for a folder or a whole bucket."""
    scheme, location = split_url(url)
    web = scheme in ("http", "https")
    path, mark, query = location.partition("#")[0].partition("?") if web else (location, "", "")
    folder, slash, name = path.rpartition("/")
    if not slash or not name:
        return url, ""
    escaped = web or scheme == "sftp"
    return f"{scheme}://{folder}/{mark}{query}", unquote(name, errors="surrogateescape") if escaped else name


def _name(url: str) -> str:
    """What an input is called in the folder where it is fetched to."""
    return _local_name(_parent(url.rstrip("/"))[1] or "input")


def _files_among(items: Sequence[Object], where: str) -> list[Object]:
    """Which of the objects below a folder are files of samples; none when they are samples themselves."""
    kinds, is_one_input = kind_of_names(item.key for item in items)
    is_one_input = is_one_input or any(item.key == DATASET_FILE for item in items)
    if not is_one_input and len(set(kinds.values())) > 1:
        raise UsageError(f"{where} holds {' and '.join(sorted(set(kinds.values())))} files; give one of them")
    return [item for item in items if is_one_input or item.key.partition("/")[0] in kinds]


def _local_name(key: str) -> str:
    """A key as a relative path, after a look at each part. Zarr finds its chunks by name, and a field of ``.npy`` is
    called after its file; the folder is new and holds no links. Raises :class:`BadObject`."""
    for part in key.split("/"):
        long = len(part.encode("utf-8", "surrogateescape")) > 255
        if part in ("", ".", "..") or long or not part.isprintable():
            raise BadObject(f"{key[:100]!r} cannot be the name of a file here; copy that object under another name")
    return key


def _fetched(
    store: Store, items: Sequence[tuple[Object, Path]], folder: Path, url: str, options: Message, reporter: _Reporter
) -> Message:
    """Write objects to their paths below ``folder``; gives the description of the whole."""
    need, disk = sum(max(0, item.size) for item, _ in items), os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if need > free:
        parent = Path(os.path.realpath(folder)).parent
        raise CapacityError(
            f"{redact(url)} has {format_size(need)}, but the disk of {parent} only {format_size(free)} free,\n"
            "and it must lie there while it is converted; free some space, or name --out on another disk"
        )
    come = [0] * len(items)

    def copy(number: int, stop: threading.Event) -> None:
        item, path = items[number]
        make_missing(path.parent)

        def progress(count: int) -> None:
            come[number] = count
            reporter(Progress("fetch", sum(come), need or None))

        with new_file(path) as file:
            if not stop.is_set():
                _copy(store, item, file, progress)

    # Many small objects side by side; a single large one is, too, in parts.
    fetcher: Fetcher[int, None] = Fetcher(copy, min(_THREADS, store.concurrency, len(items)))
    try:
        for _ in fetcher.run(range(len(items)), ahead=_AHEAD, size=lambda number: max(0, items[number][0].size)):
            pass
    finally:
        fetcher.close()
    content = sorted([item.key, item.size, item.etag or ""] for item, _ in items)
    path = folder / _name(url)
    description = {**describe(path, FileOptions.from_json(options)), "path": str(path)}  # as it was made: it stays good
    return {**description, "shown": redact(url), "identity": _identity(url, options, content)}


def _copy(store: Store, item: Object, file: BinaryIO, progress: Callable[[int], None]) -> None:
    """One object into an empty file: at once, over one connection where the store offers that, or by ranges."""
    streams = hasattr(store, "stream")
    if 0 <= item.size <= _RANGE or (item.size < 0 and not streams):
        progress(file.write(store.get(item)))
    elif streams:
        cast(Streaming, store).stream(item, file, progress=progress)
    else:
        _copy_ranges(store, item, file.fileno(), progress)


def _copy_ranges(store: Store, item: Object, fd: int, progress: Callable[[int], None]) -> None:
    def piece(start: int, stop: threading.Event) -> int:
        data = b"" if stop.is_set() else store.get_range(item, start, min(_RANGE, item.size - start))
        return os.pwrite(fd, data, start)

    fetcher: Fetcher[int, int] = Fetcher(piece, min(_THREADS, store.concurrency))
    done = 0
    try:
        for count in fetcher.run(range(0, item.size, _RANGE), ahead=_AHEAD, size=lambda _: _RANGE):
            done += count
            progress(done)
    finally:
        fetcher.close()


class _Reporter:
    """Progress to the starter, a few times a second."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._next = channel, 0.0

    def __call__(self, step: Progress) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_SECONDS
            self._channel.send({"phase": step.phase, "done": step.done, "total": step.total})
