"""Compressed pieces of values: what is read back, what is refused, and what a damaged piece does."""

from __future__ import annotations

import itertools
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachetool.core.block import Block, Ragged
from cachetool.core.errors import CorruptError
from cachetool.core.extents import EXTENTS_FILE, Extents, Frames
from cachetool.core.schema import Field, Schema
from cachetool.formats.compression import chosen, compressed, compression_of
from cachetool.formats.frames import Scratch, read_frames
from cachetool.formats.shard import PlainFile, open_plain, shard_bound, side_folder
from tests.formats.samples import EVERY_FIELD
from tests.formats.samples import block as random_block

PACKED = [("zarr", "blosc"), ("zarr", "zstd"), ("hdf5", "gzip"), ("tfrecord", "gzip")]


def packed(codec: str, values: bytes, cuts: list[int], shuffle: int = 1) -> tuple[Frames, bytes]:
    """Return the frames of ``values``, cut at these positions, and the file with them."""
    import numcodecs

    parts = []
    for begin, end in itertools.pairwise(cuts):
        plain = np.frombuffer(values[begin:end], np.uint8)
        plain = np.ascontiguousarray(plain.reshape(-1, shuffle).T).ravel()
        if codec == "zlib":
            parts.append(zlib.compress(plain.tobytes()))
        elif codec == "deflate":
            stream = zlib.compressobj(wbits=-15)
            parts.append(stream.compress(plain.tobytes()) + stream.flush(zlib.Z_FULL_FLUSH))
        else:
            kind = numcodecs.Blosc("lz4") if codec == "blosc" else numcodecs.Zstd(checksum=True)
            parts.append(bytes(kind.encode(plain)))
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    offsets = np.concatenate([[3], 3 + np.cumsum(sizes)])[:-1].astype(np.int64)
    even = len({*np.diff(cuts).tolist()}) == 1
    starts = None if even else np.array(cuts, dtype=np.int64)
    return Frames(codec, offsets, sizes, cuts[1] if even else 0, shuffle, starts), b"abc" + b"".join(parts)


