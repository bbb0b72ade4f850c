"""The batches of loaders in the functions by which trainers move, convert and rebuild batches.

All of them are in the default suite: they need no trainer and take seconds.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch.utils import _pytree as pytree
from torch.utils.data import default_convert

from cachetool.cache import open_cache
from cachetool.core.block import Ragged
from cachetool.loaders import numpy as numpy_loader
from cachetool.loaders import torch as torch_loader
from cachetool.loaders.torch import TensorList
from tests.loaders.numbered import EVERY, put, sample

pytestmark = [pytest.mark.trainers, pytest.mark.first]
Convert = Callable[[Any], Any]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a cache of samples with a field of each kind and dtype."""
    root = tmp_path_factory.mktemp("batches") / "cache"
    with open_cache(root, max_size="20MB") as cache:
        put(cache, range(8), schema=EVERY)
    return root


@pytest.fixture(scope="module")
def tensors(filled: Path) -> Iterator[dict[str, Any]]:
    """Return a batch of the torch loader."""
    with torch_loader.Loader(filled, batch_size=8, workers=0, shuffle=False) as loader:
        yield next(iter(loader))


@pytest.fixture(scope="module")
def numpies(filled: Path) -> Iterator[dict[str, Any]]:
    """Return a batch of the numpy loader."""
    with numpy_loader.Loader(filled, batch_size=8, workers=0, shuffle=False) as loader:
        yield next(iter(loader))


def same(one: Any, other: Any) -> bool:
    """Return True if two values have the same type, dtype, shape and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, Ragged):
        return all(same(getattr(one, name), getattr(other, name)) for name in Ragged.__slots__)
    if isinstance(one, TensorList):
        return same(one.values, other.values) and same(one.shapes, other.shapes) and same(list(one), list(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_batch_has_tensors_lists_and_tensor_lists_with_the_written_values(
    tensors: dict[str, Any], numpies: dict[str, Any]
) -> None:
    for field in EVERY:
        kinds = {"fixed": (torch.Tensor, np.ndarray), "ragged": (TensorList, Ragged)}
        kind, other = kinds.get(field.kind, (list, list))
        assert type(tensors[field.name]) is kind, field.name
        assert type(numpies[field.name]) is other, field.name
        for number in range(8):
            value, written = tensors[field.name][number], sample(EVERY, number)[field.name]
            if kind is list:
                assert type(value) is type(written)
                assert value == numpies[field.name][number] == written
            else:
                array = np.asarray(written)
                assert value.shape == array.shape
                assert value.numpy().tobytes() == array.tobytes()


# -- what trainers do with a batch -------------------------------------------------------------------------------------


def _move(name: str) -> Convert:
    """Return a library's function that returns the batch unchanged on the CPU."""
    if name == "lightning":
        apply = pytest.importorskip("lightning_utilities.core.apply_func")
        return lambda batch: apply.apply_to_collection(batch, _Transferable, lambda leaf: leaf.to("cpu"))
    if name == "lightning, each tensor":
        apply = pytest.importorskip("lightning_utilities.core.apply_func")
        return lambda batch: apply.apply_to_collection(batch, torch.Tensor, torch.clone)
    if name == "accelerate":
        utils = pytest.importorskip("accelerate.utils")
        return lambda batch: utils.send_to_device(batch, torch.device("cpu"), non_blocking=True)
    if name == "ignite":
        utils = pytest.importorskip("ignite.utils")
        return lambda batch: utils.convert_tensor(batch, device="cpu", non_blocking=True)
    if name == "pytree":
        return lambda batch: pytree.tree_map(lambda leaf: leaf.to("cpu") if hasattr(leaf, "to") else leaf, batch)
    if name == "jax":
        jax = pytest.importorskip("jax")
        return lambda batch: jax.tree.map(lambda leaf: leaf, batch)
    if name == "optree":
        optree = pytest.importorskip("optree")
        return lambda batch: optree.tree_map(lambda leaf: leaf, batch)
    assert name == "torch"
    return default_convert


class _Meta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return callable(getattr(instance, "to", None))


