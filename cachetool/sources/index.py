"""Index files beside tar and TFRecord files. They say where each record lies, so one record can be fetched without the
others.

=====================================  ====================================================================
``x.tfrecord.idx .index .tfindex``     a line for each record: offset and bytes, its frame included, as the
                                       packages ``tfrecord`` and DALI write them
``x.idx`` beside ``x.tar``             DALI's ``wds2idx``: a line with version and count, then one for each
                                       sample: extension, offset, size and, from v1.2 on, name of each member
``dataset.json``                       the fields of records that ``cachetool convert --out`` wrote
=====================================  ====================================================================

``dataset.json`` is also read here: it gives the schema of records, which their file does not contain.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import AccessDenied, BadObject, CorruptError, NotFound
from cachetool.core.extents import EXTENTS_FILE
from cachetool.formats.exported import DATASET_FILE, SIDE_FOLDER
from cachetool.formats.shard import CHECKSUMS_FILE
from cachetool.proc.folders import MAX_JSON
from cachetool.sources.kinds import INDEXES, Kind
from cachetool.sources.opening import FileFacts, units_of
from cachetool.sources.ours import NOT_OURS, Exported, exported
from cachetool.sources.rows import UNIT_BYTES
from cachetool.stores import Object, Store
from cachetool.stores.base import Batch, Page

__all__ = ["IndexSeen", "index_facts"]

_TAR_RECORD = 512
# A hostile server may send an index or a line without an end. 1 GiB and 1 MiB are far above any real one.
_MOST_INDEX, _MOST_LINE = 2**30, 2**20
_LEAST_RECORD = 16
"""Bytes of the smallest TFRecord record: length 8, checksum of the length 4, no data, checksum of the data 4."""

_Numbers = npt.NDArray[np.int64]


def _names(key: str) -> Iterator[str]:
    """Yield the keys under which the index of the file ``key`` may lie: the extension is appended, or replaces the last
    one."""
    for stem in (key, key.rpartition(".")[0]):
        for extension in INDEXES:
            yield stem + extension


class IndexSeen:
    """The index files of a place, collected while its listing is read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[str, Object] = {}

    def note(self, pages: Iterable[Batch]) -> Iterator[Batch]:
        """Yield ``pages`` unchanged and remember their index files."""
        for page in pages:
            beside = (*INDEXES, DATASET_FILE)
            columns = Page.of(page)
            self._seen.update((key, columns[at]) for at, key in enumerate(columns.keys) if key.endswith(beside))
            yield page

    def ask(self, key: str) -> None:
        """Look for the index of ``key`` when this one file is the source, so no listing names the files beside it."""
        for name in _names(key):
            try:
                self._seen[name] = self._store.find(name)
            except NotFound:
                continue
            return

    def ask_ours(self) -> None:
        """Look for the ``dataset.json`` of ``convert --out`` when one file is the source, so no listing names the files
        beside it."""
        with contextlib.suppress(NotFound, AccessDenied, BadObject):
            self._seen[DATASET_FILE] = self._store.find(DATASET_FILE)

    def exported(self, kind: Kind, names: Iterable[str], *, alone: bool) -> Exported | None:
        """Return what ``dataset.json`` says about the files ``names``, or None if ``convert`` did not write them.

        Raises :class:`CorruptError` for a ``dataset.json`` that is damaged.
        """
        about, names = self._seen.get(DATASET_FILE), list(names)
        if about is None or not 0 <= about.size <= MAX_JSON:
            return None
        try:
            ours = exported(self._store.get(about), kind.name, names, alone=alone)
        except (NotFound, AccessDenied):
            return None
        # An emptied dataset.json does not show who wrote it. The files of checksums that convert writes beside each
        # data file do: if they exist, the folder was exported, and reading it as a foreign one would hide the damage.
        if ours is None and names and not alone:
            for side in (EXTENTS_FILE, CHECKSUMS_FILE):
                with contextlib.suppress(NotFound, AccessDenied, BadObject):
                    self._store.find(f"{SIDE_FOLDER}/{names[0]}/{side}")
                    raise CorruptError(NOT_OURS)
        return ours

    def of(self, key: str) -> Object | None:
        """Return the index of a file, or None if it has no index or is compressed as a whole."""
        # The offsets in an index are those of the uncompressed bytes, so they cannot be used for ranged requests of a
        # compressed file.
        if key.lower().endswith(("gz", "tgz")):
            return None
        return next((self._seen[name] for name in _names(key) if name in self._seen), None)


def index_facts(kind: Kind, item: Object, index: Object, get: Callable[[Object], memoryview]) -> FileFacts:
    """Return the facts of the file ``item``, read from its ``index``. Raises :class:`BadObject` naming the index."""
    try:
        body = get(index)
        if len(body) > _MOST_INDEX:
            raise ValueError("an index without end")
        numbers = _tar(body) if kind.name == "tar" else _tfrecord(body)
        # An index may claim any number of records. No more fit than the file has bytes for, so memory stays bounded by
        # the size of the file.
        starts, stops = _all(numbers, most=item.size // _LEAST_RECORD)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise BadObject(f"{index.key!r} is not the index of a {kind.name} file") from error
    # Everything that reads the file later relies on these bounds: records rise, are not empty and end inside the file.
    if len(starts) and (
        starts[0] < 0 or (np.diff(starts) <= 0).any() or (stops <= starts).any() or stops[-1] > item.size
    ):
        raise BadObject(f"the index {index.key!r} does not fit {item.key!r}: it has positions outside of the file")
    cuts, parts = units_of(starts, stops, unit_bytes=UNIT_BYTES)
    return FileFacts(len(starts), 1, 0, [], {}, {}, cuts=cuts, parts=parts)


def _lines(body: memoryview) -> Iterator[str]:
    # BytesIO over the memoryview yields one line at a time, so an index of 1 GiB does not become a list of lines.
    for line in io.BytesIO(body):
        if len(line) > _MOST_LINE:
            raise ValueError("a line without end")
        yield line.decode("ascii")


def _all(numbers: Iterator[tuple[int, int]], *, most: int) -> tuple[_Numbers, _Numbers]:
    """Return where the records begin and where they end, in bytes.

    Raises ValueError for more than ``most`` records, because the file cannot hold so many.
    """
    flat = np.fromiter(itertools.chain.from_iterable(itertools.islice(numbers, most + 1)), dtype=np.int64)
    if len(flat) > 2 * most:
        raise ValueError("more records than fit into the file")
    return flat[0::2], flat[1::2]


def _tfrecord(body: memoryview) -> Iterator[tuple[int, int]]:
    for line in _lines(body):
        if line.strip():
            offset, size = map(int, line.split())
            yield offset, offset + size


def _tar(body: memoryview) -> Iterator[tuple[int, int]]:
    lines = _lines(body)
    version, said = next(lines, "").split()
    step, count = {"v1.0": 3, "v1.1": 3, "v1.2": 4}[version], int(said)
    start = came = 0
    for line in itertools.islice(lines, count):
        words = line.rstrip("\r\n").split(" ")
        offset, size = int(words[len(words) - step + 1]), int(words[len(words) - step + 2])
        # DALI names the offset of each member's data, not of its header. A long name is stored in blocks before that
        # header, so the sample is taken from the end of the previous sample.
        stop = -(-(offset + size) // _TAR_RECORD) * _TAR_RECORD
        yield start, stop
        start, came = stop, came + 1
    if came != count:
        raise ValueError("fewer lines than its first line says")
