"""Common promises of HDF5 and Zarr: bounds, shards cut short, empty shards, detected damage, rows in any order."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachetool.core.block import Block
from cachetool.core.errors import CapacityError, CorruptError, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.formats import columnar, get_format, hdf5, zarr
from cachetool.formats.base import Format, Written
from cachetool.formats.digest import checksums
from tests.formats.samples import EVERY_KIND, block, on_disk

NAMES = ("hdf5", "zarr")
MODES = [(name, mode) for name in NAMES for mode in (None, *get_format(name).compressions)]


def write(
    kind: Format,
    path: Path,
    content: Block,
    *,
    capacity: int | None = None,
    mode: str | None = None,
    step: int = 7,
) -> Written:
    """Write a shard of ``content`` in blocks of ``step`` samples, announced as ``capacity`` samples."""
    most = content.samples if capacity is None else capacity
    nbytes = content.nbytes + (most - content.samples) * content.schema.fixed_nbytes
    writer = kind.create(path, content.schema, samples=most, nbytes=nbytes, compression=mode)
    for start in range(0, content.samples, step):
        writer.write(content.slice(start, min(start + step, content.samples)))
    return writer.finish()


def data_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("c.*") if p.is_file())


@pytest.mark.parametrize("name", NAMES)
def test_distant_rows_are_read_separately_and_adjacent_rows_together(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Schema((Field("x", "<u4", (256,)), Field("b", "bytes")))
    kind, content = get_format(name), block(schema, 400, largest=3000)
    written = write(kind, tmp_path / "data", content)
    wanted = np.array([399, 3, 4, 200, 201, 3, 0])

    with kind.open(tmp_path / "data") as reader:
        monkeypatch.setattr(type(reader), "gap_bytes", 2048)
        fetched: list[tuple[str, int, int]] = []
        fetch = type(reader)._fetch  # type: ignore[attr-defined]
        monkeypatch.setattr(
            type(reader), "_fetch", lambda self, p, a, b: fetched.append((p.name, a, b)) or fetch(self, p, a, b)
        )
        taken = reader.take(wanted)

    assert np.array_equal(checksums(taken), written.checksums[:, wanted])
    assert [call[1:] for call in fetched if call[0] == "x"] == [(0, 5), (200, 202), (399, 400)]


@pytest.mark.parametrize(("name", "mode"), MODES)
@pytest.mark.parametrize(("capacity", "samples"), [(23, 23), (300, 9), (60, 0)])
def test_the_bound_is_never_exceeded_while_a_shard_is_written(
    tmp_path: Path, name: str, mode: str | None, capacity: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured before and after every write to a file, and after every truncation."""
    from cachetool.formats.files import BulkFile

    few = (Field("n/n", "<i8"), Field("x", "<f4", (5, 5)), Field("s", "str"), Field("b", "bytes"))
    schema = Schema((*few, Field("r", "<c8", (None,)), Field("large", "<f8", (60, 120))))
    kind, content = get_format(name), block(schema, samples, largest=30_000)
    path = tmp_path / "data"
    peak = 0

    def measured(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal peak
            out = method(*args, **kwargs)
            peak = max(peak, on_disk(path))
            return out

        return call

    for method in ("write_at", "finish"):
        monkeypatch.setattr(BulkFile, method, measured(getattr(BulkFile, method)))
    write(kind, path, content, capacity=capacity, mode=mode)

    nbytes = content.nbytes + (capacity - samples) * schema.fixed_nbytes
    assert peak > 0
    assert on_disk(path) <= peak <= kind.bound(schema, capacity, nbytes, compression=mode)


@pytest.mark.parametrize("name", NAMES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    strings=st.integers(0, 3),
    capacity=st.integers(1, 120),
    share=st.floats(0, 1),
)
def test_a_shard_with_fewer_samples_than_announced_is_small_and_complete(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    sizes: list[int],
    strings: int,
    capacity: int,
    share: float,
) -> None:
    """Any share of the announced samples arrives, in arrays that were placed for all of them."""
    for module in (hdf5, zarr):
        monkeypatch.setattr(module, "STREAM_BYTES", 2**14)
    fixed = [Field(f"f/{i}" if i % 2 else f"f{i}", "|u1", (size,)) for i, size in enumerate(sizes)]
    schema = Schema((*fixed, *(Field(f"s{i}", "str") for i in range(strings))))
    kind, content = get_format(name), block(schema, round(share * capacity), seed=capacity)
    path = tmp_path / "data"
    _remove(path)

    written = write(kind, path, content, capacity=capacity)

    nbytes = content.nbytes + (capacity - content.samples) * schema.fixed_nbytes
    assert on_disk(path) <= kind.bound(schema, capacity, nbytes)
    assert on_disk(path) <= kind.bound(schema, content.samples, content.nbytes)
    with kind.open(path) as reader:
        assert np.array_equal(checksums(reader.read(0, content.samples)), written.checksums)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", NAMES)
def test_large_arrays_are_not_buffered_in_memory(tmp_path: Path, name: str) -> None:
    """A larger shard of a fixed schema does not increase the anonymous memory of the process."""
    kind = get_format(name)
    schema = Schema((Field("x", "<f8", (2**17,)), Field("y", "<i4")))
    content = Block(schema, {"x": np.ones((8, 2**17)), "y": np.arange(8, dtype="<i4")})
    writer = kind.create(tmp_path / "data", schema, samples=320, nbytes=40 * content.nbytes)
    writer.write(content)
    before = _anonymous_memory()

    for _ in range(39):
        writer.write(content)

    assert _anonymous_memory() - before < 32 * 2**20
    assert writer.finish().samples == 320


def _anonymous_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("the kernel does not tell RssAnon")


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_a_file_truncated_anywhere_is_detected(tmp_path: Path, name: str, mode: str | None) -> None:
    """Opening or reading raises an error that names the file; no truncation returns other samples than the written
    ones.
    """
    kind = get_format(name)
    schema = Schema((Field("x", "<f8", (3, 2)), Field("n/n", "<i8"), Field("r", "<M8[D]", (None,)), Field("s", "str")))
    content = block(schema, 40, largest=400)
    path = tmp_path / "data"
    write(kind, path, content, mode=mode)

    for file in data_files(path):
        whole = file.read_bytes()
        for size in {0, 1, len(whole) // 3, len(whole) * 9 // 10, len(whole) - 1}:
            os.truncate(file, size)
            with pytest.raises(CorruptError, match=str(path)), kind.open(path) as reader:
                reader.read(0, 40)
        file.write_bytes(whole)
    with kind.open(path) as reader:
        assert np.array_equal(checksums(reader.read(0, 40)), checksums(content))


@pytest.mark.parametrize("name", NAMES)
def test_a_shard_of_another_schema_or_a_newer_layout_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, schema = get_format(name), Schema((Field("x", "<f4", (3,)),))
    write(kind, tmp_path / "data", block(schema, 2))

    with pytest.raises(CorruptError, match=r"data holds x: float32 \(3,\), not x: float64 \(3,\)"):
        kind.open(tmp_path / "data", schema=Schema((Field("x", "<f8", (3,)),)))
    monkeypatch.setattr(columnar, "_LAYOUT", 0)
    with pytest.raises(CorruptError, match=r"data has layout 1, .* update cachetool"):
        kind.open(tmp_path / "data")


@pytest.mark.parametrize("name", NAMES)
def test_a_description_of_more_samples_than_rows_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, schema = get_format(name), Schema((Field("x", "<f4", (3,)),))
    module = {"hdf5": hdf5, "zarr": zarr}[name]
    monkeypatch.setattr(module, "header", lambda schema, samples: columnar.header(schema, samples + 1))
    write(kind, tmp_path / "data", block(schema, 2))

    with pytest.raises(CorruptError, match="data: 'x' has 2 rows, not 3"):
        kind.open(tmp_path / "data")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_no_shard_is_refused(tmp_path: Path, name: str) -> None:
    kind = get_format(name)
    (tmp_path / "junk").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(5000))
    (tmp_path / "folder").mkdir()

    for what in ("junk", "folder", "nothing"):
        with pytest.raises(CorruptError, match=what):
            kind.open(tmp_path / what)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("field", ["x", "x.offsets", "x.shapes"])
def test_an_index_that_does_not_fit_names_field_and_sample(tmp_path: Path, name: str, field: str) -> None:
    """Offsets and shapes are changed through the format's own library, as a faulty writer would leave them."""
    kind, schema = get_format(name), Schema((Field("x", "<f4", (None,)),))
    path = tmp_path / "data"
    write(kind, path, Block.from_samples(schema, [{"x": np.arange(k, dtype="f4")} for k in (2, 3, 4)]))
    changed = {"x": np.ones(8, dtype="f4"), "x.offsets": np.array([0, 2, 1, 9]), "x.shapes": np.array([[2], [4], [4]])}
    _replace(kind, path, field, changed[field])

    with pytest.raises(CorruptError, match="sample 1" if field == "x.shapes" else "'x'"), kind.open(path) as reader:
        reader.read(0, 3)


def _replace(kind: Format, path: Path, name: str, values: Any) -> None:
    if kind.name == "hdf5":
        import h5py

        with h5py.File(path, "r+") as file:
            del file[name]
            file[name] = values
    else:
        import zarr as library

        group: Any = library.open_group(path, mode="r+")
        del group[name]
        key = {"name": "default", "separator": "."}
        shape = values.shape
        array = group.create_array(
            name, shape=shape, dtype=values.dtype, chunks=shape, shards=shape, compressors=None, chunk_key_encoding=key
        )
        array[:] = values


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_too_little_disk_space_is_an_error_before_anything_is_written(
    tmp_path: Path, name: str, mode: str | None
) -> None:
    kind, schema = get_format(name), Schema((Field("x", "<f4", (2**16,)),))
    content = block(schema, 8)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer: Any = None
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, hard))
    try:
        with pytest.raises(CapacityError, match="no space for"):  # noqa: PT012 - where it is said is the format's affair
            writer = kind.create(tmp_path / "data", schema, samples=8, nbytes=content.nbytes, compression=mode)
            writer.write(content)
            writer.finish()
        if writer is not None:
            writer.abort()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _open_files(tmp_path) == []


@pytest.mark.parametrize(("name", "mode"), MODES)
@pytest.mark.parametrize("blocks", [0, 3])
def test_an_aborted_shard_closes_its_files(tmp_path: Path, name: str, mode: str | None, blocks: int) -> None:
    kind, content = get_format(name), block(EVERY_KIND, 500)
    writer = kind.create(tmp_path / "data", EVERY_KIND, samples=5000, nbytes=10 * content.nbytes, compression=mode)
    for _ in range(blocks):
        writer.write(content)

    writer.abort()

    assert _open_files(tmp_path) == []


def _open_files(folder: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        if os.path.lexists(link := f"/proc/self/fd/{fd}") and (target := os.readlink(link)).startswith(str(folder)):
            found.append(target)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_invalid_options_are_refused(tmp_path: Path, name: str) -> None:
    kind = get_format(name)

    with pytest.raises(UsageError, match="no compression 'snappy'; use one of"):
        kind.create(tmp_path / "data", EVERY_KIND, samples=1, nbytes=1, compression="snappy")
    assert list(tmp_path.iterdir()) == []
