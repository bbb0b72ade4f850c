"""Mixtures: the order of an epoch that draws from several groups of samples in a ratio.

A group is a dataset, or all samples with one label. Each has an order of its own, which continues from epoch to epoch
and begins again only when all its samples were drawn::

    position of the epoch --- the ratio ---> group, number of its draw --- the group's order ---> sample

Positions are divided by a table of one period: 3 : 1 has a period of four draws, ``A A B A``. So the draws of any
stretch of the order are in the ratio, up to about one draw for each group. Within short windows positions are shuffled,
because groups that follow each other in a fixed cycle would be batches of always the same groups.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cachetool.core.errors import UsageError
from cachetool.core.permutation import Permutation
from cachetool.core.text import shown
from cachetool.core.units import is_one_of
from cachetool.loaders.crop import hashed, uniforms
from cachetool.loaders.order import EpochOrder, Int64s, Shuffle

__all__ = [
    "DATASET",
    "MOST_DRAWS",
    "Group",
    "Member",
    "MixedOrder",
    "Mixture",
    "Shares",
    "Weights",
    "drawn",
    "length_of",
    "parse_mixture",
    "parse_weights",
    "shares",
]

DATASET = "__dataset__"
"""Name of the field that tells which dataset of a mixture a sample is of: its number, in the order of the mixture."""
Shares = tuple[int, ...]
"""Draws of each group in one period; 0 for a group that takes no part."""
Group = Int64s | range
"""The numbers of the items of a group."""

Weights = Mapping[Any, float]
"""A weight for each dataset, by the name that the loader was given."""


@dataclass(frozen=True, slots=True)
class Member:
    """A dataset of a mixture."""

    name: str
    """The name for messages and states."""
    root: str
    """Folder of the cache, or the first of the paths."""
    dataset: str | None = None
    paths: tuple[str, ...] = ()
    """Paths of shards outside of any cache."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The groups from which an epoch draws, and its length."""

    members: tuple[Member, ...] = ()
    """The datasets; empty if the groups are those of :attr:`balance`."""
    mix: str = "sample"
    """``sample`` or ``batch``: what comes from one dataset."""
    epoch_samples: int | None = None
    epoch_of: int | None = None
    """Number of the member that is read once in an epoch."""
    balance: str | None = None
    """Field whose values make the groups."""
    weights_by: tuple[tuple[int | str, float], ...] = ()
    """The weights of some values; other values have the weight 1."""
    sample_weights: str = ""
    """Digest of the weights of single samples, which are drawn by these."""

    @classmethod
    def from_json(cls, value: dict[str, Any] | None) -> Mixture | None:
        """Rebuild the value that ``dataclasses.asdict`` described."""
        if value is None:
            return None
        members = tuple(Member(**{**member, "paths": tuple(member["paths"])}) for member in value["members"])
        return cls(**{**value, "members": members, "weights_by": tuple(map(tuple, value["weights_by"]))})

    def weight_of(self, value: int | str) -> float:
        """Return the weight of a value of the field :attr:`balance`."""
        return dict(self.weights_by).get(value, 1.0)

    def length(self, ratio: Shares, items: Sequence[int], *, epoch: int = 0, batch: int = 1, whole: int = 1) -> int:
        """Return the number of samples of an epoch whose groups have so many ``items``, drawn ``batch`` at a time; a
        multiple of ``whole``.

        Raises :class:`UsageError` if the dataset that an epoch reads once takes no part.
        """
        samples = self._length(ratio, items, epoch if whole == 1 else 0, batch)
        # A remainder that is not read would be drawn in no epoch.
        return samples - samples % whole

    def _length(self, ratio: Shares, items: Sequence[int], epoch: int, batch: int) -> int:
        if self.epoch_samples is not None:
            return self.epoch_samples
        if self.epoch_of is None:
            return sum(items)
        if not ratio[self.epoch_of]:
            raise UsageError(
                f"epoch_of= names {shown(self.members[self.epoch_of].name)}, whose weight is 0 in this epoch; give it a"
                " weight, or use epoch_samples="
            )
        each = max(1, items[self.epoch_of] // batch)
        first, behind = (length_of(ratio, self.epoch_of, number * each) for number in (epoch, epoch + 1))
        return batch * (behind - first)

    def first(
        self, ratio: Shares, items: Sequence[int], samples: int, *, epoch: int, batch: int = 1, whole: int = 1
    ) -> int:
        """Return how many draws of the ratio come before an epoch of ``samples``, if all epochs before were alike.

        An epoch begins where the last one ended, in the middle of a period too. Otherwise a dataset of a small weight
        would be rounded away in each epoch.
        """
        if self.epoch_of is not None and whole == 1:
            return length_of(ratio, self.epoch_of, epoch * max(1, items[self.epoch_of] // batch))
        return epoch * -(-samples // batch)

    def state(self, batch_size: int) -> str:
        """Return the part that decides the order, as text for states."""
        values = {
            # Folders may have moved since, and their order tells which is which.
            "datasets": [member.dataset or "" for member in self.members],
            "batch_size": batch_size * (self.mix == "batch"),
            "mix": self.mix,
            "epoch_samples": self.epoch_samples,
            "epoch_of": self.epoch_of,
            "balance": self.balance,
            "weights_by": list(self.weights_by),
            "sample_weights": self.sample_weights,
        }
        return ", ".join(f"{name}={value!r}" for name, value in values.items() if value)


_PERIOD, _LONGEST_PERIOD = 2**17, 2**20
"""Most draws of a period of rounded weights, and the same for weights of which some are tiny beside others."""
MOST_DRAWS = 2**24
"""Most draws of a period: of many groups of equal weights each has one."""
_LARGE = 1e300
_ROUNDED = 1e-3
"""Largest error of rounding, as a part of a group's own share, with which the shorter period is used."""
_REPEATED = 2**11
"""Least draws after which the shuffled sequence of groups repeats. It is computed for each epoch."""
_WINDOW = 16
"""Least positions that are shuffled together. A ratio within 1 % over each 1,000 draws allows no more than this."""
_DENOMINATOR = 10**3
_ALIKE = 1e-9
"""Part by which two weights differ that are one: decimal numbers such as 0.1 have no exact binary form."""
_LONGEST = 2**32
"""Most samples of an epoch that repeats samples: the numbers of its steps must fit into memory."""
_SMALL = 2**12
"""Items of a group from which its order is computed by itself. Below, one call for all groups is faster: 256 draws from
1,000 groups take 2 ms instead of 58."""
_APART = 2**64
"""Distance of the seeds of the groups, more than that of seeds that users choose."""


def shares(weights: Sequence[float]) -> Shares:
    """Return whole numbers in the ratio of these weights, the smallest ones: 0.75 and 0.25 give 3 and 1.

    The weights are finite, 0 or more, and not all 0. If their ratio needs large numbers it is rounded, and a group of
    less than a millionth of all draws has a millionth of them.
    """
    if (exact := _exact(weights)) is not None:
        return exact
    there = np.array([weight > 0 for weight in weights])
    # Integers have no limit.
    parts = np.array([min(weight, _LARGE) for weight in weights], dtype=np.float64)
    parts = parts / parts.max()
    parts /= parts.sum()
    for period in (_PERIOD, _LONGEST_PERIOD):
        whole = np.where(there, np.maximum(1, np.rint(parts * period)), 0).astype(np.int64)
        error = np.abs(whole / whole.sum() - parts)[there]
        if (error <= _ROUNDED * parts[there]).all():
            break
    divisor = int(np.gcd.reduce(whole))
    return tuple((whole // divisor).tolist())


def _exact(weights: Sequence[float]) -> Shares | None:
    """Return the shares of weights whose ratio is one of small numbers; None for others."""
    least = min(weight for weight in weights if weight)
    common, found = 1, dict[float, Fraction]()
    for weight in weights:
        if weight not in found:
            if (fraction := _near(weight, least)) is None:
                return None
            found[weight] = fraction
            common = math.lcm(common, fraction.denominator)
            if common > _LONGEST_PERIOD:
                return None
    whole = [int(found[weight] * common) for weight in weights]
    divisor = math.gcd(*whole)
    whole = [one // divisor for one in whole]
    # Many groups of one weight have a long period without large numbers.
    return tuple(whole) if sum(whole) <= max(_PERIOD, len(whole)) else None


def _near(weight: float, least: float) -> Fraction | None:
    """Return the fraction of small numbers that a weight is of another one, such as 7 for 0.7 and 0.1; None if there is
    none."""
    if isinstance(weight, int) and isinstance(least, int):
        return Fraction(weight, least)
    if weight > _LARGE or not (times := weight / least) < _LONGEST_PERIOD:
        return None
    fraction = Fraction(times).limit_denominator(_DENOMINATOR)
    return fraction if abs(float(fraction) - times) <= _ALIKE * times else None


@functools.lru_cache(maxsize=8)
def _table(ratio: Shares) -> Int64s:
    """Return the group of each draw of a period, (period,)."""
    counts = np.array(ratio, dtype=np.int64)
    groups = np.repeat(np.arange(len(counts)), counts)
    draws = _counted(groups, len(counts))
    # Draw j of a group stands where an even distribution puts it. Stable, so that equal groups come in their order.
    at = np.argsort((draws + 0.5) / counts[groups], kind="stable")
    table: Int64s = groups[at]
    return table


def drawn(ratio: Shares, draws: int) -> Int64s:
    """Return how many of the first ``draws`` draws each group has, (groups,)."""
    table = _table(ratio)
    periods, more = divmod(draws, len(table))
    counts: Int64s = periods * np.array(ratio, dtype=np.int64) + np.bincount(table[:more], minlength=len(ratio))
    return counts


def length_of(ratio: Shares, group: int, items: int) -> int:
    """Return a number of draws of which ``group`` has ``items``, the nearest to the ratio. The group takes part."""
    if items == 0:
        return 0
    table = _table(ratio)
    at = np.flatnonzero(table == group)

    def place(draw: int) -> int:
        periods, more = divmod(draw, ratio[group])
        return periods * len(table) + int(at[more])

    exact = round(Fraction(items * len(table), ratio[group]))
    return min(max(exact, place(items - 1) + 1), place(items))


def parse_weights(given: object, names: Sequence[Any], *, what: str) -> Shares:
    """Return the weights of datasets as shares, in the order of ``names``.

    Raises :class:`UsageError` for a name that is not among them, and for numbers that are no weights.
    """
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} is {shown(given)}, not a dict of datasets and their weights")
    if missing := [name for name in names if name not in given]:
        raise UsageError(f"{what} has no weight for {shown(missing[0])}; give one for each dataset, 0 to leave it out")
    if others := [name for name in given if name not in names]:
        raise UsageError(f"{what} names {shown(others[0])}; the datasets are {', '.join(map(str, names))}")
    weights = [parse_weight(given[name], what=f"{what}: the weight of {shown(name)}") for name in names]
    if not any(weights):
        raise UsageError(f"{what} has only weights of 0; give at least one dataset a weight")
    return shares(weights)


def parse_weight(value: object, *, what: str) -> float:
    """Return a weight: an int, or a float. Raises :class:`UsageError`."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UsageError(f"{what} is {shown(value)}; use a number of 0 or more")
    return value


def parse_mixture(
    given: object,
    *,
    cache: object,
    mix: object,
    epoch_samples: int | None,
    epoch_of: object,
    balance: object,
    weights_by: object,
    sample_weights: str,
    located: Callable[[Any, str | None], tuple[Path, tuple[Path, ...]]],
) -> Mixture | None:
    """Return these arguments of a loader in their one form; None if samples are not drawn in a ratio.

    ``given`` is the first argument of the loader, a dict for a mixture. ``located`` finds a cache or plain files.
    Raises :class:`UsageError`.
    """
    if not is_one_of(mix, ("sample", "batch")):
        raise UsageError(f"mix={shown(mix)} cannot be used; it must be 'sample' or 'batch'")
    if epoch_samples is not None and epoch_samples > _LONGEST:
        raise UsageError(f"epoch_samples={epoch_samples} is too large; an epoch has at most {_LONGEST} samples")
    if not isinstance(given, Mapping):
        for name, value in {"cache": cache, "epoch_of": epoch_of}.items():
            if value is not None:
                raise UsageError(f"{name}={shown(value)} needs a mixture: a dict of datasets and their weights, first")
        if mix != "sample":
            raise UsageError("mix='batch' needs a mixture: a dict of datasets and their weights, first")
        return _balanced(balance, weights_by, epoch_samples, sample_weights)
    for name, value in {"balance": balance, "weights_by": weights_by, "sample_weights": sample_weights or None}.items():
        if value is not None:
            raise UsageError(f"{name}= and a mixture both choose how often a sample is drawn; leave one of them out")
    if epoch_samples is not None and epoch_of is not None:
        raise UsageError("epoch_samples= and epoch_of= both choose the length of an epoch; leave one of them out")
    if not given:
        raise UsageError("the mixture is empty; name datasets and their weights, such as {'sim': 3, 'obs': 1}")
    names = list(given)
    # Types first: comparing an array has no truth value.
    if epoch_of is not None and not any(type(name) is type(epoch_of) and name == epoch_of for name in names):
        raise UsageError(f"epoch_of={shown(epoch_of)} is no dataset of the mixture, which has {_listed(names)}")
    members = [_member(name, cache, located) for name in names]
    for number, one in enumerate(members):
        if any(
            (one.root, one.dataset, one.paths) == (each.root, each.dataset, each.paths) for each in members[:number]
        ):
            raise UsageError(f"{shown(one.name)} is in the mixture twice; give it one weight")
    return Mixture(tuple(members), str(mix), epoch_samples, None if epoch_of is None else names.index(epoch_of))


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(shown(name) for name in names)


def _member(name: Any, cache: object, located: Callable[[Any, str | None], tuple[Path, tuple[Path, ...]]]) -> Member:
    if cache is not None:
        if not isinstance(name, str):
            raise UsageError(f"{shown(name)} is no name of a dataset; with cache= a mixture names its datasets")
        root, paths = located(cache, name)
        return Member(name, str(root), name, tuple(map(str, paths)))
    place, dataset = name if isinstance(name, tuple) and len(name) == 2 else (name, None)
    if not isinstance(place, str | Path) or not isinstance(dataset, str | None):
        raise UsageError(
            f"{shown(name)} is no dataset of a mixture; use the name of a dataset with cache=, or a folder of a cache"
            " or of files, or a pair of a folder and a dataset"
        )
    root, paths = located(place, dataset)
    return Member(str(place) if dataset is None else f"{place}:{dataset}", str(root), dataset, tuple(map(str, paths)))


def _balanced(balance: object, weights_by: object, epoch_samples: int | None, sample_weights: str) -> Mixture | None:
    if sample_weights:
        for name, value in {"balance": balance, "weights_by": weights_by}.items():
            if value is not None:
                raise UsageError(
                    f"{name}= and sample_weights= both choose how often a sample is drawn; leave one of them out"
                )
        return Mixture(epoch_samples=epoch_samples, sample_weights=sample_weights)
    if balance is None:
        if weights_by is not None:
            raise UsageError(f"weights_by={shown(weights_by)} needs balance=, the name of a field")
        if epoch_samples is not None:
            raise UsageError(
                f"epoch_samples={epoch_samples} needs balance=, sample_weights=, or a mixture: a dict of datasets and"
                " their weights"
            )
        return None
    if not isinstance(balance, str):
        raise UsageError(f"balance={shown(balance)} cannot be used; it must be the name of a field")
    if weights_by is not None and not isinstance(weights_by, Mapping):
        raise UsageError(f"weights_by={shown(weights_by)} cannot be used; use a dict of values and their weights")
    weights = {}
    for value, weight in (weights_by or {}).items():
        value = value.item() if isinstance(value, np.generic) else value
        if not isinstance(value, int | str):
            raise UsageError(f"weights_by= cannot name {shown(value)}; use whole numbers or text")
        weights[int(value) if isinstance(value, int) else value] = parse_weight(
            weight, what=f"weights_by=: the weight of {shown(value)}"
        )
    return Mixture(epoch_samples=epoch_samples, balance=balance, weights_by=tuple(weights.items()))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = np.arange(1, 7, dtype=np.uint64) * _GOLDEN
"""The numbers that are added to a key, one for each round."""


def permuted(at: Int64s, sizes: Int64s, *, key: int, of: Sequence[Int64s]) -> Int64s:
    """Return the places ``at``, each below its number of ``sizes``, in permutations of ``0 .. size - 1``.

    Places whose numbers in all arrays of ``of`` are equal are of one permutation. It is that of
    :mod:`cachetool.core.permutation`, a Feistel network with cycle walking, computed for many permutations at once: a
    mixture may have a thousand groups of a few samples, and passes over each.
    """
    keys = np.full(len(at), key, dtype=np.uint64)
    for numbers in of:
        keys = hashed(keys + (numbers.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    half = np.ones(len(at), dtype=np.uint64)
    for bits in range(1, 21):
        half += (sizes > 4**bits).astype(np.uint64)
    mask = (np.uint64(1) << half) - np.uint64(1)
    value = at.astype(np.uint64)
    walking = np.arange(len(at))
    while len(walking):
        here, lower = value[walking], mask[walking]
        left, right = here >> half[walking], here & lower
        for number in _ROUNDS:
            left, right = right, left ^ (hashed(right + keys[walking] + number) & lower)
        value[walking] = (left << half[walking]) | right
        walking = walking[value[walking] >= sizes[walking].astype(np.uint64)]
    return value.astype(np.int64)


def _in_windows(groups: Int64s, window: int, keys: npt.NDArray[np.float64]) -> Int64s:
    """Return the groups shuffled by random ``keys`` within windows, all (k,)."""
    # The numbers of windows are the whole parts.
    shuffled: Int64s = groups[np.argsort(keys + np.arange(len(groups)) // window)]
    return shuffled


def _counted(groups: Int64s, count: int) -> Int64s:
    """Return, for each entry, how many equal ones are before it, (k,); all are below ``count``."""
    order = np.argsort(groups.astype(np.int32), kind="stable")
    of_each = np.bincount(groups, minlength=count)
    numbers = np.empty_like(groups)
    numbers[order] = np.arange(len(groups)) - np.repeat(np.cumsum(of_each) - of_each, of_each)
    return numbers


class MixedOrder:
    """The order of an epoch that draws from groups: ``order[positions]`` returns the numbers of the items at these
    positions; both int64, (k,).

    Args:
        groups: The items of each group; none is empty that has a share.
        ratio: The share of each group.
        samples: Number of positions of the epoch, of all ranks together.
        shuffle: Order of the items of a group.
        seed: Decides the order, together with the epoch.
        epoch: Number of the epoch.
        first: Number of draws in the epochs before. Each group continues there, if it was drawn from in the same ratio.
        batch: Number of draws that stay together in one group, which then begin at multiples of it.
        nbytes: Known size of a sample, for ``shuffle="window"``.
    """

    window = 0
    """There are no windows that a disk reads as a whole."""

    def __init__(
        self,
        groups: Sequence[Group],
        ratio: Shares,
        samples: int,
        *,
        shuffle: Shuffle = "full",
        seed: int = 0,
        epoch: int = 0,
        first: int = 0,
        batch: int = 1,
        nbytes: int = 0,
    ) -> None:
        self._groups, self._seed, self._batch = groups, seed, batch
        self._shuffle, self._nbytes = shuffle, nbytes
        self._sizes = np.array([len(group) for group in groups], dtype=np.int64)
        self._key = int.from_bytes(hashlib.sha256(f"cachetool mixture {seed}".encode()).digest()[:8], "little")
        self._orders: dict[tuple[int, int], EpochOrder | Permutation] = {}
        cells = -(-samples // batch)
        """Number of draws of the ratio."""
        table = _table(ratio)
        periods = -(-_REPEATED // len(table))
        self._turn = periods * len(table)
        """Draws after which the shuffled sequence of groups repeats."""
        self._whole, rest = divmod(cells, self._turn)
        """Number of whole turns of the epoch. What follows is shuffled by itself, because it is shorter."""
        self._begins = self._turn if self._whole else 0
        """Index of the last turn in the following two arrays."""
        table = np.roll(table, -(first % len(table)))
        turns = [np.resize(table, self._begins), np.resize(table, rest)]
        if shuffle != "no":
            window = max(_WINDOW, 4 * len(groups))
            keys = uniforms(np.arange(self._begins + rest), 1, of="mixture", seed=seed, epoch=epoch)[:, 0]
            of_each = np.split(keys, [self._begins])
            turns = [_in_windows(turn, window, of_turn) for turn, of_turn in zip(turns, of_each, strict=True)]
        self._of = np.concatenate(turns)
        """Group of each draw of a turn, and of each draw of the last one."""
        self._number = np.concatenate([_counted(turn, len(groups)) for turn in turns])
        """Number of each of these draws among those of its group."""
        self._each = periods * np.array(ratio, dtype=np.int64)
        """Draws of each group in a turn."""
        self._before = batch * drawn(ratio, first)
        """Draws of each group in the epochs before."""

    def __getitem__(self, positions: Int64s) -> Int64s:
        cells = positions if self._batch == 1 else positions // self._batch
        turns, at = np.divmod(cells, self._turn)
        at += self._begins * (turns == self._whole)
        groups = self._of[at]
        draws = self._number[at] + turns * self._each[groups]
        if self._batch > 1:
            draws = draws * self._batch + positions % self._batch
        draws += self._before[groups]
        sizes = self._sizes[groups]
        passes, within = np.divmod(draws, sizes)
        if self._shuffle == "full" and len(small := np.flatnonzero(sizes < _SMALL)):
            few = groups[small]
            within[small] = permuted(within[small], sizes[small], key=self._key, of=(few, passes[small]))
        out = np.empty_like(positions)
        for group in np.flatnonzero(np.bincount(groups)).tolist():
            here, items = np.flatnonzero(groups == group), self._groups[group]
            those = within[here]
            if self._shuffle == "window" or (self._shuffle == "full" and len(items) >= _SMALL):
                those = self._ordered(group, passes[here], those)
            out[here] = those + items.start if isinstance(items, range) else items[those]
        return out

    def _ordered(self, group: int, passes: Int64s, at: Int64s) -> Int64s:
        """Return the items at these places of the orders of one group, of one pass or several."""
        first, last = int(passes.min()), int(passes.max())
        if first == last:
            return self._order(group, first)[at]
        out = np.empty_like(at)
        for number in np.unique(passes).tolist():
            here = np.flatnonzero(passes == number)
            out[here] = self._order(group, number)[at[here]]
        return out

    def _order(self, group: int, number: int) -> EpochOrder | Permutation:
        """Return the order of a group in one pass."""
        if (order := self._orders.get((group, number))) is None:
            size = len(self._groups[group])
            if self._shuffle == "window":
                seed = self._seed + _APART * group
                order = EpochOrder(size, shuffle="window", seed=seed, epoch=number, nbytes=self._nbytes)
            else:
                # Named by the group: groups of one size would otherwise have one order, and their samples pair up.
                order = Permutation(size, seed=self._seed, pass_number=number, part=f"group {group}")
            if len(self._orders) > 2 * len(self._groups):
                self._orders.clear()
            self._orders[group, number] = order
        return order
