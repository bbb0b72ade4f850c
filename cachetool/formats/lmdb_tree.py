"""An LMDB file written by appending: the pages of :mod:`cachetool.formats.lmdb_pages` made whole, each once, in order.

::

    meta  meta | value  value  value  leaf | value  value  leaf | ... | branch  branch  root
    written last     a large value on pages of its own; the leaf of some values behind the last of them

py-lmdb is called once for each value and writes through a map, one page fault for each page: 0.35 of a raw write for
samples of 3 KiB. Here a block of values is laid out with NumPy, copied to where it belongs, and written in one piece;
what is large is written from where it is.
Which pages there are depends on the values alone, not on the cut into blocks. No environment, no lock, no map that a
full disk would turn into a signal. The library still has the last word: the writer opens the finished file with it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np

from cachetool.formats.files import BulkFile
from cachetool.formats.lmdb_pages import (
    BIG,
    BRANCH,
    DB,
    LARGEST_NODE,
    LEAF,
    MAGIC,
    META,
    META_PAGE,
    NODE_HEADER,
    OVERFLOW,
    PAGE,
    PAGE_HEADER,
    VERSION,
)
from cachetool.formats.runs import Bytes, Int64s, Placed, as_bytes, ends, put_rows

__all__ = ["TreeWriter"]

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
