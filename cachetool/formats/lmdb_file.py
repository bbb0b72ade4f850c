"""What is in an LMDB file of ours besides the values, and how large it gets. No LMDB needed.

Keys are the number of the sample in twelve digits, then ``__len__`` and ``__schema__``, which sort behind all digits,
so that a shard is written by appending alone.
"""

from __future__ import annotations

import json
import mmap

import numpy as np

from cachetool.errors import CorruptError
from cachetool.formats.lmdb_pages import PAGE_HEADER, last_keys, read_leaves
from cachetool.formats.lmdb_values import ValueLayout
from cachetool.formats.runs import Bytes, Int64s, windows
from cachetool.schema import Schema

__all__ = ["KEY", "LEN_KEY", "PUTS", "SCHEMA_KEY", "is_ours", "map_size", "read_header", "schema_json"]

KEY = b"%012d"
LEN_KEY, SCHEMA_KEY = b"__len__", b"__schema__"
PUTS = 50_000
"""Samples a transaction; LMDB keeps track of at most 131,071 changed pages in one."""
_KEY_BYTES = 12
_PSIZE = min(mmap.PAGESIZE, 0x8000)
_NODE = 8 + _KEY_BYTES + 2  # header, key, and the pointer to it
_LARGEST_NODE = ((_PSIZE - PAGE_HEADER) // 2 & -2) - 2  # me_nodemax of mdb.c: larger ones go to overflow pages
_INLINE = _LARGEST_NODE - 8 - _KEY_BYTES


def schema_json(schema: Schema) -> bytes:
    """The value of ``__schema__``."""
    return json.dumps(schema.to_json(), separators=(",", ":")).encode()


def map_size(schema: Schema, samples: int, nbytes: int) -> int:
    """Upper bound of the size of a file of at most ``samples`` samples and ``nbytes`` bytes of values, in whole pages.

    A value above about half a page takes whole pages, 16 bytes of which are a header.
    """
    layout = ValueLayout(schema)
    room = _PSIZE - PAGE_HEADER
    if schema.is_fixed:
        if schema.fixed_nbytes:
            samples = min(samples, nbytes // schema.fixed_nbytes)
        inline = layout.head <= _INLINE
        node = _NODE + (layout.head + layout.head % 2 if inline else 8)
        leaves = -(-samples // (room // node))
        pages = leaves + (0 if inline else samples * -(-(PAGE_HEADER + layout.head) // _PSIZE))
    else:
        # Any mixture of sizes: the smaller of two bounds that are linear in bytes and samples. Leaf pages may be
        # half empty; an overflow page holds at least `_INLINE` bytes; a value wastes less than a page.
        total = nbytes + samples * layout.overhead
        small = total * _PSIZE // _INLINE + samples * 3 * _NODE
        large = total + samples * (_PSIZE + 4 * _NODE)
        pages = min(small, large) // _PSIZE + 1
        leaves = min(pages, samples + 1)
    branches = leaves // 64 + 4
    commits = 1 + samples // PUTS
    extra = 2 + 16 * commits + len(schema_json(schema)) // _PSIZE + 2
    return (pages + branches + extra) * _PSIZE


def is_ours(buffer: Bytes) -> bool:
    """Whether the LMDB file in ``buffer`` ends with the entries of a shard of ours. Touches a few pages."""
    return last_keys(buffer)[-2:] in ([LEN_KEY, SCHEMA_KEY], [SCHEMA_KEY])


def read_header(buffer: Bytes, *, name: str) -> tuple[int, Schema]:
    """Count and schema of the shard in ``buffer``, whose structure and keys are checked whole.

    Raises :class:`CorruptError`, naming ``name``.
    """
    nodes = read_leaves(buffer, name=name)

    def text(array: Int64s, sizes: Int64s, entry: int) -> bytes:
        start = int(array[entry])
        return buffer[start : start + int(sizes[entry])].tobytes()

    def key(entry: int) -> bytes:
        return text(nodes.key_starts, nodes.key_sizes, entry)

    samples = len(nodes.starts) - 2
    if samples < 0 or key(-2) != LEN_KEY or key(-1) != SCHEMA_KEY:
        raise CorruptError(f"{name} is an LMDB file, but not a shard of cachetool: it has no __len__ and __schema__")
    try:
        schema = Schema.from_json(json.loads(text(nodes.starts, nodes.sizes, -1)))
        count = int(text(nodes.starts, nodes.sizes, -2))
    except ValueError as error:
        raise CorruptError(f"{name}: its __schema__ or __len__ is damaged: {error}") from error
    good = (nodes.key_sizes[:samples] == _KEY_BYTES).all() and count == samples
    if good and samples:
        digits = windows(buffer, _KEY_BYTES)[nodes.key_starts[:samples]].astype(np.int64) - ord("0")
        powers = 10 ** np.arange(_KEY_BYTES - 1, -1, -1, dtype=np.int64)
        good = ((digits >= 0) & (digits <= 9)).all() and np.array_equal(digits @ powers, np.arange(samples))
    if not good:
        raise CorruptError(f"{name}: its keys are not the numbers of its {count} samples")
    return samples, schema
