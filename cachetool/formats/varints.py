"""Writing varints, the numbers of protocol buffers, padded with zero groups to a width that is the same in all records.

Readers of protocol buffers take any width up to ten bytes. Reading records that anybody wrote is
:mod:`cachetool.core.tf_example`'s job.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["unpad_varints", "varint", "varints"]


def varint(value: int, width: int = 0) -> bytes:
    """``value`` (0 to 2**64 - 1) as a varint of at least ``width`` bytes."""
    out = bytearray()
    while value > 0x7F or len(out) + 1 < width:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varints(values: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.uint8]:
    """Each of ``values`` as a varint of exactly ``width`` bytes, (k, width). They must fit."""
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(7)
    groups = (values[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
    groups[:, :-1] |= 0x80
    return groups


def unpad_varints(groups: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64] | None:
    """What :func:`varints` encoded, (k,) as two's complement; None when a row is no varint of exactly that width."""
    more = groups >= 0x80
    if not more[:, :-1].all() or more[:, -1:].any():
        return None
    shifts = np.arange(groups.shape[1], dtype=np.uint64) * np.uint64(7)
    values: npt.NDArray[np.uint64] = ((groups & 0x7F).astype(np.uint64) << shifts).sum(axis=1, dtype=np.uint64)
    return values.view(np.int64)
