"""The contract of every source: each test runs for a folder, an S3 bucket and a web server with the same samples."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cachetool.core.block import Block
from cachetool.core.errors import BadObject, UsageError
from cachetool.core.schema import Field, Schema
from cachetool.sources.base import ReadResult, Source
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source, open_source
from tests.servers import folder_server, hub_server, sftp_server
from tests.sources.bombs import FILES, OBJECTS

COUNT = 60
SCHEMA = Schema((Field("image", "<f4", (3, 5)), Field("label", "<i8"), Field("__key__", "str")))


def image(number: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.full((3, 5), number, dtype=np.float32))
    return file.getvalue()


def samples() -> dict[str, bytes]:
    """Return keys and bodies of :data:`COUNT` samples in two folders."""
    found = {}
    for number in range(COUNT):
        found[f"part{number % 2}/{number:03d}.image.npy"] = image(number)
        found[f"part{number % 2}/{number:03d}.json"] = json.dumps({"label": number}).encode()
    return found


@dataclass
class Place:
    """A store with the samples, and functions that change them there."""

    url: str
    put: Callable[[str, bytes], None]
    delete: Callable[[str], None]


@pytest.fixture(params=["local", "s3", "http", "sftp", "hf"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Return each kind of store in turn, with the samples in it."""
    root = tmp_path / "place"

    def put(key: str, body: bytes) -> None:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(body)

    with contextlib.ExitStack() as stack:
        found = Place(str(root), put, lambda key: (root / key).unlink())
        if request.param != "s3":
            for key, body in samples().items():
                put(key, body)
        if request.param == "http":
            found.url = stack.enter_context(folder_server(root, index="json")).url
        elif request.param == "sftp":
            monkeypatch.setenv("HOME", str(tmp_path / "home"))
            found.url = stack.enter_context(sftp_server(root, tmp_path / "home"))
        elif request.param == "hf":
            monkeypatch.setenv("HF_ENDPOINT", stack.enter_context(hub_server(root, page=50)).url)
            found.url = "hf://datasets/owner/name"
        elif request.param == "s3":
            moto = request.getfixturevalue("moto")
            for name, value in moto.env.items():
                monkeypatch.setenv(name, value)
            bucket, client = f"source-{uuid.uuid4().hex}", moto.client
            moto.put(bucket, {})
            found = Place(
                f"s3://{bucket}/p",
                lambda key, body: moto.put(bucket, {f"p/{key}": body}),
                lambda key: client.delete_object(Bucket=bucket, Key=f"p/{key}"),
            )
            moto.put(bucket, {f"p/{key}": body for key, body in samples().items()})
        yield found


@pytest.fixture
def source(place: Place, tmp_path: Path) -> Iterator[Source]:
    """Return a source of the listed and opened store."""
    list_source(place.url, tmp_path / "listing")
    with contextlib.closing(open_source(place.url, tmp_path / "listing")) as found:
        yield found


def order(seed: int = 0, count: int = COUNT) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(seed).permutation(COUNT)[:count].astype(np.int64)


def whole(pieces: list[ReadResult]) -> Block:
    return Block.concat([piece.block for piece in pieces])


def check(block: Block) -> list[int]:
    """Return the labels. Check that every field of each sample belongs to its label."""
    found = []
    for at in range(len(block)):
        sample = block.sample(at)
        number = int(sample["label"])
        assert (sample["image"] == number).all()
        assert sample["__key__"] == f"part{number % 2}/{number:03d}"
        found.append(number)
    return found


def test_units_and_samples_are_counted_and_the_url_has_no_secrets(source: Source) -> None:
    assert (source.units, source.samples) == (COUNT, COUNT)
    assert "@" not in source.url


def test_the_probe_finds_the_schema_and_the_mean_size(source: Source) -> None:
    probe = source.probe(order(count=20))

    assert probe.schema == SCHEMA
    assert probe.mean_bytes == 8 + 60 + len("part0/000")