def read(frames: Frames, file: bytes, starts: list[int], sizes: list[int]) -> list[bytes]:
    """Return runs of the values."""
    to = np.cumsum([0, *sizes])
    out = np.full(int(to[-1]), 255, dtype=np.uint8)
    view = memoryview(file)
    read_frames(
        frames, lambda at, size: view[at : at + size], out, to[:-1], np.array(starts, dtype=np.int64),
        np.array(sizes, dtype=np.int64), Scratch(),
    )  # fmt: skip
    return [out[a:b].tobytes() for a, b in itertools.pairwise(to)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_runs_of_any_frames_are_the_values_that_were_packed(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(["blosc", "zstd", "zlib", "deflate"]))
    shuffle = data.draw(st.sampled_from([1, 2, 4, 8])) if codec == "zlib" else 1
    steps = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    if data.draw(st.booleans()):
        steps = [steps[0]] * len(steps)
    cuts = np.cumsum([0, *(shuffle * step for step in steps)]).tolist()
    some = st.sampled_from([b"\0", b"\1", b"\7", b"\xff"])
    values = b"".join(data.draw(st.lists(some, min_size=cuts[-1], max_size=cuts[-1])))
    frames, file = packed(codec, values, cuts, shuffle)
    runs = data.draw(
        st.lists(
            st.integers(0, cuts[-1]).flatmap(lambda at: st.tuples(st.just(at), st.integers(0, cuts[-1] - at))),
            max_size=12,
        )
    )
    starts, sizes = [at for at, _ in runs], [size for _, size in runs]
    assert read(frames, file, starts, sizes) == [values[at : at + size] for at, size in runs]


def test_neighbours_in_one_frame_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    frames, file = packed("zstd", bytes(range(200)), [0, 100, 200])
    fetched: list[int] = []
    view, out = memoryview(file), np.empty(60, dtype=np.uint8)

    def fetch(at: int, size: int) -> memoryview:
        fetched.append(at)
        return view[at : at + size]

    starts, sizes = np.array([150, 10, 120, 40, 20, 180]), np.full(6, 10)
    read_frames(frames, fetch, out, np.arange(6) * 10, starts, sizes, Scratch())
    assert len(fetched) == 2
    assert out.reshape(6, 10)[:, 0].tolist() == starts.tolist()


@pytest.mark.parametrize("codec", ["blosc", "zstd", "zlib", "deflate"])
def test_a_frame_that_is_larger_or_smaller_than_it_must_be_is_refused(codec: str) -> None:
    frames, file = packed(codec, bytes(1000), [0, 500, 1000])
    for nbytes in (400, 600):
        wrong = Frames(codec, frames.offsets, frames.sizes, nbytes)
        with pytest.raises(CorruptError, match="damaged frame at 3: "):
            read(wrong, file, [0], [nbytes])


@pytest.mark.parametrize("codec", ["blosc", "zstd", "zlib", "deflate"])
def test_a_file_that_ends_inside_of_a_frame_is_refused(codec: str) -> None:
    frames, file = packed(codec, np.random.default_rng(0).bytes(1000), [0, 1000])
    with pytest.raises(CorruptError, match="cut short"):
        read(frames, file[:-2], [0], [1000])


def test_a_run_outside_of_the_values_is_refused() -> None:
    frames, file = packed("zstd", bytes(100), [0, 50, 100])
    for start, size in ((90, 11), (-1, 5)):
        with pytest.raises(IndexError):
            read(frames, file, [start], [size])


def test_no_damaged_frame_crashes_the_process() -> None:
    # In a process of its own: a crash must fail this test alone.
    program = """
import numpy as np
from cachetool.core.errors import CorruptError
from tests.formats.test_frames import packed, read
rng = np.random.default_rng(0)
values = np.cumsum(rng.integers(0, 3, size=3000)).astype("<u2").tobytes()
for codec, shuffle in (("blosc", 1), ("zstd", 1), ("zlib", 2), ("deflate", 1)):
    frames, file = packed(codec, values, [0, 3000, 6000], shuffle)
    for _ in range(3000):
        raw = bytearray(file)
        for _ in range(rng.integers(1, 4)):
            raw[rng.integers(3, len(raw))] = rng.integers(256)
        try:
            read(frames, bytes(raw), [0, 4000], [6000, 100])
        except CorruptError:
            pass
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "alive", done.stderr[-1000:]


@pytest.fixture(scope="module", params=PACKED, ids=" ".join)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Block]:
    """A compressed file of each format, with fields of every kind."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / ".extents").mkdir()
    name, compression = request.param
    kind = compressed(name, compression)
    block = random_block(EVERY_FIELD, 500, largest=30)
    path = folder / f"data{kind.suffix}"
    file = PlainFile(path, kind, block.schema, samples=500, nbytes=block.nbytes)
    for at in range(0, 500, 70):
        file.write(block.slice(at, min(500, at + 70)))
    file.finish()
    return name, path, block


def test_a_compressed_file_takes_no_more_than_its_bound(written: tuple[str, Path, Block]) -> None:
    name, path, block = written
    kind = compressed(name, next(c for f, c in PACKED if f == name))
    files = [path, *side_folder(path).rglob("*"), *(path.rglob("*") if path.is_dir() else ())]
    taken = sum(max(4096, file.stat().st_blocks * 512) for file in files)
    assert taken <= shard_bound(kind, block.schema, 500, block.nbytes)


def test_noise_takes_no_more_than_the_bound_of_a_compressed_file(tmp_path: Path) -> None:
    (tmp_path / ".extents").mkdir()
    schema = Schema((Field("x", "<f4", (1025,)), Field("b", "bytes"), Field("y", "<i8")))
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 3000, size=300)
    values = rng.integers(0, 256, size=int(sizes.sum()), dtype=np.uint8)
    x = rng.integers(0, 2**32, size=(300, 1025), dtype=np.uint32).view("<f4")
    block = Block(schema, {"x": x, "b": Ragged(values, np.concatenate([[0], np.cumsum(sizes)])), "y": np.arange(300)})
    for name, compression in PACKED:
        kind = compressed(name, compression)
        path = tmp_path / f"{compression}{kind.suffix}"
        file = PlainFile(path, kind, schema, samples=300, nbytes=block.nbytes)
        file.write(block)
        file.finish()
        files = [path, *side_folder(path).rglob("*"), *(path.rglob("*") if path.is_dir() else ())]
        assert sum(file.stat().st_blocks * 512 for file in files) <= shard_bound(kind, schema, 300, block.nbytes)
        with open_plain(path, kind, schema) as reader:
            assert (np.asarray(reader.read(0, 300).columns["x"]).view("<u4") == x.view("<u4")).all()


def test_extents_of_other_codecs_or_impossible_frames_are_refused(written: tuple[str, Path, Block]) -> None:
    _, path, block = written
    raw = (side_folder(path) / EXTENTS_FILE).read_bytes()
    codec = next(c for c in (b"blosc", b"zstd", b"zlib", b"deflate") if b'"' + c + b'"' in raw)
    with pytest.raises(CorruptError, match="not frames of field"):
        Extents.from_buffer(raw.replace(b'"' + codec + b'"', b'"' + b"x" * len(codec) + b'"'), schema=block.schema)


def test_the_first_samples_decide_whether_auto_compresses() -> None:
    schema = Schema((Field("x", "<f4", (4096,)),))
    rng = np.random.default_rng(0)
    noise = Block(schema, {"x": rng.integers(0, 2**32, size=(4, 4096), dtype=np.uint32).view("<f4")})
    smooth = Block(schema, {"x": np.round(np.cumsum(rng.normal(size=(4, 4096)), axis=1), 1).astype("<f4")})
    kind = compressed("zarr", None)
    assert compression_of(chosen(kind, [noise])) is None
    assert compression_of(chosen(kind, [smooth])) == "blosc"
