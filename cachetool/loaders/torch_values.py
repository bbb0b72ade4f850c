"""Values that the loaders for PyTorch return, and the place of a process among the processes of a job."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from cachetool.core.block import Column, Ragged
from cachetool.core.schema import Field
from cachetool.loaders.columns import texts
from cachetool.loaders.ranks import launched

__all__ = [
    "Sample",
    "Samples",
    "TensorList",
    "dtype_of",
    "finished",
    "initialised",
    "shared_run",
    "world",
]

Sample: TypeAlias = dict[str, Any]


class TensorList(Sequence[torch.Tensor]):
    """A list of tensors of one dtype whose shapes differ, kept in one storage: a ragged field of a batch.

    Tensor i is a view of ``values``. ``list(tensors)`` is a plain list of tensors.

    Args:
        tensors: Tensors of one dtype and rank, which are copied into a new storage. Default: none.

    Attributes:
        values: All values, flat, a tensor of shape (total,).
        offsets: Index in ``values`` of the first value of each tensor, an int64 array of shape (k + 1,).
        shapes: Shape of each tensor, an int64 array of shape (k, rank).

    Raises:
        TypeError: The tensors differ in dtype or rank, or an element is not a tensor.

    Example:
        >>> import torch
        >>> from cachetool.loaders.torch import TensorList
        >>> tensors = TensorList([torch.zeros(2, 3), torch.ones(1, 3)])
        >>> len(tensors), tensors[1].shape, tensors.values.shape
        (2, torch.Size([1, 3]), torch.Size([9]))
    """

    values: torch.Tensor
    """All values, flat, (total,)."""
    offsets: npt.NDArray[np.int64]
    """Index in ``values`` of each tensor's first value, (k + 1,)."""
    shapes: npt.NDArray[np.int64]
    """Shape of each tensor, (k, rank)."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        tensors = list(tensors)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            wrong = next(tensor for tensor in tensors if not isinstance(tensor, torch.Tensor))
            raise TypeError(f"a TensorList holds tensors, not {type(wrong).__name__}; use list(tensors) instead")
        ranks = {tensor.ndim for tensor in tensors}
        if len(ranks) > 1 or len({tensor.dtype for tensor in tensors}) > 1:
            raise TypeError("a TensorList holds tensors of one dtype and rank; use list(tensors) instead")
        self.values = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
        self.offsets = np.cumsum([0, *(tensor.numel() for tensor in tensors)], dtype=np.int64)
        shapes = [list(tensor.shape) for tensor in tensors]
        self.shapes = np.array(shapes, dtype=np.int64).reshape(len(tensors), ranks.pop() if ranks else 0)

    @classmethod
    def of(cls, values: torch.Tensor, offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64]) -> Self:
        """Return the tensors that lie one after another in ``values``, without a copy.

        Args:
            values: All values, flat, a tensor of shape (total,).
            offsets: Index in ``values`` of the first value of each tensor, an int64 array of shape (k + 1,).
            shapes: Shape of each tensor, an int64 array of shape (k, rank).

        Returns:
            A list of k tensors.
        """
        tensors = cls.__new__(cls)
        tensors.values, tensors.offsets, tensors.shapes = values, offsets, shapes
        return tensors

    def __len__(self) -> int:
        return len(self.shapes)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return self.values[int(self.offsets[at]) : int(self.offsets[at + 1])].view(self.shapes[at].tolist())

    def pin_memory(self, device: Any = None) -> TensorList:
        """Return the same tensors in page-locked memory; ``DataLoader`` calls this method.

        Args:
            device: The device to lock the memory for, as for :meth:`torch.Tensor.pin_memory`. Default: the present one.

        Returns:
            A list of k tensors.
        """
        return self.of(self.values.pin_memory(device), self.offsets, self.shapes)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same tensors on another device or of another dtype; nothing is copied where nothing changes.

        Args:
            *args: Arguments of :meth:`torch.Tensor.to`.
            **kwargs: Keyword arguments of :meth:`torch.Tensor.to`.

        Returns:
            A list of k tensors.
        """
        return self.of(self.values.to(*args, **kwargs), self.offsets, self.shapes)

    def __repr__(self) -> str:
        return f"TensorList({len(self)} tensors of {self.values.dtype})"


