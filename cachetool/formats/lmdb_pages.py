"""Where LMDB keeps its values, read from the file's own pages.

LMDB stores every value contiguously: in its leaf page when small, else alone on overflow pages. Walking the tree once
with NumPy gives the position of every value without an environment, and proves that no pointer leads out of the file,
which the C library would follow into a SIGBUS.

Layout of the engine 0.9 format (``mdb.c`` of LMDB 0.9, structs MDB_page, MDB_node, MDB_meta, MDB_db), little-endian::

    page   0 pgno u64 | 8 pad u16 | 10 flags u16 | 12 lower u16 | 14 upper u16 | 16 node pointers u16 ...
           on an overflow page 12 is the number of pages, u32, and 16 the value
    node   0 lo u16 | 2 hi u16 | 4 flags u16 | 6 key size u16 | 8 key | data
           leaf: data size = lo | hi << 16; flag 1: data is the u64 number of an overflow page
           branch: child page = lo | hi << 16 | flags << 32
    meta   pages 0 and 1, at 16: magic u32 | version u32 | address u64 | map size u64 | db free | db main | last page u64 | txn u64
    db     pad u32 (of db free: the page size) | flags u16 | depth u16 | branch, leaf, overflow pages u64 | entries u64 | root u64
"""  # noqa: E501 - the table is easier to check on one line each

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import CorruptError
from cachetool.formats.runs import Bytes, Int64s, ends, windows

__all__ = [
    "BIG",
    "BRANCH",
    "DB",
    "LARGEST_NODE",
    "LEAF",
    "MAGIC",
    "META",
    "META_PAGE",
    "NODE_HEADER",
    "OVERFLOW",
    "PAGE",
    "PAGE_HEADER",
    "VERSION",
    "LeafNodes",
    "last_keys",
    "read_leaves",
]

