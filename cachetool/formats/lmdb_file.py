"""What is in an LMDB file of ours besides the values, and how large it gets. No LMDB needed.

Keys are the number of the sample in twelve digits, then ``__len__`` and ``__schema__``, which sort behind all digits,
so that a shard is written by appending alone.
"""

from __future__ import annotations

import json

import numpy as np

from cachetool.core.errors import CorruptError
from cachetool.core.schema import Schema
from cachetool.formats.lmdb_pages import LARGEST_NODE, NODE_HEADER, PAGE, PAGE_HEADER, last_keys, read_leaves
from cachetool.formats.lmdb_values import ValueLayout
from cachetool.formats.runs import Bytes, Int64s, windows

__all__ = ["KEY", "LEN_KEY", "SCHEMA_KEY", "file_bound", "is_ours", "keys_of", "read_header", "schema_json"]

KEY = b"%012d"
LEN_KEY, SCHEMA_KEY = b"__len__", b"__schema__"
_KEY_BYTES = 12
_POWERS = 10 ** np.arange(_KEY_BYTES - 1, -1, -1, dtype=np.int64)
_NODE = NODE_HEADER + _KEY_BYTES + 2  # and the pointer to it
_INLINE = LARGEST_NODE - NODE_HEADER - _KEY_BYTES


def schema_json(schema: Schema) -> bytes:
    """The value of ``__schema__``."""
    return json.dumps(schema.to_json(), separators=(",", ":")).encode()


def keys_of(first: int, count: int) -> Bytes:
    """The keys of ``count`` samples from ``first``, (samples, 12)."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    return (numbers[:, None] // _POWERS % 10 + ord("0")).astype(np.uint8)


def file_bound(schema: Schema, samples: int, nbytes: int) -> int:
    """Upper bound of the size of a file of at most ``samples`` samples and ``nbytes`` bytes of values, in whole pages.

    A value above about half a page takes whole pages, 16 bytes of which are a header.
    """
    layout = ValueLayout(schema)
    room = PAGE - PAGE_HEADER
    if schema.is_fixed:
        if schema.fixed_nbytes:
            samples = min(samples, nbytes // schema.fixed_nbytes)
        inline = layout.head <= _INLINE
        node = _NODE + (layout.head + layout.head % 2 if inline else 8)
        leaves = -(-samples // (room // node))
        pages = leaves + (0 if inline else samples * -(-(PAGE_HEADER + layout.head) // PAGE))
    else:
        # Any mixture of sizes: the smaller of two bounds that are linear in bytes and samples. Leaf pages may be
        # half empty; an overflow page holds at least `_INLINE` bytes; a value wastes less than a page.
        total = nbytes + samples * layout.overhead
        small = total * PAGE // _INLINE + samples * 3 * _NODE
        large = total + samples * (PAGE + 4 * _NODE)
        pages = min(small, large) // PAGE + 1
        leaves = min(pages, samples + 1)
    branches = leaves // 64 + 4
    extra = 2 + 2 + len(schema_json(schema)) // PAGE + 2
    return (pages + branches + extra) * PAGE


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
        good = ((digits >= 0) & (digits <= 9)).all() and np.array_equal(digits @ _POWERS, np.arange(samples))
    if not good:
        raise CorruptError(f"{name}: its keys are not the numbers of its {count} samples")
    return samples, schema