class _Transferable(metaclass=_Meta):
    """A movable object in the sense of Lightning."""


MOVES = ["lightning", "lightning, each tensor", "accelerate", "ignite", "pytree", "jax", "optree", "torch"]


def in_order(name: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Sort the batch by its keys, as JAX and optree do."""
    return dict(sorted(batch.items())) if name in ("jax", "optree") else batch


@pytest.mark.parametrize("name", MOVES)
def test_libraries_return_a_batch_of_tensors_unchanged(name: str, tensors: dict[str, Any]) -> None:
    assert same(in_order(name, _move(name)(tensors)), in_order(name, tensors))


def dated(column: Any) -> bool:
    """Return True if these are dates or durations."""
    return isinstance(column, np.ndarray) and column.dtype.kind in "mM"


@pytest.mark.parametrize("name", MOVES)
def test_libraries_return_a_batch_of_arrays_unchanged(name: str, numpies: dict[str, Any]) -> None:
    """torch's default_convert makes tensors of arrays. It does not know dates, so they are left out there."""
    if name == "ignite":
        pytest.skip("ignite takes tensors, str, bytes, and collections of them, and no array")
    batch = numpies
    if name == "torch":
        batch = {key: each for key, each in numpies.items() if not dated(each)}
    out = in_order(name, _move(name)(batch))
    expected: dict[str, Any] = {
        key: torch.as_tensor(each) if name == "torch" and isinstance(each, np.ndarray) else each
        for key, each in in_order(name, batch).items()
    }
    assert same(out, expected)


@pytest.mark.parametrize("by", ["apply_to_collection", "pytree"])
def test_conversion_to_half_changes_every_floating_tensor(by: str, tensors: dict[str, Any]) -> None:
    def half(leaf: Any) -> Any:
        return leaf.half() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    if by == "pytree":  # where a ragged column is a leaf with ``to``
        out = pytree.tree_map(
            lambda leaf: (
                leaf.to(torch.half) if isinstance(leaf, TensorList) and leaf.values.is_floating_point() else half(leaf)
            ),
            tensors,
        )
    else:
        apply = pytest.importorskip("lightning_utilities.core.apply_func")
        out = apply.apply_to_collection(tensors, torch.Tensor, half)
    for dtype in ("float32", "float64"):
        for kind in ("scalar", "array", "ragged"):
            name = f"{kind} {dtype}"
            assert len(out[name]) == 8
            for value, before in zip(out[name], tensors[name], strict=True):
                assert value.dtype == torch.half
                assert torch.equal(value, before.half())
    assert type(out["ragged float32"]) is TensorList
    assert same(out["words"], tensors["words"])


def test_a_ragged_column_moves_to_a_device_as_a_whole(tensors: dict[str, Any]) -> None:
    apply = pytest.importorskip("lightning_utilities.core.apply_func")
    out = apply.apply_to_collection(tensors, _Transferable, lambda leaf: leaf.to("meta"))
    for field in EVERY:
        if field.kind == "ragged":
            assert type(out[field.name]) is TensorList
            assert [each.device.type for each in out[field.name]] == ["meta"] * 8
            assert [each.shape for each in out[field.name]] == [each.shape for each in tensors[field.name]]


@pytest.mark.parametrize("kind", ["tensors", "numpies"])
def test_a_batch_can_be_pickled_and_copied(kind: str, request: pytest.FixtureRequest) -> None:
    batch = request.getfixturevalue(kind)
    assert same(copy.deepcopy(batch), batch)
    wide = [torch.uint16, torch.uint32, torch.uint64]  # PyTorch pickles these but cannot unpickle them; torch.save can
    dtypes = {
        key: getattr(each.values if isinstance(each, TensorList) else each, "dtype", None)
        for key, each in batch.items()
    }
    some = {key: each for key, each in batch.items() if dtypes[key] not in wide}
    assert same(pickle.loads(pickle.dumps(some)), some)
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=False), batch)


# -- TensorList --------------------------------------------------------------------------------------------------------


