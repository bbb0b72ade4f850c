"""When a loader looks for its next snapshot: early enough that training never waits for it, late enough to be new.

::

    begun(e) ------------- batches made ------------- look ahead ------------ delivered(e) -- begun(e + 1)
             rings hold what is left of the epoch     |--- at least a second ---|  |- at once -|
"""

from __future__ import annotations

import time

from cachetool.cache.history import Delivered

__all__ = ["Timing"]

_ONWARD, _LONGEST = 0.5, 3.0
"""Seconds after the last batch was handed out in which the next epoch begins at once, no command having run in between:
half as long again as a step of training, but so many at least and at most."""
_FRESH = 10.0
"""Seconds after which a provisional snapshot is looked at again when the last batch is delivered."""
_LEAD = 1.0
"""Seconds before the end of an epoch in which the next one's snapshot is taken: a disk may pause for so long."""


class Timing:
    """What is known of how fast the training goes. Times are those of ``time.monotonic``."""

    def __init__(self) -> None:
        self._began = self._looked = self._onward = self._step = 0.0

    def begun(self) -> None:
        """An epoch begins."""
        self._began = time.monotonic()

    def delivered(self, pace: Delivered) -> None:
        """Its last batch was delivered."""
        self._step = max(0.0, pace.seconds - pace.waited) / max(1, pace.batches)
        self._onward = time.monotonic() + max(_ONWARD, min(1.5 * self._step, _LONGEST))

    def looked(self) -> None:
        """What the catalog has is known."""
        self._looked = time.monotonic()

    @property
    def at_once(self) -> bool:
        """Whether an epoch that begins now follows the one before without a pause."""
        return time.monotonic() <= self._onward

    @property
    def old(self) -> bool:
        """Whether it is long ago that somebody looked."""
        return time.monotonic() > self._looked + _FRESH

    def spare(self, steps: int) -> float:
        """Seconds for which the look ahead can wait, all batches of an epoch of so many steps being made.

        Half of the time that the batches will last if this epoch goes as the one before, since as many are to be made
        for the next one meanwhile.
        """
        left = steps * self._step - (time.monotonic() - self._began)
        return max(0.0, min(left / 2, left - _LEAD))
