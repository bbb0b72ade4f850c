"""The advice of messages about sources."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest

from cachetool.sources import file_listing
from cachetool.sources.byte_source import MemoryRanges, SourceFile
from cachetool.sources.options import SourceOptions
from cachetool.sources.raw import open_raw
from cachetool.sources.registry import list_source
from tests.advice.conftest import World, follows
from tests.advice.rows import Row, follow
from tests.servers import Moto
from tests.sources.test_blocks import write_image
from tests.sources.test_files_tfrecord import FLOAT, ONE, example
from tests.sources.test_files_tfrecord import write as write_records

Put = Callable[[Path], object]


def files(*names: str, body: bytes = b"x") -> Put:
    """Write files with the same body into ``d``. ``0-39`` in a name stands for each of these numbers."""

    def put(folder: Path) -> None:
        for name in names:
            for number in range(40) if "0-39" in name else (0,):
                path = folder / "d" / name.replace("0-39", f"{number:02d}")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(body)

    return put


def hdf5(name: str = "t.h5", **arrays: object) -> Put:
    """Write an HDF5 file. ``__`` in a name separates a group from its array."""

    def put(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        with h5py.File(folder / name, "w") as file:
            for array, values in arrays.items():
                file[array.replace("__", "/")] = values

    return put


CUBE = hdf5(x=np.zeros((6, 4, 2)), y=np.zeros(6))


def ome(folder: Path) -> None:
    """Write ``t.zarr``, an image of OME-Zarr."""
    write_image(folder / "t.zarr", 3)


def labelled(folder: Path) -> None:
    """Write ``t.h5`` with an array whose dimensions have names."""
    with h5py.File(folder / "t.h5", "w") as file:
        file["x"] = np.zeros((6, 4))
        file["x"].dims[0].label, file["x"].dims[1].label = "a", "b"


def packed(units: str = "", calendar: str = "standard", count: float = 1) -> Put:
    """Write ``t.h5`` with packed values."""

    def put(folder: Path) -> None:
        with h5py.File(folder / "t.h5", "w") as file:
            file["t"] = np.full(12, count)
            file["t"].attrs.update({"units": units, "calendar": calendar} if units else {"scale_factor": 0.5})

    return put


def npy(value: object) -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray(value))
    return out.getvalue()


def image(mode: str, size: tuple[int, int] = (4, 4), form: str = "PNG") -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new(mode, size).save(out, form)
    return out.getvalue()


def samples(*bodies: bytes, end: str) -> Put:
    """Write one object per body into ``d``."""

    def put(folder: Path) -> None:
        (folder / "d").mkdir(exist_ok=True)
        for number, body in enumerate(bodies):
            (folder / f"d/{number:03d}.{end}").write_bytes(body)

    return put


def table(name: str = "t.parquet", **columns: object) -> Put:
    def put(folder: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        (folder / name).parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table(columns), folder / name)

    return put


def database(entries: dict[bytes, bytes], name: bytes | None = None) -> Put:
    """Write entries into ``t.lmdb``."""

    def put(folder: Path) -> None:
        with lmdb.open(str(folder / "t.lmdb"), subdir=False, max_dbs=4, lock=False) as environment:
            place = environment.open_db(name)
            with environment.begin(write=True, db=place) as transaction:
                for key, value in entries.items():
                    transaction.put(key, value)

    return put


def tar(*names: str, name: str = "t.tar", last: bytes = npy(1)) -> Put:
    def put(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        with tarfile.open(folder / name, "w") as archive:
            for member_name in names:
                member = tarfile.TarInfo(member_name)
                body = last if member_name == names[-1] else npy(1)
                member.size = len(body)
                archive.addfile(member, io.BytesIO(body))

    return put


def tars(folder: Path) -> None:
    """Write forty archives of one sample."""
    for number in range(40):
        tar("a.x.npy", "a.z.npy", name=f"d/{number:02d}.tar")(folder)


def zarr(folder: Path) -> None:
    """Write ``t.zarr`` with one array."""
    import zarr as library

    library.open_group(str(folder / "t.zarr"), mode="w").create_array("x", data=np.arange(12))


def numbered(key: bytes, count: int) -> dict[bytes, bytes]:
    return {key % number: b"%d" % number for number in range(count)}


ARRAYS = samples(*[npy([1.0, 2.0])] * 12, end="x.npy")
FLAT = {"x": np.arange(60.0), "offsets": np.arange(0, 61, 5)}
ALIKE = {f"clip{number}__x": np.zeros((100, 4)) for number in range(50)}
CLIPS = {f"demo_{number}__x": np.zeros((5 + number, 4)) for number in range(12)}
PAIRS = numbered(b"image-%d", 9) | numbered(b"label-%d", 9) | {b"num-samples": b"9"}
UNEVEN = numbered(b"image-%d", 9) | numbered(b"label-%d", 8)
PICTURES = files("0-39.jpg", "a0-39.png")


def virtual(folder: Path) -> None:
    """Write ``t.h5`` with an array of a few bytes that declares a large size."""
    with h5py.File(folder / "t.h5", "w") as file:
        file.create_dataset("x", (10**12, 1000), "f8", chunks=(1, 1000))
        file["y"] = np.arange(12)


def external(folder: Path) -> None:
    """Write ``t.h5`` with an array whose bytes lie in another file."""
    with h5py.File(folder / "t.h5", "w") as file:
        file.create_dataset("x", (12,), "u1", external=[(str(folder / "x.bin"), 0, 12)])
        file["y"] = np.arange(12)


def mixed_records(folder: Path) -> None:
    write_records(folder / "t.tfrecord", example(a=ONE, b=ONE), example(a=FLOAT, b=ONE))


def row(module: str, beginning: str, put: Put | tuple[Put, ...] | None, fails: str, *works: str) -> Row:
    """Return a row: a message, a pull of SOURCE that fails with it, and the options of pulls that work."""
    source, _, options = fails.partition(" ")
    puts = put if isinstance(put, tuple) else () if put is None else (put,)
    pull = f"pull {source} --all --workers 1 --cache x"
    lines = tuple(f"{pull}{number} {line}" for number, line in enumerate(works))
    place = module if "/" in module else f"sources/{module}"
    return Row(f"{place}.py", beginning, (*puts, f"{pull} {options}"), lines)


pytestmark = pytest.mark.soak  # 250 commands; test_complete.py says by default which message has no test

ROWS = [
    row(
        "blame", "{}, or skip such rows", table(a=range(200), b=[None, *range(199)]), "t.parquet",
        "--on-error skip",
    ),
    row(
        "rows", "{} {}; leave the column out", table(a=range(200), b=[None, *range(199)]), "t.parquet",
        "{(--fields -b)}",
    ),
    row("blocks", "it has none of the dimensions", CUBE, "t.h5 --block 1=2", "--block 1=2 --fields x,y"),
    row("blocks", "{}: --edges drop leaves", CUBE, "t.h5 --block 0=9 --edges drop", "--block {(0=6)}", "--block 0=9"),
    row("blocks", "{}: no array has the dim", CUBE, "t.h5 --block z=2", "--block 1=2"),
    row("blocks", "--block names a dimension", labelled, "t.h5 --block 0=2,a=2", "--block a=2"),
    row("blocks", "{} at the edges left out", CUBE, "t.h5 --block 0=4 --edges drop --json", "--block 0=4"),
    row("zarr", "level {} of {}; to", ome, "t.zarr --block y=4", "--block y=4 {(--level 1)}"),
    row("zarr", "{}: --level {}: image", ome, "t.zarr --block y=4 --level 2", "--block y=4 --level 1"),
    row("options", "--level is for blocks", ome, "t.zarr --level 1", "--block y=4 --level 1", "--fields 1"),
    row("options", "--runs draws neigh", CUBE, "t.h5 --block 0=4 --runs 2", "--block 0=4", "--runs 2"),
    row("registry", "--runs draws neigh", ARRAYS, "d --runs 2", ""),
    row("file_listing", "--block needs arrays", table(a=range(9)), "t.parquet --block 0=2", ""),
    row("registry", "--block needs arrays", ARRAYS, "d --block 0=2", "", "--block 0=2 --read-as npy"),
    row("options", "unknown --edges", CUBE, "t.h5 --block 0=4 --edges no", "--block 0=4 --edges pad"),
    row("options", "--block names the dimension {}, but", CUBE, "t.h5 --block 100=4", "--block 0=4"),
    row("options", "--block names the dimension {} twice", CUBE, "t.h5 --block 0=4,0=2", "--block 0=4"),
    row("options", "--block {} is not DIM", CUBE, "t.h5 --block 0", "--block 0=4"),
    row("options", "--edges {} is for blocks", CUBE, "t.h5 --edges drop", "--block 0=4 --edges drop", ""),
    row("options", "--rows chooses arrays", CUBE, "t.h5 --block 0=4 --rows 6", "--block 0=4", "--rows 6"),
    row("options", "--block and --read-as", CUBE, "t.h5 --block 0=4 --read-as rows", "--block 0=4", "--read-as rows"),
    row("core/cf", "CF attributes of", packed(), "t.h5", "--decode cf"),
    row(
        "core/cf", "; leave out --decode cf to read", packed("days since 2000-01-01", "360_day"),
        "t.h5 --decode cf", "",
    ),
    row(
        "file_listing", "--decode {} needs fields", files("rows.npy", body=npy(np.zeros((3, 2)))),
        "d/rows.npy --decode image", "",
    ),
    row("file_listing", "--value-format is for lmdb", packed(), "t.h5 --value-format npy", ""),
    row("files", "--decode cf finds nothing", hdf5(x=np.arange(12)), "t.h5 --decode cf", ""),
    row("files", "{} is in no folder", hdf5("d/t.h5", x=np.arange(12)), "d --label-from-folder", ""),
    row("flat", "it says where each sample", hdf5(**FLAT), "t.h5 --json", "--read-as rows"),
    row("flat", "{}: {} looks like", hdf5(x=np.arange(70.0), offsets=FLAT["offsets"]), "t.h5", "{(--fields x)}"),
    row("globs", "{} has a glob", ARRAYS, "d/0*.npy --include *.npy", ""),
    row("globs", "not chosen by --include", files("0-39.bin"), "d --include *0.bin --json", ""),
    row("globs", "{} is a Zarr, and", zarr, "t.zarr --include x", ""),
    row("globs", "{}: {} selects none", ARRAYS, "d --include *.jpg", "--include *.npy"),
    row("grouping", "names are cut at the last dot", files("2024.01.0-39.bin"), "d --json", "--stem first"),
    row("grouping", "{}: {} names end in numbers", files("frame.0-39"), "d", "{(--stem '[^']*')}"),
    row(
        "grouping", "{}: names cut at the first dot", files("2024.01.0-39.bin", "2024.01.0-39.json", body=b"{}"), "d",
        "--stem last",
    ),
    row(
        "groups", "{}: {} groups have", hdf5(**ALIKE), "t.h5", "{(--read-as groups)}", "{(--read-as rows)}",
        "{(--fields \\S+)}",
    ),
    row("groups", "{}: --read-as groups needs", hdf5(x=np.arange(12)), "t.h5 --read-as groups", ""),
    row("groups", "each of the {} groups", hdf5(**CLIPS), "t.h5", "--read-as rows"),
    row("images", "--decode {} finds no image", ARRAYS, "d --decode image", ""),
    row(
        "images", "{} has both colour images", table(i=[image("RGB"), image("L")] * 6, n=range(12)),
        "t.parquet --decode mask", "--decode image", "{(--fields -\\w)}",
    ),
    row(
        "images", ", or read its numbers", samples(*[image("I;16")] * 6, end="png"), "d --decode image",
        "--decode mask", "",
    ),
    row("keys", "names that --stem does not", files("0-39.bin"), "d --stem 0(.*)[.] --json", "--stem first"),
    row("keys", "--stem must be first", ARRAYS, "d --stem (", "--stem first", "--stem last", "--stem '(...)'"),
    row("kinds", "read as bytes", samples(*[npy(np.zeros((3, 2)))] * 6, end="odd"), "d --json", "--read-as files"),
    row("kinds", "--read-as {}: {} has no files", files("0-39.txt"), "d --read-as files", ""),
    row("kinds", "--read-as {}: {} {}", ARRAYS, "d --read-as hdf5", "--read-as npy"),
    row("lmdb_streams", "{}: --read-as groups needs", database(numbered(b"%d", 9)), "t.lmdb --read-as groups", ""),
    row("lmdb_streams", "are fields of samples; to", database(PAIRS), "t.lmdb", "--read-as rows"),
    row("objects", "--decode cf is for", files("0-39.bin"), "d --decode cf", ""),
    row("objects", "--value-format is for objects", files("0-39.json", body=b'{"a": 1}'), "d --value-format npy", ""),
    row("objects", "{} is in no folder", files("0-39.bin"), "d --label-from-folder", ""),
    row("objects", "--rename {}={}", ARRAYS, "d --rename y=z", "--rename x=z"),
    row(
        "objects", "{}{}; leave it out", samples(*[b'{"a": 1, "b": null}'] * 12, end="json"), "d",
        "{(--fields -\\w+)}",
    ),
    row(
        "objects", "it has more than",
        samples(json.dumps(dict.fromkeys(map(str, range(5000)), 1)).encode(), end="json"), "d", "--fields 1,2",
    ),
    row(
        "objects", "sample {} has field {} twice", files("0-39.a.bin", "0-39.b.bin"),
        "d --rename a.bin=z --rename b.bin=z", "--rename a.bin=z",
    ),
    row("options", "--resize must be", ARRAYS, "src --decode image --resize 0", ""),
    row("options", "--fields can keep", None, "src --fields x,-n", "--fields x", "--fields -n"),
    row("options", "{} is left out with --no-key", None, "src --fields -__key__", "--no-key"),
    row("options", "--fields has a minus", None, "src --fields -", "--fields -n"),
    row(
        "options", "unknown --decode", samples(*[image("L")] * 3, end="png"), "d --decode other", "--decode image",
        "--decode mask",
    ),
    row(
        "options", "--resize needs", samples(*[image("L")] * 3, end="png"), "d --resize 3",
        "--resize 3 --decode image",
    ),
    row("options", "--rename cannot change", None, "src --rename __key__=a", "--no-key"),
    row(
        "options", "--label-from-folder must be", files("a/0-39.bin"), "d --label-from-folder=number",
        "--label-from-folder text", "--label-from-folder int",
    ),
    row("options", "--fields names no field", None, "src --no-key --fields __key__", "--fields x"),
    row("readers", "{}: two fields would", hdf5(x=np.arange(12), y=np.arange(12)), "t.h5 --rename x=y", "--rename x=z"),
    row(
        "readers", "{}: --rename {}: unknown field", hdf5(x=np.arange(12), y=np.arange(12)), "t.h5 --rename a=b",
        "--rename x=z",
    ),
    row(
        "rows", ", the length with the most bytes",
        hdf5(x=np.zeros((12, 50)), y=np.zeros(9), z=np.zeros(9)), "t.h5 --json",
        "{(--fields y,z)}",
    ),
    row(
        "shapes", "field {} is {} in {} but {} in {};\n", samples(*[npy(1.5)] * 6, npy([1]), end="x.npy"), "d",
        "--on-error skip",
    ),
    row(
        "shapes", "read the samples in the {} files",
        (files("a.txt", body=bytes(10**6)), hdf5("d/b.h5", x=np.arange(12))), "d", "{(--read-as files)}",
    ),
    row("shapes", "choose the fields", files("0-39.a.bin", "0-39.b.bin", "x.a.bin"), "d", "{(--fields [a-z.]+)}"),
    row("shapes", "make both one field", PICTURES, "d", "{(--rename \\S+ --rename \\w+=X)}"),
    row("shapes", "choose one of them", PICTURES, "d", "{(--include \\S+)}", "{or (--include [^ ;]+)}"),
    row("shapes", "join the objects of several", files("a/0-39.jpg", "b/0-39.txt"), "d", "{(--stem '\\S+')}"),
    row(
        "shapes", "field {} is {} in {} but {} in {}; leave",
        (hdf5("d/a.h5", x=np.arange(9), y=np.arange(9)), hdf5("d/b.h5", x=np.zeros(9), y=np.arange(9))), "d",
        "{(--fields -\\w)}",
    ),
    row(
        "shapes", "leave these fields out",
        (hdf5("d/a.h5", x=np.arange(9), y=np.arange(9)), hdf5("d/b.h5", x=np.arange(9))), "d", "{(--fields -\\w)}",
    ),
    row(
        "shapes", "choose fields that all have",
        (
            hdf5("d/a.h5", x=np.arange(9), y=np.arange(9)),
            hdf5("d/b.h5", y=np.arange(9), **{n: np.zeros((9, ord(n))) for n in "abcdefghijkl"}),
        ),
        "d", "--fields y",
    ),
    row("limits", "{} claims {} of", virtual, "t.h5", "{(--fields -\\w+)}"),
    row("hdf5", "\nchoose other fields", external, "t.h5 --fields x", "--fields y"),
    row("lmdb", "{}: --fields leaves", database(numbered(b"%d", 9)), "t.lmdb --fields -value", "--fields value"),
    row(
        "lmdb", "{}: --value-format {} needs", database(PAIRS), "t.lmdb --value-format raw:uint8,1",
        "--value-format raw:uint8,1 {(--fields \\w+)}",
    ),
    row(
        "lmdb", "{}: {} has the key", (database(numbered(b"a%d", 9), b"a"), database(numbered(b"b%d", 9), b"b")),
        "t.lmdb", "{(--fields \\w+)}",
    ),
    row(
        "lmdb", "{}: the value of {} is", database({b"0": b"fine", b"1": pickle.dumps(["x" * 50], 4)}), "t.lmdb",
        "{(--value-format bytes)}",
    ),
    row("lmdb_streams", ", or read each entry", database(UNEVEN), "t.lmdb", "{(--read-as rows)}"),
    row("lmdb_streams", "{}: the fields made from", database(UNEVEN), "t.lmdb", "{(--fields \\w+)}"),
    row(
        "lmdb_streams", "are separate samples", database(numbered(b"cat-%d", 12) | numbered(b"dog-%d", 12)), "t.lmdb",
        "{(--read-as groups)}",
    ),
    row(
        "parquet", "the path beside the bytes", table(i=[{"bytes": b"x", "path": "a"}] * 12), "t.parquet --json",
        "--fields i.path",
    ),
    row("tfrecord", "{}: feature {} is", mixed_records, "t.tfrecord", "{(--fields -\\w)}"),
    row(
        "kinds", "; to read each file as bytes", (hdf5("d/a.nc", x=np.arange(9)), hdf5("d/b.nc", x=np.arange(9))), "d",
        "--read-as objects",
    ),
    row("tar", "{}: names cut at the first dot", tar(*[f"2024.{n}.0.npy" for n in range(120)]), "t.tar", "--stem last"),
    row(
        "value_format", "unknown --value-format", files("0-39.bin"), "d --value-format other", "--value-format bytes",
        "--value-format raw:uint8,1",
    ),
    row(
        "value_format", "--value-format {} describes", files("0-39.bin"), "d --value-format raw:uint8,0",
        "--value-format raw:uint8,1",
    ),
    row(
        "value_format", "; if it holds {} samples", files("0-39.bin", body=b"1234"), "d --value-format raw:uint8,2",
        "--value-format raw:uint8,2 --read-as files",
    ),
    row("segments", "--start-early is for folders of objects, not", hdf5(x=np.arange(12)), "t.h5 --start-early", ""),
    row("segments", "--start-early needs names in order", ARRAYS, "d --start-early --stem last", "--stem first"),
    row(
        "shapes", "{} has the fields {}, but", (tars, tar("a.x.npy", "a.y.npy", "a.z.npy", name="d/20.tar")), "d",
        "--fields x",
    ),
    row(
        "shapes", "{}: field {} is {}, but", (tars, tar("a.x.npy", "a.z.npy", name="d/20.tar", last=npy(1.5))), "d",
        "{(--fields -\\w)}",
    ),
    Row(
        "sources/objects.py", "sample {} has the fields",
        (samples(*[b"x"] * 200, end="a"), files("150.b"), "pull d --all --order sequential --cache x"),
        ("pull d --all --order sequential --on-error skip --cache x", "pull d --all --cache y --stem '(.*)'"),
    ),
    Row(
        "sources/objects.py", "object {} has {}, but at most",
        (samples(*[b"x"] * 200, end="a"), "$ truncate -s 5G d/150.a", "pull d --all --order sequential --cache x"),
        "pull d --all --order sequential --on-error skip --cache x",
    ),
    Row(
        "sources/file_table.py", "{} was listed with other",
        ("pull a.h5 --samples 1 --cache x", "pull a.h5 --all --cache x --decode cf"),
        ("pull a.h5 --all --cache x", "pull a.h5 --all --cache x --fields x --dataset other"),
    ),
    Row(
        "sources/ours.py", "{} does not fit the files",
        (
            "convert a.h5 --to lmdb --out two --shard-size 1", "$ rm two/part-00000*", "pull two --all --cache x",
        ),
        ("convert a.h5 --to lmdb --out new", "pull new --all --cache x"),
    ),
    Row(
        "sources/registry.py", "{} was listed with --stem",
        (files("2024.01.0-39.bin"), "pull d --samples 1 --cache x", "pull d --all --cache x --stem first"),
        ("pull d --all --cache x --stem first --dataset other", "pull d --all --cache y --stem first"),
    ),
    Row(
        "sources/segments.py", "listing {} has",
        (
            "pull src --all --cache x", "$ cp a.h5 src/a.bin; cp src/s00.npz src/t.npz; rm src/a.bin",
            "pull src --all --cache x --refresh", "$ rm -r x/listings/*/segment*", "pull src --all --cache x",
        ),
        "pull src --all --cache x --dataset again",
    ),
    Row(
        "sources/images.py", "an image of shape",
        (table(i=[image("L")] * 3000 + [image("L", (5, 5))]), "pull t.parquet --all --cache x --decode image"),
        "pull t.parquet --all --cache y --decode image --resize 3",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_advice_of_a_message_works(world: World, row: Row) -> None:
    follow(world, row)


@follows("sources/options.py", "--concurrency must be")
def test_the_bounds_of_a_number_in_a_message_are_accepted(world: World) -> None:
    world.raises(lambda: SourceOptions(concurrency=0))
    world.works("pull src --samples 1 --concurrency 1 --cache new")
    world.works("pull src --samples 1 --concurrency 1024 --cache new")


@follows("sources/options.py", "--list-workers must be")
def test_the_bounds_of_list_workers_are_accepted(world: World) -> None:
    world.raises(lambda: SourceOptions(list_workers=257))
    world.works("pull src --samples 1 --list-workers 1 --cache new")
    world.works("pull src --samples 1 --list-workers 256 --cache new")


@follows("sources/raw.py", "{}: a file of raw numbers")
def test_raw_files_are_read_with_the_requested_value_format(world: World) -> None:
    file = SourceFile(world.folder / "d/0.bin", 1, MemoryRanges(memoryview(b"x")))
    world.raises(lambda: open_raw(file, SourceOptions()))
    files("0-39.bin")(world.folder)
    world.works("pull d --all --cache x --read-as files --value-format raw:uint8,1")


@follows("sources/file_listing.py", "{} is compressed")
@pytest.mark.parametrize("way", ["unpack", "convert"])
def test_a_compressed_archive_is_unpacked_or_converted(world: World, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_listing, "MAX_WHOLE", 100)
    packed_archive = world.folder / "a.tar.gz"
    packed_archive.write_bytes(gzip.compress((world.folder / "a.tar").read_bytes()))
    world.raises(lambda: list_source(str(packed_archive), world.folder / "listing"))
    if way == "convert":
        world.works("convert a.tar.gz --to lmdb --out new")
    world.works(f"pull {'new' if way == 'convert' else 'a.tar'} --all --cache x")


@follows("sources/segments.py", "--start-early is for folders of objects, but {}")
@follows("sources/segments.py", "--start-early cuts names")
def test_start_early_in_a_bucket_needs_objects_and_a_chosen_stem(world: World, moto: Moto) -> None:
    world.environment |= moto.env
    moto.put("early-files", {f"{name}.h5": (world.folder / "a.h5").read_bytes() for name in "ab"})
    moto.put("early-dates", {f"2024.01.{day:02d}.bin": b"x" for day in range(1, 31)})
    for place in ("early-files", "early-dates"):
        world.fails(f"pull s3://{place}/ --all --cache x --start-early")
        world.works(f"pull s3://{place}/ --all --cache {place}")
    world.works("pull s3://early-dates/ --all --cache x --start-early --stem first")
