"""A writer of classic NetCDF files for tests, of all three versions, that also writes wrong numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

TYPES = {"i1": 1, "S1": 2, "i2": 3, "i4": 4, "f4": 5, "f8": 6, "u1": 7, "u2": 8, "u4": 9, "i8": 10, "u8": 11}
"""Numbers of the types; those from 7 on exist only in CDF-5."""
Variable = tuple[tuple[str, ...], Any, Mapping[str, Any]]
"""Names of the dimensions, values, attributes."""


def classic(
    variables: Mapping[str, Variable], dims: Mapping[str, int | None], *, version: int = 1, stated: int | None = None
) -> bytes:
    """Return a file of these variables. The dimension of length None has as many records as the values.

    ``stated``: the number of records that the header states, instead of the true one.
    """
    wide = 8 if version == 5 else 4

    def number(value: int, size: int = wide) -> bytes:
        return value.to_bytes(size, "big")

    def padded(body: bytes) -> bytes:
        return body + bytes(-len(body) % 4)

    def name(text: str) -> bytes:
        return number(len(text.encode())) + padded(text.encode())

    def listed(tag: int, entries: list[bytes]) -> bytes:
        return number(tag if entries else 0, 4) + number(len(entries)) + b"".join(entries)

    def attribute(key: str, value: Any) -> bytes:
        array = np.frombuffer(value.encode(), "S1") if isinstance(value, str) else np.atleast_1d(value)
        big = array.astype(array.dtype.newbyteorder(">"))
        return name(key) + number(TYPES[array.dtype.str[1:]], 4) + number(array.size) + padded(big.tobytes())

    numbers = list(dims)
    arrays = {key: np.asarray(values) for key, (_, values, _) in variables.items()}
    in_records = [key for key, (along, _, _) in variables.items() if along and dims[along[0]] is None]
    records = max([len(arrays[key]) for key in in_records], default=0)

    def sized(key: str) -> int:
        array = arrays[key]
        nbytes = array.dtype.itemsize * int(np.prod(array.shape[key in in_records :], dtype=np.int64))
        return nbytes if in_records == [key] else nbytes + -nbytes % 4

    def header(begins: Mapping[str, int]) -> bytes:
        entries = [
            name(key) + number(len(along)) + b"".join(number(numbers.index(dim)) for dim in along)
            + listed(12, [attribute(*one) for one in attributes.items()]) + number(TYPES[arrays[key].dtype.str[1:]], 4)
            + number(sized(key) + -sized(key) % 4) + number(begins[key], 4 if version == 1 else 8)
            for key, (along, _, attributes) in variables.items()
        ]  # fmt: skip
        return (
            b"CDF" + bytes([version]) + number(records if stated is None else stated)
            + listed(10, [name(dim) + number(length or 0) for dim, length in dims.items()])
            + listed(12, [attribute("title", "a test")]) + listed(11, entries)
        )  # fmt: skip

    at = len(header(dict.fromkeys(variables, 0)))
    begins = {}
    fixed = [key for key in variables if key not in in_records]
    for key in (*fixed, *in_records):
        begins[key] = at
        at += sized(key)
    big = {key: array.astype(array.dtype.newbyteorder(">")) for key, array in arrays.items()}
    body = [big[key].tobytes().ljust(sized(key), b"\0") for key in fixed]
    body += [big[key][row : row + 1].tobytes().ljust(sized(key), b"\0") for row in range(records) for key in in_records]
    return header(begins) + b"".join(body)
