"""Crops: boxes that the feeders cut out of samples, against slices of the samples."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

from cachetool.cache import open_cache
from cachetool.core.errors import CacheToolError, CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.loaders.crop import Crops, uniforms
from cachetool.loaders.numpy import Loader
from tests.loaders.cropped import BOX, SHAPE, boxed, checked, put_volumes, volume, volumes
from tests.loaders.numbered import put_samples

WORKERS = pytest.mark.parametrize("workers", [0, 2])
PAIR: dict[str, Any] = {"volume": BOX, "label": BOX}
STORED = [
    ("lmdb", None),
    ("hdf5", None),
    ("hdf5", "gzip"),
    ("zarr", None),
    ("zarr", "blosc"),
    ("zarr", "zstd"),
    ("tfrecord", None),
    ("tfrecord", "gzip"),
]

# -- values ------------------------------------------------------------------------------------------------------------

SIZES = (7, 5, 6, 4, 3)
DTYPES = ("|b1", "|i1", "<u2", "<f4", "<c16", "<M8[us]", "<m8[s]")
RANKS = Schema(
    (
        Field("text", "str"),
        *(Field(f"{rank} {d[1:3]}", d, SIZES[:rank]) for rank in range(1, 6) for d in DTYPES),
        *(Field(f"ragged {rank}", "<i4", (None,) * rank) for rank in range(1, 6)),
        Field("number", "<i8"),
    )
)


def ranks(number: int) -> dict[str, Any]:
    """Return a sample; its text has another length in each, so the values behind it are at odd places."""
    rng, out = np.random.default_rng(number), {"text": "x" * (number % 11), "number": number}
    for field in RANKS:
        if field.name not in out:
            shape = tuple(rng.integers(3, 6, field.rank)) if field.kind == "ragged" else field.sizes
            out[field.name] = rng.integers(0, 2 if field.numpy.kind == "b" else 100, shape).astype(field.numpy)
    return out


@pytest.mark.parametrize(("format", "compression"), STORED)
def test_crops_of_every_rank_and_type_are_slices_at_their_corners(
    format: str, compression: str | None, tmp_path: Path
) -> None:
    with open_cache(tmp_path / "cache", max_size="100MB") as cache:
        for start in (0, 7):
            samples = [ranks(number) for number in range(start, start + 7)]
            put_samples(cache, samples, schema=RANKS, format=format, compression=compression)
    names = [field.name for field in RANKS if field.shape]
    # A whole axis, the whole sample, a single element, and sizes between.
    kinds: list[Any] = [(3, None, 6, 2, 3), SIZES, (1, 1, 1, 1, 1), (2, 3, 4, 2, 2)]
    crop = {
        name: (3, 2, 3, 1, 2)[: RANKS[name].rank] if name.startswith("ragged") else kinds[at % 4][: RANKS[name].rank]
        for at, name in enumerate(names)
    }
    counts: Counter[int] = Counter()
    for workers in (0, 2):
        with Loader(tmp_path / "cache", batch_size=8, crop=crop, crops=2, workers=workers) as loader:
            for batch in loader:
                assert list(batch) == [*RANKS.names, *(f"{name}_corner" for name in names)]
                for at, number in enumerate(batch["number"].tolist()):
                    counts[number] += 1
                    sample = ranks(number)
                    for name in names:
                        expected = boxed(sample[name], batch[f"{name}_corner"][at], crop[name])
                        assert batch[name].dtype == RANKS[name].numpy
                        assert batch[name][at].tobytes() == expected.tobytes(), name
    assert counts == dict.fromkeys(range(14), 4)


@pytest.mark.parametrize("format", ["hdf5", "zarr"])
def test_crops_are_what_the_library_of_the_format_slices(format: str, tmp_path: Path) -> None:
    volumes(tmp_path / "cache", [range(20)], format=format)
    (shard,) = (tmp_path / "cache" / "shards").iterdir()
    suffix = {"hdf5": "h5", "zarr": "zarr"}[format]
    file: Any = h5py.File(shard / f"data.{suffix}") if format == "hdf5" else zarr.open_group(shard / "data.zarr")
    rows = {int(number): row for row, number in enumerate(file["number"][:])}
    with Loader(tmp_path / "cache", batch_size=30, crop=PAIR, crops=9, workers=1) as loader:
        for batch in loader:
            for at, number in enumerate(batch["number"].tolist()):
                where = tuple(slice(c, c + s) for c, s in zip(batch["volume_corner"][at].tolist(), BOX, strict=True))
                for name in PAIR:
                    assert np.array_equal(file[name][(rows[number], *where)], batch[name][at])


@WORKERS
def test_large_boxes_are_copied_too(workers: int, tmp_path: Path) -> None:
    schema = Schema((Field("number", "<i8"), Field("big", "<f4", (40, 50, 60))))
    arrays = np.random.default_rng(1).standard_normal((4, 40, 50, 60)).astype("<f4")
    with open_cache(tmp_path / "cache", max_size="100MB") as cache:
        put_samples(cache, [{"number": n, "big": arrays[n]} for n in range(4)], schema=schema)
    for box in ((24, 32, 40), (24, 32, None), (3, None, None), None):
        options: dict[str, Any] = {} if box is None else {"crop": {"big": box}, "crops": 5}
        with Loader(tmp_path / "cache", batch_size=3, workers=workers, **options) as loader:
            for batch in loader:
                for at, number in enumerate(batch["number"].tolist()):
                    corner = batch["big_corner"][at] if box else (0, 0, 0)
                    assert np.array_equal(batch["big"][at], boxed(arrays[number], corner, box or (None,) * 3))


# -- random corners ----------------------------------------------------------------------------------------------------


def test_corners_are_uniform_and_independent_between_axes_crops_and_epochs() -> None:
    crops, count = Crops((("x", (3, 4, 5)),), 2), 10**5
    shapes = np.tile(np.array([[9, 14, 5]]), (count, 1))
    corners = [
        crops.corners(
            shapes,
            (3, 4, 5),
            np.arange(count) % 2,
            uniforms(np.arange(count), 3, of="crop", seed=7, epoch=epoch),
        )
        for epoch in (0, 1)
    ]
    assert corners[0].min(axis=0).tolist() == [0, 0, 0]
    assert corners[0].max(axis=0).tolist() == [6, 10, 0]

    def even(*numbers: tuple[np.ndarray, int]) -> bool:
        """Return True if all combinations are equally frequent: chi-square is below its 0.9999 quantile, nearly."""
        table = np.zeros([size for _, size in numbers])
        np.add.at(table, tuple(values for values, _ in numbers), 1)
        freedom = table.size - 1
        statistic = ((table - table.mean()) ** 2 / table.mean()).sum()
        return bool(statistic < freedom + 3.72 * np.sqrt(2 * freedom) + 9)

    first, second = (corner[:, 0] for corner in corners)
    assert even((first, 7))
    assert even((corners[0][:, 1], 11))
    assert even((first, 7), (corners[0][:, 1], 11))
    assert even((first, 7), (second, 7))
    assert even((first[:-1], 7), (first[1:], 7))
    assert even((first, 7), (np.arange(count) % 2, 2))


def test_another_seed_or_epoch_has_other_corners_and_fields_of_one_shape_share_them(tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    seen = []
    for seed in (0, 1):
        with Loader(place, batch_size=10, crop=PAIR, crops=3, workers=0, seed=seed) as loader:
            seen += [sorted(checked(loader, PAIR)) for _ in range(2)]
    assert all(label == image for epoch in seen for _, image, label in epoch)
    assert all(Counter(number for number, *_ in epoch) == dict.fromkeys(range(33), 3) for epoch in seen)
    for a in range(4):
        for b in range(a):
            assert seen[a] != seen[b]
    assert len({corner for _, corner, _ in seen[0]}) > 60


# -- grids -------------------------------------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize(("box", "stride"), [(BOX, None), ((5, 10, 3), 2), ((12, 4, 8), (1, 3, 5)), (SHAPE, None)])
def test_a_grid_stitches_to_its_volumes_bit_for_bit(box: Any, stride: Any, workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    stitched = {number: np.full(SHAPE, np.nan, dtype="<f4") for number in range(33)}
    boxes: Counter[int] = Counter()
    options: dict[str, Any] = {"crop": {"volume": box, "label": box}, "crops": "grid", "stride": stride}
    with Loader(place, batch_size=16, workers=workers, **options) as loader:
        length = len(loader)
        batches = list(loader)
    for batch in batches:
        for at, number in enumerate(batch["number"].tolist()):
            corner = batch["volume_corner"][at].tolist()
            stitched[number][tuple(slice(c, c + s) for c, s in zip(corner, box, strict=True))] = batch["volume"][at]
            boxes[number] += 1
    steps = box if stride is None else np.broadcast_to(stride, 3)
    each = int(np.prod([1 + -(-(have - size) // step) for have, size, step in zip(SHAPE, box, steps, strict=True)]))
    assert boxes == dict.fromkeys(range(33), each)
    assert length == len(batches) == -(-33 * each // 16)
    for number, array in stitched.items():
        assert array.tobytes() == volume(number)["volume"].tobytes()


@WORKERS
@pytest.mark.parametrize("shuffle", ["full", "window", False])
def test_ragged_samples_have_grids_of_their_own_size(shuffle: Any, workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    left = {number: np.ones_like(volume(number)["plane"], dtype=bool) for number in range(33)}
    crop = {"plane": (4, 4)}
    with Loader(place, batch_size=7, crop=crop, crops="grid", stride=3, workers=workers, shuffle=shuffle) as loader:
        found = checked(loader, crop)
    assert len(found) == len(set(found))
    for number, corner in found:
        left[number][tuple(slice(c, c + 4) for c in corner)] = False
    assert not any(array.any() for array in left.values())
    if shuffle is False:
        assert found == sorted(found)


def test_the_grid_of_ragged_samples_is_divided_among_ranks_and_selected(tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    crop = {"plane": (4, 4)}
    options: dict[str, Any] = {"batch_size": 5, "crop": crop, "crops": "grid", "workers": 1, "min_samples": 1}
    with Loader(place, **options) as loader:
        whole = checked(loader, crop)
    parts = []
    for rank in range(3):
        with Loader(place, **options, rank=rank, world_size=3, run=str(rank)) as loader:
            parts += checked(loader, crop)
    assert sorted(parts) == sorted(whole)
    with Loader(place, **options, where={"number": range(5, 29)}) as loader:
        assert sorted(checked(loader, crop)) == sorted(one for one in whole if 5 <= one[0] < 29)


@WORKERS
def test_grids_of_different_sizes_are_refused(workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    for crop, says in (
        ({"volume": (4, 5, 3), "label": (6, 5, 4)}, r"one sample has \{'volume': 18, 'label': 8\}; give boxes"),
        ({"plane": (4, 4), "volume": (4, 5, 3)}, r"one sample has \{'plane': \d, 'volume': 18\}; give boxes"),
    ):
        with (
            Loader(place, batch_size=4, crop=crop, crops="grid", workers=workers) as loader,
            pytest.raises(UsageError, match=says),
        ):
            list(loader)


# -- samples smaller than their box ------------------------------------------------------------------------------------

FILLS: dict[Any, dict[str, Any]] = {
    -3: {"constant_values": -3},
    float("nan"): {"constant_values": float("nan")},
    "reflect": {"mode": "reflect"},
    "edge": {"mode": "edge"},
}


@WORKERS
@pytest.mark.parametrize("pad", FILLS)
@pytest.mark.parametrize("compression", [None, "blosc"])
def test_small_samples_are_filled_up_behind_their_end(
    compression: str | None, pad: Any, workers: int, tmp_path: Path
) -> None:
    place = volumes(tmp_path / "cache", format="zarr", compression=compression)
    crop: dict[str, Any] = {"plane": (7, 12), "volume": (14, 5, None)}
    with Loader(place, batch_size=7, crop=crop, crops=2, crop_pad=pad, workers=workers) as loader:
        found = checked(loader, crop, **FILLS[pad])
    assert len(found) == 66
    # Only behind the end: what is smaller than its box begins at its first element.
    assert {corner[1] for _, corner, _ in found} == {0}


@WORKERS
def test_a_smaller_sample_without_crop_pad_is_an_error_that_names_it(workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    with Loader(place, batch_size=7, crop={"plane": (9, 2)}, workers=workers) as loader:
        says = r"field 'plane' has the shape \(., .\), smaller than the box \(9, 2\) of crop=; .* crop_pad=0"
        with pytest.raises(UsageError, match=says):
            list(loader)
    with Loader(place, batch_size=7, crop={"volume": (9, 20, 2)}, workers=workers) as loader:
        says = "a box of 20 along axis 1, but a sample has only 10; give a smaller box, or fill up with crop_pad=0"
        with pytest.raises(UsageError, match=says):
            list(loader)


@WORKERS
@pytest.mark.parametrize("value", [-1, 256, 2.5, float("nan")])
def test_a_number_that_a_field_cannot_hold_is_refused_at_once(value: float, workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    with Loader(place, batch_size=7, crop={"label": (13, 5, 3)}, crop_pad=value, workers=workers) as loader:
        with pytest.raises(UsageError, match=rf"^crop_pad= has the value {value}: field 'label' holds uint8") as error:
            next(iter(loader))
        assert "\n" not in str(error.value)


@WORKERS
def test_dates_and_flags_are_filled_up(workers: int, tmp_path: Path) -> None:
    schema = Schema((Field("day", "<M8[D]", (2, 3)), Field("good", "|b1", (2, 3))))
    day = np.datetime64("2024-05-01") + np.arange(6).reshape(2, 3)
    good = np.array([[True, False, True], [False, True, True]])
    with open_cache(tmp_path / "cache", max_size="20MB") as cache:
        put_samples(cache, [{"day": day, "good": good}], schema=schema)
    crop: dict[str, Any] = {"day": (2, 4), "good": (4, 2)}
    with Loader(tmp_path / "cache", batch_size=1, crop=crop, crop_pad=1, workers=workers) as loader:
        (batch,) = loader
    assert (
        batch["day"][0].astype("<i8").tolist()
        == np.pad(day.astype("<i8"), ((0, 0), (0, 1)), constant_values=1).tolist()
    )
    corner = int(batch["good_corner"][0, 1])
    assert batch["good"][0].tolist() == [*good[:, corner : corner + 2].tolist(), [True] * 2, [True] * 2]


# -- corners of a function ---------------------------------------------------------------------------------------------


def near_point(sample: Any, rng: np.random.Generator) -> Any:
    """Return the corner of a box around the sample's point."""
    return sample["point"] - np.array(BOX) // 2 + rng.integers(-1, 2, 3)


