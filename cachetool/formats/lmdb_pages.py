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

An LMDB file is written by appending: the pages are made whole, each once, in order.

::

    meta  meta | value  value  value  leaf | value  value  leaf | ... | branch  branch  root
    written last     a large value on pages of its own; the leaf of some values behind the last of them

py-lmdb is called once for each value and writes through a map, one page fault for each page: 0.35 of a raw write for
samples of 3 KiB. Here a block of values is laid out with NumPy, copied to where it belongs, and written in one piece;
what is large is written from where it is.
Which pages there are depends on the values alone, not on the cut into blocks. No environment, no lock, no map that a
full disk would turn into a signal. The library still has the last word: the writer opens the finished file with it.
"""  # noqa: E501 - the table is easier to check on one line each

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import CorruptError
from cachetool.formats.files import BulkFile
from cachetool.formats.runs import Bytes, Int64s, Placed, as_bytes, ends, put_rows, windows

__all__ = [
    "BIG",
    "BRANCH",
    "DB",
    "LARGEST_NODE",
    "LEAF",
    "LeafNodes",
    "MAGIC",
    "META",
    "META_PAGE",
    "NODE_HEADER",
    "OVERFLOW",
    "PAGE",
    "PAGE_HEADER",
    "TreeWriter",
    "VERSION",
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
            metas = [m for m in (self._meta(1 << bits) for bits in range(9, 17)) if m is not None]
            return metas[0] if metas else None
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


_ROOM = PAGE - PAGE_HEADER
_POINTER = 2
_PIECE = 2**22  # bytes of values laid out at once
_NO_ROOT = 2**64 - 1
_SPARE_BYTES = 64 * 2**20
_INTEGER_KEY = 8  # what LMDB says of its table of free pages


_spare: list[Bytes] = []
"""The buffer of the last writer, for the next one: memory that is new costs as much as what is done with it."""


class TreeWriter:
    """Appends entries to a file of its own; keys must come in LMDB's order, that of their bytes.

    ``file`` is new and empty. Call :meth:`finish` once; the file is then complete, but neither cut nor closed.
    """

    def __init__(self, file: BulkFile) -> None:
        self._file = file
        self._next = 2  # page number
        self._pages = {BRANCH: 0, LEAF: 0, OVERFLOW: 0}
        self._entries = 0
        self._buffer = _spare.pop() if _spare else np.empty(_PIECE + 64 * PAGE, dtype=np.uint8)
        self._leaf = np.zeros(PAGE, dtype=np.uint8)  # the one that is not full yet
        self._count, self._used = 0, 0  # its entries, and bytes of their nodes
        self._leaves: list[int] = []
        self._first_keys: list[bytes] = []
        self._where: list[Int64s] = []  # of each value: the number of its leaf, -1 on pages of its own,
        self._at: list[Int64s] = []  # and where it begins in that leaf, or in the file
        file.size = self._next * PAGE

    def append(self, keys: Bytes, sizes: Int64s, place: Callable[[Bytes, Int64s, slice], Placed]) -> None:
        """Add entries with ``keys``, (entries, bytes), and values of ``sizes`` bytes.

        ``place(buffer, starts, part)`` is called for consecutive parts of them and copies the values of ``part`` to
        ``starts`` in ``buffer``, every byte of them but for those that it gives back with their places.
        """
        total = ends(sizes)
        first = 0
        while first < len(sizes):
            stop = max(first + 1, int(np.searchsorted(total, total[first] + _PIECE, side="right")) - 1)
            part = slice(first, stop)
            self._append(keys[part], sizes[part], lambda buffer, at, part=part: place(buffer, at, part))  # type: ignore[misc]
            first = stop

    def _append(self, keys: Bytes, sizes: Int64s, place: Callable[[Bytes, Int64s], Placed]) -> None:
        count, width = keys.shape
        head = NODE_HEADER + width
        big = head + sizes > LARGEST_NODE
        nodes = head + np.where(big, 8, sizes)
        nodes += nodes & 1
        own = np.where(big, -(-(PAGE_HEADER + sizes) // PAGE), 0)  # pages that a value has to itself
        leaf, firsts = self._into_leaves(nodes)
        # A leaf is written as soon as an entry does not fit into it any more: before the pages of that entry's value.
        before = ends(own)
        value_page = before[:-1] + leaf
        leaf_page = np.append(before[firsts[1:]], before[-1]) + np.arange(len(firsts))
        pages = int(leaf_page[-1]) + 1  # the last one is not full, and stays here
        buffer = self._room(pages * PAGE)
        lines = buffer.reshape(pages, PAGE)
        lines[leaf_page] = 0
        lines[(value_page + own - 1)[big]] = 0  # what a value leaves of its last page

        within, stops = ends(nodes), np.append(firsts[1:], count)
        used, counts = within[stops] - within[firsts], stops - firsts
        number = np.arange(count) - np.repeat(firsts, counts)
        reach = within[1:] - np.repeat(within[firsts], counts)  # from the end of the page down to the node
        number[: counts[0]] += self._count
        reach[: counts[0]] += self._used
        counts[0] += self._count
        used[0] += self._used
        buffer[leaf_page[0] * PAGE : (leaf_page[0] + 1) * PAGE] = self._leaf
        node = (leaf_page[leaf] + 1) * PAGE - reach  # nodes grow down from the end of their page
        short = buffer.view("<u2")
        short[leaf_page[leaf] * (PAGE // 2) + PAGE_HEADER // 2 + number] = PAGE - reach
        heads = np.empty((count, 4), dtype="<u2")
        heads[:, 0], heads[:, 1], heads[:, 2], heads[:, 3] = sizes & 0xFFFF, sizes >> 16, np.where(big, BIG, 0), width
        put_rows(buffer, node, as_bytes(heads).reshape(count, 8))
        put_rows(buffer, node + NODE_HEADER, keys)
        starts = node + head
        if big.any():
            page = value_page[big]
            put_rows(buffer, starts[big], as_bytes((self._next + page).astype("<u8")).reshape(-1, 8))
            _page_heads(buffer, page, self._next, OVERFLOW)
            buffer.view("<u4")[page * (PAGE // 4) + 3] = own[big]
            starts[big] = page * PAGE + PAGE_HEADER
        _page_heads(buffer, leaf_page, self._next, LEAF)
        short[leaf_page * (PAGE // 2) + 6] = PAGE_HEADER + _POINTER * counts
        short[leaf_page * (PAGE // 2) + 7] = PAGE - used
        large = place(buffer, starts)

        self._where.append(np.where(big, -1, len(self._leaves) + leaf))
        self._at.append(np.where(big, self._next * PAGE + starts, starts - leaf_page[leaf] * PAGE))
        begun = firsts if self._count == 0 else firsts[1:]
        self._first_keys += [keys[i].tobytes() for i in begun.tolist()]
        self._leaves += (self._next + leaf_page[:-1]).tolist()
        self._leaf = buffer[-PAGE:].copy()
        self._count, self._used = int(counts[-1]), int(used[-1])
        self._entries += count
        self._pages[LEAF] += len(leaf_page) - 1
        self._pages[OVERFLOW] += int(before[-1])
        self._write(buffer[:-PAGE], large)

    def _into_leaves(self, nodes: Int64s) -> tuple[Int64s, Int64s]:
        """Which leaf each node goes to, 0: the one that is not full yet; and the first node of each."""
        total = ends(nodes + _POINTER)
        room, at = _ROOM - self._used - _POINTER * self._count, 0
        firsts = [0]
        while (at := int(np.searchsorted(total, total[at] + room, side="right")) - 1) < len(nodes):
            firsts.append(at)
            room = _ROOM
        first = np.array(firsts, dtype=np.int64)
        return np.repeat(np.arange(len(first)), np.diff(np.append(first, len(nodes)))), first

    def _room(self, nbytes: int) -> Bytes:
        if nbytes > len(self._buffer):
            self._buffer = np.empty(nbytes, dtype=np.uint8)  # for one large value
        return self._buffer[:nbytes]

    def _write(self, pages: Bytes, large: Sequence[tuple[int, Bytes]] = ()) -> None:
        pieces, at = [], 0
        for start, run in sorted(large, key=lambda placed: placed[0]):
            pieces += [pages[at:start], run]
            at = start + len(run)
        self._file.append(*pieces, pages[at:])
        self._next += len(pages) // PAGE

    def finish(self) -> Int64s:
        """Write the leaf that is left, the branches and the meta pages; where each value begins in the file."""
        _page_heads(self._leaf, np.zeros(1, dtype=np.int64), self._next, LEAF)
        self._leaves.append(self._next)
        self._pages[LEAF] += 1
        self._write(self._leaf)
        depth, level = 1, list(zip(self._first_keys, self._leaves, strict=True))
        while len(level) > 1:
            level = self._branches(level)
            depth += 1
        self._file.write_at(
            0, [_meta(0, 2, 0, {}, 0, _NO_ROOT), _meta(1, self._next, depth, self._pages, self._entries, level[0][1])]
        )
        if len(self._buffer) <= _SPARE_BYTES and not _spare:
            _spare.append(self._buffer)
        self._buffer = np.empty(0, dtype=np.uint8)
        where, at = np.concatenate(self._where), np.concatenate(self._at)
        return at + np.where(where < 0, 0, np.array(self._leaves, dtype=np.int64)[where] * PAGE)

    def _branches(self, children: list[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
        """Write the branch pages over ``children``, each its first key and page; the same of these pages."""
        groups: list[list[tuple[bytes, int]]] = [[]]
        room = _ROOM
        for child in children:
            need = NODE_HEADER + len(child[0]) + len(child[0]) % 2 + _POINTER
            if need > room:
                groups.append([])
                room = _ROOM
            groups[-1].append(child)
            room -= need
        if len(groups[-1]) == 1 and len(groups) > 1:  # LMDB takes no branch with a single child
            groups[-1].insert(0, groups[-2].pop())
        parents = []
        for group in groups:
            parents.append((group[0][0], self._next))
            self._pages[BRANCH] += 1
            self._write(_branch(self._next, group))
        return parents


def _page_heads(buffer: Bytes, pages: Int64s, first: int, kind: int) -> None:
    """Number and kind of ``pages`` of ``buffer``, which begins with the page ``first`` of the file."""
    buffer.view("<u8")[pages * (PAGE // 8)] = first + pages
    buffer.view("<u4")[pages * (PAGE // 4) + 2] = kind << 16


def _branch(number: int, children: list[tuple[bytes, int]]) -> Bytes:
    page = bytearray(PAGE)
    upper = PAGE
    for i, (key, child) in enumerate(children):
        name = key if i else b""  # the first child has all that is below the second one's key
        node = struct.pack("<HHHH", child & 0xFFFF, child >> 16 & 0xFFFF, child >> 32, len(name)) + name
        upper -= len(node) + len(node) % 2
        page[upper : upper + len(node)] = node
        struct.pack_into("<H", page, PAGE_HEADER + _POINTER * i, upper)
    struct.pack_into("<QHHHH", page, 0, number, 0, BRANCH, PAGE_HEADER + _POINTER * len(children), upper)
    return np.frombuffer(page, dtype=np.uint8)


def _meta(number: int, pages: int, depth: int, kinds: dict[int, int], entries: int, root: int) -> bytes:
    """The meta page ``number``, of the transaction of that number."""
    free = DB.pack(PAGE, _INTEGER_KEY, 0, 0, 0, 0, 0, _NO_ROOT)
    main = DB.pack(0, 0, depth, kinds.get(BRANCH, 0), kinds.get(LEAF, 0), kinds.get(OVERFLOW, 0), entries, root)
    head = struct.pack("<QHHHH", number, 0, META_PAGE, 0, 0) + META.pack(MAGIC, VERSION, 0, pages * PAGE)
    return (head + free + main + struct.pack("<QQ", pages - 1, number)).ljust(PAGE, b"\0")
