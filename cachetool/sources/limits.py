"""How much a file is believed: what it claims to hold, against the bytes that it has on disk."""

from __future__ import annotations

from cachetool.core.errors import BadObject
from cachetool.core.units import format_size

__all__ = [
    "FREE_VALUE",
    "LMDB_HEAD",
    "MAX_VALUE",
    "allowed",
    "check_allocation",
    "check_claims",
    "is_lmdb",
    "quoted",
]

MAX_VALUE = 4 * 2**30
"""Bytes of the largest single value, chunk or record that is read."""
FREE_VALUE = 64 * 2**20
"""A value up to this size is read whatever the file's size..."""
VALUE_RATIO = 100
"""...a larger one takes at least one byte on disk for so many in memory."""
FREE_TOTAL = 4 * 2**30
TOTAL_RATIO = 1000
"""The same for all samples together: sparse and empty data compress far better as a whole than one value does."""
LMDB_HEAD = 32
_LMDB_MAGIC = b"\xde\xc0\xef\xbe"


def check_allocation(what: str, nbytes: int, *, stored: int) -> None:
    """Refuse to make room for ``nbytes`` of one value that comes out of ``stored`` bytes on disk.

    Raises :class:`BadObject` naming ``what``.
    """
    most = allowed(stored)
    if nbytes > most:
        raise BadObject(
            f"{what} claims {format_size(nbytes)} in one piece, out of {format_size(stored)} on disk;"
            f" at most {format_size(most)} are read"
        )


def allowed(stored: int) -> int:
    """The bytes that one value may have that comes out of ``stored`` bytes."""
    return min(MAX_VALUE, FREE_VALUE + VALUE_RATIO * stored)


def check_claims(what: str, claims: dict[str, tuple[int, int]], *, stored: int) -> None:
    """Refuse arrays, ``{name: (bytes of all rows, rows)}``, that claim more than ``stored`` bytes on disk can mean.

    Raises :class:`BadObject` naming ``what`` and the array.
    """
    for name, (nbytes, rows) in claims.items():
        check_allocation(f"{what}: a row of {quoted(name)}", nbytes // max(1, rows), stored=stored)
    total = sum(max(nbytes, rows) for nbytes, rows in claims.values())  # rows of nothing do not go on for ever either
    if total > FREE_TOTAL + TOTAL_RATIO * stored:
        name = max(claims, key=lambda array_name: claims[array_name][0])
        raise BadObject(
            f"{what} claims {format_size(total)} of samples out of {format_size(stored)} on disk, most in"
            f" {quoted(name)}; leave that out with --fields -{name}"
        )


def is_lmdb(head: bytes) -> bool:
    """Whether a file that begins with ``head`` (:data:`LMDB_HEAD` bytes) is one of LMDB: its magic number stands behind
    the header of the first page, of 16 bytes (engine 0.9) or 24 (1.0)."""
    return _LMDB_MAGIC in (head[16:20], head[24:28])


def quoted(name: str) -> str:
    """A name out of a file, fit to be shown."""
    return repr(name if len(name) <= 100 else name[:97] + "...")
