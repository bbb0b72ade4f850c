"""What the loaders for PyTorch hand out, and where they stand among the processes of a job."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch

from cachetool.core.block import Column, Ragged
from cachetool.core.schema import Field
from cachetool.loaders.columns import texts
from cachetool.loaders.ranks import launched
from cachetool.loaders.read.gather import Empty

__all__ = [
    "Sample",
    "Samples",
    "TensorList",
    "dtype_of",
    "empty_tensors",
    "finished",
    "initialised",
    "shared_run",
    "world",
]

Sample: TypeAlias = dict[str, Any]


class TensorList(Sequence[torch.Tensor]):
    """Tensors of one dtype whose shapes differ, kept in one storage: a ragged field of a batch.

    Tensor i is a view of ``values``; a plain list is ``list(tensors)``. ``TensorList(list_of_tensors)`` copies tensors
    of one dtype and rank into a new storage: trainers rebuild the sequences of a batch that way. Raises
    :class:`TypeError` for what is no such list.
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
            raise TypeError(f"a TensorList is of tensors, not of {type(wrong).__name__}; take list(tensors) instead")
        ranks = {tensor.ndim for tensor in tensors}
        if len(ranks) > 1 or len({tensor.dtype for tensor in tensors}) > 1:
            raise TypeError("a TensorList is of tensors of one dtype and rank; take list(tensors) instead")
        self.values = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
        self.offsets = np.cumsum([0, *(tensor.numel() for tensor in tensors)], dtype=np.int64)
        shapes = [list(tensor.shape) for tensor in tensors]
        self.shapes = np.array(shapes, dtype=np.int64).reshape(len(tensors), ranks.pop() if ranks else 0)

    @classmethod
    def of(cls, values: torch.Tensor, offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64]) -> Self:
        """Return the tensors that lie one after another in ``values``, (total,), without a copy: tensor i has the
        shape ``shapes[i]``, (k, rank), and begins at ``offsets[i]``, (k + 1,)."""
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
        """The same tensors in page-locked memory; called by DataLoader."""
        return self.of(self.values.pin_memory(device), self.offsets, self.shapes)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the same tensors on another device or of another dtype; the arguments are those of
        :meth:`torch.Tensor.to`. As there, nothing is copied where nothing changes."""
        return self.of(self.values.to(*args, **kwargs), self.offsets, self.shapes)

    def __repr__(self) -> str:
        return f"TensorList({len(self)} tensors of {self.values.dtype})"


class Samples(Sequence[Sample]):
    """Samples gathered together: a sequence of dicts over columns, so that a collate function may take either."""

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
        return {name: column[at] for name, column in self.columns.items()}


def initialised() -> bool:
    """Return True if this process is one of a job of torch.distributed."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world() -> tuple[int, int]:
    """Rank and world size of torch.distributed, or of the launcher's environment."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if initialised() else launched()


def least(*values: int) -> list[int]:
    """Return the least of each of these numbers that any process of the job has; all of them call this."""
    where = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    numbers = torch.tensor(values, dtype=torch.int64, device=where)
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN)
    out: list[int] = numbers.tolist()
    return out


def shared_run() -> str | None:
    """Return a name of this job that all its processes get, from the key-value store of torch.distributed; None where
    that has none.

    Unlike a collective, the store answers any process at any time: a length that rank 0 alone asks for, to print it,
    does not wait for the other ranks.
    """
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        name: bytes = store.compare_set("cachetool/run", "", f"torch {secrets.token_hex(8)}")
    except (AttributeError, RuntimeError, ValueError):  # a function of no promised name; MPI has no store
        return None
    return name.decode()


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a stored one; dates and durations as the int64 they are."""
    dtype = np.dtype(name)
    return torch.from_numpy(np.empty(0, dtype="<i8" if dtype.kind in "mM" else dtype)).dtype


def empty_tensors(tensors: dict[str, torch.Tensor]) -> Empty:
    """For :func:`~cachetool.loaders.read.gather.gather`: columns that are tensors, which are put into ``tensors`` by
    name."""

    def empty(field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        if field.kind in ("bytes", "str"):
            return np.empty(shape, dtype=np.uint8)
        tensor = tensors[field.name] = torch.empty(shape, dtype=dtype_of(field.dtype))
        array: npt.NDArray[Any] = tensor.numpy().view(field.numpy)
        return array

    return empty


def finished(field: Field, column: Column, tensor: torch.Tensor | None = None) -> torch.Tensor | TensorList | list[Any]:
    """What a batch holds for a column: of numbers the ``tensor`` that it was gathered into, or its own memory."""
    if not isinstance(column, Ragged):
        return _tensor(field, column) if tensor is None else tensor
    if column.shapes is None:
        return texts(column, text=field.kind == "str")
    return TensorList.of(_tensor(field, column.values) if tensor is None else tensor, column.offsets, column.shapes)


def _tensor(field: Field, values: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.view("<i8") if field.numpy.kind in "mM" else values)
