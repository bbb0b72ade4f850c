"""Files beside tar and TFRecord files: where each record lies, to fetch it without the rest, and what its fields are.

=====================================  ====================================================================
``x.tfrecord.idx .index .tfindex``     a line for each record: offset and bytes, its frame included, as the
                                       packages ``tfrecord`` and DALI write them
``x.idx`` beside ``x.tar``             DALI's ``wds2idx``: a line with version and count, then one for each
                                       sample: extension, offset, size and, from v1.2 on, name of each member
``dataset.json``                       the fields of records that ``cachetool convert --out`` wrote
=====================================  ====================================================================
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

__all__ = ["IndexSeen", "index_facts"]

_TAR_RECORD = 512
_MOST_INDEX, _MOST_LINE = 2**30, 2**20
_LEAST_RECORD = 16
"""Bytes of the smallest record with its frame."""

_Numbers = npt.NDArray[np.int64]


def _names(key: str) -> Iterator[str]:
    for stem in (key, key.rpartition(".")[0]):
        for extension in INDEXES:
            yield stem + extension


class IndexSeen:
    """The index files of a place, noted while its listing passes by."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: dict[str, Object] = {}

    def note(self, pages: Iterable[list[Object]]) -> Iterator[list[Object]]:
        """The pages, as they are."""
        for page in pages:
            beside = (*INDEXES, DATASET_FILE)
            self._seen.update((item.key, item) for item in page if item.key.endswith(beside))
            yield page

    def ask(self, key: str) -> None:
        """Look for the index of the one file ``key``, which no listing led to."""
        for name in _names(key):
            try:
                self._seen[name] = self._store.find(name)
            except NotFound:
                continue
            return

    def ask_ours(self) -> None:
        """Look for what ``convert --out`` writes beside its files, which no listing led to."""
        with contextlib.suppress(NotFound, AccessDenied, BadObject):
            self._seen[DATASET_FILE] = self._store.find(DATASET_FILE)

    def exported(self, kind: Kind, names: Iterable[str], *, alone: bool) -> Exported | None:
        """Read what ``dataset.json`` says of files that ``convert`` wrote; None for files of others. Raises
        :class:`CorruptError` for a ``dataset.json`` that is damaged."""
        about, names = self._seen.get(DATASET_FILE), list(names)
        if about is None or not 0 <= about.size <= MAX_JSON:
            return None
        try:
            ours = exported(self._store.get(about), kind.name, names, alone=alone)
        except (NotFound, AccessDenied):
            return None
        if ours is None and names and not alone:  # one that was emptied says nothing of whom it is
            for side in (EXTENTS_FILE, CHECKSUMS_FILE):
                with contextlib.suppress(NotFound, AccessDenied, BadObject):
                    self._store.find(f"{SIDE_FOLDER}/{names[0]}/{side}")
                    raise CorruptError(NOT_OURS)
        return ours

    def of(self, key: str) -> Object | None:
        """The index of a file; None when it has none, or is packed as a whole."""
        if key.lower().endswith(("gz", "tgz")):
            return None
        return next((self._seen[name] for name in _names(key) if name in self._seen), None)


def index_facts(kind: Kind, item: Object, index: Object, get: Callable[[Object], memoryview]) -> FileFacts:
    """What the index of ``item`` says. Raises :class:`BadObject` naming it."""
    try:
        body = get(index)
        if len(body) > _MOST_INDEX:
            raise ValueError("an index without end")
        numbers = _tar(body) if kind.name == "tar" else _tfrecord(body)
        starts, stops = _all(numbers, most=item.size // _LEAST_RECORD)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise BadObject(f"{index.key!r} is not the index of a {kind.name} file") from error
    if len(starts) and (
        starts[0] < 0 or (np.diff(starts) <= 0).any() or (stops <= starts).any() or stops[-1] > item.size
    ):
        raise BadObject(f"{index.key!r} does not fit {item.key!r}: it names bytes that are not there")
    cuts, parts = units_of(starts, stops, unit_bytes=UNIT_BYTES)
    return FileFacts(len(starts), 1, 0, [], {}, {}, cuts=cuts, parts=parts)


def _lines(body: memoryview) -> Iterator[str]:
    for line in io.BytesIO(body):
        if len(line) > _MOST_LINE:
            raise ValueError("a line without end")
        yield line.decode("ascii")


def _all(numbers: Iterator[tuple[int, int]], *, most: int) -> tuple[_Numbers, _Numbers]:
    """Where records begin and end. Raises ValueError for more than ``most`` of them: so many the file cannot hold."""
    flat = np.fromiter(itertools.chain.from_iterable(itertools.islice(numbers, most + 1)), dtype=np.int64)
    if len(flat) > 2 * most:
        raise ValueError("more records than the file has room for")
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
        # A sample begins where the one before it ends: long names stand before the header that an index names.
        stop = -(-(offset + size) // _TAR_RECORD) * _TAR_RECORD
        yield start, stop
        start, came = stop, came + 1
    if came != count:
        raise ValueError("fewer lines than its first one says")