@st.composite
def lists(draw: st.DrawFn) -> list[torch.Tensor]:
    """Generate tensors of one dtype and rank."""
    rank = draw(st.integers(0, 3))
    dtype = draw(st.sampled_from(["<f4", "<i8", "<u1", "<f8", "|b1"]))
    shape = st.tuples(*[st.integers(0, 3)] * rank)
    return draw(
        st.lists(arrays.arrays(dtype, shape, elements={"allow_nan": False} if "f" in dtype else None).map(torch.tensor))
    )


@given(lists())
def test_a_tensor_list_of_its_tensors_is_equal_to_it(given_tensors: list[torch.Tensor]) -> None:
    first = TensorList(given_tensors)
    assert same(list(first), given_tensors)
    assert same(TensorList(list(first)), first)
    assert same(TensorList(each for each in first), first)
    assert same(pickle.loads(pickle.dumps(first)), first)
    assert first.values.numel() == first.offsets[-1] == sum(each.numel() for each in given_tensors)
    assert first.shapes.shape == (len(given_tensors), given_tensors[0].ndim if given_tensors else 0)


@given(lists())
def test_a_tensor_list_of_another_dtype_has_one_storage(given_tensors: list[torch.Tensor]) -> None:
    first = TensorList(given_tensors)
    other = first.to(torch.float64)
    assert same(list(other), [each.to(torch.float64) for each in given_tensors])
    assert first.to(first.values.dtype).values is first.values, "nothing is copied where nothing changes"
    storage = other.values.untyped_storage().data_ptr()
    assert all(each.untyped_storage().data_ptr() == storage for each in other)
    moved = first.to(device="meta", non_blocking=True)
    assert [each.shape for each in moved] == [each.shape for each in given_tensors]


def test_a_tensor_list_is_a_sequence_of_views() -> None:
    given_tensors = [torch.arange(6.0).view(2, 3), torch.ones(0, 2), torch.full((1, 1), 7.0)]
    first = TensorList(given_tensors)
    assert len(first) == 3
    assert same(first[-1], given_tensors[2])
    assert same(first[1:], given_tensors[1:])
    assert same(first[::-2], given_tensors[::-2])
    assert same(list(reversed(first)), given_tensors[::-1])
    first[0][1, 2] = 9.0
    assert first.values[5] == 9.0
    assert given_tensors[0][1, 2] == 5.0, "the constructor copies"
    with pytest.raises(IndexError):
        first[3]
    assert repr(first) == "TensorList(3 tensors of torch.float32)"


def test_a_tensor_list_accepts_views_that_are_not_contiguous() -> None:
    given_tensors = [torch.arange(6).view(2, 3).T, torch.arange(8).view(2, 4)[:, ::2]]
    assert same(list(TensorList(given_tensors)), given_tensors)


def test_a_tensor_list_may_be_empty() -> None:
    for empty in (TensorList(), TensorList([]), TensorList(iter(()))):
        assert len(empty) == 0
        assert list(empty) == []
        assert empty[:] == []
        assert len(TensorList(list(empty))) == 0
        assert len(empty.to(torch.int64)) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        [1, 2],
        ["a"],
        "text",
        [np.ones(3)],
        [torch.ones(2), None],
        [torch.ones(2), torch.ones(2, dtype=torch.int64)],
        [torch.ones(2), torch.ones(2, 2)],
        5,
        None,
    ],
)
def test_a_list_of_tensors_of_different_kinds_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError):
        TensorList(wrong)


def test_gradients_flow_through_a_tensor_list() -> None:
    source = torch.ones(3, requires_grad=True)
    first = TensorList([source * 2, source[:2] * 3])
    (first[0].sum() + first[1].sum()).backward()
    assert source.grad is not None
    assert source.grad.tolist() == [5.0, 5.0, 2.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory is of a GPU's driver")
def test_a_tensor_list_can_be_page_locked() -> None:
    first = TensorList([torch.ones(2), torch.ones(3)])
    assert first.pin_memory().values.is_pinned()
    assert same(list(first.pin_memory()), list(first))
