"""A :class:`tf.data.Dataset` over the TFRecord shards of a cache that grows.

::

    from_generator              one element an epoch: the names of all files of a new snapshot. Python's only turn.
      flat_map                  what an epoch is made of, so that batches come out of it and not records: a small record
                                takes TensorFlow as long to hand on as to read
        interleave              TFRecordDataset over each file; with split= or where= zipped with a mask, filtered
        shuffle -> batch        of records, not yet parsed
      map                       a whole batch at once: parse_example, or small fields cut out where they lie; decode_raw
      repeat

All of it is public methods. TensorFlow optimises their functions at the beginning of each epoch, which takes 30 ms.

Records of half a MiB and more are decoded one by one and then batched: each is still in the processor's cache then.

The snapshot's lease ends when the last file of the epoch has been read, or with an iterator that was abandoned. Nothing
here imports the ``tfrecord`` package, which cannot be loaded beside TensorFlow.

Records as tensors: any ``tf.train.Example`` by parsing it, those that we wrote by where their values lie.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from cachetool.loaders.order import order
from cachetool.loaders.selection import Selection, WhereOption, parse_where
from cachetool.loaders.settings import Where, where_dict
from cachetool.loaders.snapshots.follow import CacheSubscription, Subscription, beside, subscribe
from cachetool.loaders.split import parse_split
from cachetool.loaders.view import ShardFile, View

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    raise without("tensorflow", "tensorflow", error) from None

__all__ = ["feature_spec", "make_dataset", "parse_batch"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_as_written: Callable[[_Function], _Function] = tf.autograph.experimental.do_not_convert
_OPEN_FILES = 16
_TOGETHER = 16
"""Small records that are taken from one file before the next one's turn."""
_LARGE = 2**16
"""Bytes of a record from which on it is read without a buffer in between, and files are worth a thread each."""
_BUFFER = 2**18
"""Bytes of one file that are read at once."""
_HUGE = 2**19
"""Bytes of a record from which on a batch of them leaves the processor's cache between reading and parsing."""


def feature_spec(schema: Iterable[Field]) -> dict[str, tf.io.FixedLenFeature]:
    """What ``tf.io.parse_example`` needs to parse records of this schema; :func:`parse_batch` decodes the result.

    Integer and bool scalars are int64 features, float32 scalars float32. All else is one string: the little-endian
    bytes of an array or of another scalar, UTF-8 text, plain bytes. A ragged field ``x`` has its shape in ``x/shape``.
    """
    spec: dict[str, tf.io.FixedLenFeature] = {}
    types = {"int64": tf.int64, "float": tf.float32, "bytes": tf.string}
    for field in schema:
        spec[field.name] = tf.io.FixedLenFeature([], types[storage_kind(field)])
        if field.kind == "ragged":
            spec[shape_name(field)] = tf.io.FixedLenFeature([field.rank], tf.int64)
    return spec


def parse_batch(records: tf.Tensor, schema: Schema) -> dict[str, tf.Tensor | tf.RaggedTensor]:
    """The fields of serialised records, (batch,) strings; see :func:`make_dataset` for the result."""
    return _fields_of(records, schema, None)


def _fields_of(
    records: tf.Tensor, schema: Schema, layout: ExampleLayout | None
) -> dict[str, tf.Tensor | tf.RaggedTensor]:
    """As :func:`parse_batch`; of records of a ``layout``, which we wrote, fixed fields are cut out where they lie."""
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
    """Padded varints as int64: seven bits of each byte, the lowest first."""
    bits = tf.cast(tf.io.decode_raw(raw, tf.uint8), tf.int64) & 0x7F
    return tf.reduce_sum(tf.bitwise.left_shift(bits, np.arange(0, 7 * nbytes, 7)), axis=1)


def _integers(value: tf.Tensor, field: Field) -> tf.Tensor:
    if field.numpy == np.uint64:
        return tf.bitcast(value, tf.uint64)  # numbers above 2**63 - 1 are stored as their two's complement
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
    """Strings of equal length as numbers, with one dimension more."""
    dtype = field.numpy
    # decode_raw knows neither dates nor unsigned numbers of more than 16 bits.
    decodable = np.dtype(f"i{dtype.itemsize}") if dtype.kind in "mM" or dtype in (np.uint32, np.uint64) else dtype
    numbers: Any = tf.io.decode_raw(raw, tf.as_dtype(decodable))
    return tf.bitcast(numbers, tf.as_dtype(dtype)) if dtype.kind == "u" and decodable != dtype else numbers


