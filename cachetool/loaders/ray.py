"""Batches of a cache in Ray's object store, for a pipeline that is Ray's already.

::

    node that has the cache                                     wherever the caller is
    feeders -> batch -> ray.put, at most `in_flight` ahead ->   ObjectRef -> a task, an actor, ray.get

    ray.init(address="auto")
    for epoch in range(90):
        with batches("/data/{node}", batch_size=256, fields=["image", "label"], epoch=epoch) as refs:
            for ref in refs:
                train.remote(ref)           # on that node an argument is read where it lies, without a copy

A value is a dict of NumPy arrays; ``ray.get`` gives them read-only, over the object store's memory. It belongs to the
caller: a batch goes when no reference to it is left, not when the epoch ends. Training alone, without a pipeline of
Ray's, is faster with the loader for PyTorch in each worker, which needs no object store.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cachetool.core.closing import Closing
from cachetool.core.errors import CacheToolError, UsageError, without

try:
    import ray
except ModuleNotFoundError as error:
    raise without("ray", "ray", error) from None
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cachetool.cache import CacheDir
from cachetool.cache.layout import root_of
from cachetool.core.nodes import Node, cache_of, node_of
from cachetool.core.units import parse_whole
from cachetool.loaders.numpy import Loader

__all__ = ["Batches", "batches", "cache_here"]

IN_FLIGHT = 4


def cache_here(cache: str) -> str:
    """The folder of the cache of the node that this process is on: ``cache`` with its name in place of ``{node}``.

    For a loader in a worker of Ray: ``Loader(cache_here("/data/{node}"), ...)``. Raises :class:`UsageError` when Ray is
    not connected.
    """
    return cache_of(cache, _node(None))


def batches(
    cache: CacheDir | str | Path | Sequence[str | Path],
    *,
    batch_size: int,
    fields: str | Sequence[str] | None = None,
    epoch: int = 0,
    node: str | None = None,
    in_flight: int = IN_FLIGHT,
    **options: Any,
) -> Batches:
    """One epoch over the newest snapshot of a cache, as references to batches in the object store of its node.

    - ``cache``: a cache's folder on that node, in which ``{node}`` stands for the node's name; or plain files there.
    - ``fields``: names of fields, whose batches are dicts: an array (k, *shape) for each numeric field, a list for str
      and bytes, a :class:`~cachetool.core.block.Ragged` for a ragged one. One name alone gives its bare arrays, which
      is what ``ray.data.from_numpy_refs`` takes.
    - ``node``: name or id of the node; by default that of the caller.
    - ``in_flight``: how many batches are made that were not asked for yet, at least 1.
    - ``options``: those of :class:`cachetool.loaders.numpy.Loader`: shuffle, seed, drop_last, split, transform, ...;
      ``epoch`` decides the order together with the seed.

    The snapshot is leased, on its node, from the first batch until the last one is made or :meth:`Batches.close`.
    Raises :class:`UsageError` when Ray is not connected or has no such node. What a loader raises at the beginning of
    an epoch is raised by the first ``next()``, what it raises later by ``ray.get`` of the last reference.
    """
    in_flight = parse_whole(in_flight, what="in_flight=", least=1)
    where = _node(node)
    single = fields if isinstance(fields, str) else None
    settings = {
        "rank": 0,  # what the launcher of the caller says means nothing on that node
        "world_size": 1,
        **options,
        "batch_size": batch_size,
        "fields": [single] if single is not None else fields,
    }
    root = cache.root if isinstance(cache, CacheDir) else cache
    # The task there has another working directory.
    paths: str | list[str]
    if isinstance(root, str | Path):
        paths = cache_of(str(root_of(root).absolute()), where)
    else:
        paths = [str(root_of(path).absolute()) for path in root]
    return Batches(where, paths, single, epoch, in_flight, settings)


class Batches(Closing, Iterator["ray.ObjectRef[Any]"]):
    """References to the batches of an epoch, in order. A context manager; its length is what is left of the epoch."""

    def __init__(
        self,
        node: Node,
        cache: str | list[str],
        single: str | None,
        epoch: int,
        in_flight: int,
        settings: dict[str, Any],
    ) -> None:
        self.node = node
        """Where the batches are made."""
        maker = ray.remote(_make_batches).options(
            num_cpus=0,  # it waits for room most of the time, and must not wait for the tasks that it feeds
            num_returns="streaming",
            max_retries=0,  # another run would read another snapshot
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            _generator_backpressure_num_objects=in_flight,
        )
        self._refs: Iterator[ray.ObjectRef[Any]] = maker.remote(cache, single, epoch, settings)
        self._left: int | None = None
        self._closed = False
        self._finalizer = weakref.finalize(self, _cancel, self._refs)
        self._finalizer.atexit = False  # Ray ends what a driver that ends has left

    def __next__(self) -> ray.ObjectRef[Any]:
        if self._closed:
            raise StopIteration
        if not len(self):
            next(self._refs, None)  # until here it held its lease
            self.close()
            raise StopIteration
        ref = next(self._refs)
        self._left = len(self) - 1
        return ref

    def __len__(self) -> int:
        if self._closed:
            return 0
        if self._left is None:
            try:
                self._left = int(ray.get(next(self._refs)))
            except RayTaskError as error:
                self.close()
                cause = getattr(error, "cause", None)
                raise (cause if isinstance(cause, CacheToolError) else error) from None
        return self._left

    def close(self) -> None:
        """End the epoch here and give its lease back; batches that were given stay. May be called twice."""
        self._closed = True
        self._finalizer()


def _make_batches(cache: str | list[str], single: str | None, epoch: int, settings: dict[str, Any]) -> Iterator[Any]:
    """On the node: how many batches there will be, then the batches. Ray copies each into the object store and asks for
    the next one when there is room."""
    with Loader(cache, epochs=epoch + 1, **settings) as loader:
        loader.epoch = epoch
        batches = iter(loader)
        yield len(batches)  # type: ignore[arg-type]
        for batch in batches:
            yield batch if single is None else batch[single]
            del batch


def _cancel(refs: Any) -> None:
    """Interrupt the maker, whose ``with`` block gives back what it holds; nothing when it is done."""
    with contextlib.suppress(Exception):  # Ray may be gone before us
        ray.cancel(refs)


def _node(wanted: str | None) -> Node:
    """A living node by its name or id; None: the one that this process is on. Raises :class:`UsageError`."""
    if not ray.is_initialized():
        raise UsageError('Ray is not connected; call ray.init(address="auto") first')
    alive = [node_of(row) for row in ray.nodes() if row["Alive"]]
    wanted = ray.get_runtime_context().get_node_id() if wanted is None else wanted
    chosen = [node for node in alive if wanted in (node.id, node.name)]
    if len(chosen) != 1:
        names = ", ".join(sorted(node.name for node in alive))
        what = "no node" if not chosen else f"{len(chosen)} nodes"
        raise UsageError(f"Ray has {what} called {wanted!r}; its nodes are {names}")
    return chosen[0]