class _OfBatch(dict[str, Any]):
    """A sample of :class:`Samples`. Its type tells PyTorch's collate function that the batch has columns already."""


class Samples(Sequence[Sample]):
    """A sequence of samples, dicts, over columns, so that a collate function may take either.

    ``DataLoader`` gets this object from ``dataset.__getitems__``. ``samples[i]`` is a dict from field to value.

    Args:
        columns: Field to column: a tensor of shape (k, *shape), a :class:`TensorList`, or a list of k ``bytes`` or
            ``str``.
        count: Number of samples, k.

    Example:
        >>> import torch
        >>> from cachetool.loaders.torch import Samples
        >>> samples = Samples({"label": torch.tensor([3, 1])}, 2)
        >>> samples[0]
        {'label': tensor(3)}
    """

    def __init__(self, columns: Mapping[str, Sequence[Any] | torch.Tensor], count: int) -> None:
        self.columns = columns
        """Field to (k, ...) tensor, :class:`TensorList`, or list of bytes or str."""
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(self._count)[index]
        return _OfBatch((name, column[at]) for name, column in self.columns.items())


def _collated(batch: Sequence[Sample], *, collate_fn_map: Any = None) -> Sample:
    """Return what PyTorch's ``default_collate`` returns for samples of :class:`Samples`, without a copy of tensors."""
    if not isinstance(batch, Samples):
        return dict(collate([dict(sample) for sample in batch], collate_fn_map=collate_fn_map))
    return {
        name: column if isinstance(column, torch.Tensor) else collate(list(column), collate_fn_map=collate_fn_map)
        for name, column in batch.columns.items()
    }


# The way that the documentation of default_collate names to extend it.
default_collate_fn_map[_OfBatch] = _collated


def initialised() -> bool:
    """Return True if this process belongs to a job of torch.distributed."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world() -> tuple[int, int]:
    """Return rank and world size of torch.distributed, otherwise those of the launcher's environment."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if initialised() else launched()


def least(*values: int) -> list[int]:
    """Return, for each of these numbers, the least one that any process of the job has. All processes must call
    this."""
    # The backend NCCL reduces tensors of a GPU only.
    where = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    numbers = torch.tensor(values, dtype=torch.int64, device=where)
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN)
    out: list[int] = numbers.tolist()
    return out


def shared_run() -> str | None:
    """Return a name of this job that is the same in all its processes, from the key-value store of torch.distributed;
    None if the backend has no store."""
    try:
        # A store and not a collective, because it answers each process at any time. Rank 0 alone may ask for a length,
        # to print it, and in a collective it would wait for the other ranks for ever.
        store = torch.distributed.distributed_c10d._get_default_store()
        name: bytes = store.compare_set("cachetool/run", "", f"torch {secrets.token_hex(8)}")
    # The function is private, so another version of PyTorch may lack it, and the backend MPI has no store.
    except (AttributeError, RuntimeError, ValueError):
        return None
    return name.decode()


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a stored dtype; int64 for dates and durations, which are stored so."""
    dtype = np.dtype(name)
    return torch.from_numpy(np.empty(0, dtype="<i8" if dtype.kind in "mM" else dtype)).dtype


def finished(field: Field, column: Column, tensor: torch.Tensor | None = None) -> torch.Tensor | TensorList | list[Any]:
    """Return the value of a column in a batch; for numbers the ``tensor`` into which the column was gathered, or else a
    tensor over the memory of the column."""
    if not isinstance(column, Ragged):
        return _tensor(field, column) if tensor is None else tensor
    if column.shapes is None:
        return texts(column, text=field.kind == "str")
    return TensorList.of(_tensor(field, column.values) if tensor is None else tensor, column.offsets, column.shapes)


def _tensor(field: Field, values: npt.NDArray[Any]) -> torch.Tensor:
    # PyTorch has no dates, so they are viewed as the int64 that they are stored as.
    return torch.from_numpy(values.view("<i8") if field.numpy.kind in "mM" else values)
