"""A :class:`tf.data.Dataset` over the TFRecord shards of a cache that grows.

::

    from_generator              one element an epoch: the names of all files of a new snapshot. Python's only call.
      flat_map                  all of an epoch, so that batches leave it and not records: handing a small record on
                                takes TensorFlow as long as reading it
        interleave              TFRecordDataset over each file; with split= or where= zipped with a mask, filtered
        shuffle -> batch        of records that are not parsed yet
      map                       a whole batch at once: parse_example, or small fields cut out by offset; decode_raw
      repeat

Only public methods are used. TensorFlow optimises their functions at the beginning of each epoch, which takes 30 ms.

Records of 512 KiB and more are decoded one by one and then batched, because each is then still in the processor's
cache.

The lease of the snapshot ends when the last file of the epoch was read, or with an iterator that was abandoned. This
module does not import the ``tfrecord`` package, which cannot be loaded beside TensorFlow.

Any ``tf.train.Example`` becomes tensors by parsing it; records that cachetool wrote by the offsets of their values.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cachetool.cache import CacheDir
from cachetool.cache.history import Delivered
from cachetool.core.errors import UsageError, without
from cachetool.core.schema import Field, Schema
from cachetool.core.text import shown
from cachetool.core.units import parse_flag, parse_text, parse_whole
from cachetool.formats.example import ExampleLayout, shape_name, storage_kind
from cachetool.formats.files import missing_is_corrupt, open_plain, refuse_links
from cachetool.formats.tfrecord import is_gzip
from cachetool.loaders.fixed_epochs import FixedEpochs
from cachetool.loaders.loader import BaseLoader
from cachetool.loaders.order import order
from cachetool.loaders.other_names import OF_TENSORFLOW, answering
from cachetool.loaders.selection import Selection, WhereOption, parse_where
from cachetool.loaders.settings import Where, where_dict
from cachetool.loaders.snapshots.follow import CacheSubscription, Subscription, beside, subscribe
from cachetool.loaders.split import parse_split
from cachetool.loaders.tensorflow_loader import Batches, batches_of
from cachetool.loaders.view import ShardFile, View

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    raise without("tensorflow", "tensorflow", error) from None

__all__ = ["feature_spec", "make_dataset", "parse_batch"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_as_written: Callable[[_Function], _Function] = tf.autograph.experimental.do_not_convert
_OPEN_FILES = 16
"""Number of files that are read in turn if records are shuffled."""
_TOGETHER = 16
"""Number of small records that are taken from one file before the next file is read."""
# A GB of records of 3 KiB takes 2.6 s of processor time without threads and 5.3 s with them. Handing over a larger
# record costs little beside reading it.
_LARGE = 2**16
"""Bytes of a record from which on it is read without a buffer, and several threads read files."""
_BUFFER = 2**18
"""Bytes of one file that are read at once."""
# A batch of such records leaves the processor's cache between reading and parsing. A GB of records of 1 MiB takes 1.2 s
# of processor time parsed one by one, 2.4 s batched first.
_HUGE = 2**19
"""Bytes of a record from which on records are parsed before they are batched."""


def feature_spec(schema: Iterable[Field]) -> dict[str, tf.io.FixedLenFeature]:
    """Return the features with which ``tf.io.parse_example`` parses records of a schema.

    :func:`parse_batch` decodes the parsed features. Scalars of integers and bool are int64 features, float32 scalars
    are float32. Every other field is one string: the little-endian bytes of an array or of another scalar, UTF-8 text,
    or plain bytes. A ragged field ``x`` has its shape in ``x/shape``.

    Args:
        schema: The fields, such as ``cache.schema()``.

    Returns:
        Name of the feature to ``tf.io.FixedLenFeature``.

    Example:
        >>> import cachetool
        >>> from cachetool.loaders.tensorflow import feature_spec
        >>> with cachetool.open_cache("data/cache") as cache:
        ...     sorted(feature_spec(cache.schema()))
        ['__key__', 'label', 'volume']
    """
    spec: dict[str, tf.io.FixedLenFeature] = {}
    types = {"int64": tf.int64, "float": tf.float32, "bytes": tf.string}
    for field in schema:
        spec[field.name] = tf.io.FixedLenFeature([], types[storage_kind(field)])
        if field.kind == "ragged":
            spec[shape_name(field)] = tf.io.FixedLenFeature([field.rank], tf.int64)
    return spec


def parse_batch(records: tf.Tensor, schema: Schema) -> dict[str, tf.Tensor | tf.RaggedTensor]:
    """Return the fields of serialised ``tf.train.Example`` records.

    Args:
        records: Serialised records, a ``tf.string`` tensor of shape (batch,).
        schema: The fields of the records, such as ``cache.schema()``.

    Returns:
        Field to tensor, as an element of :func:`make_dataset`.

    Example:
        >>> import cachetool, tensorflow as tf
        >>> from cachetool.loaders.tensorflow import parse_batch
        >>> with cachetool.open_cache("data/cache") as cache:
        ...     schema, shard = cache.schema(), cache.shards()[0]
        ...     records = tf.data.TFRecordDataset(str(shard.data)).batch(4)
        ...     parse_batch(next(iter(records)), schema)["volume"].shape
        TensorShape([4, 16, 16, 16])
    """
    return _fields_of(records, schema, None)


def _fields_of(
    records: tf.Tensor, schema: Schema, layout: ExampleLayout | None
) -> dict[str, tf.Tensor | tf.RaggedTensor]:
    """Return the fields of serialised records, as :func:`parse_batch` does.

    With a ``layout`` the records are cachetool's own, and fixed fields are cut out at their offsets instead of being
    parsed.
    """
    heads = () if layout is None else layout.places
    places = {place.field.name: place for place in heads if place.field.kind == "fixed"}
    others = [field for field in schema if field.name not in places]
    count = tf.shape(records)[0]
    parsed = tf.io.parse_example(records, feature_spec(others)) if others else {}
    out = {}
    for field in schema:
        if field.name in places:
            place = places[field.name]
            raw = tf.strings.substr(records, place.offset, place.nbytes)
            if place.mode == "int":
                out[field.name] = _integers(_varints(raw, place.nbytes), field)
            else:
                out[field.name] = tf.reshape(_numbers(raw, field), [count, *field.sizes])
        else:
            out[field.name] = _decode(field, parsed, count)
    return out


def _varints(raw: tf.Tensor, nbytes: int) -> tf.Tensor:
    """Return padded varints as int64: seven bits of each byte, the lowest first."""
    bits = tf.cast(tf.io.decode_raw(raw, tf.uint8), tf.int64) & 0x7F
    return tf.reduce_sum(tf.bitwise.left_shift(bits, np.arange(0, 7 * nbytes, 7)), axis=1)


def _integers(value: tf.Tensor, field: Field) -> tf.Tensor:
    if field.numpy == np.uint64:
        # A TFRecord has signed integers only, so numbers above 2**63 - 1 are stored as their two's complement.
        return tf.bitcast(value, tf.uint64)
    return tf.cast(value, field.numpy)


def _decode(field: Field, parsed: dict[str, tf.Tensor], count: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
    value = parsed[field.name]
    if field.kind in ("bytes", "str"):
        return value
    if field.kind == "ragged":
        shapes = parsed[shape_name(field)]
        flat = _numbers(tf.strings.reduce_join(value), field)
        lengths = [tf.repeat(shapes[:, axis], tf.reduce_prod(shapes[:, :axis], axis=1)) for axis in range(field.rank)]
        return tf.RaggedTensor.from_nested_row_lengths(flat, lengths)
    if storage_kind(field) == "bytes":
        return tf.reshape(_numbers(value, field), [count, *field.sizes])
    return value if storage_kind(field) == "float" else _integers(value, field)


def _numbers(raw: tf.Tensor, field: Field) -> tf.Tensor:
    """Return strings of equal length as numbers, with one more dimension."""
    dtype = field.numpy
    # decode_raw() knows neither dates nor unsigned numbers of more than 16 bits. So their bytes are decoded as signed
    # integers of the same size.
    decodable = np.dtype(f"i{dtype.itemsize}") if dtype.kind in "mM" or dtype in (np.uint32, np.uint64) else dtype
    numbers: Any = tf.io.decode_raw(raw, tf.as_dtype(decodable))
    return tf.bitcast(numbers, tf.as_dtype(dtype)) if dtype.kind == "u" and decodable != dtype else numbers


@answering(OF_TENSORFLOW)
def make_dataset(
    cache: CacheDir | str | Path | Batches,
    *,
    batch_size: int | None = None,
    shuffle_buffer: int = 0,
    fields: Sequence[str] | None = None,
    dataset: str | None = None,
    seed: int | None = None,
    repeat: bool = False,
    drop_remainder: bool = False,
    run: str | None = None,
    split: str | None = None,
    validation: float | str | None = None,
    where: WhereOption | None = None,
    as_supervised: Sequence[Any] | None = None,
) -> tf.data.Dataset:
    """Return a ``tf.data.Dataset`` of batches over the TFRecord shards of a cache, or of the batches of a loader.

    Each iteration over the dataset, and each turn of ``repeat``, takes a new snapshot, so the dataset grows with the
    cache. TensorFlow does not know its length, and Keras keeps the number of batches of the first epoch: to train on a
    growing cache whole, give ``repeat=True`` here and ``steps_per_epoch`` to ``model.fit``. TensorFlow's autotuning is
    off, also for what is built on the dataset; options of your own may switch it on.

    A loader gives a dataset all that loaders have: mixtures, shards of any format, ``crop``, ``pad``, ranks, and a
    state in the middle of an epoch. Then only ``repeat`` and ``as_supervised`` can be given here.

    Args:
        cache: An open cache, the folder of a cache, or a folder that ``cachetool convert --out`` wrote. Or a
            :class:`cachetool.loaders.numpy.Loader`, or its ``epochs_of(steps=N)``, whose number of steps TensorFlow
            then knows.
        batch_size: Most samples in one batch; 1 or more. Needed without a loader.
        shuffle_buffer: Records in the shuffle buffer; files are shuffled too. 0: the oldest samples first. Default: 0.
        fields: Names of the fields of an element, in this order. Default: all fields, or those of ``as_supervised``.
        dataset: Name of the dataset of the cache. Default: ``"default"``, or the only dataset.
        seed: Whole number that decides the random order, together with the number of the epoch. Default: a random one.
        repeat: True: continue for ever, with a new snapshot at each turn. Default: False.
        drop_remainder: True: leave out a last batch of fewer than ``batch_size`` samples. Default: False.
        run: Name of a training run of several processes, which then get the same snapshot for the same epoch. Default:
            none.
        split: ``"train"`` or ``"validation"``: read only this side of the samples, the same sides as in every loader.
            Default: all samples.
        validation: Share of the samples on the validation side, between 0 and 1, or text such as ``"10%"``. Needs
            ``split``. Default: 5 %.
        where: Read only samples with these values: a dict from the name of a field to a number, a text, or a set, list
            or range of them. Default: all samples.
        as_supervised: Names of two or three fields, or lists of names: an element is then a tuple of inputs, targets
            and, with a third, sample weights, as ``model.fit`` takes it. Default: an element is a dict.

    Returns:
        A dataset whose elements are dicts from field to batch: a dense tensor of shape (batch, *shape) for numbers, a
        ``tf.string`` tensor of shape (batch,) for ``bytes`` and ``str``, and a ``tf.RaggedTensor`` with as many ragged
        dimensions as the array has for a ragged field. ``datetime64`` and ``timedelta64`` become int64.

    Raises:
        UsageError: The loader has no batch, or makes tensors of PyTorch. Without a loader: there is no such cache,
            dataset or field; the shards have another format than TFRecord (convert them with ``cachetool convert --to
            tfrecord``); or an argument cannot be used. An epoch ends with an error when the dataset was emptied, has
            other fields, or has less than one batch with ``drop_remainder``.

    Example:
        >>> from cachetool.loaders.tensorflow import make_dataset
        >>> dataset = make_dataset("data/cache", batch_size=8, fields=["volume", "label"], shuffle_buffer=100)
        >>> for batch in dataset:
        ...     volumes, labels = batch["volume"], batch["label"]
        >>> volumes.shape
        TensorShape([8, 16, 16, 16])
    """
    repeat, drop_remainder = parse_flag(repeat, what="repeat="), parse_flag(drop_remainder, what="drop_remainder=")
    if isinstance(cache, BaseLoader | FixedEpochs):
        _alone(
            batch_size=batch_size, shuffle_buffer=shuffle_buffer, fields=fields, dataset=dataset, seed=seed,
            drop_remainder=drop_remainder, run=run, split=split, validation=validation, where=where,
        )  # fmt: skip
        names = None if as_supervised is None else _parse_supervised(as_supervised)
        return batches_of(cache, repeat=repeat, element=_as_written(functools.partial(_element, names=names)))
    if isinstance(cache, Mapping):
        raise UsageError(
            "a mixture of datasets needs a loader: make_dataset(Loader({...}, batch_size=...)) with the Loader of"
            " cachetool.loaders.numpy"
        )
    if batch_size is None:
        raise UsageError("batch_size= is missing; give the number of samples of a batch")
    batch_size = parse_whole(batch_size, what="batch_size=", least=1)
    shuffle_buffer = parse_whole(shuffle_buffer, what="shuffle_buffer=", least=0)
    seed = None if seed is None else parse_whole(seed, what="seed=")
    share, where_values = parse_split(split, validation), parse_where(where)
    run = None if run is None else parse_text(run, what="run=")
    chosen = None if split is None and where_values is None else Selection(split, share, where_values)
    subscription = subscribe(cache, dataset=dataset, run=run)
    place = ""
    if isinstance(subscription, CacheSubscription):
        place = f" --cache {shlex.quote(str(subscription.root))}"
    try:
        first = subscription.newest(peek=True)
        if not first.samples:
            raise UsageError(_nothing(first, place))
        size = _record_size(first, _files(first, chosen)[0])
        supervised = None if as_supervised is None else _parse_supervised(as_supervised)
        schema = _selected(first.schema, fields, supervised)
    finally:
        subscription.close()
    options = _Options(
        batch_size=batch_size, shuffle_buffer=shuffle_buffer, seed=secrets.randbits(32) if seed is None else seed,
        is_seeded=seed is not None, repeat=repeat, drop_remainder=drop_remainder, run=run, split=split,
        where=where_values, selection=chosen, place=place, supervised=supervised,
    )  # fmt: skip
    column = tf.TensorSpec((None,), tf.string)
    signature = (column, column, column, tf.TensorSpec((), tf.int64))
    epoch = functools.partial(_epoch, subscription, first.schema, itertools.count(), options)
    epochs = tf.data.Dataset.from_generator(epoch, output_signature=signature)
    return _tuned(_batches(epochs, first.schema, schema, size, options), repeat=repeat)


def _alone(**options: object) -> None:
    """Refuse options that a loader has itself. Raises :class:`UsageError`."""
    for name, value in options.items():
        if value not in (None, 0, False):
            raise UsageError(f"{name}={shown(value)} belongs to the loader that make_dataset() is given; use it there")


def _parse_supervised(names: Any) -> tuple[Any, ...]:
    """Return the argument ``as_supervised``, two or three names of fields or lists of names. Raises
    :class:`UsageError`."""
    parts = tuple(names) if isinstance(names, list | tuple) else ()
    good = [
        isinstance(part, str) or (isinstance(part, list | tuple) and part and all(isinstance(n, str) for n in part))
        for part in parts
    ]
    if not 2 <= len(parts) <= 3 or not all(good):
        raise UsageError(
            f"as_supervised={shown(names)} cannot be used; name the fields of inputs and targets, such as"
            " ('volume', 'label')"
        )
    return tuple(part if isinstance(part, str) else tuple(part) for part in parts)


def _selected(schema: Schema, fields: str | Sequence[str] | None, supervised: tuple[Any, ...] | None) -> Schema:
    """Return the schema of the requested fields, or of those of ``as_supervised`` alone. Raises :class:`UsageError`."""
    names = () if supervised is None else tuple(tf.nest.flatten(supervised))
    if fields is None and names:
        fields = list(dict.fromkeys(names))
    selected = schema if fields is None else schema.select(fields)
    for name in names:
        # The lookup raises the error for a name that fields= leaves out.
        selected[name]
    return selected


def _element(batch: dict[str, Any], names: tuple[Any, ...] | None) -> Any:
    """Return a batch unchanged, or as the tuple that ``as_supervised`` names."""
    if names is None:
        return batch
    for name in tf.nest.flatten(names):
        if name not in batch:
            raise UsageError(f"as_supervised= names field {shown(name)}; a batch has {', '.join(batch)}")
    return tuple(batch[part] if isinstance(part, str) else tuple(batch[name] for name in part) for part in names)


@dataclass(frozen=True, slots=True)
class _Options:
    """The checked arguments of :func:`make_dataset`."""

    batch_size: int
    shuffle_buffer: int
    seed: int
    """Seed that was given, or a random one."""
    is_seeded: bool
    """True if a seed was given."""
    repeat: bool
    drop_remainder: bool
    run: str | None
    split: str | None
    where: Where | None
    selection: Selection | None
    place: str
    """Option that names the cache, for commands in messages."""
    supervised: tuple[Any, ...] | None
    """Fields of the inputs, targets and sample weights."""

    @property
    def shuffle(self) -> bool:
        """True if files and records are shuffled."""
        return self.shuffle_buffer > 0


def _epoch(
    subscription: Subscription, schema: Schema, numbers: Iterator[int], options: _Options
) -> Iterator[tuple[Any, ...]]:
    """Yield one element: the columns of :func:`_files` of a new snapshot, in the order of this epoch, and the epoch's
    number.

    The snapshot is leased until the generator ends. ``schema`` is that of the first snapshot.
    """
    # The copy has a lease of its own: TensorFlow may run two iterators over one dataset at the same time.
    number, lease = next(numbers), copy.copy(subscription)
    began = time.monotonic()
    close = lease.close
    try:
        view = lease.newest(epoch=None if options.run is None else number, sparing=True)
        columns = _files(view, options.selection)
        # The graph finds fields in a record by the first schema, so records of another one would be decoded as wrong
        # values.
        if view.schema != schema:
            raise UsageError(f"the fields of dataset {view.dataset!r} have changed; call make_dataset() again")
        # TensorFlow would end without a message, or with repeat() ask for empty epochs for ever.
        if not view.samples or (options.repeat and not columns[0]):
            raise UsageError(_nothing(view, options.place, options.split, options.where))
        samples = view.samples if options.selection is None else sum(mask.count(1) for mask in columns[2])
        if options.drop_remainder and samples < options.batch_size:
            raise UsageError(
                f"{samples} samples are too few for a batch of batch_size={options.batch_size} with"
                " drop_remainder=True; pull more, or use smaller batches"
            )
        blocks = order(len(columns[0]), shuffle=options.shuffle, seed=options.seed, epoch=number)
        at = [int(i) for block in blocks for i in block]
        yield *([column[i] for i in at] for column in columns), number
        whole, part = divmod(samples, options.batch_size)
        batches = whole + (part > 0 and not options.drop_remainder)
        seconds = time.monotonic() - began
        lease.served(Delivered(seconds, batches, None, None, samples), last=True)
    # The generator is collected, perhaps in the middle of a transaction of this very thread. A second transaction here
    # would wait for the first one for ever, so another thread ends the lease.
    except GeneratorExit:
        close = functools.partial(beside, lease.close)
        raise
    finally:
        close()


def _batches(epochs: tf.data.Dataset, stored: Schema, schema: Schema, size: int, options: _Options) -> tf.data.Dataset:
    """Return batches of the fields of ``schema``, from records of the fields ``stored``, about ``size`` bytes each."""
    # parse_example() copies large values in many threads, but cutting them out uses one: from 64 KiB on cutting reaches
    # 0.70 instead of 0.98 of the best pipeline written by hand. Small records gain.
    layout = ExampleLayout(stored) if size < _LARGE else None

    @_as_written
    def parsed(records: tf.Tensor) -> Any:
        return _element(_fields_of(records, schema, layout), options.supervised)

    @_as_written
    def parsed_alone(record: tf.Tensor) -> Any:
        fields = _fields_of(tf.expand_dims(record, 0), schema, layout)
        return _element({name: tf.squeeze(value, 0) for name, value in fields.items()}, options.supervised)

    together = size < _HUGE or any(field.kind == "ragged" for field in schema)

    @_as_written
    def one_epoch(*given: tf.Tensor) -> tf.data.Dataset:
        *files, number = given
        fixed = options.is_seeded or not options.shuffle
        records = _records(
            tuple(files), size=size, mixed=options.shuffle, fixed=fixed, masked=options.selection is not None
        )
        if options.shuffle:
            records = _shuffled(records, options.shuffle_buffer, options.seed, number)
        return records.batch(options.batch_size, drop_remainder=options.drop_remainder) if together else records

    out = epochs.flat_map(one_epoch)
    if together:
        return out.map(parsed, tf.data.AUTOTUNE)
    return out.map(parsed_alone, tf.data.AUTOTUNE).batch(options.batch_size, drop_remainder=options.drop_remainder)


def _tuned(batches: tf.data.Dataset, *, repeat: bool) -> tf.data.Dataset:
    """Return the batches with prefetching, and with autotuning off."""
    # Prefetching ends with the epoch. TensorFlow by itself puts it after repeat(), where it would take the next
    # snapshot before the last batches of this epoch are trained.
    out = batches.prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    # Without autotuning AUTOTUNE means one call for each of up to 16 processors. The thread of autotuning makes epochs
    # of 0.3 s a fifth slower, and the end of every third epoch waits for it, up to as long again as the epoch took.
    options.autotune.enabled = False
    if repeat:
        options.experimental_optimization.inject_prefetch = False
        out = out.repeat()
    return out.with_options(options)


def _nothing(view: View, place: str, split: str | None = None, where: Where | None = None) -> str:
    if where is not None and view.samples:
        return (
            f"where={shown(where_dict(where))} selects none of the {view.samples} samples of dataset"
            f" {view.dataset!r}; use other values, or pull more"
        )
    if split is not None and view.samples:
        return f"none of the {view.samples} samples of dataset {view.dataset!r} belongs to split={split!r}; pull more"
    named = "" if view.dataset in ("", "default") else f" --dataset {shlex.quote(view.dataset)}"
    return f"dataset {view.dataset!r} has no samples; fill it with: cachetool pull SOURCE --to tfrecord{named}{place}"


def _files(view: View, selection: Selection | None) -> tuple[list[str], list[str], list[bytes]]:
    """Return names, compressions and masks of the files of a view.

    With a ``selection`` a mask has a bool for each record, and files without a selected record are left out; otherwise
    masks are empty. Raises :class:`UsageError` for shards in other formats, and what :meth:`Selection.chosen` raises.
    """
    others = sorted({part.format for part in view.parts} - {"tfrecord"})
    if others:
        name = f"dataset {view.dataset!r}" if view.dataset else "the folder"
        raise UsageError(
            f"{name} has shards in {', '.join(others)}, but make_dataset() reads only tfrecord;"
            f" run: {view.conversion('tfrecord')}"
        )
    chosen = np.ones(view.samples, dtype=np.bool_)
    if selection is not None:
        chosen[:] = False
        chosen[selection.chosen(view)] = True
    masks = [mask.tobytes() if selection is not None else b"" for mask in np.split(chosen, view.starts[1:-1])]
    named = [
        (_data_file(part), mask)
        for part, mask in zip(view.parts, masks, strict=False)
        if selection is None or any(mask)
    ]
    # TFRecordDataset must be told how a file is compressed.
    files = [(name, "GZIP" if is_gzip(Path(name)) else "", mask) for name, mask in named]
    return [name for name, _, _ in files], [kind for _, kind, _ in files], [mask for _, _, mask in files]


def _data_file(part: ShardFile) -> str:
    """Return the path of the data file that TensorFlow opens."""
    path = f"{part.where}/{part.file or 'data.tfrecord'}"
    # TensorFlow would follow a link to any file of the user, and wait for ever for a pipe. A cache contains neither, so
    # a planted one is refused.
    if not part.links:
        refuse_links(part.where, ())
        if not os.path.isfile(path) or os.path.islink(path):
            with missing_is_corrupt(path):
                os.close(open_plain(path, links=False)[0])
    return path


def _record_size(view: View, files: list[str]) -> int:
    """Return the mean size of a record in bytes."""
    return sum(Path(file).stat().st_size for file in files) // max(1, view.samples)


def _records(files: tuple[tf.Tensor, ...], *, size: int, mixed: bool, fixed: bool, masked: bool) -> tf.data.Dataset:
    @_as_written
    def of(file: tf.Tensor, kind: tf.Tensor, mask: tf.Tensor) -> tf.data.Dataset:
        records = tf.data.TFRecordDataset(file, kind, 0 if size >= _LARGE else _BUFFER)
        if not masked:
            return records
        flags = tf.data.Dataset.from_tensor_slices(tf.io.decode_raw(mask, tf.bool))
        chosen = tf.data.Dataset.zip(records, flags).filter(_as_written(lambda record, here: here))
        return chosen.map(_as_written(lambda record, here: record))

    named = tf.data.Dataset.from_tensor_slices(files)
    cycle = _OPEN_FILES if mixed else 1
    # No threads here: handing a small record from thread to thread takes longer than reading it.
    if size < _LARGE:
        return named.interleave(of, cycle, _TOGETHER)
    return named.interleave(of, cycle, num_parallel_calls=tf.data.AUTOTUNE, deterministic=fixed)


def _shuffled(records: tf.data.Dataset, buffer: int, seed: int, epoch: tf.Tensor) -> tf.data.Dataset:
    """Return the records shuffled, differently in each epoch; ``epoch`` is a tensor of the function that calls this."""
    # A graph begins with the user's global seed, and TensorFlow refuses a global seed of 0 beside a seed that is a
    # tensor. So this graph gets a seed of its own. In tf.data's debug mode, which is eager, the call would change the
    # user's own seed.
    if not tf.executing_eagerly():
        tf.random.set_seed(seed % (2**31 - 2) + 1)
    return records.shuffle(buffer, seed=epoch + 1, reshuffle_each_iteration=False)
