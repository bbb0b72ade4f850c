"""Batches of a cache in Ray's object store, for pipelines that use Ray already.

::

    node that has the cache                                     any node
    feeders -> batch -> ray.put, at most `in_flight` ahead ->   ObjectRef -> a task, an actor, ray.get

    ray.init(address="auto")
    for epoch in range(90):
        with batches("/data/{node}", batch_size=256, fields=["image", "label"], epoch=epoch) as refs:
            for ref in refs:
                train.remote(ref)           # on that node Ray reads an argument in place, without a copy

A value is a dict of NumPy arrays. ``ray.get`` returns the arrays read-only, over the memory of the object store. A
batch belongs to the caller: Ray deletes it when no reference to it is left, not when the epoch ends. Training alone,
without a pipeline in Ray, is faster with the loader for PyTorch in each worker, which needs no object store.
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
    """Return the cache folder of the node of this process: ``cache`` with the node's name in place of ``{node}``.

    For a loader in a Ray worker: ``Loader(cache_here("/data/{node}"), ...)``. Raises :class:`UsageError` if Ray is not
    connected.
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
    """Return one epoch over the newest snapshot of a cache, as references to batches in the object store of its node.

    Args:
        cache: Folder of the cache on that node, in which ``{node}`` stands for the node's name; or plain files there.
        batch_size: Most samples of a batch.
        fields: Names of fields. A batch is then a dict: an array (k, *shape) for a numeric field, a list for str and
            bytes, a :class:`~cachetool.core.block.Ragged` for a ragged field. A single name (a str) yields the bare
            arrays of that field, which ``ray.data.from_numpy_refs`` takes. Default: None, all fields.
        epoch: Number of the epoch, which decides the order together with the seed. Default: 0.
        node: Name or id of the node. Default: the node of the caller.
        in_flight: Number of batches that are made ahead, at least 1. Default: 4.
        options: Options of :class:`cachetool.loaders.numpy.Loader`: shuffle, seed, drop_last, split, transform, ...

    Returns:
        The references, an iterator with a length, to be used in a ``with`` block. The snapshot is leased on its node
        from the
        first batch until the last batch is made or :meth:`Batches.close` is called.

    Raises:
        UsageError: If Ray is not connected or has no such node. Errors of the loader at the beginning of the epoch are
            raised by the first ``next()``, later errors by ``ray.get`` of the last reference.
    """
    in_flight = parse_whole(in_flight, what="in_flight=", least=1)
    where = _node(node)
    single = fields if isinstance(fields, str) else None
    settings = {
        # One process on that node makes all batches. RANK and WORLD_SIZE in the caller's environment are about other
        # processes, so the loader must not look them up.
        "rank": 0,
        "world_size": 1,
        **options,
        "batch_size": batch_size,
        "fields": [single] if single is not None else fields,
    }
    root = cache.root if isinstance(cache, CacheDir) else cache
    # Absolute paths, because the task runs in another working directory.
    paths: str | list[str]
    if isinstance(root, str | Path):
        paths = cache_of(str(root_of(root).absolute()), where)
    else:
        paths = [str(root_of(path).absolute()) for path in root]
    return Batches(where, paths, single, epoch, in_flight, settings)


class Batches(Closing, Iterator["ray.ObjectRef[Any]"]):
    """References to the batches of an epoch, in order. A context manager; its length is the number of batches left."""

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
        """Node on which the batches are made."""
        maker = ray.remote(_make_batches).options(
            # The task waits for space most of the time. With a processor reserved it could block the very tasks that
            # consume its batches.
            num_cpus=0,
            num_returns="streaming",
            # A second run would read another snapshot, and so repeat and lose samples.
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            _generator_backpressure_num_objects=in_flight,
        )
        self._refs: Iterator[ray.ObjectRef[Any]] = maker.remote(cache, single, epoch, settings)
        self._left: int | None = None
        self._closed = False
        self._finalizer = weakref.finalize(self, _cancel, self._refs)
        # Ray ends the tasks of a driver that ends.
        self._finalizer.atexit = False

    def __next__(self) -> ray.ObjectRef[Any]:
        if self._closed:
            raise StopIteration
        if not len(self):
            # The maker holds its lease until its generator has ended, so the end is awaited here.
            next(self._refs, None)
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
                # Ray wraps an error of the maker. The cause is the error that the user knows from a local loader,
                # without a remote traceback.
                raise (cause if isinstance(cause, CacheToolError) else error) from None
        return self._left

    def close(self) -> None:
        """End the epoch and its lease; batches that were yielded stay. May be called twice."""
        self._closed = True
        self._finalizer()


def _make_batches(cache: str | list[str], single: str | None, epoch: int, settings: dict[str, Any]) -> Iterator[Any]:
    """Yield the number of batches, then the batches; runs as a Ray task on the node of the cache."""
    with Loader(cache, epochs=epoch + 1, **settings) as loader:
        loader.epoch = epoch
        batches = iter(loader)
        yield len(batches)  # type: ignore[arg-type]
        # Ray copies each value into the object store, and asks for the next one when fewer than in_flight batches wait
        # there.
        for batch in batches:
            yield batch if single is None else batch[single]
            # Ray has its copy. Without this the feeders could not fill the batch's memory while the next one is made.
            del batch


def _cancel(refs: Any) -> None:
    """Interrupt the maker, whose ``with`` block ends the lease; does nothing if the maker is done."""
    # This may run in a finalizer after Ray has shut down; the maker has ended then anyway.
    with contextlib.suppress(Exception):
        ray.cancel(refs)


def _node(wanted: str | None) -> Node:
    """Return a living node by its name or id; None means the node of this process. Raises :class:`UsageError`."""
    if not ray.is_initialized():
        raise UsageError('Ray is not connected; call ray.init(address="auto") first')
    alive = [node_of(row) for row in ray.nodes() if row["Alive"]]
    wanted = ray.get_runtime_context().get_node_id() if wanted is None else wanted
    chosen = [node for node in alive if wanted in (node.id, node.name)]
    # Two nodes may have one name. Guessing would read the cache of the other one.
    if len(chosen) != 1:
        names = ", ".join(sorted(node.name for node in alive))
        what = "no node" if not chosen else f"{len(chosen)} nodes"
        raise UsageError(f"Ray has {what} called {wanted!r}; its nodes are {names}")
    return chosen[0]
