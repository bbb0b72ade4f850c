"""Objects of servers that ignore ranges: fetched whole, and kept where temporary files go while parts are asked for.

Each process keeps its own, at most :data:`KEPT` bytes; those asked for last stay. An object that would have to be
fetched again and again for single rows is refused.
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable

from cachetool.core.errors import SourceError
from cachetool.core.units import format_size
from cachetool.stores.base import Object, check_length

__all__ = ["LARGEST_WHOLE", "WholeObjects"]

LARGEST_WHOLE = 4 * 2**30
"""Bytes of the largest object that is fetched whole, as the largest value."""
KEPT = 4 * 2**30
_TIMES = 4
"""How often one object is fetched whole: to look at it, to count its samples, to read them, and once more."""


class WholeObjects:
    """The objects of one store that came whole. Used by many threads."""

    def __init__(self, get: Callable[[Object], memoryview]) -> None:
        """``get`` fetches and checks one."""
        self._get = get
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, memoryview] = OrderedDict()
        self._times: Counter[str] = Counter()

    def knows(self, item: Object) -> bool:
        """Whether the server ignored a range of this object before."""
        return item.key in self._times

    def part(self, item: Object, size: int, start: int, stop: int, what: str) -> memoryview:
        """Bytes of an object that has ``size`` bytes, less than 0 where the server does not say. Raises
        :class:`SourceError` naming ``what`` for one that is too large, is too short, or is fetched too often."""
        why = f"{what}: the server ignores the Range header"
        if size < 0:
            raise SourceError(f"{why}, and the size of the object is unknown; copy it to a disk of this machine first")
        if size > LARGEST_WHOLE:
            raise SourceError(
                f"{why}, and at most {format_size(LARGEST_WHOLE)} are fetched whole, not {format_size(size)};"
                " copy it to a disk of this machine first"
            )
        with self._lock:
            body = self._kept.get(item.key)
            if body is None:
                if self._times[item.key] == _TIMES:
                    raise SourceError(
                        f"{why}, and random samples of so many objects would fetch it whole again and again;\n"
                        "write them into files first, in order: cachetool convert SOURCE --to hdf5 --out DIR"
                    )
                self._times[item.key] += 1
                body = _on_disk(self._get(item))
                self._kept[item.key] = body
                while sum(map(len, self._kept.values())) > KEPT and len(self._kept) > 1:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(item.key)
        check_length(item, got=len(body[start:stop]), want=stop - start)
        return body[start:stop]

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._kept.clear()


def _on_disk(body: memoryview) -> memoryview:
    """The bytes in a file without a name, which the kernel may drop from memory; as they are where there is no room."""
    with contextlib.suppress(OSError, ValueError), tempfile.TemporaryFile() as file:
        file.write(body)
        file.flush()
        return memoryview(mmap.mmap(file.fileno(), len(body), access=mmap.ACCESS_READ))
    return body
