"""Batches of tensors for PyTorch's ``DataLoader``, in a worker made in the memory in which they reach the training
process.

::

    shard in memory -- one copy --> shared memory -- its descriptor --> training process

Gathered into ordinary memory, a batch would be copied once more when the worker hands it over.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing import get_sharing_strategy

from cachetool.core.schema import Field, Schema
from cachetool.loaders.read.gather import Empty, Located, copied
from cachetool.loaders.torch_values import TensorList, dtype_of, finished

__all__ = ["columns_of"]

_WRITTEN = 1024
"""Bytes of a value from which it is written into shared memory rather than copied."""
_AT_ONCE, _BYTES_AT_ONCE = 1024, 2**30
"""Values and bytes that one system call writes; Linux allows 1,024 (``IOV_MAX``) and 2 GiB."""


def columns_of(
    located: Located, count: int, schema: Schema, *, shared: bool
) -> dict[str, torch.Tensor | TensorList | list[Any]]:
    """Return the values of ``count`` samples that were located, in the form of a batch.

    ``shared`` makes tensors in the memory by which PyTorch hands them to another process.
    """
    return {field.name: _column(field, located, count, shared=shared) for field in schema}


def _column(field: Field, located: Located, count: int, *, shared: bool) -> torch.Tensor | TensorList | list[Any]:
    if shared and (tensor := _written(field, located, count)) is not None:
        return tensor
    tensors: dict[str, torch.Tensor] = {}
    column = copied(located, count, (field,), empty=_empty_tensors(tensors, shared=shared))[field.name]
    return finished(field, column, tensors.get(field.name))


def _empty_tensors(tensors: dict[str, torch.Tensor], *, shared: bool) -> Empty:
    """Return the function by which :func:`~cachetool.loaders.read.gather.copied` makes columns that are tensors.

    The function puts each tensor into ``tensors`` by the name of its field.
    """
    made = _shared_tensor if shared else torch.empty

    def empty(field: Field, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        if field.kind in ("bytes", "str"):
            return np.empty(shape, dtype=np.uint8)
        tensor = tensors[field.name] = made(shape, dtype=dtype_of(field.dtype))
        array: npt.NDArray[Any] = tensor.numpy().view(field.numpy)
        return array

    return empty


def _shared_tensor(shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    # The call that PyTorch's own collate function uses. The public share_memory_() would copy the values.
    storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
    tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(storage, 0, shape)  # type: ignore[call-overload,no-any-return]


def _written(field: Field, located: Located, count: int) -> torch.Tensor | None:
    """Return large values of a fixed field, written into new shared memory by system calls; None if they cannot be.

    A page of shared memory that is touched first costs a fault, and is filled with zeros before the copy. Written, it
    costs neither: 64 samples of 128 KiB take 6.3 ms instead of 10.2, and 256 of 3 KiB 1.0 instead of 1.4.
    """
    if field.kind != "fixed" or field.nbytes < _WRITTEN or len(located) != 1 or located[0][0] is not None:
        return None
    runs = located[0][1][field.name]
    # The other strategy of PyTorch, the only one of macOS, keeps no descriptor.
    described = get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    if not described or not count or runs.unmapped is not None:
        return None
    tensor = _shared_tensor((count, *field.sizes), dtype=dtype_of(field.dtype))
    fd, _ = tensor.untyped_storage()._share_fd_cpu_()
    source, nbytes, starts = runs.buffer.data, field.nbytes, runs.starts.tolist()
    step = max(1, min(_AT_ONCE, _BYTES_AT_ONCE // nbytes))
    try:
        for at in range(0, count, step):
            rows = [source[start : start + nbytes] for start in starts[at : at + step]]
            if os.pwritev(fd, rows, at * nbytes) != len(rows) * nbytes:
                return None
    except OSError:
        # The file was cut, or no memory is left: the copy in its place ends with the message for that.
        return None
    return tensor
