"""The pages of an LMDB file: a reader that finds every value in them, and a writer that makes them without LMDB.

LMDB stores every value in one piece: a small one in its leaf page, a large one alone on overflow pages. The reader
walks the tree once with NumPy. The walk gives the position of every value without an LMDB environment. It also proves
that no pointer leads out of the file: the C library would follow such a pointer and die of SIGBUS.

Layout of the engine 0.9 format (``mdb.c`` of LMDB 0.9, structs MDB_page, MDB_node, MDB_meta, MDB_db), little-endian::

    page   0 pgno u64 | 8 pad u16 | 10 flags u16 | 12 lower u16 | 14 upper u16 | 16 node pointers u16 ...
           on an overflow page 12 is the number of pages, u32, and 16 the value
    node   0 lo u16 | 2 hi u16 | 4 flags u16 | 6 key size u16 | 8 key | data
           leaf: data size = lo | hi << 16; flag 1: data is the u64 number of an overflow page
           branch: child page = lo | hi << 16 | flags << 32
    meta   pages 0 and 1, at 16: magic u32 | version u32 | address u64 | map size u64 | db free | db main | last page u64 | txn u64
    db     pad u32 (of db free: the page size) | flags u16 | depth u16 | branch, leaf, overflow pages u64 | entries u64 | root u64

The writer only appends: it makes each page whole, once, in order.

::

    meta  meta | value  value  value  leaf | value  value  leaf | ... | branch  branch  root
    written last     a large value on pages of its own; the leaf of some values behind the last of them

py-lmdb needs one call for each value and writes through a memory map with a page fault for each page: samples of 3 KiB
reach 0.35 of a raw write. This writer lays out a block of values with NumPy, copies them into place and writes them in
one piece. It writes large values from where they are, without a copy. The pages depend on the values alone, not on the
cut into blocks. The writer needs no environment, no lock and no map, so a full disk raises an error and no signal. LMDB
still has the last word: the caller opens the finished file with the library.
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
"""Bytes of a page in files that cachetool writes. The reader accepts any page size of LMDB."""
PAGE_HEADER, NODE_HEADER = 16, 8
LARGEST_NODE = ((PAGE - PAGE_HEADER) // 2 & -2) - 2
"""Bytes of header, key and value of the largest entry that lies whole in a leaf (``me_nodemax`` of mdb.c)."""
MAGIC, VERSION = 0xBEEFC0DE, 1
BRANCH, LEAF, OVERFLOW, META_PAGE = 1, 2, 4, 8
BIG = 1
META = struct.Struct("<IIQQ")
DB = struct.Struct("<IHHQQQQQ")
# All page flags but "dirty" (0x10), which LMDB may leave on disk. With any other unknown flag LMDB would read the page
# in another way than this module.
_FLAGS = 0xFFFF ^ 0x10
# LMDB's own limit of a cursor's stack (CURSOR_STACK of mdb.c): it cannot walk a deeper tree.
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class LeafNodes:
    """The entries of the main database, in key order. Positions are in bytes from the start of the file."""

    key_starts: Int64s
    key_sizes: Int64s
    starts: Int64s
    """Position of each value."""
    sizes: Int64s
    """Size of each value in bytes."""


def read_leaves(buffer: Bytes, *, name: str) -> LeafNodes:
    """Return the entries of the LMDB file in ``buffer``.

    Raises :class:`CorruptError`, naming ``name``, when the buffer is not a whole LMDB file of engine 0.9 with a plain
    main database, or when any page number, pointer or size in it leads outside the file.
    """
    try:
        return _Tree(buffer).leaves()
    # IndexError comes from the gathering of bytes: ``windows`` refuses a position behind the file's last byte.
    except (ValueError, IndexError, struct.error) as error:
        raise CorruptError(f"{name} is not a whole LMDB file: {error}") from error


def last_keys(buffer: Bytes) -> list[bytes]:
    """Return the keys of the last leaf page of the LMDB file in ``buffer``. Reads one page for each level of the tree.

    Empty if :func:`read_leaves` would refuse the pages that are read.
    """
    try:
        at, head = _Tree(buffer).last_leaf()
    except (ValueError, IndexError, struct.error):
        return []
    sizes = head[:, 3].tolist()
    return [buffer[start + 8 : start + 8 + size].tobytes() for start, size in zip(at.tolist(), sizes, strict=True)]


def _require(condition: Any, what: str) -> None:
    """Raise ValueError, which the callers turn into a :class:`CorruptError`, unless ``condition`` holds."""
    if not condition:
        raise ValueError(what)


class _Tree:
    """The main database of an LMDB file. Every number out of the file is checked before it is used as a position."""

    def __init__(self, buffer: Bytes) -> None:
        self.buffer = buffer
        # LMDB writes its two meta pages in turn. The one with the higher transaction number counts, and a damaged one
        # is ignored.
        metas = [m for m in (self._meta(0), self._meta(None)) if m is not None]
        _require(metas, "no valid meta page")
        _txn, self.psize, self.depth, self.entries, self.root, last = max(metas)
        self.pages = last + 1
        # A map that is larger than the file is where SIGBUS comes from: LMDB trusts the last page number of the meta
        # page.
        _require(self.pages * self.psize <= len(buffer), f"cut short: {len(buffer)} of {self.pages * self.psize} bytes")

    def _meta(self, at: int | None) -> tuple[int, int, int, int, int, int] | None:
        """Return (txn, page size, depth, entries, root, last page) of the meta page at byte ``at``; None: of the second
        one."""
        if at is None:
            # The second meta page lies at the page size, which stands in the first one. If the first one is damaged,
            # the eight possible page sizes are few enough to try.
            metas = [m for m in (self._meta(1 << bits) for bits in range(9, 17)) if m is not None]
            return metas[0] if metas else None
        # 136 bytes are magic to txn: 24 + 48 + 48 + 16.
        raw = self.buffer[at + PAGE_HEADER : at + PAGE_HEADER + 136].tobytes()
        if len(raw) < 136:
            return None
        magic, version, _address, _mapsize = META.unpack_from(raw)
        psize, *_ = DB.unpack_from(raw, 24)
        _pad, flags, depth, _b, _l, _o, entries, root = DB.unpack_from(raw, 72)
        last, txn = struct.unpack_from("<QQ", raw, 120)
        if magic != MAGIC or version != VERSION or psize not in [1 << bits for bits in range(9, 17)]:
            return None
        # Flags would mean sorted duplicates, reversed or integer keys: another order and other nodes. Page numbers have
        # 48 bits in a branch node.
        if flags or at not in (0, psize) or last >= 1 << 48:
            return None
        return txn, psize, depth, entries, root, last

    def leaves(self) -> LeafNodes:
        """Return all entries, after all pages were checked. Raises ValueError or IndexError for a damaged file."""
        nothing = np.empty(0, dtype=np.int64)
        # An empty database has no root page (its number is 2^64 - 1).
        if self.entries == 0:
            return LeafNodes(nothing, nothing, nothing, nothing)
        _require(0 < self.depth <= _MAX_DEPTH, f"the tree has the depth {self.depth}")
        _require(self.root < self.pages, f"the root page {self.root} does not exist")
        level = np.array([self.root], dtype=np.int64)
        for _ in range(self.depth - 1):
            at, head, _limit = self._nodes(level, BRANCH)
            del at
            # A branch node has no data. Its size and flags fields together hold the child's page number.
            level = head[:, 0] | head[:, 1] << 16 | head[:, 2] << 32
            # Pages 0 and 1 are meta pages. A level with more children than the file has pages contains a page twice;
            # without this limit a damaged tree of depth 32 would grow without end.
            _require(
                len(level) <= self.pages and (level < self.pages).all() and (level > 1).all(),
                "a child page that does not exist",
            )
        at, head, limit = self._nodes(level, LEAF)
        _require(len(at) == self.entries, f"it has {len(at)} entries instead of {self.entries}")
        sizes = head[:, 0] | head[:, 1] << 16
        starts = at + 8 + head[:, 3]
        big = head[:, 2] == BIG
        # Other flags mean a sub-database or duplicate values, whose data is not the value itself.
        _require((big | (head[:, 2] == 0)).all(), "an entry that is no plain value")
        # The value of a large entry is in pages of its own: its node holds the 8 bytes of a page number only.
        _require((starts + np.where(big, 8, sizes) <= limit).all(), "an entry that reaches past its page")
        if big.any():
            starts[big] = self._overflow(starts[big], sizes[big])
        return LeafNodes(at + 8, head[:, 3], starts, sizes)

    def last_leaf(self) -> tuple[Int64s, Int64s]:
        """Return position and header of the nodes of the leaf page with the highest keys."""
        _require(self.entries > 0 and 0 < self.depth <= _MAX_DEPTH and self.root < self.pages, "no tree")
        page = np.array([self.root], dtype=np.int64)
        for _ in range(self.depth - 1):
            _at, head, _limit = self._nodes(page, BRANCH)
            # Only the last child: a few pages of a large file are read, so opening a folder of many files stays fast.
            page = (head[:, 0] | head[:, 1] << 16 | head[:, 2] << 32)[-1:]
            _require((page < self.pages).all(), "a child page that does not exist")
        at, head, _limit = self._nodes(page, LEAF)
        return at, head

    def _nodes(self, pages: Int64s, kind: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return position, header (nodes, 4) and end of page of all nodes on ``pages``, which must be of ``kind``."""
        base = pages * self.psize
        head = self._gather(base, PAGE_HEADER)
        # Each page holds its own number. A pointer into the middle of a value, or a page that was copied to another
        # place, shows here.
        _require((head.view("<u8")[:, 0] == pages).all(), "a page with the number of another page")
        short = head.view("<u2").astype(np.int64)
        _require((short[:, 5] & _FLAGS == kind).all(), "a page of the wrong kind")
        lower = short[:, 6]
        # ``lower`` is the end of the node pointers, so it bounds the number of nodes before any pointer is read.
        _require(((lower > PAGE_HEADER) & (lower <= self.psize)).all(), "a page with bad bounds")
        counts = (lower - PAGE_HEADER) // 2
        first = ends(counts)
        # All pages of a level are read at once: a Python loop over the nodes of a shard with a million samples would
        # take seconds.
        within = np.arange(int(first[-1]), dtype=np.int64) - np.repeat(first[:-1], counts)
        bases = np.repeat(base, counts)
        pointers = self._gather(bases + PAGE_HEADER + 2 * within, 2).view("<u2")[:, 0].astype(np.int64)
        # A node's header of 8 bytes must fit behind its pointer.
        _require(((pointers >= PAGE_HEADER) & (pointers <= self.psize - 8)).all(), "an entry outside its page")
        at, limit = bases + pointers, bases + self.psize
        nodes = self._gather(at, 8).view("<u2").astype(np.int64)
        _require((at + 8 + nodes[:, 3] <= limit).all(), "a key that reaches past its page")
        return at, nodes, limit

    def _overflow(self, at: Int64s, sizes: Int64s) -> Int64s:
        """Return the positions of the values whose page numbers stand at ``at``, after their pages were checked."""
        pages = self._gather(at, 8).view("<u8")[:, 0]
        # Compared as u64: as int64 a number above 2^63 would be negative and pass.
        _require((pages < self.pages).all(), "an overflow page outside the file")
        first = pages.astype(np.int64)
        # Only the first overflow page has a header. The value runs over the following pages without a gap, which makes
        # it one extent.
        need = -(-(sizes + PAGE_HEADER) // self.psize)
        _require((first + need <= self.pages).all(), "a value that reaches past the file")
        head = self._gather(first * self.psize, PAGE_HEADER)
        _require((head.view("<u2")[:, 5] & _FLAGS == OVERFLOW).all(), "a value on a page of the wrong kind")
        _require((head.view("<u4")[:, 3] >= need).all(), "a value on too few pages")
        return first * self.psize + PAGE_HEADER

    def _gather(self, at: Int64s, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return ``nbytes`` bytes at each of the positions ``at``, (positions, nbytes)."""
        return np.ascontiguousarray(windows(self.buffer, nbytes)[at])


_ROOM = PAGE - PAGE_HEADER
_POINTER = 2
# Bytes of values that are laid out at once. The buffer of a writer stays at this size, except for larger values.
_PIECE = 2**22
_NO_ROOT = 2**64 - 1
# Most bytes of a buffer that is kept for the next writer. A larger one was made for one huge value.
_SPARE_BYTES = 64 * 2**20
# MDB_INTEGERKEY, a flag of LMDB's own table of free pages. mdb.c writes it into every new file.
_INTEGER_KEY = 8


# The buffer of the last writer, for the next one. The kernel clears new memory page by page, which costs as much as
# everything that is then done with it.
_spare: list[Bytes] = []


class TreeWriter:
    """A writer that appends entries to an LMDB file. Keys must come in LMDB's order, the order of their bytes.

    ``file`` is new and empty. Call :meth:`finish` once. The file is then complete, but neither truncated nor closed.
    """

    def __init__(self, file: BulkFile) -> None:
        self._file = file
        # Pages 0 and 1 are the meta pages, which are written last: until then LMDB refuses the file.
        self._next = 2
        self._pages = {BRANCH: 0, LEAF: 0, OVERFLOW: 0}
        self._entries = 0
        # 64 pages more than the values, for the leaf pages and page headers of a piece.
        self._buffer = _spare.pop() if _spare else np.empty(_PIECE + 64 * PAGE, dtype=np.uint8)
        # The leaf that is not full yet, the number of its entries, and the bytes of their nodes. It stays in memory
        # between blocks, so the cut into blocks does not show in the file.
        self._leaf = np.zeros(PAGE, dtype=np.uint8)
        self._count, self._used = 0, 0
        self._leaves: list[int] = []
        self._first_keys: list[bytes] = []
        # For each value: the number of its leaf, or -1 if it has pages of its own; and its position in that leaf, or in
        # the file. The page number of a leaf is known only when the leaf is full.
        self._where: list[Int64s] = []
        self._at: list[Int64s] = []
        file.size = self._next * PAGE

    def append(self, keys: Bytes, sizes: Int64s, place: Callable[[Bytes, Int64s, slice], Placed]) -> None:
        """Add entries with ``keys``, (entries, bytes), and values of ``sizes`` bytes.

        ``place(buffer, starts, part)`` is called for consecutive parts of the entries. It copies the values of ``part``
        to ``starts`` in ``buffer``: every byte, except large runs, which it returns with their positions.
        """
        total = ends(sizes)
        first = 0
        while first < len(sizes):
            # At least one entry, because a single value may be larger than a piece.
            stop = max(first + 1, int(np.searchsorted(total, total[first] + _PIECE, side="right")) - 1)
            part = slice(first, stop)
            self._append(keys[part], sizes[part], lambda buffer, at, part=part: place(buffer, at, part))  # type: ignore[misc]
            first = stop

    def _append(self, keys: Bytes, sizes: Int64s, place: Callable[[Bytes, Int64s], Placed]) -> None:
        """Lay out the pages of some entries in memory and write all of them but the last leaf, which may get more
        entries."""
        count, width = keys.shape
        head = NODE_HEADER + width
        # The same rule as in LMDB: larger nodes would leave space for less than two in a page, and LMDB itself stores
        # them on overflow pages.
        big = head + sizes > LARGEST_NODE
        nodes = head + np.where(big, 8, sizes)
        # LMDB keeps nodes at even positions.
        nodes += nodes & 1
        # LMDB gives a large value whole pages, and no other value shares them.
        own = np.where(big, -(-(PAGE_HEADER + sizes) // PAGE), 0)
        leaf, firsts = self._into_leaves(nodes)
        # A leaf is written as soon as an entry does not fit into it any more, so it comes before the pages of that
        # entry's value. This order depends on the values alone and not on the cut into blocks.
        before = ends(own)
        value_page = before[:-1] + leaf
        leaf_page = np.append(before[firsts[1:]], before[-1]) + np.arange(len(firsts))
        # The last page is the leaf that is not full. It is copied out of the buffer below and not written yet.
        pages = int(leaf_page[-1]) + 1
        buffer = self._room(pages * PAGE)
        lines = buffer.reshape(pages, PAGE)
        # The buffer holds bytes of the last piece. Gaps in leaves and behind the value in its last page must be zero:
        # equal samples must make equal files, and no old data may reach the disk.
        lines[leaf_page] = 0
        lines[(value_page + own - 1)[big]] = 0

        within, stops = ends(nodes), np.append(firsts[1:], count)
        used, counts = within[stops] - within[firsts], stops - firsts
        number = np.arange(count) - np.repeat(firsts, counts)
        # LMDB fills a page with nodes from its end downwards, so a node's place counts from there.
        reach = within[1:] - np.repeat(within[firsts], counts)
        # The first leaf already holds entries of the block before. The new ones continue behind them.
        number[: counts[0]] += self._count
        reach[: counts[0]] += self._used
        counts[0] += self._count
        used[0] += self._used
        buffer[leaf_page[0] * PAGE : (leaf_page[0] + 1) * PAGE] = self._leaf
        node = (leaf_page[leaf] + 1) * PAGE - reach  # nodes grow down from the end of their page
        # Pages are even in size and all 16-bit numbers lie at even positions, so one view of the buffer as u16
        # addresses all of them.
        short = buffer.view("<u2")
        short[leaf_page[leaf] * (PAGE // 2) + PAGE_HEADER // 2 + number] = PAGE - reach
        heads = np.empty((count, 4), dtype="<u2")
        # The node of a large value has the size of the value, not of the page number that it holds. LMDB reads it so.
        heads[:, 0], heads[:, 1], heads[:, 2], heads[:, 3] = sizes & 0xFFFF, sizes >> 16, np.where(big, BIG, 0), width
        put_rows(buffer, node, as_bytes(heads).reshape(count, 8))
        put_rows(buffer, node + NODE_HEADER, keys)
        starts = node + head
        if big.any():
            page = value_page[big]
            put_rows(buffer, starts[big], as_bytes((self._next + page).astype("<u8")).reshape(-1, 8))
            _page_heads(buffer, page, self._next, OVERFLOW)
            # An overflow page has the number of its pages where other pages have ``lower`` and ``upper``.
            buffer.view("<u4")[page * (PAGE // 4) + 3] = own[big]
            starts[big] = page * PAGE + PAGE_HEADER
        _page_heads(buffer, leaf_page, self._next, LEAF)
        short[leaf_page * (PAGE // 2) + 6] = PAGE_HEADER + _POINTER * counts
        short[leaf_page * (PAGE // 2) + 7] = PAGE - used
        # Headers first, values last: the values fill the places that are left. Large ones are not copied but written
        # from the block's own memory.
        large = place(buffer, starts)

        self._where.append(np.where(big, -1, len(self._leaves) + leaf))
        self._at.append(np.where(big, self._next * PAGE + starts, starts - leaf_page[leaf] * PAGE))
        # The first key of the leaf that was begun earlier is in the list already.
        begun = firsts if self._count == 0 else firsts[1:]
        self._first_keys += [keys[i].tobytes() for i in begun.tolist()]
        self._leaves += (self._next + leaf_page[:-1]).tolist()
        # A copy, because the buffer is used again for the next piece.
        self._leaf = buffer[-PAGE:].copy()
        self._count, self._used = int(counts[-1]), int(used[-1])
        self._entries += count
        self._pages[LEAF] += len(leaf_page) - 1
        self._pages[OVERFLOW] += int(before[-1])
        self._write(buffer[:-PAGE], large)

    def _into_leaves(self, nodes: Int64s) -> tuple[Int64s, Int64s]:
        """Return the leaf of each node and the first node of each leaf.

        Leaf 0 is the leaf that is not full yet.
        """
        # One search for each leaf instead of one step for each entry: a leaf of small samples holds up to some hundred.
        total = ends(nodes + _POINTER)
        room, at = _ROOM - self._used - _POINTER * self._count, 0
        firsts = [0]
        while (at := int(np.searchsorted(total, total[at] + room, side="right")) - 1) < len(nodes):
            firsts.append(at)
            room = _ROOM
        first = np.array(firsts, dtype=np.int64)
        return np.repeat(np.arange(len(first)), np.diff(np.append(first, len(nodes)))), first

    def _room(self, nbytes: int) -> Bytes:
        """Return a buffer of ``nbytes``, whose content is undefined."""
        if nbytes > len(self._buffer):
            # A single value larger than a piece needs a buffer of its own size: a value must lie in one piece.
            self._buffer = np.empty(nbytes, dtype=np.uint8)
        return self._buffer[:nbytes]

    def _write(self, pages: Bytes, large: Sequence[tuple[int, Bytes]] = ()) -> None:
        """Append ``pages`` to the file, with the runs of ``large`` in the places that were left for them."""
        pieces, at = [], 0
        # The list is in the order of fields, the file needs the order of positions. The key avoids a comparison of
        # arrays.
        for start, run in sorted(large, key=lambda placed: placed[0]):
            pieces += [pages[at:start], run]
            at = start + len(run)
        self._file.append(*pieces, pages[at:])
        self._next += len(pages) // PAGE

    def finish(self) -> Int64s:
        """Write the last leaf, the branches and the meta pages. Return the position of each value in the file."""
        # The page number in the header was a guess of the last piece: large values may have moved the leaf since.
        _page_heads(self._leaf, np.zeros(1, dtype=np.int64), self._next, LEAF)
        self._leaves.append(self._next)
        self._pages[LEAF] += 1
        self._write(self._leaf)
        depth, level = 1, list(zip(self._first_keys, self._leaves, strict=True))
        while len(level) > 1:
            level = self._branches(level)
            depth += 1
        self._file.write_at(
            # Last: a writer that is killed before leaves a file without a magic number, which everybody refuses. Meta
            # page 1 has the higher transaction number, so LMDB takes it; meta page 0 says that the database was empty
            # before.
            0,
            [_meta(0, 2, 0, {}, 0, _NO_ROOT), _meta(1, self._next, depth, self._pages, self._entries, level[0][1])],
        )
        # One buffer only: writers in a process usually follow each other.
        if len(self._buffer) <= _SPARE_BYTES and not _spare:
            _spare.append(self._buffer)
        self._buffer = np.empty(0, dtype=np.uint8)
        where, at = np.concatenate(self._where), np.concatenate(self._at)
        return at + np.where(where < 0, 0, np.array(self._leaves, dtype=np.int64)[where] * PAGE)

    def _branches(self, children: list[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
        """Write the branch pages over ``children``, given as first key and page number. Return the same of the branch
        pages."""
        groups: list[list[tuple[bytes, int]]] = [[]]
        room = _ROOM
        for child in children:
            need = NODE_HEADER + len(child[0]) + len(child[0]) % 2 + _POINTER
            if need > room:
                groups.append([])
                room = _ROOM
            groups[-1].append(child)
            room -= need
        # LMDB refuses a branch page with a single child, so the last group takes one child of the group before.
        if len(groups[-1]) == 1 and len(groups) > 1:
            groups[-1].insert(0, groups[-2].pop())
        parents = []
        for group in groups:
            parents.append((group[0][0], self._next))
            self._pages[BRANCH] += 1
            self._write(_branch(self._next, group))
        return parents


def _page_heads(buffer: Bytes, pages: Int64s, first: int, kind: int) -> None:
    """Write number and kind of ``pages`` of ``buffer``, whose first page is the page ``first`` of the file."""
    buffer.view("<u8")[pages * (PAGE // 8)] = first + pages
    buffer.view("<u4")[pages * (PAGE // 4) + 2] = kind << 16


def _branch(number: int, children: list[tuple[bytes, int]]) -> Bytes:
    """Return a branch page with this number over ``children``, given as first key and page number."""
    page = bytearray(PAGE)
    upper = PAGE
    for i, (key, child) in enumerate(children):
        # The key of the first child is never compared: the child holds all keys below the second one's. LMDB writes it
        # empty.
        name = key if i else b""
        node = struct.pack("<HHHH", child & 0xFFFF, child >> 16 & 0xFFFF, child >> 32, len(name)) + name
        upper -= len(node) + len(node) % 2
        page[upper : upper + len(node)] = node
        struct.pack_into("<H", page, PAGE_HEADER + _POINTER * i, upper)
    struct.pack_into("<QHHHH", page, 0, number, 0, BRANCH, PAGE_HEADER + _POINTER * len(children), upper)
    return np.frombuffer(page, dtype=np.uint8)


def _meta(number: int, pages: int, depth: int, kinds: dict[int, int], entries: int, root: int) -> bytes:
    """Return the meta page ``number``, which is of the transaction with the same number."""
    free = DB.pack(PAGE, _INTEGER_KEY, 0, 0, 0, 0, 0, _NO_ROOT)
    main = DB.pack(0, 0, depth, kinds.get(BRANCH, 0), kinds.get(LEAF, 0), kinds.get(OVERFLOW, 0), entries, root)
    # The map size is the file's size, so LMDB maps no bytes behind the end of the file. The page size stands in the pad
    # of the table of free pages.
    head = struct.pack("<QHHHH", number, 0, META_PAGE, 0, 0) + META.pack(MAGIC, VERSION, 0, pages * PAGE)
    return (head + free + main + struct.pack("<QQ", pages - 1, number)).ljust(PAGE, b"\0")