@pytest.mark.parametrize("block_bytes", [1, 500, 8 * 2**20])
def test_samples_are_complete_and_in_the_requested_order(source: Source, block_bytes: int) -> None:
    """The units are numbered by key: part0 holds the even numbers."""
    units = order()

    pieces = list(source.read(units, schema=SCHEMA, block_bytes=block_bytes))

    assert check(whole(pieces)) == [2 * unit if unit < 30 else 2 * (unit - 30) + 1 for unit in units.tolist()]
    assert np.concatenate([piece.draws for piece in pieces]).tolist() == list(range(COUNT))
    assert [piece.done for piece in pieces] == np.cumsum([len(piece.block) for piece in pieces]).tolist()
    assert sum(piece.fetched for piece in pieces) == sum(map(len, samples().values()))
    assert not any(piece.skipped for piece in pieces)
    assert all(piece.block.nbytes < block_bytes + 200 for piece in pieces)


def test_a_fetch_may_name_a_unit_twice_or_no_unit(source: Source) -> None:
    twice = list(source.read(np.array([3, 3]), schema=SCHEMA))

    assert check(whole(twice)) == [6, 6]
    assert list(source.read(np.array([], dtype=np.int64), schema=SCHEMA)) == []


def test_another_process_numbers_the_units_equally(place: Place, source: Source, tmp_path: Path) -> None:
    list_source(place.url, tmp_path / "again")
    with contextlib.closing(open_source(place.url, tmp_path / "again")) as other:
        assert other.identity == source.identity
        assert check(whole(list(other.read(np.array([7]), schema=SCHEMA)))) == [14]


def test_a_bad_unit_is_an_error_that_names_the_object(place: Place, tmp_path: Path) -> None:
    place.put("part0/004.image.npy", b"junk")
    list_source(place.url, tmp_path / "l")
    with contextlib.closing(open_source(place.url, tmp_path / "l")) as source:
        with pytest.raises(BadObject, match=r"part0/004\.image\.npy.*not a \.npy file"):
            list(source.read(order(), schema=SCHEMA))
        with pytest.raises(BadObject, match=r"part0/004\.image\.npy"):
            source.probe(np.arange(COUNT))
        assert source.probe(np.arange(COUNT), skip_bad=True).schema == SCHEMA


def test_bad_missing_and_changed_units_are_skipped_and_named(place: Place, tmp_path: Path) -> None:
    place.put("part0/004.image.npy", b"junk")
    list_source(place.url, tmp_path / "l")
    place.delete("part1/007.json")
    place.put("part0/010.json", b'{"label": 10, "more": 1}')
    units = order(3)
    with contextlib.closing(open_source(place.url, tmp_path / "l")) as source:
        pieces = list(source.read(units, schema=SCHEMA, skip_bad=True, block_bytes=400))

    skipped = {s.key: (s.draw, s.reason) for piece in pieces for s in piece.skipped}
    assert sorted(check(whole(pieces))) == [n for n in range(COUNT) if n not in (4, 7, 10)]
    assert set(skipped) == {"part0/004", "part1/007", "part0/010"}
    assert "not a .npy file" in skipped["part0/004"][1]
    assert "does not exist any more" in skipped["part1/007"][1]
    assert "changed since it was listed" in skipped["part0/010"][1]
    assert units[skipped["part0/004"][0]] == 2
    draws = [*np.concatenate([piece.draws for piece in pieces]), *(draw for draw, _ in skipped.values())]
    assert sorted(draws) == list(range(COUNT))
    assert pieces[-1].done == COUNT


