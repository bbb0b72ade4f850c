"""Reading compressed values: each frame that holds a part of a wanted sample is read by a file descriptor and decoded.

A frame is read rather than mapped. A map would save a copy of compressed bytes, which is a tenth of the time of
decoding them. But a process may have only 65,530 maps.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import CorruptError
from cachetool.core.extents import Frames
from cachetool.formats.files import not_plain
from cachetool.formats.frames import Scratch, frames_of, read_frames
from cachetool.formats.runs import Bytes, Int64s, ends
from cachetool.loaders.read.unmapped import Descriptors, asleep_at
from cachetool.loaders.view import ShardFile

__all__ = ["Framed"]


class Framed:
    """The frames in which the values of one field lie, for some samples.

    Value i is in the shard ``parts[numbers[i]]``, in the file ``names[numbers[i]]``. Positions are those before
    compression. ``frames`` has the frames of each shard. Has the methods of
    :class:`~cachetool.loaders.read.unmapped.Unmapped`.
    """

    __slots__ = ("_descriptors", "_frames", "_names", "_numbers", "_parts", "_scratch")
    near = 2**62
    """Bytes between two runs of one value that are read rather than left out: all, because a large value is one frame,
    which is decoded as a whole."""

    def __init__(
        self,
        descriptors: Descriptors,
        scratch: Scratch,
        parts: Sequence[ShardFile],
        names: Sequence[str],
        frames: Sequence[Frames | None],
        numbers: npt.NDArray[np.intp],
    ) -> None:
        self._descriptors, self._scratch = descriptors, scratch
        self._parts, self._names, self._frames, self._numbers = parts, names, frames, numbers

    def slice(self, start: int, stop: int) -> Framed:
        """Return the frames of values ``start`` to ``stop`` alone."""
        numbers = self._numbers[start:stop]
        return Framed(self._descriptors, self._scratch, self._parts, self._names, self._frames, numbers)

    def repeat(self, count: int) -> Framed:
        """Return the frames of each value ``count`` times."""
        numbers = np.repeat(self._numbers, count)
        return Framed(self._descriptors, self._scratch, self._parts, self._names, self._frames, numbers)

    def read(self, out: Bytes, to: Int64s, starts: Int64s, sizes: Int64s) -> None:
        """Decode ``sizes[i]`` bytes from position ``starts[i]`` of the values of its shard to ``out[to[i] :]``.

        Raises :class:`CorruptError`, which names the file, and the errors of :meth:`Descriptors.open`.
        """
        for number, chosen, frames, fd in self._opened():
            scratch = self._scratch

            def fetch(position: int, size: int, fd: int = fd, scratch: Scratch = scratch) -> memoryview:
                memory, done = scratch.packed(size), 0
                while done < size and (count := os.preadv(fd, (memory[done:],), position + done)):
                    done += count
                return memory[:done]

            try:
                read_frames(frames, fetch, out, to[chosen], starts[chosen], sizes[chosen], scratch)
            except CorruptError as error:
                raise CorruptError(f"{self._path(number)} {error}") from error
            except OSError as error:
                # These come of a folder or a pipe in place of the file, put there by somebody else.
                if error.errno in (errno.EISDIR, errno.ESPIPE):
                    raise not_plain(self._path(number)) from error
                raise

    def asleep(self, starts: Int64s) -> npt.NDArray[np.bool_]:
        """Return a bool for each position: True if the kernel says that its frame is not in memory."""
        asleep = np.zeros(len(starts), dtype=np.bool_)
        for _, chosen, frames, fd in self._opened():
            first, _ = frames_of(frames, starts[chosen], np.ones(len(chosen), dtype=np.int64))
            # A position at the end of the values, of a sample without bytes, is in no frame.
            first = np.minimum(first, len(frames.offsets) - 1)
            asleep[chosen] = asleep_at(fd, frames.offsets[first])
        return asleep

    def will_need(self, starts: Int64s, sizes: Int64s) -> None:
        """Ask the kernel to read the frames of these runs, without waiting."""
        if not hasattr(os, "posix_fadvise"):
            return
        for _, chosen, frames, fd in self._opened():
            first, behind = frames_of(frames, starts[chosen], sizes[chosen])
            counts = np.minimum(behind, len(frames.offsets)) - first
            numbers = np.unique(np.repeat(first - ends(counts)[:-1], counts) + np.arange(int(counts.sum())))
            for position, size in zip(frames.offsets[numbers].tolist(), frames.sizes[numbers].tolist(), strict=True):
                # The file is no plain file, which the read itself reports.
                with contextlib.suppress(OSError):
                    os.posix_fadvise(fd, position, size, os.POSIX_FADV_WILLNEED)

    def _path(self, number: int) -> str:
        return f"{self._parts[number].where}/{self._names[number]}"

    def _opened(self) -> Iterator[tuple[int, Int64s, Frames, int]]:
        """Yield for each shard its number, which of the values it has, its frames, and a descriptor of its file."""
        # A stable sort keeps the values of a shard in the order asked for.
        order = np.argsort(self._numbers, kind="stable")
        numbers = self._numbers[order]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        for chosen in np.split(order, cuts) if len(order) else ():
            number = int(self._numbers[chosen[0]])
            # An array without any bytes has no frames, and nothing is read of it.
            if (frames := self._frames[number]) is None or not len(frames.offsets):
                continue
            fd, kept = self._descriptors.open(self._parts[number], self._names[number])
            try:
                yield number, chosen, frames, fd
            finally:
                if not kept:
                    os.close(fd)
