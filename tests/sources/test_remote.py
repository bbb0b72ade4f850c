"""Files of many samples on a store: every kind delivers its samples once, in any requested order, and fetches hardly
more than their bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.core.block import Block
from cachetool.core.errors import BadObject, NotFound, UsageError
from cachetool.core.schema import Schema
from cachetool.formats import get_format
from cachetool.formats.shard import open_shard
from cachetool.sources.base import Source
from cachetool.sources.byte_source import MemoryRanges, SourceFile
from cachetool.sources.kinds import Census
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source, open_source
from cachetool.stores import Object
from tests.servers import Http, Scripted, counted_s3, folder_server, scripted_server, serve_file
from tests.sources.classic import classic

ROWS, SHAPE = 200, (8, 16)
IMAGES = np.arange(ROWS * 128, dtype=np.float32).reshape(ROWS, *SHAPE)
LABELS = np.arange(ROWS, dtype=np.int64)


def write_npy(folder: Path) -> str:
    np.save(folder / "rows.npy", IMAGES)
    return "rows.npy"


def write_big_endian_npy(folder: Path) -> str:
    np.save(folder / "rows.npy", IMAGES.astype(">f4"))
    return "rows.npy"


def write_hdf5(folder: Path) -> str:
    with h5py.File(folder / "rows.h5", "w", userblock_size=512) as file:
        file["image"], file["label"] = IMAGES, LABELS
    return "rows.h5"


def write_chunked_hdf5(folder: Path) -> str:
    with h5py.File(folder / "rows.h5", "w") as file:
        file.create_dataset("image", data=IMAGES, chunks=(7, 8, 8), compression="gzip")
        file.create_dataset("label", data=LABELS, chunks=(50,))
        file["name"] = [f"name {number}" for number in range(ROWS)]
    return "rows.h5"


def write_netcdf3(folder: Path) -> str:
    along = ("row", "y", "x")
    variables = {"image": (along, IMAGES, {}), "label": (("row",), LABELS.astype("i4"), {})}
    (folder / "rows.nc").write_bytes(classic(variables, {"row": ROWS, "y": 8, "x": 16}, version=2))
    return "rows.nc"


def write_netcdf3_records(folder: Path) -> str:
    names = np.array([f"name {number}".encode() for number in range(ROWS)]).view("S1").reshape(ROWS, -1)
    variables = {
        "image": (("row", "y", "x"), IMAGES, {}), "label": (("row",), LABELS.astype("i4"), {}),
        "name": (("row", "length"), names, {}),
    }  # fmt: skip
    (folder / "rows.nc").write_bytes(classic(variables, {"row": None, "y": 8, "x": 16, "length": names.shape[1]}))
    return "rows.nc"


def write_zarr(folder: Path, zarr_format: int = 3, **more: object) -> str:
    group = zarr.open_group(folder / "rows.zarr", mode="w", zarr_format=zarr_format)
    group.create_array("image", shape=IMAGES.shape, chunks=(7, 8, 16), dtype="f4", **more)[:] = IMAGES
    group.create_array("label", shape=LABELS.shape, chunks=(50,), dtype="i8")[:] = LABELS
    return "rows.zarr"


def write_zarr2(folder: Path) -> str:
    return write_zarr(folder, 2)


def write_sharded_zarr(folder: Path) -> str:
    return write_zarr(folder, shards=(28, 8, 16))


def write_parquet(folder: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    flat = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(IMAGES.reshape(-1)), 128)
    names = [f"name {number}" for number in range(ROWS)]
    table = pyarrow.table({"image": flat, "label": LABELS, "name": names})
    parquet.write_table(table, folder / "rows.parquet", row_group_size=17)
    return "rows.parquet"


WRITERS = [
    write_npy,
    write_big_endian_npy,
    write_hdf5,
    write_chunked_hdf5,
    write_netcdf3,
    write_netcdf3_records,
    write_zarr,
    write_zarr2,
    write_sharded_zarr,
    write_parquet,
]


@contextlib.contextmanager
def source_of(url: str, folder: Path, **options: object) -> Iterator[Source]:
    chosen = SourceOptions(**options)  # type: ignore[arg-type]
    list_source(url, folder, chosen)
    with contextlib.closing(open_source(url, folder, chosen)) as source:
        yield source


def everything(source: Source, draws: np.ndarray, **more: object) -> Block:
    schema = source.probe(draws[:4]).schema
    pieces = list(source.read(draws, schema=schema, **more))  # type: ignore[arg-type]
    assert np.concatenate([piece.draws for piece in pieces]).tolist() == list(range(len(draws)))
    assert pieces[-1].done == len(draws)
    return Block.concat([piece.block for piece in pieces])


def keys(block: Block) -> list[str]:
    column = block.columns["__key__"]
    return [column[at].tobytes().decode() for at in range(len(block))]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Http]:
    (tmp_path / "place").mkdir()
    with folder_server(tmp_path / "place", index="json") as found:
        yield found


@pytest.mark.parametrize("write", WRITERS)
def test_rows_are_delivered_once_in_the_order_of_the_draws(tmp_path: Path, server: Http, write: object) -> None:
    name = write(tmp_path / "place")  # type: ignore[operator]
    with source_of(f"{server.url}/{name}", tmp_path / "listing") as source:
        order = source.order(seed=3, pass_number=0)
        draws = order[np.arange(source.units)]
        block = everything(source, draws, block_bytes=20_000)

    assert sorted(draws.tolist()) == list(range(ROWS))
    assert draws.tolist() != list(range(ROWS))
    image = block.columns["rows" if "npy" in name else "image"]
    np.testing.assert_array_equal(image.reshape(-1, *SHAPE), IMAGES[draws])
    assert keys(block) == [f"{name}#{number}" for number in draws]
    assert source.url == f"{server.url}/{name}"
    if "label" in block.columns:
        np.testing.assert_array_equal(block.columns["label"], LABELS[draws])
    if "name" in block.columns:
        assert [bytes(block.columns["name"][at]).decode() for at in range(9)] == [f"name {n}" for n in draws[:9]]


def narrow(number: h5py.h5t.TypeID, bits: int, at: int = 0) -> h5py.h5t.TypeID:
    """Return a whole number with fewer bits than its bytes have."""
    made = number.copy()
    made.set_precision(bits)
    made.set_offset(at)
    return made


def bfloat16() -> h5py.h5t.TypeID:
    made = h5py.h5t.IEEE_F32LE.copy()
    made.set_fields(15, 7, 8, 0, 7)
    made.set_size(2)
    made.set_ebias(127)
    return made


@pytest.mark.parametrize(
    "kind",
    [narrow(h5py.h5t.STD_I16LE, 12), narrow(h5py.h5t.STD_I16LE, 12, 2), narrow(h5py.h5t.STD_I32LE, 24), bfloat16()],
    ids=["12 bits", "12 bits from the second", "24 bits", "bfloat16"],
)
def test_number_types_unknown_to_numpy_are_read_as_by_h5py(tmp_path: Path, server: Http, kind: h5py.h5t.TypeID) -> None:
    """Their bytes in the file differ from those of the NumPy type."""
    path = tmp_path / "place" / "rows.h5"
    with h5py.File(path, "w") as file:
        values = h5py.h5d.create(file.id, b"values", kind, h5py.h5s.create_simple((ROWS, 8)))
        values.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(ROWS * 8, dtype="i4").reshape(ROWS, 8) % 256 - 100)
        file["label"] = LABELS
    with h5py.File(path) as file:
        expected = file["values"][:]
    with source_of(f"{server.url}/rows.h5", tmp_path / "listing") as source:
        draws = source.order(seed=3, pass_number=0)[np.arange(ROWS)]
        block = everything(source, draws)

    assert block.columns["values"].dtype == expected.dtype
    np.testing.assert_array_equal(block.columns["values"], expected[draws])
    np.testing.assert_array_equal(block.columns["label"], LABELS[draws])


@pytest.mark.parametrize("userblock", [0, 512])
def test_unwritten_hdf5_values_are_the_fill_value(tmp_path: Path, server: Http, userblock: int) -> None:
    with h5py.File(tmp_path / "place" / "rows.h5", "w", userblock_size=userblock) as file:
        file.create_dataset("empty", (ROWS, 3), "<f4", fillvalue=7)
        file["label"] = LABELS
    with source_of(f"{server.url}/rows.h5", tmp_path / "listing") as source:
        block = everything(source, source.order(seed=3, pass_number=0)[np.arange(ROWS)])

    np.testing.assert_array_equal(block.columns["empty"], np.full((ROWS, 3), 7, dtype="<f4"))
    np.testing.assert_array_equal(np.sort(block.columns["label"]), LABELS)


def test_missing_parquet_rows_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow 26 omits rows of a list of bools in tiny pages of version 2.0."""
    parquet = pytest.importorskip("pyarrow.parquet")
    from cachetool.sources.parquet import open_parquet

    path = tmp_path / write_parquet(tmp_path)
    whole = parquet.ParquetFile.read_row_group

    def short(self: Any, number: int, columns: list[str]) -> Any:
        return whole(self, number, columns=columns).slice(0, 0 if number == 1 else None)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", short)
    body = memoryview(path.read_bytes())
    rows = open_parquet(SourceFile(path, len(body), MemoryRanges(body)), SourceOptions(fields=("label",), key=False))
    assert rows.read(0, 17).columns["label"].tolist() == LABELS[:17].tolist()
    with pytest.raises(BadObject, match=r"'label' has 17 rows in row group 1, but pyarrow reads 0;\n"):
        rows.read(0, ROWS)