PAGE = 4096
"""Bytes of a page of the files that we write; those of others are read with any page size."""
PAGE_HEADER, NODE_HEADER = 16, 8
LARGEST_NODE = ((PAGE - PAGE_HEADER) // 2 & -2) - 2
"""Header, key and value of the largest entry that is whole in a leaf (me_nodemax of mdb.c)."""
MAGIC, VERSION = 0xBEEFC0DE, 1
BRANCH, LEAF, OVERFLOW, META_PAGE = 1, 2, 4, 8
BIG = 1
META = struct.Struct("<IIQQ")
DB = struct.Struct("<IHHQQQQQ")
_FLAGS = 0xFFFF ^ 0x10  # all but "dirty", which may stay on disk; any other has LMDB read the page in another way
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class LeafNodes:
    """All entries of the main database, in key order. Positions are bytes from the start of the file."""

    key_starts: Int64s
    key_sizes: Int64s
    starts: Int64s
    """Where each value begins."""
    sizes: Int64s
    """Its bytes."""


def read_leaves(buffer: Bytes, *, name: str) -> LeafNodes:
    """The entries of the LMDB file in ``buffer``.

    Raises :class:`CorruptError`, naming ``name``, when it is not a whole LMDB file of engine 0.9 with a plain main
    database, or when any page number, pointer or size in it leads outside the file.
    """
    try:
        return _Tree(buffer).leaves()
    except (ValueError, IndexError, struct.error) as error:
        raise CorruptError(f"{name} is not a whole LMDB file: {error}") from error


def last_keys(buffer: Bytes) -> list[bytes]:
    """The keys of the last leaf page of the LMDB file in ``buffer``, read by one page a level; empty when it is not
    such a file as :func:`read_leaves` takes."""
    try:
        at, head = _Tree(buffer).last_leaf()
    except (ValueError, IndexError, struct.error):
        return []
    sizes = head[:, 3].tolist()
    return [buffer[start + 8 : start + 8 + size].tobytes() for start, size in zip(at.tolist(), sizes, strict=True)]


def _require(condition: Any, what: str) -> None:
    if not condition:
        raise ValueError(what)


class _Tree:
    def __init__(self, buffer: Bytes) -> None:
        self.buffer = buffer
        metas = [m for m in (self._meta(0), self._meta(None)) if m is not None]
        _require(metas, "no valid meta page")
        _txn, self.psize, self.depth, self.entries, self.root, last = max(metas)
        self.pages = last + 1
        _require(self.pages * self.psize <= len(buffer), f"cut short: {len(buffer)} of {self.pages * self.psize} bytes")

    def _meta(self, at: int | None) -> tuple[int, int, int, int, int, int] | None:
        """(txn, page size, depth, entries, root, last page) of the meta page at ``at``, None: of the second one."""
        if at is None:
            # The page size stands in the first meta page; where that is damaged, powers of two are few enough to try.
            found = [m for m in (self._meta(1 << bits) for bits in range(9, 17)) if m is not None]
            return found[0] if found else None
        raw = self.buffer[at + PAGE_HEADER : at + PAGE_HEADER + 136].tobytes()
        if len(raw) < 136:
            return None
        magic, version, _address, _mapsize = META.unpack_from(raw)
        psize, *_ = DB.unpack_from(raw, 24)
        _pad, flags, depth, _b, _l, _o, entries, root = DB.unpack_from(raw, 72)
        last, txn = struct.unpack_from("<QQ", raw, 120)
        if magic != MAGIC or version != VERSION or psize not in [1 << bits for bits in range(9, 17)]:
            return None
        if flags or at not in (0, psize) or last >= 1 << 48:
            return None
        return txn, psize, depth, entries, root, last

    def leaves(self) -> LeafNodes:
        nothing = np.empty(0, dtype=np.int64)
        if self.entries == 0:
            return LeafNodes(nothing, nothing, nothing, nothing)
        _require(0 < self.depth <= _MAX_DEPTH, f"tree of depth {self.depth}")
        _require(self.root < self.pages, f"root page {self.root}")
        level = np.array([self.root], dtype=np.int64)
        for _ in range(self.depth - 1):
            at, head, _limit = self._nodes(level, BRANCH)
            del at
            level = head[:, 0] | head[:, 1] << 16 | head[:, 2] << 32
            _require(len(level) <= self.pages and (level < self.pages).all() and (level > 1).all(), "child page")
        at, head, limit = self._nodes(level, LEAF)
        _require(len(at) == self.entries, f"{len(at)} entries, {self.entries} announced")
        sizes = head[:, 0] | head[:, 1] << 16
        starts = at + 8 + head[:, 3]
        big = head[:, 2] == BIG
        _require((big | (head[:, 2] == 0)).all(), "an entry that is no plain value")
        _require((starts + np.where(big, 8, sizes) <= limit).all(), "an entry that reaches past its page")
        if big.any():
            starts[big] = self._overflow(starts[big], sizes[big])
        return LeafNodes(at + 8, head[:, 3], starts, sizes)

    def last_leaf(self) -> tuple[Int64s, Int64s]:
        """Position and header of the nodes of the leaf page with the highest keys."""
        _require(self.entries > 0 and 0 < self.depth <= _MAX_DEPTH and self.root < self.pages, "no tree")
        page = np.array([self.root], dtype=np.int64)
        for _ in range(self.depth - 1):
            _at, head, _limit = self._nodes(page, BRANCH)
            page = (head[:, 0] | head[:, 1] << 16 | head[:, 2] << 32)[-1:]
            _require((page < self.pages).all(), "child page")
        at, head, _limit = self._nodes(page, LEAF)
        return at, head

    def _nodes(self, pages: Int64s, kind: int) -> tuple[Int64s, Int64s, Int64s]:
        """Position, header (nodes, 4) and end of page of all nodes on ``pages``, which must be of ``kind``."""
        base = pages * self.psize
        head = self._gather(base, PAGE_HEADER)
        _require((head.view("<u8")[:, 0] == pages).all(), "a page that is another page")
        short = head.view("<u2").astype(np.int64)
        _require((short[:, 5] & _FLAGS == kind).all(), "a page of the wrong kind")
        lower = short[:, 6]
        _require(((lower > PAGE_HEADER) & (lower <= self.psize)).all(), "a page with bad bounds")
        counts = (lower - PAGE_HEADER) // 2
        first = ends(counts)
        within = np.arange(int(first[-1]), dtype=np.int64) - np.repeat(first[:-1], counts)
        bases = np.repeat(base, counts)
        pointers = self._gather(bases + PAGE_HEADER + 2 * within, 2).view("<u2")[:, 0].astype(np.int64)
        _require(((pointers >= PAGE_HEADER) & (pointers <= self.psize - 8)).all(), "an entry outside its page")
        at, limit = bases + pointers, bases + self.psize
        nodes = self._gather(at, 8).view("<u2").astype(np.int64)
        _require((at + 8 + nodes[:, 3] <= limit).all(), "a key that reaches past its page")
        return at, nodes, limit

    def _overflow(self, at: Int64s, sizes: Int64s) -> Int64s:
        pages = self._gather(at, 8).view("<u8")[:, 0]
        _require((pages < self.pages).all(), "an overflow page outside the file")
        first = pages.astype(np.int64)
        need = -(-(sizes + PAGE_HEADER) // self.psize)
        _require((first + need <= self.pages).all(), "a value that reaches past the file")
        head = self._gather(first * self.psize, PAGE_HEADER)
        _require((head.view("<u2")[:, 5] & _FLAGS == OVERFLOW).all(), "a value on a page of the wrong kind")
        _require((head.view("<u4")[:, 3] >= need).all(), "a value on too few pages")
        return first * self.psize + PAGE_HEADER

    def _gather(self, at: Int64s, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.ascontiguousarray(windows(self.buffer, nbytes)[at])
