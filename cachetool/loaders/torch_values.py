"""What the loaders for PyTorch hand out, and where they stand among the processes of a job."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import torch

from cachetool.block import Column, Ragged
from cachetool.loaders.gather import Empty
from cachetool.loaders.ranks import given, launched
from cachetool.schema import Field

__all__ = ["Sample", "Samples", "TensorList", "dtype_of", "empty_tensors", "finished", "world"]

Sample: TypeAlias = dict[str, Any]


class TensorList(Sequence[torch.Tensor]):
    """Tensors of one dtype whose shapes differ, kept as one: what a ragged field is in a batch.

    Tensor i is a view of ``values``; a list of its own is ``list(tensors)``.
    """

    def __init__(self, values: torch.Tensor, offsets: npt.NDArray[np.int64], shapes: npt.NDArray[np.int64]) -> None:
        self.values = values
        """All values, flat."""
        self.offsets = offsets
        """Where each tensor begins in values, (k + 1,)."""
        self.shapes = shapes
        """Shape of each tensor, (k, rank)."""

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
        return TensorList(self.values.pin_memory(device), self.offsets, self.shapes)

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


def world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size as given, or those of torch.distributed, or of the launcher's environment."""
    if (place := given(rank, world_size)) is not None:
        return place
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return launched()


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a stored one; dates and durations as the int64 they are."""
    dtype = np.dtype(name)
    return torch.from_numpy(np.empty(0, dtype="<i8" if dtype.kind in "mM" else dtype)).dtype


def empty_tensors(made: dict[str, torch.Tensor]) -> Empty:
    """For :func:`~cachetool.loaders.gather.gather`: columns that are tensors, which are put into ``made`` by name."""

    def empty(field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        if field.kind in ("bytes", "str"):
            return np.empty(shape, dtype=np.uint8)
        tensor = made[field.name] = torch.empty(shape, dtype=dtype_of(field.dtype))
        found: npt.NDArray[Any] = tensor.numpy().view(field.numpy)
        return found

    return empty


def finished(field: Field, column: Column, tensor: torch.Tensor | None) -> torch.Tensor | TensorList | list[Any]:
    """What a batch holds for a column that was gathered into ``tensor``, or for bytes and str into plain memory."""
    if not isinstance(column, Ragged):
        assert tensor is not None
        return tensor
    if column.shapes is not None:
        assert tensor is not None
        return TensorList(tensor, column.offsets, column.shapes)
    data, offsets = column.values.tobytes(), column.offsets.tolist()
    pieces = [data[start:stop] for start, stop in itertools.pairwise(offsets)]
    return pieces if field.kind == "bytes" else [piece.decode("utf-8", "surrogateescape") for piece in pieces]
