"""Listing files of many samples: each is looked at once, to know its rows and where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from cachetool.core.errors import BadObject, NotFound, UsageError
from cachetool.core.schema import KEY, Field, Schema
from cachetool.sources.byte_source import Files, RangeServer, renamed
from cachetool.sources.decode import MAX_HEADER, npy_layout
from cachetool.sources.fetch import Fetcher
from cachetool.sources.file_table import write_table
from cachetool.sources.guard import GuardedFile
from cachetool.sources.index import IndexSeen, index_facts
from cachetool.sources.kinds import EachFile, Kind
from cachetool.sources.listing import Listing, write_listing
from cachetool.sources.opening import FileFacts
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import FileOptions
from cachetool.stores import Object, Store

__all__ = ["Guarded", "list_files"]

OPENER = "cachetool.sources.opening:open_remote"
WHOLE = ("tar", "tfrecord", "lmdb")
_HEADER = 4096


def list_files(
    store: Store,
    folder: Path,
    pages: Iterable[list[Object]],
    kind: Kind,
    options: SourceOptions,
    *,
    progress: Callable[[int], None] | None = None,
    alone: bool = False,
) -> Listing:
    """Write the listing of the files among ``pages`` and what they hold into ``folder``. ``alone``: of one file, beside
    which nothing was looked for.

    Raises :class:`BadObject` for a file that cannot be read, or two that have no schema in common,
    :class:`UsageError` when nothing in them can be taken.
    """
    if options.decode and kind == "npy":
        raise UsageError(f"--decode image is for fields of bytes; the rows of .npy files are numbers: {store.url}")
    seen = IndexSeen(store)
    listing = write_listing(
        folder, seen.note(pages), stem=EachFile(kind), url=store.url, left_out=lambda: store.left_out, progress=progress
    )
    if not listing.objects:
        return listing
    files = Files(store, listing)
    ours = _ours(seen, files, kind, options)
    facts: list[FileFacts] = []
    if kind in WHOLE:
        if alone and kind != "lmdb":
            seen.ask(files.name(0))
        indexes = [seen.of(files.name(number)) for number in range(listing.objects)]
        present = [index for index in indexes if index is not None]
        if kind == "lmdb" or len(present) < len(indexes):
            write_table(folder, kind, options, [], files=listing.objects, ours=ours)
        else:
            facts = [index_facts(kind, files.identified(at), index, store.get) for at, index in enumerate(present)]
            parts = [part for number, file_facts in enumerate(facts) for part in _placed(files, number, file_facts)]
            write_table(folder, kind, options, facts, files=listing.objects, parts=parts, ours=ours, seen=files.seen())
    elif kind == "npy":
        facts = _npy_facts(files, options)
        write_table(folder, kind, options, facts, files=listing.objects, seen=files.seen())
    else:
        facts = _look(files, folder, kind, options)
    if facts and not any(file_facts.rows for file_facts in facts):
        where = "it" if len(facts) == 1 else f"any of {len(facts)} files"
        raise NotFound(f"no samples under {store.url}: no rows in {where}")
    return listing


def _ours(seen: IndexSeen, files: Files, kind: Kind, options: SourceOptions) -> Schema | None:
    """What files that cachetool wrote hold. Raises :class:`UsageError` for those that cannot be read by rows."""
    if kind not in ("hdf5", "zarr", "tfrecord"):
        return None
    if kind == "tfrecord":
        return seen.schema(kind, map(files.name, range(files.listing.objects)))
    ours = seen.schema(kind, ())
    for field in ours or ():
        new = options.rename.get(field.name, field.name)
        if field.kind != "fixed" and field.name != KEY and (options.fields is None or new in options.fields):
            raise UsageError(
                f"{files.store.url}: field {field.name!r} differs in length, so that rows of these {kind} files cannot"
                " be pulled;\nbring them into another format first: cachetool convert FOLDER --to lmdb --out NEW"
            )
    return ours


def _look(files: Files, folder: Path, kind: Kind, options: SourceOptions) -> list[FileFacts]:
    """Have the guarded process open every file, for what it is."""
    folders: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    if kind == "zarr":
        folders, roots = files.zarr_folders()
        if not roots:
            raise NotFound(f"{files.store.url}: no Zarr in it")
    with Guarded(files, kind, options, roots=roots, folders=folders) as (server, source):
        facts = [FileFacts(**file_facts) for file_facts in server.facts]
        _check(files, kind, facts)
        parts = [part for number, file_facts in enumerate(facts) for part in _placed(files, number, file_facts)]
        write_table(
            folder,
            kind,
            options,
            facts,
            files=len(facts),
            roots=roots,
            folders=folders,
            skipped=source.skipped,
            parts=parts,
            seen=files.seen(),
        )
    return facts


class Guarded:
    """The guarded process over ``files``: ``with Guarded(...) as (server, source)``."""

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
    ) -> None:
        items = [] if roots else [files.item(number) for number in range(files.listing.objects)]
        spec = {
            "kind": kind,
            "files": [name.rstrip("/") or files.store.url.rstrip("/").rpartition("/")[2] for name in roots]
            or [item.key for item in items],
            "sizes": [files.listing.bytes] * len(roots) or [item.size for item in items],
            "roots": roots,
            "folders": folders,
            "schema": None if schema is None else schema.to_json(),
            "rows": rows,
            "piece": piece,
        }
        self.server = RangeServer(files.store, files.item, spec, files.find)
        wanted = FileOptions(fields=options.fields, rename=options.rename, key=False)
        try:
            with renamed(self.server.path, files.store.url, self.server):
                self.source = GuardedFile(self.server.path, wanted, opener=OPENER)
        except BaseException:
            self.server.close()
            raise

    def __enter__(self) -> tuple[RangeServer, GuardedFile]:
        return self.server, self.source

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self.source.close()
        self.server.close()


def _check(files: Files, kind: Kind, facts: list[FileFacts]) -> None:
    """Rows that the guarded process says to lie in a file must lie in it: it may be under a hostile file's command."""
    for number, file_facts in enumerate(facts):
        schema = Schema.from_json(file_facts.schema)
        for field in schema:
            offset = file_facts.offsets[field.name]
            if offset < 0:
                continue
            stored = np.dtype(file_facts.stored[field.name])
            same = stored.newbyteorder("<") == field.numpy.newbyteorder("<") and kind != "zarr"
            if not same or offset + file_facts.rows * field.nbytes > files.item(number).size:
                raise BadObject(f"{files.item(number).key!r}: field {field.name!r} reaches past the end of the file")
        good = file_facts.rows >= 0 and file_facts.chunk >= 1
        if file_facts.cuts is not None:
            good = (
                good
                and bool((np.diff([0, *file_facts.cuts]) > 0).all())
                and (not file_facts.cuts or file_facts.cuts[-1] == file_facts.rows)
            )
        if not good:
            raise BadObject(f"{files.name(number)!r}: its reader talks nonsense")


