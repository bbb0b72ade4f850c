"""The base of the loaders of all frameworks: arguments, epochs, lengths, and state.

The arguments of a loader are checked once, and kept as :class:`~cachetool.loaders.settings.Settings`. Each ``iter()``
begins an epoch, whose batches a feed makes.

A trainer may ask for the length once and then take that many batches of every epoch. It then trains only a part of a
growing cache, without any error. :class:`Lengths` detects this, because an epoch is left exactly where another epoch
would have ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from cachetool.cache import CacheDir
from cachetool.cache.forking import members
from cachetool.core.closing import Closing
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.core.schema import names_of
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_duration, parse_flag, parse_text, parse_whole
from cachetool.loaders.crop import Corner, CropOption, OffsetsOption, parse_crop, parse_offsets
from cachetool.loaders.decode import DecodeOption, parse_decode
from cachetool.loaders.epoch import Epoch, Progress
from cachetool.loaders.feed.processes import Processes
from cachetool.loaders.feed.protocol import Feed, Ratios
from cachetool.loaders.feed.transform import Function, Functions, dumps
from cachetool.loaders.fixed_epochs import FixedEpochs
from cachetool.loaders.mixture import Shares, Weights, parse_mixture, parse_weights
from cachetool.loaders.order import SHUFFLES, Steps, parse_epoch
from cachetool.loaders.other_names import OF_LOADERS, answering
from cachetool.loaders.padding import PadOption, VarlenOption, parse_pad
from cachetool.loaders.ranks import given, launched, on_node
from cachetool.loaders.ring.memory import MOST_KEPT
from cachetool.loaders.ring.slot import Batch
from cachetool.loaders.sample_weights import SampleWeights, parse_sample_weights
from cachetool.loaders.selection import WhereOption, parse_where
from cachetool.loaders.settings import Settings, where_dict
from cachetool.loaders.snapshots.follow import launched_run, subscribe
from cachetool.loaders.snapshots.plain_files import located
from cachetool.loaders.snapshots.resume import SAVED, STATE, require_same, require_state
from cachetool.loaders.snapshots.waiting import say
from cachetool.loaders.split import parse_split
from cachetool.loaders.waits import Report

__all__ = ["BaseLoader", "CacheOrPaths", "Lengths", "parse_arguments"]

_LEAST = {"batch_size": 1, "seed": None, "workers": 0}


def parse_arguments(cache_or_paths: Any, options: Mapping[str, Any]) -> tuple[Settings, int | None, int]:
    """Return the settings of a loader, its ``steps=`` and its ``workers=``.

    ``options`` has the keyword arguments of :class:`cachetool.loaders.numpy.Loader`. The settings are those of the only
    process of a run; :meth:`BaseLoader._placed` adds rank, world size and run later. Raises :class:`UsageError`, which
    names the argument and its value.
    """
    values = dict(options)
    for name, least in _LEAST.items():
        values[name] = parse_whole(values[name], what=f"{name}=", least=least)
    for name in ("prefetch", "steps", "epochs", "min_samples", "epoch_samples"):
        if values[name] is not None:
            values[name] = parse_whole(values[name], what=f"{name}=", least=None if name == "prefetch" else 1)
    for name in ("drop_last", "verify", "concurrent"):
        values[name] = parse_flag(values[name], what=f"{name}=")
    for name in ("wait", "hold"):
        values[name] = parse_duration(values[name], what=f"{name}=")
    values["validation"] = parse_split(values["split"], values["validation"])
    values["where"] = parse_where(values["where"])
    values["decode"] = parse_decode(values["decode"])
    values["pad"], values["varlen"] = parse_pad(values["pad"], values["varlen"])
    cutting = [values.pop(name) for name in ("crop", "crops", "stride", "corner", "crop_pad")]
    values["crop"], values["offsets"] = parse_crop(*cutting), parse_offsets(values["offsets"])
    _check(values)
    for place in (cache_or_paths, values["cache"]):
        if isinstance(place, CacheDir):
            # Feeders open the cache by its folder, so the cap of this open cache must be on the disk before they start.
            place.settle_cap()
    names = ("cache", "mix", "epoch_samples", "epoch_of", "balance", "weights_by", "sample_weights")
    values["sample_weights"] = "" if values["sample_weights"] is None else values["sample_weights"].digest
    mixture = parse_mixture(cache_or_paths, **{name: values.pop(name) for name in names}, located=located)
    values["mixture"] = mixture
    if mixture is None or not mixture.members:
        root, paths = located(cache_or_paths, values["dataset"])
    elif values["dataset"] is not None:
        raise UsageError(f"dataset={shown(values['dataset'])} cannot be used in a mixture, which names its datasets")
    else:
        root, paths = Path(mixture.members[0].root), ()
    values["min_each"] = values["min_samples"] is None
    if values["min_each"]:
        # A validation side or a selection may be smaller than one batch for ever, so a loader that waited for a whole
        # batch would never begin.
        may_be_few = values["split"] == "validation" or values["where"] is not None or bool(values["offsets"])
        values["min_samples"] = 1 if may_be_few else values["batch_size"]
    values |= {
        "root": str(root),
        "paths": tuple(map(str, paths)),
        "fields": None if values["fields"] is None else names_of(values["fields"]),
        "shuffle": SHUFFLES[values["shuffle"]],
        "rank": 0,
        "world_size": 1,
        "node": (0, 1),
    }
    settings = Settings(**{name: values[name] for name in Settings.__dataclass_fields__})
    if settings.fields and not settings.stored_fields:
        raise UsageError(f"fields={shown(list(settings.fields))} has no field of the dataset; add at least one")
    return settings, values["steps"], values["workers"]


def _check(values: Mapping[str, Any]) -> None:
    _require(is_one_of(values["shuffle"], SHUFFLES), "shuffle", values["shuffle"], "'full', 'window' or False")
    prefetch = values["prefetch"]
    _require(prefetch is None or 1 <= prefetch <= MOST_KEPT, "prefetch", prefetch, f"1 to {MOST_KEPT} batches")
    transform_each, transform = values["transform_each"], values["transform"]
    _require(is_one_of(transform_each, ("sample", "batch")), "transform_each", transform_each, "'sample' or 'batch'")
    _require(transform is None or callable(transform), "transform", transform, "a function")
    dataset, run = values["dataset"], values["run"]
    _require(dataset is None or (isinstance(dataset, str) and dataset != ""), "dataset", dataset, "a name")
    _require(run is None or isinstance(run, str), "run", run, "a name")
    for name in ("dataset", "run"):
        if values[name] is not None:
            parse_text(values[name], what=f"{name}=")
    missing = values["missing"]
    _require(is_one_of(missing, ("error", "skip")), "missing", missing, "'error' or 'skip'")


def _require(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise UsageError(f"{name}={shown(value)} cannot be used; it must be {wanted}")


_KEPT = 64
"""Number of epochs whose lengths are remembered."""


class Lengths:
    """The lengths that ``len()`` of one loader returned, and a check that no epoch is left at the length of another."""

    def __init__(self) -> None:
        self._by_epoch: dict[int, int] = {}
        self._warned = False
        # The loader has it too. This object is checked when the loader is collected, so it must not refer to the
        # loader, which would then never be collected.
        self.progress: Progress | None = None
        """Progress of the epoch that was begun last."""

    def tell(self, epoch: int, length: int) -> int:
        """Remember that ``len()`` returned ``length`` for this epoch, and return it."""
        # Removed and inserted anew, so that the epochs that were asked for last are kept.
        self._by_epoch.pop(epoch, None)
        self._by_epoch[epoch] = length
        if len(self._by_epoch) > _KEPT:
            del self._by_epoch[next(iter(self._by_epoch))]
        return length

    def forget(self) -> None:
        """Forget all lengths.

        An integration that asks for the length of each epoch calls this first, because an epoch that is left at an
        older length is then left on purpose: by early stopping, or at a number of steps.
        """
        self._by_epoch.clear()

    def check(self) -> None:
        """Print one line to stderr, once and on rank 0, if the epoch begun last was left at the length of another
        epoch.

        Called when the next epoch begins, when the loader is closed, and at the latest when it is collected or the
        process ends.
        """
        progress, self.progress = self.progress, None
        if progress is None or self._warned or not progress.left or progress.feed.pid != os.getpid():
            return
        # All ranks leave an epoch at the same step, so one line by rank 0 is enough.
        if progress.begun.steps.rank:
            return
        epoch, reached = progress.begun.epoch, progress.before + progress.step
        others = [number for number, length in self._by_epoch.items() if length == reached and number != epoch]
        if not others or self._by_epoch.get(epoch) == reached:
            return
        self._warned = True
        say(
            f"epoch {epoch} ended after {reached} of {progress.before + progress.steps} batches, because the trainer"
            f" kept the length of epoch {others[-1]}, so samples added since then are not trained; use"
            " loader.epochs_of(steps=N), or see the page of this trainer in docs/README.md"
        )


T = TypeVar("T")
CacheOrPaths: TypeAlias = CacheDir | str | Path | Sequence[str | Path]
"""An open cache, its folder, or one or several shards outside of any cache."""
SampleWeightsOption: TypeAlias = Mapping[Any, float] | tuple[Sequence[Any], Any]
"""Weights of samples by their keys: a dict, or a pair of keys and weights."""


class BaseLoader(Closing, ABC, Generic[T]):
    """The base class of all loaders: the batches of a cache, epoch by epoch.

    ``iter(loader)`` begins an epoch, which reads every sample of one snapshot of the cache once. Feeder processes make
    the batches in shared memory. A loader is a context manager; :meth:`close` stops its feeders.

    Args:
        cache_or_paths: The samples: an open cache, or the folder of a cache. Or files outside any cache, which take no
            lease: a folder that ``cachetool convert --out`` wrote, one of its files, or a list of such folders and
            files. Or a mixture, a dict of datasets and their weights: with ``cache`` names of its datasets, otherwise
            such folders, or pairs of the folder of a cache and a dataset. An epoch draws from each dataset in the ratio
            of the weights, without repeats until it is through.
        batch_size: Most samples in one batch of one rank; 1 or more.
        fields: The name of a field, or a list of names: the fields of a batch, in this order. Default: all fields of
            the dataset.
        shuffle: ``"full"`` or True: another random order in each epoch. ``"window"``: a random order in which
            neighbouring samples are read together, which is faster for small samples on a cold disk. False: the order
            in which the samples arrived in the cache. Default: ``"full"``.
        seed: Whole number that decides the random order, together with the number of the epoch and its snapshot.
            Default: 0.
        drop_last: True: every batch has ``batch_size`` samples, and the remainder is left out. False: the sizes of the
            batches of an epoch differ by at most one sample; when fewer samples than ranks are left, some of the last
            batches are empty. Default: False.
        rank: Number of this process among those that divide the samples, from 0. Give it together with ``world_size``.
            Default: the environment variables ``RANK`` and ``WORLD_SIZE``, read when an epoch begins or is counted;
            without them 0 of 1. A cache that holds one node's share of its source is then divided by the ranks of that
            node only.
        world_size: Number of processes that divide the samples. No sample goes to two of them, and all take the same
            number of steps. Default: see ``rank``.
        steps: Most batches in one epoch, 1 or more; batches delivered before a resume count. Default: all batches of
            the snapshot.
        workers: Number of feeder processes. 0: ``next()`` makes the batch in the calling process. Default: 2.
        prefetch: Batches that each feeder keeps ready, 1 to 8192, including the batch in use; a feeder keeps at
            least 2. Default: 96 MiB of batches in all feeders together, at least 12 MiB and at most 128 batches in
            each; up to four times as many when the training loop has to wait again and again.
        transform: A function from one sample, a dict, to another dict. The feeders call it. If the function has a
            parameter ``rng``, it gets a ``numpy.random.Generator`` that ``seed``, epoch and sample decide. The first
            result fixes the fields, dtypes and shapes. Default: none.
        transform_each: ``"sample"``: ``transform`` gets one sample. ``"batch"``: it gets a dict of columns, arrays of
            shape (k, *shape). Default: ``"sample"``.
        decode: Fields that the feeders decode, before ``transform``: a dict from the name of a field to a decoder.
            ``"jpeg"``, or :class:`JPEG` with a size, a crop and a flip: bytes of an image; needs the extra ``image``.
            ``"cf"``: numbers with CF attributes such as ``scale_factor`` become the values they stand for, with NaN
            where one is missing; float32, or float64 if stored integers have more than 16 bits or floats 64; times
            become datetime64[ns]. The string ``"cf"`` in place of a dict decodes all fields with CF attributes.
            Default: none.
        crop: Boxes that are cut out of the samples: a dict from the name of a field to the sizes of its boxes, such as
            ``{"volume": (64, 64, 64)}``; None as a size keeps a whole axis. The epoch then counts, shuffles and divides
            crops, and a batch has the first elements of the boxes as ``NAME_corner``, int64 of shape (k, rank). Fields
            of one shape with boxes of one shape get the same corners. Default: samples as a whole.
        crops: Number of random boxes of each sample in each epoch, or ``"grid"``: boxes side by side that cover each
            sample; the last box of an axis ends where the sample ends. Default: 1.
        stride: Distance of the boxes of a grid, a number or one for each axis. Default: the sizes of the box.
        corner: A function that chooses the corners in place of chance. It gets a sample, whose fields are read when
            they are asked for, and a ``numpy.random.Generator``, and returns the first element of the box, one number
            for each axis; a box that would reach outside is moved inside. The feeders call it. Default: none.
        crop_pad: How a sample that is smaller than its box is filled up behind its end: a number, ``"reflect"`` or
            ``"edge"``. Default: such a sample is an error.
        offsets: Fields of which a batch has the values of neighbouring samples: a dict from the name of a field to
            numbers of rows, such as ``{"t2m": (-2, -1, 0, 1)}``; t2m then has the shape (k, 4, *shape). The last number
            in ``__key__`` tells which samples are neighbours, and the text around it which series they are of. A sample
            that lacks a neighbour in the cache is left out. Other fields are those of the sample itself. With
            ``split``, runs of 128 rows go to one side. Default: none.
        pad: Pad ragged fields to the longest sample of each batch: a dict from the name of a field to the number that
            fills it up, or to a :class:`~cachetool.loaders.padding.Pad`. The batch then has an array of shape
            (k, longest) and the lengths as ``NAME_length``. ``transform`` gets and returns samples without padding.
            Example: ``{"tokens": 0}``. Default: ragged fields stay ragged.
        varlen: Names of ragged fields that the batch has for attention without padding: the values of all samples as
            one array, ``NAME_offsets`` (int32, from 0, of shape (k + 1,)) and ``NAME_longest``, an int. Default: none.
        dataset: Name of the dataset of the cache. Default: ``"default"``, or the only dataset. Not for files outside a
            cache.
        run: Name of the training run, the same on all its ranks, which then share snapshots. Default: a name from the
            environment of torchrun or Slurm.
        split: ``"train"`` or ``"validation"``: read only this side of the samples. A hash of ``__key__`` decides the
            side, so a sample never changes sides. Default: all samples.
        validation: Share of the samples on the validation side, between 0 and 1, or text such as ``"10%"``. Needs
            ``split``. Default: 5 %.
        where: Read only samples with these values: a dict from the name of a field to a number, a text, or a set, list
            or range of them. All fields must match. Example: ``{"label": {0, 1}}``. Default: all samples.
        min_samples: Samples that must be in the cache before the first epoch begins. Default: ``world_size`` x
            ``batch_size``; with ``split="validation"``, ``where`` or ``offsets``: ``world_size``.
        wait: Longest time to wait for ``min_samples``, in seconds or as text such as ``"10min"``. Default: 600.
        hold: Time for which the snapshot of the next epoch stays leased after the present epoch ended or its loop was
            left, in seconds or as text. Default: 60.
        epochs: Number of epochs after which no further snapshot is taken in advance. Default: no limit.
        missing: For a resumed epoch of which shards were evicted: ``"error"`` raises an error, ``"skip"`` leaves their
            samples out. Default: ``"error"``.
        verify: True: the feeders compare every value with the checksum that was stored with it. Default: False.
        concurrent: True: an iterator continues when the loader is iterated again, and each thread may have its own
            epoch; each further iterator has its own feeders. False: older iterators end with an error. Default: False.
        cache: The cache whose datasets a mixture names. Default: none.
        mix: ``"sample"``: a batch has samples of all datasets of a mixture. ``"batch"``: each batch has
            ``batch_size`` samples of one dataset. Default: ``"sample"``.
        epoch_samples: Number of samples in an epoch of a mixture, of ``balance`` or of ``sample_weights``, on all ranks
            together. Default: as many samples as all datasets have.
        epoch_of: The dataset of a mixture that an epoch reads once, as it is named in the dict. Default: none.
        weights: A function that gives the weights of a mixture for the number of an epoch, a dict. Default: the weights
            of the first argument in all epochs.
        balance: A field of text or whole numbers: draw each of its values equally often. Default: none.
        weights_by: Weights of some values of the field ``balance``; other values have the weight 1. Default: none.
        sample_weights: Weights of samples by their keys, a dict, or a pair of keys and weights: draw a sample as often
            as its weight says. A batch then has ``__weight__``, float32 of shape (k,), the mean weight divided by that
            of the sample. A sample without a weight has the mean weight. Default: each sample once.

    Raises:
        UsageError: An argument cannot be used; there is no such cache, dataset or field; or too few samples arrived
            within ``wait`` seconds (raised by ``iter()`` or ``len()``).
        CorruptError: Stored bytes do not match their layout or, with ``verify``, their checksum (raised while
            iterating).
    """

    @answering(OF_LOADERS)
    def __init__(
        self,
        cache_or_paths: CacheOrPaths | Weights,
        *,
        batch_size: int,
        fields: str | Sequence[str] | None = None,
        shuffle: str | bool = "full",
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        steps: int | None = None,
        workers: int = 2,
        prefetch: int | None = None,
        transform: Function | None = None,
        transform_each: str = "sample",
        decode: DecodeOption | None = None,
        crop: CropOption | None = None,
        crops: int | str | None = None,
        stride: int | Sequence[int] | None = None,
        corner: Corner | None = None,
        crop_pad: float | str | None = None,
        offsets: OffsetsOption | None = None,
        pad: PadOption | None = None,
        varlen: VarlenOption | None = None,
        dataset: str | None = None,
        run: str | None = None,
        split: str | None = None,
        validation: float | str | None = None,
        where: WhereOption | None = None,
        min_samples: int | None = None,
        wait: float | str = 600.0,
        hold: float | str = 60.0,
        epochs: int | None = None,
        missing: str = "error",
        verify: bool = False,
        concurrent: bool = False,
        cache: CacheDir | str | Path | None = None,
        mix: str = "sample",
        epoch_samples: int | None = None,
        epoch_of: Any = None,
        weights: Callable[[int], Weights] | None = None,
        balance: str | None = None,
        weights_by: Mapping[Any, float] | None = None,
        sample_weights: SampleWeightsOption | None = None,
    ) -> None:
        self._sample_weights = parse_sample_weights(sample_weights)
        options = {**locals(), "sample_weights": self._sample_weights}
        self._settings, self._limit, self._workers = parse_arguments(cache_or_paths, options)
        self._names = list(cache_or_paths) if isinstance(cache_or_paths, Mapping) else []
        """The datasets of a mixture, as the caller named them."""
        self._weights: Weights | Callable[[int], Weights] | None = None
        if isinstance(cache_or_paths, Mapping):
            self.weights = cache_or_paths
        if weights is not None:
            if not self._names or not callable(weights):
                raise UsageError(
                    f"weights={shown(weights)} cannot be used; it must be a function of the epoch, for a mixture"
                )
            self._weights = weights
        self._given = given(rank, world_size)
        self._here: tuple[int, Settings] | None = None
        """Process id, and the settings with the rank and world size of that process."""
        self._fed_with: Settings | None = None
        self._functions = Functions(transform, corner, self._sample_weights)
        self._concurrent, self._claim = concurrent, threading.Lock()
        self._home: threading.Thread | None = None
        # Serialised in the constructor, so that a function that cannot be sent to the feeders raises its error here,
        # and not at the first epoch.
        self._sent = b"" if self._workers == 0 else dumps(self._functions)
        self._epoch, self._chosen = 0, False
        self._feed: Feed | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        # A weak reference, so that an iterator that the user forgets is collected, and its lease ends after hold=
        # seconds.
        self._latest: weakref.ref[Epoch[T]] | None = None
        self._progress: Progress | None = None
        self._report: Report | None = None
        """The report of the epoch that ended last."""
        """Progress of the epoch that was begun last."""
        self._resume: dict[str, Any] | None = None
        self._taken = self._resumed = 0
        """Number of batches of the epoch to resume that were delivered before, and number of that epoch."""
        self._loaded = False
        """True if a state was loaded and no epoch was begun since."""
        self._last = self._others = -1
        """Number of the epoch that was begun last, and number of the last one that ran beside another."""
        self._beside: weakref.WeakSet[Epoch[T]] = weakref.WeakSet()
        self._lengths = Lengths()
        # A trainer may never close its loader. The finalizer prints the line at the latest when the process ends.
        weakref.finalize(self, self._lengths.check)

    # -- what a framework adds -----------------------------------------------------------------------------------------

    def _world(self) -> tuple[int, int]:
        """Return rank and world size of this process, looked up at each call."""
        return self._given or launched()

    def _shared_run(self) -> str | None:
        """Return a name of the run that all its processes have, if the launcher gave none."""
        return None

    @property
    def _collective(self) -> bool:
        """True if all ranks agree on the steps of an epoch, and so must begin the same epochs."""
        return False

    def _agreed(self, steps: int) -> int:
        """Return the number of steps that all ranks take if this rank could take ``steps``."""
        return steps

    @abstractmethod
    def _finish(self, batch: Batch) -> T:
        """Return the batch in the form of the framework."""

    # -- what trainers read --------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Most samples in one batch of one rank."""
        return self._settings.batch_size

    @property
    def drop_last(self) -> bool:
        """True if every batch has exactly ``batch_size`` samples."""
        return self._settings.drop_last

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that the numbers of the field ``label`` stand for: name i belongs to number i.

        ``pull --label-from-folder int`` stores these names. Empty if no field has names.
        """
        place = [Path(path) for path in self._settings.paths] or self._settings.root
        subscription = subscribe(place, dataset=self._settings.dataset, run=None)
        try:
            return subscription.now().schema.classes
        finally:
            subscription.close()

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0.

        Every epoch that was delivered whole or left with ``break`` counts. The next ``iter()`` begins this epoch, or
        the following one if this epoch was left. Set this attribute to choose the epoch that begins next.
        """
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch, self._chosen = parse_epoch(number), True

    @property
    def weights(self) -> Weights | Callable[[int], Weights] | None:
        """The weights of the datasets of a mixture, a dict, or the function that gives them for an epoch; None without
        a mixture.

        Set this attribute to change the weights from the next epoch on.

        Raises:
            UsageError: The loader has no mixture, or the dict does not fit its datasets.
        """
        return self._weights

    @weights.setter
    def weights(self, weights: Weights | Callable[[int], Weights]) -> None:
        if not self._names:
            raise UsageError("this loader has no mixture; create it with a dict of datasets and their weights")
        if not callable(weights):
            parse_weights(weights, self._names, what="the mixture")
            weights = dict(weights)
        self._weights = weights

    @property
    def sample_weights(self) -> SampleWeights | None:
        """The weights of single samples.

        Set this attribute between two epochs, to a dict of keys and weights or a pair of keys and weights, to draw the
        next epochs by other weights. The feeders are then started again.

        Raises:
            UsageError: The weights cannot be used; the loader was created without ``sample_weights``; or an epoch is
                under way.
        """
        return self._sample_weights

    @sample_weights.setter
    def sample_weights(self, weights: SampleWeightsOption) -> None:
        parsed, mixture = parse_sample_weights(weights), self._settings.mixture
        if parsed is None or mixture is None or not mixture.sample_weights:
            raise UsageError("sample_weights can be changed, but a loader must be created with or without it")
        latest = None if self._latest is None else self._latest()
        if latest is not None and not latest.progress.ended and latest.progress.touched:
            raise UsageError("an epoch is under way, which draws by the present sample_weights; set others after it")
        if self._resume is not None:
            raise UsageError(
                "the state of an epoch was loaded, which draws by the sample_weights that it was begun with; set others"
                " after this epoch"
            )
        if self._progress is not None and self._progress.left:
            # The epoch that was left cannot continue by other weights.
            self._epoch, self._progress = self._next(), None
        self._sample_weights = parsed
        self._functions = self._functions._replace(weights=parsed)
        self._sent = b"" if self._workers == 0 else dumps(self._functions)
        # Other settings end the feeders, which have the weights before.
        self._settings = replace(self._settings, mixture=replace(mixture, sample_weights=parsed.digest))
        self._here = None

    def _ratios(self, epoch: int) -> Ratios:
        """Return the shares of a mixture's datasets in this epoch and in the next one."""
        following: Shares = ()
        this = self._ratio(epoch)
        # A function may know only the epochs that are trained. The error comes if that epoch is begun.
        with contextlib.suppress(Exception):
            following = self._ratio(epoch + 1)
        return this, following

    def _ratio(self, epoch: int) -> Shares:
        if self._weights is None:
            return ()
        given, what = self._weights, "the mixture"
        if callable(given):
            given, what = given(epoch), f"weights= of epoch {epoch}"
        return parse_weights(given, self._names, what=what)

    def report(self) -> Report:
        """Return where the time of the present epoch went so far, or of the last one between two epochs.

        Returns:
            Waits for batches, and the seconds of them by cause; ``print()`` shows it as three lines.

        Raises:
            UsageError: No batch was delivered yet.

        Example:
            >>> from cachetool.loaders.numpy import Loader
            >>> with Loader("data/cache", batch_size=8) as loader:
            ...     batches = sum(1 for batch in loader)
            ...     loader.report().batches
            3
        """
        at = self._progress
        if at is not None and 0 < at.step < at.steps and not at.feed.closed:
            return at.feed.times.report(at.begun.epoch, at.step)
        if self._report is None:
            raise UsageError("there is nothing to report before the first batch; call report() in or after an epoch")
        return self._report

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` begin epoch number ``epoch``; trainers call this method before each epoch.

        The call has no effect right after :meth:`load_state_dict`, because the state says where training continues.

        Args:
            epoch: Number of the epoch, 0 or more.

        Raises:
            UsageError: ``epoch`` is not a whole number of 0 or more.

        Example:
            >>> from cachetool.loaders.numpy import Loader
            >>> with Loader("data/cache", batch_size=8) as loader:
            ...     loader.set_epoch(3)
            ...     loader.epoch
            3
        """
        epoch = parse_epoch(epoch)
        if not self._loaded and epoch != self._next():
            self.epoch = epoch

    def epochs_of(self, *, steps: int) -> FixedEpochs[T]:
        """Return a view of this loader in which every epoch has exactly ``steps`` batches.

        The view goes through pass after pass of the cache, and each pass takes a new snapshot. Use the view for a
        trainer that keeps the length of the first epoch, and for learning-rate schedules that count steps.

        Args:
            steps: Number of batches in each epoch, 1 or more.

        Returns:
            A :class:`~cachetool.loaders.fixed_epochs.FixedEpochs`, to be iterated like a loader.

        Raises:
            UsageError: ``steps`` is not a whole number of 1 or more.

        Example:
            >>> from cachetool.loaders.numpy import Loader
            >>> with Loader("data/cache", batch_size=8) as loader:
            ...     epochs = loader.epochs_of(steps=5)
            ...     len(epochs), sum(1 for batch in epochs)
            (5, 5)
        """
        return FixedEpochs(self, steps=steps)

    # -- epochs --------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        """Begin an epoch, or begin the same epoch again if no batch of it was taken.

        Older iterators of this loader end with an error, or continue with ``concurrent=True``. The loader takes the
        snapshot of an epoch when all batches of the epoch before are made and half of them are delivered. ``iter()``
        itself takes the newest snapshot for the first epoch, after :meth:`refresh`, ``hold`` seconds after the epoch
        before, with ``workers=0`` and with ``split="validation"``.
        """
        return self.begin()

    def begin(self) -> Epoch[T]:
        """Begin an epoch as ``iter()`` does, with the batches in host memory even if the loader has a ``device``.

        Returns:
            An iterator over the batches of the epoch; its ``len()`` is the number of batches that are left.

        Raises:
            UsageError: As for ``iter()``; see the class.
        """
        before = None if self._latest is None else self._latest()
        going_on = before is not None and not before.progress.ended and not before.replaced
        alone = not self._concurrent or (not going_on and self._home in (None, threading.current_thread()))
        # Called before the lock is taken: it may ask the feeders and wait, and the handler of a signal may begin an
        # epoch in this thread meanwhile, which would wait for the lock for ever.
        untouched = self._untouched(before) if alone else None
        # Two threads that begin at the same moment must get different numbers of epochs.
        with self._claim:
            beside = self._concurrent and (going_on or not self._at_home())
            # The handler of a signal or another thread may have begun or read an epoch since it was looked up.
            if untouched is not None and (beside or untouched is not self._progress or untouched.touched):
                untouched = None
            if not beside and untouched is None:
                self._epoch = self._next()
            self._last = number = max(self.epoch, self._last + 1) if beside else self.epoch
            self._others = number if beside else self._others
        if beside:
            epoch = self._started(self._new_feed(), number, None, own=True)
            epoch.own_feed()
            self._beside.add(epoch)
            return epoch
        if untouched is not None:
            # A prefetcher of the older iterator may have asked for locked memory. The new iterator hands arrays out,
            # and locked memory must never be handed out.
            untouched.feed.lock_pages(None)
            epoch = Epoch(self, untouched)
            if before is not None:
                before.hand_over()
            self._latest = weakref.ref(epoch)
            return epoch
        if before is not None:
            before.replace()
        self._lengths.check()
        epoch = self._started(self._fed(), number, self._left_over(number))
        # Only after success: a caller that tries again after an error must get the same epoch.
        self._chosen = self._loaded = False
        self._latest, self._progress = weakref.ref(epoch), epoch.progress
        self._lengths.progress = epoch.progress
        # The epoch that was resumed had no batch left, so it ends here.
        if epoch.progress.ended:
            epoch.deliver()
        return epoch

    def refresh(self) -> None:
        """Discard the snapshot that was taken for the next epoch, so that the next ``iter()`` or ``len()`` takes the
        newest.

        Call this method after a pull between two epochs. With several ranks, call it on all ranks before the first of
        them begins that epoch.
        """
        feed = self._feed
        if feed is None or feed.closed or feed.unsure or feed.pid != os.getpid():
            return
        begun = None if self._latest is None else self._latest()
        if begun is None and self._progress is not None and not self._progress.touched:
            # An epoch whose iterator is gone and of which nothing was read would otherwise be begun again, on its old
            # snapshot.
            self._progress = None
        feed.refresh()

    def _untouched(self, iterator: Epoch[T] | None) -> Progress | None:
        """Return the progress of the epoch begun last if no batch of it was asked for and its snapshot is still leased;
        otherwise None."""
        progress = self._progress
        # Trainers call iter() two or three times before they take a batch. All these calls must begin the same epoch,
        # because the length that the trainer asked for in between must be that of the epoch that it reads.
        if progress is None or progress.touched or progress.ended or self._chosen:
            return None
        feed = progress.feed
        if feed is not self._feed or feed.closed or feed.unsure or feed.pid != os.getpid():
            return None
        if self._fed_with is not self._placed():
            return None
        if iterator is not None:
            return None if iterator.replaced else progress
        if progress.kept:
            return progress
        # The iterator is gone, so the feeders give the snapshot up after hold= seconds; only they know whether they
        # have.
        return progress if feed.regain(progress.begun.generation) else None

    def _next(self) -> int:
        """Return the number of the next epoch."""
        at = self._progress
        # An epoch that was left with break is followed by another number. With the same number a loop that contains a
        # break would read the same samples for ever.
        left = at is not None and at.left and at.begun.epoch == self.epoch
        number = self._last + 1 if left and not self._chosen else self.epoch
        return number if self._chosen or self._left_over(number) else max(number, self._others + 1)

    def _at_home(self) -> bool:
        """Return True if the loader's own feeders belong to this thread: the first that iterates, or after its end the
        next one."""
        if self._home is None or not self._home.is_alive():
            self._home = threading.current_thread()
        return self._home is threading.current_thread()

    def _started(self, feed: Feed, number: int, resume: dict[str, Any] | None, *, own: bool = False) -> Epoch[T]:
        begun, taken = None, 0 if resume is None else self._taken
        try:
            begun = feed.begin(number, resume, self._ratios(number))
            steps = self._agreed(self._limited(begun.steps, taken))
        except BaseException as error:
            # The epoch has begun for the feeders, but this process will not read it: it was interrupted, or the ranks
            # do not agree. Feeders that went on would wait for samples, or lease some, for nobody.
            if own or begun is not None or not isinstance(error, CacheToolError):
                feed.close()
            raise
        return Epoch(self, Progress(feed, begun, steps, taken, kept=self._collective))

    def _limited(self, steps: Steps, taken: int) -> int:
        return steps.count if self._limit is None else max(0, min(steps.count, self._limit - taken))

    def _left_over(self, epoch: int) -> dict[str, Any] | None:
        """Return the state of this epoch if it is the one to resume; otherwise None."""
        return self._resume if epoch == self._resumed else None

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch.

        This is the epoch that ``iter()`` began, otherwise the next one. Batches that were delivered before a resume
        count. A later epoch may have more batches. The call waits for samples as ``iter()`` does; ``iter()`` then
        begins the snapshot that was counted, if it comes within ``hold`` seconds.
        """
        epoch = None if self._latest is None else self._latest()
        progress = None if epoch is None or epoch.over or epoch.replaced else epoch.progress
        # A forked child may be another rank, for which the inherited epoch has another length.
        if progress is not None and progress.feed.pid != os.getpid():
            steps = progress.begun.steps
            here = self._placed()
            progress = progress if (steps.rank, steps.world_size) in ((here.rank, here.world_size), here.node) else None
        if progress is None and (progress := self._untouched(None)) is not None and not progress.kept:
            # _untouched() made the feeders keep the snapshot. The iterator is still gone, so the time of hold= begins
            # again.
            progress.feed.left(progress.begun.generation)
        if progress is not None:
            return self._lengths.tell(progress.begun.epoch, progress.before + progress.steps)
        number = self._next()
        left_over = self._left_over(number)
        taken = 0 if left_over is None else self._taken
        count = self._limited(self._fed().prepare(number, left_over, self._ratios(number)).steps, taken)
        return self._lengths.tell(number, taken + count)

    def _placed(self) -> Settings:
        """Return the settings with rank, world size and run, looked up when an epoch begins or is counted."""
        rank, world_size = self._world()
        # Not looked up in the constructor, which is too early: trainers start or fork their ranks when they have the
        # loader. The same object is returned while nothing changes, because _fed() compares settings by identity.
        if self._here is not None and self._here[0] == os.getpid():
            settings = self._here[1]
            if (settings.rank, settings.world_size) == (rank, world_size):
                return settings
        run = self._settings.run or launched_run() or self._shared_run()
        if world_size > 1 and run is None:
            raise UsageError("several processes need the same run=NAME on all their loaders to share snapshots")
        node = self._given or on_node(world_size)
        settings = replace(self._settings, rank=rank, world_size=world_size, node=node, run=run)
        self._here = os.getpid(), settings
        return settings

    def _fed(self) -> Feed:
        settings = self._placed()
        # The handler of a signal may close the loader anywhere in this function. A new feed is therefore stored only
        # when its finalizer exists; otherwise nothing would end its processes.
        feed = self._feed
        if feed is not None and (feed.unsure or self._fed_with is not settings):
            feed.close()
        # A forked child needs feeders of its own: those of its parent fill shared memory for the parent.
        if feed is None or feed.closed or feed.pid != os.getpid():
            feed = self._new_feed()
            self._finalizer = weakref.finalize(self, feed.close)
            self._feed, self._fed_with = feed, settings
        return feed

    def _new_feed(self) -> Feed:
        settings = self._placed()
        if self._workers:
            return Processes(settings, feeders=self._workers, functions=self._sent)
        # Imported only for workers=0. Otherwise the training process would load the modules that read shards, which
        # only feeders need.
        from cachetool.loaders.feed.in_process import InProcess

        return InProcess(settings, functions=self._functions)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training as plain values.

        The state names the epoch, the batches delivered, and the samples of the epoch. Save the state with the model,
        before :meth:`close`.

        Returns:
            A dict of plain values, for :meth:`load_state_dict`, ``torch.save`` or JSON.

        Raises:
            UsageError: In the middle of an epoch, when the loader was closed or its feeders ended.

        Example:
            >>> from cachetool.loaders.numpy import Loader
            >>> with Loader("data/cache", batch_size=8) as loader:
            ...     batch = next(iter(loader))
            ...     state = loader.state_dict()
            >>> with Loader("data/cache", batch_size=8) as loader:
            ...     loader.load_state_dict(state)
            ...     len(loader), len(list(loader))
            (3, 2)
        """
        at = self._progress
        if at is None or at.step == 0 or at.ended or self._chosen or at.begun.epoch != self.epoch:
            return self._state(self.epoch, self._left_over(self.epoch), self._taken)
        return self._state(self.epoch, at.resume(), at.before + at.step)

    def state_behind(self, batches: int) -> dict[str, Any]:
        """Return ``state_dict()`` as it was ``batches`` batches ago in the same epoch, for trainers that read ahead.

        The last batch of an epoch ends the epoch; its states are available until the next epoch begins.

        Args:
            batches: Number of batches to go back; 0 is the present state.

        Returns:
            A dict as from :meth:`state_dict`.

        Raises:
            UsageError: The epoch has delivered fewer batches, or :meth:`state_dict` would raise.
        """
        at, batches = self._progress, parse_whole(batches, what="batches=")
        if batches == 0:
            return self.state_dict()
        if at is None or not 0 < batches <= at.step:
            raise UsageError(
                f"the current epoch has not delivered {batches} batches yet, so it has no state for that position"
            )
        taken = at.step - batches
        return self._state(at.begun.epoch, at.resume(taken), at.before + taken)

    def _state(self, epoch: int, resume: dict[str, Any] | None, taken: int) -> dict[str, Any]:
        seed, order = self._settings.seed, self._order()
        return {"state": STATE, "epoch": epoch, "seed": seed, "order": order, "resume": resume, "taken": taken}

    def _order(self) -> dict[str, Any]:
        """Return the settings, beside the seed, that decide the samples of an epoch and their order."""
        values: dict[str, Any] = {"shuffle": self._settings.shuffle, "split": self._settings.split}
        if self._settings.where is not None:
            values["where"] = str(where_dict(self._settings.where))
        if self._settings.crop is not None:
            values["crop"] = self._settings.crop.state()
        if self._settings.offsets:
            values["offsets"] = str(dict(self._settings.offsets))
        if self._settings.mixture is not None:
            values["mixture"] = self._settings.mixture.state(self._settings.batch_size)
        return values if values["split"] is None else {**values, "validation": self._settings.validation}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` continue where ``state_dict()`` was called.

        The rest of the epoch has the samples that the epoch had then, even if the cache has grown. The number of ranks
        may be another one.

        Args:
            state: A dict from :meth:`state_dict`.

        Raises:
            UsageError: ``state`` is not the state of a loader; ``seed`` is another one; or, for a state from the middle
                of an epoch, ``shuffle``, ``split``, ``validation``, ``where``, ``crop`` or ``offsets`` is another one.
                The loader is then unchanged.
        """
        require_state(state, SAVED, of="loaders")
        # A state without where=, crop= or offsets= has no entry for it. A state at the edge of an epoch may be loaded
        # with other settings, because it names no samples.
        none = {"where": None, "crop": None, "offsets": None, "mixture": None}
        saved = {**none, **(state.get("order") or {})} if state.get("resume") else {}
        here = {"seed": self._settings.seed, **none, **self._order()}
        require_same({"seed": state.get("seed"), **saved}, here, of="loader")
        self._epoch = self._resumed = int(state["epoch"])
        self._others = -1
        self._resume, self._taken = state.get("resume"), int(state.get("taken") or 0)
        self._loaded, self._chosen = True, False
        if self._latest is not None and (before := self._latest()) is not None:
            before.replace()
        self._latest = self._progress = self._lengths.progress = None

    def _delivered(self, progress: Progress) -> None:
        """Count an epoch whose last batch was delivered."""
        # An epoch that ran beside another one is no part of the loader's state.
        if progress is not self._progress:
            return
        self._report = progress.feed.times.report(progress.begun.epoch, progress.steps)
        if not self._chosen:
            self._epoch = self._last + 1
        self._resume, self._taken = None, 0

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a loader cannot be pickled or copied, because it has its own processes; create another loader in the"
            " process that iterates it, and continue there with load_state_dict()"
        )

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the feeders and end the lease. May be called twice.

        Batches stay valid. Iterating the loader again starts new feeders.
        """
        for beside in members(self._beside):
            beside.replace()
            beside.end()
        if self._latest is not None and (before := self._latest()) is not None:
            before.replace()
        if self._finalizer is not None and self._feed is not None and self._feed.pid == os.getpid():
            self._finalizer()
        self._feed = None
        # The last call, because stderr may block, for example if it is a full pipe; the feeders have ended by then.
        self._lengths.check()


# Python puts this name into its own message about a missing or unexpected argument. Users know the class as Loader.
BaseLoader.__init__.__wrapped__.__qualname__ = "Loader.__init__"  # type: ignore[attr-defined]