def make_dataset(
    cache: CacheDir | str | Path,
    *,
    batch_size: int,
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
    """Batches of the samples that are in the cache when an epoch begins.

    Each time the dataset is iterated over (and at each turn of ``repeat``) it takes a new snapshot: it grows with the
    cache. With a ``shuffle_buffer`` of so many records the files are shuffled too, by ``seed`` and epoch; without one
    the samples come oldest first. ``repeat`` goes on for ever. ``run`` names a training run of several processes: they
    get the same snapshot for the same epoch. ``split`` is ``"train"`` or ``"validation"`` by a hash of ``__key__``,
    ``validation`` (default: 5 %) of the samples in the latter: the sides of every loader, and a sample never changes
    sides. ``where`` selects samples by numbers or text, as in every loader.

    Its length is unknown to TensorFlow, and Keras takes the number of batches of the first epoch for that of all. To
    train on a growing cache whole, give ``repeat=True`` here and ``steps_per_epoch=`` to ``model.fit``. TensorFlow's
    autotuning is off, which costs short epochs more than it brings them, for all that is built on it too; options of
    your own behind it may switch it on.

    An element is a dict of batches: fixed fields as dense tensors (batch, *shape), bytes and str as ``tf.string``
    (batch,), ragged arrays as ``tf.RaggedTensor`` with as many ragged dimensions as the array has; datetime64 and
    timedelta64 as int64. ``as_supervised=("volume", "label")`` makes it a tuple of inputs and targets, and with a third
    name sample weights, as ``model.fit`` takes them; for several inputs or targets give a list of names.

    ``cache`` is a cache or its folder, or a folder that ``cachetool convert --out`` wrote. Raises :class:`UsageError`
    for a cache, dataset or field that is not there, and when shards are in another format than TFRecord. An epoch over
    a dataset that was emptied since, has other fields, or with ``drop_remainder`` less than a batch, ends with an error
    that says so; with ``repeat`` so does one over an empty side.
    """
    batch_size = parse_whole(batch_size, what="batch_size=", least=1)
    shuffle_buffer = parse_whole(shuffle_buffer, what="shuffle_buffer=", least=0)
    seed = None if seed is None else parse_whole(seed, what="seed=")
    share, where_values = parse_split(split, validation), parse_where(where)
    repeat, drop_remainder = parse_flag(repeat, what="repeat="), parse_flag(drop_remainder, what="drop_remainder=")
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


def _parse_supervised(names: Any) -> tuple[Any, ...]:
    """The argument ``as_supervised``: two or three names of fields, or lists of them. Raises :class:`UsageError`."""
    parts = tuple(names) if isinstance(names, list | tuple) else ()
    good = [
        isinstance(part, str) or (isinstance(part, list | tuple) and part and all(isinstance(n, str) for n in part))
        for part in parts
    ]
    if not 2 <= len(parts) <= 3 or not all(good):
        raise UsageError(
            f"as_supervised={shown(names)} cannot be used: fields of inputs and targets, as ('volume', 'label')"
        )
    return tuple(part if isinstance(part, str) else tuple(part) for part in parts)


def _selected(schema: Schema, fields: str | Sequence[str] | None, supervised: tuple[Any, ...] | None) -> Schema:
    """The fields asked for; those of ``as_supervised`` where only these are. Raises :class:`UsageError`."""
    names = () if supervised is None else tuple(tf.nest.flatten(supervised))
    if fields is None and names:
        fields = list(dict.fromkeys(names))
    selected = schema if fields is None else schema.select(fields)
    for name in names:
        selected[name]  # refuses a name that fields= leaves out
    return selected


def _element(batch: dict[str, Any], names: tuple[Any, ...] | None) -> Any:
    """A batch as it is, or as the tuple that ``as_supervised`` names."""
    if names is None:
        return batch
    return tuple(batch[part] if isinstance(part, str) else tuple(batch[name] for name in part) for part in names)


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of :func:`make_dataset`, checked."""

    batch_size: int
    shuffle_buffer: int
    seed: int
    """The one given, or a random one."""
    is_seeded: bool
    """Whether a seed was given."""
    repeat: bool
    drop_remainder: bool
    run: str | None
    split: str | None
    where: Where | None
    selection: Selection | None
    place: str
    """Names the cache to a command."""
    supervised: tuple[Any, ...] | None
    """Fields of the inputs, targets and sample weights."""

    @property
    def shuffle(self) -> bool:
        """Whether files and records are shuffled."""
        return self.shuffle_buffer > 0


def _epoch(
    subscription: Subscription, schema: Schema, numbers: Iterator[int], options: _Options
) -> Iterator[tuple[Any, ...]]:
    """Yield one element: the columns of :func:`_files` of a new snapshot, in the order of this epoch, and its number.

    Keeps the snapshot's lease until the generator ends. ``schema`` is that of the first snapshot.
    """
    number, lease = next(numbers), copy.copy(subscription)  # the copy has a lease of its own
    began = time.monotonic()
    close = lease.close
    try:
        view = lease.newest(epoch=None if options.run is None else number, sparing=True)
        columns = _files(view, options.selection)
        if view.schema != schema:  # by which the fields are found in a record
            raise UsageError(f"dataset {view.dataset!r} has other fields by now; call make_dataset() again")
        if not view.samples or (options.repeat and not columns[0]):  # TensorFlow would end without a word
            raise UsageError(_nothing(view, options.place, options.split, options.where))
        samples = view.samples if options.selection is None else sum(mask.count(1) for mask in columns[2])
        if options.drop_remainder and samples < options.batch_size:
            raise UsageError(
                f"{samples} samples make no batch of batch_size={options.batch_size} with drop_remainder=True;"
                " pull more, or take smaller batches"
            )
        blocks = order(len(columns[0]), shuffle=options.shuffle, seed=options.seed, epoch=number)
        at = [int(i) for block in blocks for i in block]
        yield *([column[i] for i in at] for column in columns), number
        whole, part = divmod(samples, options.batch_size)
        batches = whole + (part > 0 and not options.drop_remainder)
        seconds = time.monotonic() - began
        lease.served(Delivered(seconds, batches, None, None, samples), last=True)
    except GeneratorExit:  # collected, perhaps in the middle of a transaction of this very thread
        close = functools.partial(beside, lease.close)
        raise
    finally:
        close()


def _batches(epochs: tf.data.Dataset, stored: Schema, schema: Schema, size: int, options: _Options) -> tf.data.Dataset:
    """Batches of the fields of ``schema``, out of records of the fields ``stored`` and of ``size`` bytes."""
    # Large values are copied by many threads when they are parsed, by one when they are cut out.
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
    """The batches prefetched, with autotuning off."""
    # Prefetching ends with the epoch: behind `repeat`, where TensorFlow puts one by itself, it would take the next
    # snapshot before the last batches of this one are out.
    out = batches.prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    # AUTOTUNE then means a call for each of up to 16 processors. The thread that would choose otherwise makes epochs of
    # 0.3 s a fifth slower, and the end of every third waits for it: up to as long again as the epoch took.
    options.autotune.enabled = False
    if repeat:
        options.experimental_optimization.inject_prefetch = False
        out = out.repeat()
    return out.with_options(options)


def _nothing(view: View, place: str, split: str | None = None, where: Where | None = None) -> str:
    if where is not None and view.samples:
        return (
            f"none of the {view.samples} samples of dataset {view.dataset!r} is selected by"
            f" where={shown(where_dict(where))}; give other values, or pull more"
        )
    if split is not None and view.samples:
        return f"none of the {view.samples} samples of dataset {view.dataset!r} is of split {split!r}; pull more"
    named = "" if view.dataset in ("", "default") else f" --dataset {shlex.quote(view.dataset)}"
    return f"dataset {view.dataset!r} has no samples; fill it: cachetool pull SOURCE --to tfrecord{named}{place}"


def _files(view: View, selection: Selection | None) -> tuple[list[str], list[str], list[bytes]]:
    """Names and compressions of the files of a view; with a ``selection`` a bool for each record, and no file without
    any.

    Raises :class:`UsageError` for other formats, and what :meth:`Selection.chosen` does.
    """
    others = sorted({part.format for part in view.parts} - {"tfrecord"})
    if others:
        name = f"dataset {view.dataset!r}" if view.dataset else "the folder"
        raise UsageError(
            f"{name} has shards in {', '.join(others)}, TensorFlow reads tfrecord; run: {view.conversion('tfrecord')}"
        )
    chosen = np.ones(view.samples, dtype=np.bool_)
    if selection is not None:
        chosen[:] = False
        chosen[selection.chosen(view)] = True
    masks = [mask.tobytes() if selection is not None else b"" for mask in np.split(chosen, view.starts[1:-1])]
    files = [
        # Only compressed files have no extents.
        (_data_file(part), "" if os.path.exists(part.extents_name) else "GZIP", mask)
        for part, mask in zip(view.parts, masks, strict=False)
        if selection is None or any(mask)
    ]
    return [name for name, _, _ in files], [kind for _, kind, _ in files], [mask for _, _, mask in files]


def _data_file(part: ShardFile) -> str:
    """The file that TensorFlow opens, which would follow a link and wait for a pipe."""
    path = f"{part.where}/{part.file or 'data.tfrecord'}"
    if not part.links:
        refuse_links(part.where, ())
        if not os.path.isfile(path) or os.path.islink(path):
            with missing_is_corrupt(path):
                os.close(open_plain(path, links=False)[0])
    return path


def _record_size(view: View, files: list[str]) -> int:
    """Bytes of a record, on average."""
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
    if size < _LARGE:  # to hand a small record from thread to thread takes longer than to read it
        return named.interleave(of, cycle, _TOGETHER)
    return named.interleave(of, cycle, num_parallel_calls=tf.data.AUTOTUNE, deterministic=fixed)


def _shuffled(records: tf.data.Dataset, buffer: int, seed: int, epoch: tf.Tensor) -> tf.data.Dataset:
    """The records shuffled in another order each epoch: ``epoch`` is a tensor of the function that calls this."""
    # The graph of that function begins with the user's seed, where a 0 beside a tensor is an error to TensorFlow.
    if not tf.executing_eagerly():  # as in tf.data's debug mode, where this would change the user's own
        tf.random.set_seed(seed % (2**31 - 2) + 1)
    return records.shuffle(buffer, seed=epoch + 1, reshuffle_each_iteration=False)
