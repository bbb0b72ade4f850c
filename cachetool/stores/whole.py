"""Whole objects of servers that ignore the Range header, kept on disk while parts of them are asked for.

Each process keeps its own copies, at most :data:`KEPT` bytes; the objects asked for last stay. The copies are files in
the folder for temporary files. An object that single rows would fetch again and again is refused.
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
"""Most bytes of an object that is fetched whole. The largest value of a sample has the same limit."""
KEPT = 4 * 2**30
"""Most bytes of all copies of one store in this process."""
_TIMES = 4
"""Most fetches of one whole object: to look at it, to count its samples, to read them, and once more."""


class WholeObjects:
    """The objects of one store that came whole. ``get`` fetches and checks one object. Used by many threads."""

    def __init__(self, get: Callable[[Object], memoryview]) -> None:
        self._get = get
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, memoryview] = OrderedDict()
        self._times: Counter[str] = Counter()

    def knows(self, item: Object) -> bool:
        """Return True if the server ignored a range of this object before."""
        return item.key in self._times

    def part(self, item: Object, size: int, start: int, stop: int, what: str) -> memoryview:
        """Return the bytes [start, stop) of an object of ``size`` bytes (negative: the server does not say the size).

        ``what`` names the object in messages.

        Raises:
            SourceError: If the object is too large, has no known size, or was fetched too often.
            BadObject: If the object is shorter than ``stop``.
        """
        why = f"{what}: the server ignores the Range header"
        if size < 0:
            raise SourceError(f"{why}, and the size of the object is unknown; copy the object to this machine first")
        if size > LARGEST_WHOLE:
            raise SourceError(
                f"{why}, and the object is too large to be fetched whole ({format_size(size)};"
                f" at most {format_size(LARGEST_WHOLE)}); copy the object to this machine first"
            )
        # The lock is held during the fetch, so that two threads which ask for parts of one object fetch the object
        # once.
        with self._lock:
            body = self._kept.get(item.key)
            if body is None:
                if self._times[item.key] == _TIMES:
                    raise SourceError(
                        f"{why}, so drawing random samples would fetch each whole object several times;\n"
                        "write the samples to files in order first: cachetool convert SOURCE --to hdf5 --out DIR"
                    )
                self._times[item.key] += 1
                body = _on_disk(self._get(item))
                self._kept[item.key] = body
                # The newest copy always stays, even above the limit: the caller needs its bytes right now.
                while sum(map(len, self._kept.values())) > KEPT and len(self._kept) > 1:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(item.key)
        check_length(item, got=len(body[start:stop]), want=stop - start)
        return body[start:stop]

    def clear(self) -> None:
        """Drop all copies."""
        with self._lock:
            self._kept.clear()


def _on_disk(body: memoryview) -> memoryview:
    """Return the bytes as a map of a nameless file, which the kernel may drop from memory; without space, the bytes."""
    # A full or missing temporary folder is no error: the bytes stay in memory. mmap raises ValueError for an empty
    # body. The map outlives the file, which has no name, so the space is free again when the map goes or the process
    # dies.
    with contextlib.suppress(OSError, ValueError), tempfile.TemporaryFile() as file:
        file.write(body)
        file.flush()
        return memoryview(mmap.mmap(file.fileno(), len(body), access=mmap.ACCESS_READ))
    return body