def test_a_sample_that_does_not_fit_the_schema_is_named(source: Source) -> None:
    for schema in (
        Schema((Field("image", "<f4", (3, 6)), *SCHEMA.fields[1:])),
        Schema((SCHEMA["image"], Field("label", "str"), SCHEMA["__key__"])),
        Schema(SCHEMA.fields[:2]),
        Schema((*SCHEMA.fields, Field("extra", "<i8"))),
    ):
        with pytest.raises(BadObject, match="part0/010"):
            list(source.read(np.array([5, 6]), schema=schema))
        pieces = list(source.read(np.array([5, 6]), schema=schema, skip_bad=True))
        assert [s.draw for piece in pieces for s in piece.skipped] == [0, 1]
        assert sum(len(piece.block) for piece in pieces) == 0
        assert pieces[-1].done == 2


def test_closing_the_iterator_early_leaves_the_source_usable(source: Source) -> None:
    pieces = source.read(order(), schema=SCHEMA, block_bytes=1)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]

    assert sorted(check(whole(list(source.read(order(1), schema=SCHEMA))))) == list(range(COUNT))


def test_a_listing_of_another_grouping_is_refused(place: Place, source: Source, tmp_path: Path) -> None:
    from cachetool.sources.options import SourceOptions

    with pytest.raises(UsageError, match="--stem first"):
        open_source(place.url, tmp_path / "listing", SourceOptions(stem="last"))


def test_closing_twice_is_allowed(source: Source) -> None:
    source.probe(order(count=2))
    source.close()
    source.close()

    assert source.units == COUNT


SOME = pytest.mark.parametrize(
    "place",
    ["local", "http", *(pytest.param(name, marks=pytest.mark.soak) for name in ("s3", "sftp", "hf"))],
    indirect=True,
)
"""The tests of code behind all stores: by default only a folder and a web server."""


@SOME
def test_a_bomb_is_an_error_that_names_it_and_takes_no_memory(place: Place, tmp_path: Path) -> None:
    """Limits count the decompressed bytes, not the declared ones."""
    for unit, (name, (body, _)) in enumerate(OBJECTS.items()):
        place.put(f"part0/{2 * unit:03d}.{name}", body)
    list_source(place.url, tmp_path / "l", options := SourceOptions(decode="image"))
    with contextlib.closing(open_source(place.url, tmp_path / "l", options)) as source:
        for unit, (name, (body, said)) in enumerate(OBJECTS.items()):
            tracemalloc.start()
            with pytest.raises(BadObject, match=rf"part0/{2 * unit:03d}\.{name}.*({said})"):
                list(source.read(np.array([unit]), schema=SCHEMA))
            assert tracemalloc.get_traced_memory()[1] < 6 * len(body) + 64 * 2**20
            tracemalloc.stop()


MOST = 700 * 2**10
"""Limit in KiB for a process that reads a bomb: Python and the libraries, plus 256 MiB."""

READ = """
import contextlib, resource, sys
import numpy as np
from pathlib import Path
from cachetool.core.errors import CacheToolError
from cachetool.sources.registry import list_source, open_source
url, folder = sys.argv[1], Path(sys.argv[2])
try:
    list_source(url, folder)
    with contextlib.closing(open_source(url, folder)) as source:
        schema = source.probe(np.arange(1)).schema
        print(sum(len(piece.block) for piece in source.read(np.arange(source.units), schema=schema)))
except CacheToolError as error:
    print(type(error).__name__, error)
# Of this process since it began as Python: what getrusage says of it may be of the one that it was forked from.
own = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name in ("gzip.zarr", "bz2.zarr"))) for name in FILES]
)
def test_a_bomb_in_a_file_of_many_samples_is_an_error_and_takes_no_memory(tmp_path: Path, name: str) -> None:
    make, said = FILES[name]
    (tmp_path / "place").mkdir()
    make(tmp_path / "place" / name)

    done = subprocess.run(
        [sys.executable, "-c", READ, tmp_path / "place", tmp_path / "listing"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip

    *lines, most = done.stdout.splitlines()
    assert re.search(said, lines[0]), lines
    assert lines[0].startswith("BadObject")
    assert name in lines[0]
    assert int(most) < MOST