def _placed(files: Files, number: int, facts: FileFacts) -> Iterator[tuple[int, int, int, int, int]]:
    """File, first row, object, and where in it, of every part that is there."""
    for row, start, nbytes, key in facts.parts:
        if not key:
            if start >= 0 and 0 < nbytes <= files.item(number).size - start:
                yield number, int(row), number, int(start), int(start + nbytes)
        elif (index := files.index(str(key))) is not None and files.item(index).size:
            yield number, int(row), index, 0, files.item(index).size


def _npy_facts(files: Files, options: SourceOptions) -> list[FileFacts]:
    single = files.listing.objects == 1

    def look(number: int, _: object) -> FileFacts:
        item = files.item(number)
        try:
            head = files.store.get_range(item, 0, min(_HEADER, item.size))
            if len(head) >= 12 and 12 + int.from_bytes(head[8:10], "little") > len(head):
                head = files.store.get_range(item, 0, min(MAX_HEADER + 12, item.size))
            dtype, fortran, shape, start = npy_layout(head)
        except BadObject as error:
            raise BadObject(f"{item.key!r}: {error}") from error
        if not shape:
            raise BadObject(f"{item.key!r} holds a single number; its rows should be samples")
        if fortran and len(shape) > 1:
            raise BadObject(f"{item.key!r} is stored column by column, so that its rows cannot be fetched")
        stem = item.key.rpartition("/")[2].rpartition(".")[0] if single else "npy"
        name = options.rename.get(stem, stem)
        field = Field(name, dtype.newbyteorder("<").str, shape[1:])
        if start + shape[0] * field.nbytes != item.size:
            raise BadObject(f"{item.key!r}: {item.size} bytes are not a {dtype} array {shape}")
        if options.fields is not None and options.fields != (name,):
            raise UsageError(f"no field {options.fields[0]!r}; there is {name!r}")
        return FileFacts(shape[0], 1, 0, Schema((field,)).to_json(), {name: start}, {name: dtype.str})

    fetcher: Fetcher[int, FileFacts] = Fetcher(look, files.store.concurrency)
    try:
        return list(fetcher.run(range(files.listing.objects), ahead=2**30, size=lambda _: _HEADER))
    finally:
        fetcher.close()