def test_times_of_day_in_parquet_are_counted_from_midnight(tmp_path: Path, server: Http) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    seconds = np.arange(50) * 61
    columns = {
        unit: pyarrow.array(seconds * per, pyarrow.int32() if per <= 1000 else pyarrow.int64()).cast(kind)
        for unit, per, kind in (
            ("s", 1, pyarrow.time32("s")),
            ("ms", 1000, pyarrow.time32("ms")),
            ("us", 10**6, pyarrow.time64("us")),
            ("ns", 10**9, pyarrow.time64("ns")),
        )
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "place" / "rows.parquet")
    with source_of(f"{server.url}/rows.parquet", tmp_path / "listing") as source:
        block = everything(source, np.arange(50))

    # Parquet has no unit of seconds.
    assert [block.columns[unit].dtype.str for unit in columns] == ["<m8[ms]", "<m8[ms]", "<m8[us]", "<m8[ns]"]
    for unit in columns:
        np.testing.assert_array_equal(block.columns[unit], seconds.astype("m8[s]"))


@pytest.mark.parametrize("write", [write_chunked_hdf5, write_zarr, write_sharded_zarr, write_parquet])
def test_rows_stored_together_are_drawn_together_and_then_shuffled(tmp_path: Path, server: Http, write: object) -> None:
    name = write(tmp_path / "place")  # type: ignore[operator]
    with source_of(f"{server.url}/{name}", tmp_path / "listing", fields=("image",)) as source:
        order = source.order(seed=1, pass_number=0)
        step = 17 if name.endswith("parquet") else 7 * (64 * 1024 // (7 * 512))
        first = order[np.arange(step)]
        end = order.unit_end(0, 3)

    assert len({int(draw) // step for draw in order[np.arange(end)]}) == 1
    assert sorted(first.tolist()) != first.tolist() or len(first) < 3
    assert end <= step


def test_a_set_of_files_is_one_source(tmp_path: Path, server: Http) -> None:
    for number in range(3):
        with h5py.File(tmp_path / "place" / f"part{number}.h5", "w") as file:
            file["image"], file["label"] = IMAGES[: 50 + number], LABELS[: 50 + number]
    (tmp_path / "place" / "README.md").write_text("about these")
    with source_of(server.url, tmp_path / "listing") as source:
        draws = source.order(seed=0, pass_number=0)[np.arange(source.units)]
        block = everything(source, draws)

    assert source.samples == 153
    assert len(set(keys(block))) == 153
    assert sorted(block.columns["label"].tolist()) == sorted([*range(50), *range(51), *range(52)])


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (("part-00000.h5", "dataset.json", ".extents/part-00000.h5/extents.bin"), "hdf5"),
        (("p.lmdb", "dataset.json", ".extents/p.lmdb/extents.bin"), "lmdb"),
        (("p.zarr/zarr.json", "p.zarr/c/0", "dataset.json", ".extents/p.zarr/extents.bin"), "zarr"),
        ((".zattrs", ".zarray", "0.0", "dataset.json"), "zarr"),
        (("one/a.npy", "one/dataset.json"), None),
        (("a.npy", "other.json"), None),
        (("dataset.json",), None),
    ],
)
def test_side_files_of_an_exported_folder_do_not_count(keys: tuple[str, ...], kind: str | None) -> None:
    """Object stores also list hidden names. A ``dataset.json`` in each of many samples is one of their fields."""
    census = Census("s3://bucket/out")

    assert [list(page) for page in census.count([[Object(key, 1) for key in keys]])] == [
        [Object(key, 1) for key in keys]
    ]

    found = census.kind(None)
    assert (found and found.name) == kind


def test_npy_files_in_a_folder_are_one_sample_each_unless_read_as_files(tmp_path: Path, server: Http) -> None:
    for number in range(3):
        np.save(tmp_path / "place" / f"{number}.npy", IMAGES[:10])
    with source_of(server.url, tmp_path / "objects") as source:
        assert source.units == 3
    with source_of(server.url, tmp_path / "files", read_as="files") as source:
        block = everything(source, np.arange(30))
    np.testing.assert_array_equal(block.columns["npy"], np.concatenate([IMAGES[:10]] * 3))


def test_read_as_files_without_such_files_is_an_error(tmp_path: Path, server: Http) -> None:
    (tmp_path / "place" / "a.json").write_text("{}")
    with pytest.raises(UsageError, match="--read-as files"):
        list_source(server.url, tmp_path / "listing", SourceOptions(read_as="files"))


@pytest.mark.parametrize("write", [write_npy, write_hdf5, write_zarr, write_parquet])
def test_files_without_a_row_are_no_samples(
    tmp_path: Path, server: Http, write: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``convert`` behaves likewise. Before, a pull of such files ended at once as if everything had been drawn."""
    for name in ("ROWS", "IMAGES", "LABELS"):
        value = globals()[name]
        monkeypatch.setitem(globals(), name, 0 if name == "ROWS" else value[:0])
    name = write(tmp_path / "place")

    with pytest.raises(NotFound, match="has no rows"):
        list_source(f"{server.url}/{name}", tmp_path / "listing")


def test_rows_of_npy_cost_little_more_than_their_bytes(tmp_path: Path, server: Http) -> None:
    """The short form: 40 of 32 MiB in rows of 128 KiB are drawn."""
    rows = np.random.default_rng(0).integers(0, 255, (256, 131_072), dtype=np.uint8)
    np.save(tmp_path / "place" / "big.npy", rows)
    with h5py.File(tmp_path / "place" / "big.h5", "w") as file:
        file["rows"], file["label"] = rows, np.arange(256)
    for name in ("big.npy", "big.h5"):
        server.sent = 0
        with source_of(f"{server.url}/{name}", tmp_path / name) as source:
            draws = source.order(seed=0, pass_number=0)[np.arange(40)]
            block = everything(source, draws)
        column = "rows" if name == "big.h5" else "big"
        np.testing.assert_array_equal(block.columns[column], rows[draws])
        assert 40 * 131_072 <= server.sent <= 1.5 * 40 * 131_072, name


def test_a_chunk_is_fetched_once_for_all_its_samples(tmp_path: Path, server: Http) -> None:
    """The draws touch 16 chunks of 1 MiB, which do not compress."""
    rows = np.random.default_rng(0).integers(0, 255, (256, 131_072), dtype=np.uint8)
    array = zarr.create_array(tmp_path / "place" / "big.zarr", shape=rows.shape, chunks=(8, 131_072), dtype="u1")
    array[:] = rows
    with source_of(f"{server.url}/big.zarr", tmp_path / "listing") as source:
        server.sent = 0
        draws = source.order(seed=0, pass_number=0)[np.arange(128)]
        block = everything(source, draws)

    np.testing.assert_array_equal(block.columns["big"], rows[draws])
    touched = sum(
        (tmp_path / "place" / "big.zarr" / "c" / str(chunk) / "0").stat().st_size for chunk in np.unique(draws // 8)
    )
    assert len(np.unique(draws // 8)) == 16
    assert touched <= server.sent <= 1.2 * touched


@pytest.mark.parametrize("kind", ["hdf5", "parquet"])
def test_prefetched_ranges_are_used_by_the_reader(tmp_path: Path, server: Http, kind: str) -> None:
    """16 of 32 units of 256 KiB. If the reading library fetched them again, the bytes would double."""
    rows = np.random.default_rng(0).integers(0, 2**31, (256, 8192), dtype=np.int32)
    if kind == "hdf5":
        with h5py.File(tmp_path / "place" / "x.h5", "w", userblock_size=512) as file:
            file.create_dataset("rows", data=rows, chunks=(8, 8192))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")
        flat = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.reshape(-1)), 8192)
        table = pyarrow.table({"rows": flat})
        pyarrow.parquet.write_table(
            table, tmp_path / "place" / "x.parquet", row_group_size=8, compression="none", use_dictionary=False
        )
    with source_of(f"{server.url}/x.{'h5' if kind == 'hdf5' else kind}", tmp_path / "listing") as source:
        server.sent = 0
        draws = source.order(seed=0, pass_number=0)[np.arange(128)]
        block = everything(source, draws)

    np.testing.assert_array_equal(block.columns["rows"], rows[draws])
    assert 16 * 2**18 <= server.sent <= 1.2 * 16 * 2**18


@pytest.mark.parametrize("write", [write_npy, write_chunked_hdf5, write_zarr])
def test_a_file_that_changed_after_it_was_listed_is_never_read(tmp_path: Path, server: Http, write: object) -> None:
    name = write(tmp_path / "place")  # type: ignore[operator]
    with source_of(f"{server.url}/{name}", tmp_path / "listing") as source:
        schema = source.probe(np.arange(2)).schema
    for path in [tmp_path / "place" / name, *(tmp_path / "place" / name).rglob("*")]:
        if path.is_file():
            os.utime(path, (1, 1))  # the same bytes: the server reveals the change by its ETag
    with contextlib.closing(open_source(f"{server.url}/{name}", tmp_path / "listing")) as source:
        with pytest.raises(BadObject, match="changed since it was listed"):
            list(source.read(np.arange(100, 120), schema=schema))
        pieces = list(source.read(np.arange(100, 120), schema=schema, skip_bad=True))
        assert sum(len(piece.skipped) for piece in pieces) == 20
        assert sum(len(piece.block) for piece in pieces) == 0


@pytest.mark.parametrize("told", ["an ETag", "a time"])
@pytest.mark.parametrize("sized", [True, False], ids=["sizes in the index", "names alone"])
@pytest.mark.parametrize("write", [write_npy, pytest.param(write_hdf5, marks=pytest.mark.soak), write_chunked_hdf5])
def test_a_file_that_changed_after_an_index_without_etags_was_listed_is_never_read(
    tmp_path: Path, write: object, told: str, *, sized: bool
) -> None:
    """The identity in the answers during the probe is stored with the probe's result."""
    place = tmp_path / "place"
    place.mkdir()
    path = place / write(place)  # type: ignore[operator]

    def script(handler: Scripted) -> None:
        if not handler.path.endswith("/"):
            if told == "a time":
                handler.send_header = lambda name, value: name == "ETag" or given(name, value)  # type: ignore[method-assign]
            given = Scripted.send_header.__get__(handler)
            serve_file(handler, place, "none")
            return
        line = f'<a href="{path.name}">x</a> 21-Nov-2025 00:34 {path.stat().st_size if sized else "1K"}\n'
        handler.answer(200, line.encode(), Content_Type="text/html")

    options = SourceOptions(read_as="files")
    with scripted_server(script) as server:
        with source_of(f"{server.url}/", tmp_path / "listing", read_as="files") as source:
            assert len(everything(source, np.arange(20))) == 20
            schema = source.probe(np.arange(2)).schema
        os.utime(path, (1, 1))
        source = open_source(f"{server.url}/", tmp_path / "listing", options)
        with contextlib.closing(source), pytest.raises(BadObject, match="changed since it was listed"):
            list(source.read(np.arange(100, 120), schema=schema))


def test_an_index_of_records_belongs_to_the_file_beside_it_at_listing(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    path = place / "samples.tar"
    path.write_bytes(tar_of(range(3)))
    with tarfile.open(path) as archive:
        members = [(each.name, each.offset_data, each.size) for each in archive]
    lines = [f"npy {at} {size} {name}" for name, at, size in members if name.endswith(".npy")]
    (place / "samples.idx").write_text("\n".join([f"v1.2 {len(lines)}", *lines]) + "\n")

    def script(handler: Scripted) -> None:
        if handler.path.endswith("/"):
            sizes = "".join(
                f'<a href="{each.name}">x</a> 21-Nov-2025 00:34 {each.stat().st_size}\n' for each in place.iterdir()
            )
            handler.answer(200, sizes.encode(), Content_Type="text/html")
        else:
            serve_file(handler, place, "none")

    with scripted_server(script) as server:
        list_source(f"{server.url}/", tmp_path / "listing", SourceOptions())
        os.utime(path, (1, 1))
        source = open_source(f"{server.url}/", tmp_path / "listing", SourceOptions())
        with contextlib.closing(source), pytest.raises(BadObject, match="changed since it was listed"):
            everything_whole(source)


def test_a_hostile_or_damaged_file_is_an_error_that_names_it(tmp_path: Path, server: Http) -> None:
    for name, body in {"a.h5": b"\x89HDF\r\n\x1a\n" + b"\0" * 4096, "b.npy": b"junk", "c.parquet": b"PAR1"}.items():
        (tmp_path / "place" / name).write_bytes(body)
        with pytest.raises(BadObject, match=name.replace(".", r"\.")) as caught:
            list_source(f"{server.url}/{name}", tmp_path / f"l{name}")
        assert "/ranges" not in str(caught.value)


def tar_of(samples: range) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in samples:
            file = io.BytesIO()
            np.save(file, IMAGES[number])
            for name, body in {
                f"{number:03d}.image.npy": file.getvalue(),
                f"{number:03d}.json": json.dumps({"label": number}).encode(),
            }.items():
                info = tarfile.TarInfo(name)
                info.size = len(body)
                archive.addfile(info, io.BytesIO(body))
    return out.getvalue()


def test_tar_files_are_drawn_as_a_whole(tmp_path: Path, server: Http) -> None:
    for part in range(4):
        (tmp_path / "place" / f"part{part}.tar").write_bytes(tar_of(range(part * 10, part * 10 + 10 + part)))
    with source_of(server.url, tmp_path / "listing") as source:
        probe = source.probe(np.arange(4))
        pieces = list(source.read(np.array([2, 0, 3]), schema=probe.schema))

    assert (source.units, probe.per_unit) == (4, 11)
    block = Block.concat([piece.block for piece in pieces])
    assert block.columns["label"].tolist() == [*range(20, 32), *range(10), *range(30, 43)]
    assert np.concatenate([piece.draws for piece in pieces]).tolist() == [0] * 12 + [1] * 10 + [2] * 13
    np.testing.assert_array_equal(block.columns["image"][:12], IMAGES[20:32])


@pytest.mark.parametrize("write", [write_zarr, write_npy])
def test_a_pull_draws_the_requested_rows_and_a_later_pull_the_others_once(
    tmp_path: Path, server: Http, write: object
) -> None:
    name = write(tmp_path / "place")  # type: ignore[operator]
    url = f"{server.url}/{name}"
    with cachetool.open_cache(tmp_path / "cache", max_size="200MB") as cache:
        first = cache.pull(url, samples=31, workers=2, shard_size=8 * 512)
        assert (first.samples, sum(shard.samples for shard in cache.shards("default"))) == (31, 31)
        rest = cache.pull(url, all=True, workers=2, shard_size=20 * 512)
        shards = cache.shards("default")

    assert rest.pass_complete
    assert rest.samples == ROWS - 31
    found = [key for shard in shards for key in shard_keys(shard.path, shard.schema)]
    assert sorted(found) == sorted(f"{name}#{number}" for number in range(ROWS))


def shard_keys(path: Path, schema: Schema) -> list[str]:
    with open_shard(path, get_format("lmdb"), schema) as reader:
        return keys(reader.read(0, reader.samples))


def test_a_source_whose_files_all_changed_or_vanished_is_an_error_and_not_empty(tmp_path: Path, server: Http) -> None:
    """The probe for the schema skips bad files until none is left."""
    for part in range(2):
        (tmp_path / "place" / f"part{part}.tar").write_bytes(tar_of(range(part * 10, part * 10 + 10)))
    with source_of(server.url, tmp_path / "listing") as source:
        source.probe(np.arange(2))
    for part in range(2):
        (tmp_path / "place" / f"part{part}.tar").write_bytes(tar_of(range(part * 50, part * 50 + 50)))
    source = open_source(server.url, tmp_path / "listing")
    changed = r"'part0.tar' changed since it was listed.*\n.*another --dataset"
    with contextlib.closing(source), pytest.raises(BadObject, match=changed):
        source.probe(np.arange(2), skip_bad=True)
    for part in range(2):
        (tmp_path / "place" / f"part{part}.tar").unlink()
    source = open_source(server.url, tmp_path / "listing")
    with contextlib.closing(source), pytest.raises(NotFound, match=r"'part0.tar' does not exist any more"):
        source.probe(np.arange(2), skip_bad=True)


def test_a_pull_of_tar_files_commits_each_file_once_and_completely(tmp_path: Path, server: Http) -> None:
    for part in range(6):
        (tmp_path / "place" / f"part{part}.tar").write_bytes(tar_of(range(part * 10, part * 10 + 10 + part % 2)))
    with cachetool.open_cache(tmp_path / "cache", max_size="200MB") as cache:
        first = cache.pull(server.url, samples=15, workers=2, shard_size=2000)
        rest = cache.pull(server.url, all=True, workers=2, shard_size=2000)
        found = [key for shard in cache.shards("default") for key in shard_keys(shard.path, shard.schema)]

    assert first.samples in (20, 21, 22)
    assert rest.pass_complete
    assert first.samples + rest.samples == len(found) == 63
    assert len(set(found)) == 61  # 020 and 040 are in two of them


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["http", "s3"])
def test_500_rows_of_2_gib_cost_little_more_than_their_bytes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 128 KiB, drawn by a whole pull with two workers, and a Zarr in chunks of 1 MiB."""
    count, row = 2**14, 131_072
    place = tmp_path / "root" / "bucket"
    place.mkdir(parents=True)
    generator = np.random.default_rng(0)
    rows = np.lib.format.open_memmap(place / "big.npy", mode="w+", dtype=np.uint8, shape=(count, row))
    with h5py.File(place / "big.h5", "w") as file:
        dataset = file.create_dataset("rows", shape=(count, row), dtype="u1")
        array = zarr.create_array(place / "big.zarr", shape=(2048, row), chunks=(8, row), dtype="u1")
        for at in range(0, count, 512):
            part = generator.integers(0, 255, (512, row), dtype=np.uint8)
            rows[at : at + 512] = part
            dataset[at : at + 512] = part
            if at < 2048:
                array[at : at + 512] = part
        file["label"] = np.arange(count)
    rows.flush()
    with contextlib.ExitStack() as stack:
        if kind == "http":
            counter = stack.enter_context(folder_server(tmp_path / "root", index="json"))
            base = f"{counter.url}/bucket"
        else:
            env, counter = stack.enter_context(counted_s3(tmp_path / "root"))
            for name, value in env.items():
                monkeypatch.setenv(name, value)
            base = "s3://bucket"
        for name, limit in (("big.npy", 1.5), ("big.h5", 1.5), ("big.zarr", 1.2)):
            counter.sent = 0
            with cachetool.open_cache(tmp_path / f"cache-{name}", max_size="1GB") as cache:
                result = cache.pull(f"{base}/{name}", samples=500, workers=2)
                blocks = [read_shard(shard.path, shard.schema) for shard in cache.shards("default")]
            drawn = np.array([int(key.partition("#")[2]) for block in blocks for key in keys(block)])
            touched = len(np.unique(drawn // 8)) * 8 * row if name == "big.zarr" else 500 * row
            print(f"{kind} {name}: {counter.sent} bytes sent for {touched}: {counter.sent / touched:.3f}")
            assert result.samples == len(set(drawn.tolist())) == 500
            for block in blocks:
                for at, key in enumerate(keys(block)):
                    column = block.columns["big" if name != "big.h5" else "rows"]
                    np.testing.assert_array_equal(column[at], rows[int(key.partition("#")[2])])
            assert counter.sent <= limit * touched


def read_shard(path: Path, schema: Schema) -> Block:
    with open_shard(path, get_format("lmdb"), schema) as reader:
        return reader.read(0, reader.samples)


def test_tfrecord_and_lmdb_files_are_read_completely(tmp_path: Path, server: Http) -> None:
    """Files as convert writes them: every record and entry once, named by its number or its key."""
    np.save(tmp_path / "x.npy", LABELS[:20])
    for to in ("tfrecord", "lmdb"):
        cachetool.convert(tmp_path / "x.npy", to=to, out=tmp_path / to)
        [made] = (tmp_path / to).glob(f"part-*.{to}")
        (tmp_path / "place" / made.name).write_bytes(made.read_bytes())
        with source_of(f"{server.url}/{made.name}", tmp_path / f"listing-{to}") as source:
            block = everything_whole(source)
        assert len(set(keys(block))) == len(block) == 20
        if to == "tfrecord":
            assert block.columns["x"].tolist() == LABELS[:20].tolist()
            assert keys(block)[3] == f"{made.name}#3"


def everything_whole(source: Source) -> Block:
    schema = source.probe(np.arange(source.units)).schema
    return Block.concat([piece.block for piece in source.read(np.arange(source.units), schema=schema)])


def test_records_with_an_index_file_are_fetched_one_by_one(tmp_path: Path, server: Http) -> None:
    """TFRecord with the offsets and sizes of tfrecord2idx; records of 64 KiB and lists of different length."""
    tfrecord = pytest.importorskip("tfrecord")
    place, index, at = tmp_path / "place" / "x.tfrecord", [], 0
    writer = tfrecord.TFRecordWriter(str(place))
    for number in range(40):
        writer.write(
            {
                "image": (bytes([number]) * 70_000, "byte"),
                "label": (number, "int"),
                "tags": (list(range(number % 3 + 1)), "int"),
            }
        )
        writer.file.flush()
        index.append(f"{at} {place.stat().st_size - at}\n")
        at = place.stat().st_size
    writer.close()
    (tmp_path / "place" / "x.tfrecord.idx").write_text("".join(index))
    for url in (server.url, f"{server.url}/x.tfrecord"):
        with source_of(url, tmp_path / f"listing{len(url)}") as source:
            assert source.units == source.samples == 40
            schema = source.probe(np.arange(10)).schema
            server.sent = 0
            draws = np.array([17, 3, 3, 39, 0])
            block = Block.concat([piece.block for piece in source.read(draws, schema=schema)])
        assert block.columns["label"].tolist() == draws.tolist()
        assert [block.columns["tags"][at].tolist() for at in range(3)] == [[0, 1, 2], [0], [0]]
        assert keys(block)[0] == "x.tfrecord#17"
        assert server.sent < 6 * 71_000


def test_a_tar_with_an_index_file_is_read_sample_by_sample(tmp_path: Path, server: Http) -> None:
    """The index of DALI's wds2idx."""
    body = tar_of(range(150))
    (tmp_path / "place" / "x.tar").write_bytes(body)
    lines: dict[str, list[str]] = {}
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        for member in archive:
            key, _, extension = member.name.partition(".")
            lines.setdefault(key, []).append(f"{extension} {member.offset_data} {member.size} {member.name}")
    text = "".join(" ".join(each) + "\n" for each in lines.values())
    (tmp_path / "place" / "x.idx").write_text(f"v1.2 {len(lines)}\n{text}")
    with source_of(f"{server.url}/x.tar", tmp_path / "listing") as source:
        draws = source.order(seed=2, pass_number=0)[np.arange(source.units)]
        block = everything(source, draws)

    assert sorted(draws.tolist()) == list(range(150))
    assert block.columns["label"].tolist() == draws.tolist()
    np.testing.assert_array_equal(block.columns["image"], IMAGES[draws])


def test_an_index_that_does_not_fit_is_named(tmp_path: Path, server: Http) -> None:
    (tmp_path / "place" / "x.tfrecord").write_bytes(bytes(100))
    for text in ("0 1000\n", "junk", "10 20\n0 5\n"):
        (tmp_path / "place" / "x.tfrecord.index").write_text(text)
        with pytest.raises(BadObject, match=r"'x\.tfrecord\.index'"):
            list_source(server.url, tmp_path / f"listing-{len(text)}")


def test_files_with_units_of_different_size_are_numbered_consecutively(tmp_path: Path, server: Http) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    numbers = np.arange(100)
    for number, (start, stop, group) in enumerate([(0, 33, 10), (33, 33, 5), (33, 60, 4), (60, 100, 50)]):
        table = pyarrow.table({"x": numbers[start:stop]})
        parquet.write_table(table, tmp_path / "place" / f"{number}.parquet", row_group_size=group)
    with source_of(server.url, tmp_path / "listing") as source:
        assert source.units == 100
        order = source.order(seed=5, pass_number=1)
        assert sorted(order[np.arange(100)].tolist()) == numbers.tolist()
        assert everything(source, numbers[::-1].copy()).columns["x"].tolist() == numbers[::-1].tolist()
        assert keys(everything(source, np.array([99, 33])))[0] == "3.parquet#39"
