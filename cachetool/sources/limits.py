"""Limits on what a file may claim to hold, compared with the bytes that it has on disk."""

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

# A few bytes of a hostile file can claim any shape. Without these limits a reader would allocate what the file claims.
MAX_VALUE = 4 * 2**30
"""Bytes of the largest single value, chunk or record that is read."""
FREE_VALUE = 64 * 2**20
"""Bytes of a value that is read whatever the size of its file."""
VALUE_RATIO = 100
"""Most bytes in memory for each byte on disk, for the part of a value above :data:`FREE_VALUE`."""
FREE_TOTAL = 4 * 2**30
TOTAL_RATIO = 1000
"""Most bytes in memory for each byte on disk, for all samples of a file together, above :data:`FREE_TOTAL`. It is
larger than :data:`VALUE_RATIO` because sparse and empty data compress far better as a whole than one value does."""
LMDB_HEAD = 32
"""Number of bytes at the beginning of a file that show whether it is an LMDB file."""
_LMDB_MAGIC = b"\xde\xc0\xef\xbe"


def check_allocation(what: str, nbytes: int, *, stored: int) -> None:
    """Raise :class:`BadObject` naming ``what`` if one value of ``nbytes`` is too large for ``stored`` bytes on disk."""
    most = allowed(stored)
    if nbytes > most:
        raise BadObject(
            f"{what} claims {format_size(nbytes)} in one piece, but the file has {format_size(stored)};"
            f" at most {format_size(most)} can be read"
        )


def allowed(stored: int) -> int:
    """Return the most bytes that one value may have when it comes out of ``stored`` bytes on disk."""
    return min(MAX_VALUE, FREE_VALUE + VALUE_RATIO * stored)


def check_claims(what: str, claims: dict[str, tuple[int, int]], *, stored: int) -> None:
    """Refuse arrays, ``{name: (bytes of all rows, rows)}``, that claim more than ``stored`` bytes on disk can mean.

    Raises :class:`BadObject` naming ``what`` and the array.
    """
    for name, (nbytes, rows) in claims.items():
        check_allocation(f"{what}: a row of {quoted(name)}", nbytes // max(1, rows), stored=stored)
    # A row counts as one byte at least: rows of no bytes could otherwise claim any number of samples, which would be
    # read without an end.
    total = sum(max(nbytes, rows) for nbytes, rows in claims.values())
    if total > FREE_TOTAL + TOTAL_RATIO * stored:
        name = max(claims, key=lambda array_name: claims[array_name][0])
        raise BadObject(
            f"{what} claims {format_size(total)} of samples, but has {format_size(stored)} on disk; the largest field"
            f" is {quoted(name)}: leave it out with --fields -{name}"
        )


def is_lmdb(head: bytes) -> bool:
    """Return True if ``head``, the first :data:`LMDB_HEAD` bytes of a file, shows an LMDB file."""
    # The magic number stands behind the header of the first page, which has 16 bytes in engine 0.9 and 24 in engine
    # 1.0.
    return _LMDB_MAGIC in (head[16:20], head[24:28])


def quoted(name: str) -> str:
    """Return a name from a file, quoted and shortened for a message."""
    return repr(name if len(name) <= 100 else name[:97] + "...")