@WORKERS
def test_a_function_chooses_corners_from_other_fields_and_they_are_moved_inside(workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    options: dict[str, Any] = {"batch_size": 8, "crop": PAIR, "crops": 3, "corner": near_point}
    with Loader(place, fields=["volume", "label", "number"], workers=workers, **options) as loader:
        first, second = (sorted(checked(loader, PAIR)) for _ in range(2))
    room = np.array(SHAPE) - BOX
    for number, corner, label in first:
        wanted = volume(number)["point"] - np.array(BOX) // 2
        assert (np.array(corner) >= np.clip(wanted - 1, 0, room)).all()
        assert (np.array(corner) <= np.clip(wanted + 1, 0, room)).all()
        assert label == corner
    assert first != second
    with Loader(place, workers=1, **options) as loader:
        assert sorted(checked(loader, PAIR)) == first


@WORKERS
def test_a_function_sees_the_fields_of_a_sample_as_they_are_stored(workers: int, tmp_path: Path) -> None:
    def corner(sample: Any, rng: np.random.Generator) -> Any:
        assert set(sample) == {"__key__", "volume", "label", "plane", "point", "number"}
        expected = volume(int(sample["number"]))
        assert sample["__key__"] == expected["__key__"]
        assert np.array_equal(sample["plane"], expected["plane"])
        assert sample.get("nothing") is None
        return np.argwhere(sample["volume"] == sample["volume"].max())[0]

    crop = {"volume": (1, 1, 1)}
    place = volumes(tmp_path / "cache")
    with Loader(place, batch_size=8, crop=crop, corner=corner, workers=workers, fields=["volume", "number"]) as loader:
        for batch in loader:
            assert [float(value.max()) for value in batch["volume"]] == [
                volume(number)["volume"].max() for number in batch["number"].tolist()
            ]


@WORKERS
@pytest.mark.parametrize(
    ("corner", "says"),
    [
        (lambda sample, rng: (0, 0), r"corner= returned 2 numbers, but field 'volume' has 3 axes; return one number"),
        (lambda sample, rng: [0] * (2 + int(sample["number"]) % 2), r"corner= must return one number for each axis"),
        (lambda sample, rng: sample["nothing"], r"corner= raised KeyError: 'nothing' \(sample \d+\)"),
        (lambda sample, rng: None, r"corner= returned None; return one whole number for each axis"),
        (lambda sample, rng: "text", r"corner= returned 'text'; return one whole number"),
        (lambda sample, rng: (0, 1.5, 0), r"corner= returned \(0, 1.5, 0\); return one whole number"),
        (lambda sample, rng: (0, float("nan"), 0), r"corner= returned .*nan.*; return one whole number"),
        (lambda sample, rng: (True, False, True), r"corner= returned .*True.*; return one whole number"),
        (lambda sample: (0, 0, 0), r"corner= raised TypeError: .*takes 1 positional argument but 2 were given"),
    ],
)
def test_a_function_that_fails_is_named(corner: Any, says: str, workers: int, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    options: dict[str, Any] = {"batch_size": 8, "crop": {"volume": BOX}, "corner": corner, "workers": workers}
    with Loader(place, **options) as loader, pytest.raises(CacheToolError, match=says):
        list(loader)


def test_a_function_that_cannot_be_sent_is_refused_when_the_loader_is_made(tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache")
    with (tmp_path / "open").open("w") as file:
        with pytest.raises(UsageError, match=r"corner= cannot be sent to the feeders: .*or use workers=0"):
            Loader(place, batch_size=8, crop=PAIR, corner=lambda sample, rng: [len(file.name)])
        with pytest.raises(UsageError, match=r"transform= cannot be sent to the feeders"):
            Loader(place, batch_size=8, crop=PAIR, corner=near_point, transform=lambda sample: {"name": file.name})


# -- checksums ---------------------------------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize("format", ["lmdb", "hdf5", "zarr", "tfrecord"])
def test_a_flipped_bit_anywhere_in_a_cropped_sample_is_found(format: str, workers: int, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    volumes(place, [range(6)], format=format)
    options: dict[str, Any] = {"batch_size": 4, "crop": {"volume": (1, 1, 1)}, "workers": workers, "seed": 3}
    fields = ["number", "volume"]
    with Loader(place, **options, fields=fields, verify=True) as loader:
        corners = dict(checked(loader, {"volume": (1, 1, 1)}))
    for at in (0, 500, np.prod(SHAPE) - 1):
        if at == np.ravel_multi_index(corners[4], SHAPE):
            continue
        raw = volume(4)["volume"].tobytes()
        (shard,) = (place / "shards").iterdir()
        for path in [path for path in shard.rglob("*") if path.is_file()]:
            data = path.read_bytes()
            if (found := data.find(raw)) >= 0:
                changed = bytearray(data)
                changed[found + int(at) * 4] ^= 1
                path.write_bytes(changed)
                break
        else:
            pytest.fail("the volume is in no file")
        says = r"sample 4.*field 'volume' does not match its checksum|field 'volume'.*sample 4"
        with Loader(place, **options, fields=fields, verify=True) as loader, pytest.raises(CorruptError, match=says):
            list(loader)
        # Without verify= such a crop is not noticed, because it has none of the damaged bytes.
        with Loader(place, **options, fields=fields) as loader:
            assert len(checked(loader, {"volume": (1, 1, 1)})) == 6
        path.write_bytes(data)


def test_each_sample_is_checked_once_in_the_life_of_a_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cachetool.loaders.feed import batches as batches_module

    place = volumes(tmp_path / "cache")
    seen: list[int] = []
    check = batches_module.Checks.check

    def counted(self: Any, view: Any, indices: Any, block: Any) -> None:
        seen.extend(indices.tolist())
        check(self, view, indices, block)

    monkeypatch.setattr(batches_module.Checks, "check", counted)
    with Loader(place, batch_size=8, crop=PAIR, crops=5, workers=0, verify=True) as loader:
        for _ in range(2):
            assert len(checked(loader, PAIR)) == 5 * 33
        assert sorted(seen) == list(range(33))
        with open_cache(place) as cache:
            put_volumes(cache, range(33, 40))
        loader.refresh()
        checked(loader, PAIR)
    assert sorted(seen) == list(range(40))
