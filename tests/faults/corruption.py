"""Damage everywhere in every kind of file that cachetool reads: the law, and the program that checks it.

The law, for each of thousands of cases:

- The calling process lives, answers, and takes bounded memory. It raises only errors of cachetool whose message names
  the file and whose exit code is 2 (no sample of the file is usable), 3 or 5.
- Files of ours (a cache's shards and exported folders): ``verify`` finds every damage and names shard and file. Every
  reader with checksums (``convert``, ``show``) returns the right samples or an error.
- Foreign files: if the format has a checksum, the right samples or an error. If it has none, a changed byte of a value
  changes only the samples that it belongs to, and a changed byte of an unprotected description may form another valid
  file. A truncated file is an error, or all its samples are read. In a truncated TFRecord, whole records may be missing
  at the end, which the format cannot detect.

Run as ``python -m tests.faults.corruption FOLDER CUTS FLIPS SEED NAME...``; prints one line of JSON for each name.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import multiprocessing
import os
import random
import shutil
import sys
import tarfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cachetool.api import read_sample
from cachetool.cache import CacheDir, Facts, Origin, Shard, open_cache
from cachetool.check.verify import verify
from cachetool.conversion import to_files as exporting
from cachetool.conversion.to_files import export, write_parts
from cachetool.core.block import Block
from cachetool.core.errors import CacheToolError
from cachetool.core.progress import silent
from cachetool.core.schema import Schema
from cachetool.formats import get_format
from cachetool.formats.compression import compressed
from cachetool.formats.digest import checksums
from cachetool.formats.shard import (
    ShardFiles,
    check_content,
    check_samples,
    open_shard,
    shard_bound,
    side_folder,
    stored_checksums,
)
from cachetool.loaders.read.gather import Parts, gather, open_by_library
from cachetool.loaders.read.mapped import MappedParts
from cachetool.loaders.view import View
from cachetool.proc.task import Task
from cachetool.sources import guard
from tests.faults.damage import Case, Report, cases, look_at_all
from tests.faults.world import SCHEMA, block
from tests.sources.classic import classic
from tests.sources.files import open_files

__all__ = ["CACHED", "FOREIGN", "NAMES", "PLAIN"]

WAYS = (
    *("lmdb", "hdf5", "hdf5-gzip", "zarr", "zarr-zstd", "zarr-blosc"),
    *("tfrecord", "tfrecord-gzip"),
)
CACHED = tuple(f"cache:{way}" for way in WAYS)
"""The shards of a cache, in every format and compression."""
PLAIN = tuple(f"out:{way}" for way in WAYS)
"""The folders that ``convert --out`` wrote."""
COUNT = 40
CONVERTED = 5
"""One of this many damaged shards is also converted, because a conversion takes longer than all other checks."""
Sums = npt.NDArray[np.uint64]
T = TypeVar("T")


def polite(error: CacheToolError, name: str) -> None:
    """Assert that a user can act on the error."""
    text = str(error)
    assert error.exit_code in (2, 3, 5), f"exit code {error.exit_code}: {text}"
    assert name in text, f"the message does not name {name}: {text}"
    assert len(text.splitlines()) <= 2, f"more than two lines: {text}"


# -- files of ours -----------------------------------------------------------------------------------------------------


def commit(root: Path, way: str) -> None:
    """Commit one shard of ``COUNT`` samples to a new cache."""
    name, _, compression = way.partition("-")
    kind, content = compressed(name, compression or None), block(list(range(COUNT)))
    with open_cache(root, max_size="20MB") as cache:
        cache.declare("default", SCHEMA)
        bound = shard_bound(kind, SCHEMA, COUNT, content.nbytes)
        with cache.stage(dataset="default", schema=SCHEMA, format=name, bound=bound) as staging:
            files = ShardFiles(staging.path, kind, SCHEMA, samples=COUNT, nbytes=content.nbytes)
            files.write(content)
            facts = files.facts()
            made = Facts(facts.samples, facts.payload, facts.content, facts.digest, facts.data, facts.files)
            staging.commit(made, origin=Origin())


class Deaf:
    """A channel without a listener."""

    def send(self, message: dict[str, Any]) -> None:
        """Drop the message."""


class Here:
    """An engine that runs tasks in this process: starting thousands of processes would take too long."""

    def run(self, tasks: Sequence[Task], on_message: Any = None) -> list[dict[str, Any]]:
        """Run the tasks one after another."""
        return [write_parts(Deaf(), **dict(task.arguments)) for task in tasks]


def refuses(door: Callable[[], None], name: str) -> bool:
    """Return True if a door raises a polite error. The door itself raises AssertionError for a wrong sample."""
    try:
        door()
    except CacheToolError as error:
        polite(error, name)
        return True
    return False


def look_at_caches(folder: Path, way: str, *, cuts: int, flips: int, seed: int) -> Report:
    """Damage every file of a committed shard, and read it through every door."""
    root, chance = folder / "cache", random.Random(seed)
    apart(lambda: commit(root, way))
    expected = checksums(block(list(range(COUNT))))
    (shard,) = (root / "shards").iterdir()

    def look(case: Case) -> str:
        problems = verify(root).problems
        found = [(problem.shard, problem.file) for problem in problems]
        assert found == [(shard.name, str(case.file.relative_to(shard)))], f"verify: {problems}"
        with CacheDir(root) as cache:
            (row,) = cache.shards()
            place = {"kind": "cache", "root": str(root), "dataset": "default", "version": cache.version}
            index = chance.randrange(COUNT)

            def read(*, library: bool) -> None:
                sums = check_content(row.path, SCHEMA, row.content)
                with open_shard(row.path, get_format(row.format), SCHEMA, library=library, digest=row.digest) as reader:
                    got = checksums(reader.read(0, reader.samples))
                check_samples(got, sums, SCHEMA, name=str(row.data))
                assert np.array_equal(got, expected), "a wrong sample was read"

            def shown() -> None:
                sample = read_sample(cache, row.id, index)
                got = checksums(Block.from_samples(SCHEMA, [sample]))
                assert np.array_equal(got, expected[:, [index]]), "a wrong sample was shown"

            def converted() -> None:
                out = folder / f"converted-{os.getpid()}"
                try:
                    export(
                        place, out, kind=get_format("tfrecord"), part_bytes=10**6, probe=False, workers=1,
                        verify=True, report=silent,
                    )  # fmt: skip
                    got = stored_checksums(side_folder(out / "part-00000.tfrecord"), SCHEMA)
                    assert np.array_equal(got, expected), "a wrong sample was converted"
                finally:
                    shutil.rmtree(out, ignore_errors=True)
                    for left in folder.glob(f".{out.name}.partial-*"):
                        shutil.rmtree(left, ignore_errors=True)

            doors = [lambda: read(library=False), lambda: read(library=True), shown]
            if chance.randrange(CONVERTED) == 0:
                doors.append(converted)
            refused = [refuses(door, shard.name) for door in doors]
            gather_unchecked(row)
        return "refused" if any(refused) else "harmless"

    every = [path for path in sorted(shard.rglob("*")) if path.is_file()]
    return look_at_all(cases(every, cuts=cuts, flips=flips, seed=seed), look, spare=folder / "spare")


def gather_unchecked(row: Shard) -> None:
    """Read by extents without checksums: any value or a polite error is allowed, and this process survives."""
    view, everything = View.of_shards(1, "default", SCHEMA, [row]), np.arange(COUNT)
    library = [Parts(open_by_library)] if row.format == "lmdb" else []
    for parts in (*library, MappedParts(), MappedParts(maps=False)):
        try:
            refuses(lambda: check(gather(view, everything, parts, SCHEMA)), row.id)  # noqa: B023 - called at once
        finally:
            parts.close()


def check(columns: Any) -> None:
    """Touch every value."""
    checksums(Block(SCHEMA, columns))


def look_at_folders(folder: Path, way: str, *, cuts: int, flips: int, seed: int) -> Report:
    """Damage every file of an exported folder, and read it through every door."""
    root, out = folder / "cache", folder / "plain"
    name, _, compression = way.partition("-")

    part_bytes = 10**6 if compression else 12_000

    def make() -> None:
        commit(root, "lmdb")
        with CacheDir(root) as cache:
            place = {"kind": "cache", "root": str(root), "dataset": "default", "version": cache.version}
        export(
            place, out, kind=compressed(name, compression or None), part_bytes=part_bytes, probe=False, workers=1,
            verify=False, report=silent,
        )  # fmt: skip

    apart(make)
    expected = checksums(block(list(range(COUNT))))

    def read() -> None:
        source = open_files(out)
        try:
            got = np.concatenate([checksums(each) for each in source.blocks()], axis=1)
            source.check(0, got)
            assert source.schema == SCHEMA, "another schema was read"
            assert np.array_equal(got, expected), "a wrong sample was read"
        finally:
            source.close()

    every = [path for path in sorted(out.rglob("*")) if path.is_file()]
    look = cases(every, cuts=cuts, flips=flips, seed=seed)
    return look_at_all(look, lambda _: "refused" if refuses(read, "") else "harmless", spare=folder / "spare")


# -- files of others ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """A file, and the effect that each of its bytes can have."""

    path: Path
    values: dict[Path, list[tuple[int, int, frozenset[int]]]] = field(default_factory=dict)
    """The byte ranges of values without a checksum, and their samples."""
    sealed: frozenset[Path] | None = None
    """The files in which a checksum protects all other bytes; None: all files."""
    by_name: bool = False
    """True if only the names of fields have no checksum."""
    records: bool = False
    """True if the format cannot detect missing records at the end."""

    def can_change(self, case: Case) -> frozenset[int] | None:
        """Return the samples that this damage may change. None: any sample, because the damage is in the
        description.
        """
        for start, stop, samples in self.values.get(case.file, ()):
            if start <= case.at < stop:
                return samples
        return frozenset() if self.sealed is None or case.file in self.sealed else None


NOTHING = frozenset[int]()
ROWS = 8
"""Rows of a chunk."""


def array() -> npt.NDArray[Any]:
    """Return 40 samples of 50 numbers."""
    return np.random.default_rng(57).standard_normal((COUNT, 50)).astype("<f4")


def rows_of(start: int, nbytes: int) -> list[tuple[int, int, frozenset[int]]]:
    """Return the ranges of consecutive rows of ``nbytes`` bytes."""
    return [(start + i * nbytes, start + (i + 1) * nbytes, frozenset({i})) for i in range(COUNT)]


def make_npy(folder: Path) -> Made:
    path = folder / "x.npy"
    np.save(path, array())
    start = path.stat().st_size - array().nbytes
    return Made(path, {path: rows_of(start, 200)}, frozenset())


def make_npz(folder: Path, save: Callable[..., None]) -> Made:
    path = folder / "x.npz"
    save(path, x=array(), y=np.arange(COUNT))
    return Made(path, by_name=True)


def make_hdf5(folder: Path, **how: Any) -> Made:
    import h5py

    path = folder / "x.h5"
    values: list[tuple[int, int, frozenset[int]]] = []
    with h5py.File(path, "w") as file:
        for name, data in (("x", array()), ("y", np.arange(COUNT))):
            made = file.create_dataset(name, data=data, **({"chunks": (ROWS, *data.shape[1:]), **how} if how else {}))
            file.flush()
            if not how:
                values += rows_of(made.id.get_offset(), data.nbytes // COUNT)
                continue
            for number in range(made.id.get_num_chunks()):  # deflate and fletcher32 have their own checksum
                chunk = made.id.get_chunk_info(number)
                values.append((chunk.byte_offset, chunk.byte_offset + chunk.size, NOTHING))
    return Made(path, {path: values}, frozenset())


def make_netcdf3(folder: Path) -> Made:
    """Write records of two variables: rows of ``x`` and of ``y`` in turn."""
    path = folder / "x.nc3"
    x, y = array(), np.arange(COUNT, dtype="i4")
    along = ("record", *(f"d{axis}" for axis in range(1, x.ndim)))
    dims = {"record": None, **dict(zip(along[1:], x.shape[1:], strict=True))}
    body = classic({"x": (along, x, {}), "y": (("record",), y, {})}, dims, version=5)
    path.write_bytes(body)
    row = x.nbytes // COUNT + 4
    return Made(path, {path: rows_of(len(body) - COUNT * row, row)}, frozenset())


def make_hdf5_texts(folder: Path) -> Made:
    import h5py

    path = folder / "x.h5"
    texts = [f"text number {i} " * (i % 7 + 1) for i in range(COUNT)]
    lists = [np.arange(i % 9 + 1) + 1000 * i for i in range(COUNT)]
    with h5py.File(path, "w") as file:
        file.create_dataset("t", data=texts)
        file.create_dataset("r", (COUNT,), h5py.vlen_dtype("<i4"))[:] = np.array(
            [each.astype("<i4") for each in lists], dtype=object
        )
    raw = path.read_bytes()
    pieces = [(i, text.encode()) for i, text in enumerate(texts)]
    pieces += [(i, each.astype("<i4").tobytes()) for i, each in enumerate(lists)]
    return Made(path, {path: [found(raw, data, i) for i, data in pieces]}, frozenset())


def found(raw: bytes, data: bytes, sample: int) -> tuple[int, int, frozenset[int]]:
    """Return the range of ``data``, the bytes of a sample."""
    at = raw.index(data)
    return at, at + len(data), frozenset({sample})


def make_zarr(folder: Path, version: int, *, checked: bool = False, **how: Any) -> Made:
    import zarr

    path = folder / "x.zarr"

    def make() -> None:
        group = zarr.open_group(path, mode="w", zarr_format=version)  # type: ignore[arg-type]
        for name, data in (("x", array()), ("y", np.arange(COUNT))):
            rest = {key: (each, *data.shape[1:]) if key == "shards" else each for key, each in how.items()}
            made = group.create_array(name, shape=data.shape, dtype=data.dtype, chunks=(ROWS, *data.shape[1:]), **rest)
            made[:] = data

    apart(make)
    rows = how.get("shards", ROWS)
    values: dict[Path, list[tuple[int, int, frozenset[int]]]] = {}
    chunks = [each for each in path.rglob("*") if each.is_file() and each.name[0] not in ".z"]
    for chunk in chunks:
        numbers = [part for part in chunk.relative_to(path).as_posix().replace(".", "/").split("/") if part.isdigit()]
        samples = frozenset(range(int(numbers[0]) * rows, (int(numbers[0]) + 1) * rows))
        values[chunk] = [(0, chunk.stat().st_size, NOTHING if checked else samples)]
    return Made(path, values, frozenset(chunks))


def zarr_codec(name: str) -> dict[str, Any]:
    """Return the compressors of version 3."""
    from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

    made: Any = {
        "zstd": ZstdCodec(),
        "blosc": BloscCodec(),
        "crc32c": [Crc32cCodec()],
        "zstd-checksum": ZstdCodec(checksum=True),
    }
    return {"compressors": made[name]}


def make_tar(folder: Path, name: str) -> Made:
    path = folder / name
    chance = np.random.default_rng(64)
    with tarfile.open(path, "w:gz" if name.endswith("gz") else "w", format=tarfile.GNU_FORMAT) as archive:
        for i, row in enumerate(array()):
            body = io.BytesIO()
            np.save(body, row)
            members = {"x.npy": body.getvalue(), "txt": f"sample {i}".encode(), "jpg": chance.bytes(60 + i)}
            for field_name, data in {**members, "json": json.dumps({"n": i, "w": i / 2}).encode()}.items():
                info = tarfile.TarInfo(f"{i:04d}.{field_name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    if name.endswith("gz"):
        return Made(path)
    with tarfile.open(path) as archive:
        values = [(each.offset_data, each.offset_data + each.size, frozenset({int(each.name[:4])})) for each in archive]
    return Made(path, {path: values})


def make_tfrecord(folder: Path, name: str) -> Made:
    from cachetool.formats.tfrecord import TFRecord

    path, content = folder / name, block(list(range(COUNT)))
    writer = TFRecord().create(folder / "plain", SCHEMA, samples=COUNT, nbytes=content.nbytes, compression=None)
    writer.write(content)
    writer.finish()
    raw = (folder / "plain").read_bytes()
    path.write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    return Made(path, records=not name.endswith("gz"))


def make_lmdb(folder: Path, engine: int) -> Made:
    import lmdb

    path, chance = folder / "x.lmdb", np.random.default_rng(82)
    entries = {b"key %06d" % i: chance.bytes(10 + 70 * i) for i in range(COUNT)}

    def make() -> None:
        env = lmdb.open(str(path), subdir=False, lib_version=engine, map_size=2**24, lock=False)
        with env.begin(write=True) as txn:
            for key, value in entries.items():
                txn.put(key, value)
        env.close()

    apart(make)
    raw = path.read_bytes()
    values = [found(raw, part, i) for i, entry in enumerate(entries.items()) for part in entry]
    return Made(path, {path: values}, frozenset())


def make_alone(folder: Path, way: str) -> Made:
    """Create one file of ours without the folder that describes it."""
    kind, content = get_format(way.partition("-")[0]), block(list(range(COUNT)))
    path = folder / f"x{kind.suffix}"

    def make() -> None:
        writer = kind.create(
            path, SCHEMA, samples=COUNT, nbytes=content.nbytes, compression=way.partition("-")[2] or None
        )
        writer.write(content)
        writer.finish()

    apart(make)
    return Made(path, {}, frozenset())


MAKERS: dict[str, Callable[[Path], Made]] = {
    "npy": make_npy,
    "npz": lambda folder: make_npz(folder, np.savez),
    "npz-deflate": lambda folder: make_npz(folder, np.savez_compressed),
    "hdf5": make_hdf5,
    "hdf5-gzip": lambda folder: make_hdf5(folder, compression="gzip"),
    "hdf5-fletcher32": lambda folder: make_hdf5(folder, fletcher32=True),
    "hdf5-vlen": make_hdf5_texts,
    "netcdf3": make_netcdf3,
    "zarr2": lambda folder: make_zarr(folder, 2, compressors=None),
    "zarr2-blosc": lambda folder: make_zarr(folder, 2, compressors=numcodecs_blosc()),
    "zarr3": lambda folder: make_zarr(folder, 3, compressors=None),
    "zarr3-zstd": lambda folder: make_zarr(folder, 3, **zarr_codec("zstd")),
    "zarr3-zstd-checksum": lambda folder: make_zarr(folder, 3, checked=True, **zarr_codec("zstd-checksum")),
    "zarr3-blosc": lambda folder: make_zarr(folder, 3, **zarr_codec("blosc")),
    "zarr3-crc32c": lambda folder: make_zarr(folder, 3, checked=True, **zarr_codec("crc32c")),
    "zarr3-sharded": lambda folder: make_zarr(folder, 3, shards=2 * ROWS, compressors=None),
    "tar": lambda folder: make_tar(folder, "x.tar"),
    "tar.gz": lambda folder: make_tar(folder, "x.tar.gz"),
    "tfrecord": lambda folder: make_tfrecord(folder, "x.tfrecord"),
    "tfrecord.gz": lambda folder: make_tfrecord(folder, "x.tfrecord.gz"),
    "lmdb-0.9": lambda folder: make_lmdb(folder, 0),
    "lmdb-1.0": lambda folder: make_lmdb(folder, 1),
    "our-lmdb": lambda folder: make_alone(folder, "lmdb"),
    "our-hdf5": lambda folder: make_alone(folder, "hdf5"),
    "our-hdf5-gzip": lambda folder: make_alone(folder, "hdf5-gzip"),
    "our-zarr": lambda folder: make_alone(folder, "zarr"),
    "our-zarr-zstd": lambda folder: make_alone(folder, "zarr-zstd"),
}
FOREIGN = tuple(MAKERS)
"""The foreign files, and single files of ours without their folder."""
NAMES = (*CACHED, *PLAIN, *FOREIGN)


def numcodecs_blosc() -> Any:
    """Return the default compressor of version 2."""
    import numcodecs

    return numcodecs.Blosc()


def look_at_files(folder: Path, name: str, *, cuts: int, flips: int, seed: int) -> Report:
    """Damage a foreign file, and convert it."""
    made = apart(lambda: MAKERS[name](folder))

    def read() -> tuple[Schema, Sums]:
        source = open_files(made.path)
        try:
            blocks = [checksums(each) for each in source.blocks()]
            sums = np.concatenate(blocks, axis=1) if blocks else np.empty((len(source.schema), 0), dtype=np.uint64)
            return source.schema, sums
        finally:
            source.close()

    schema, expected = apart(read)
    assert expected.shape[1] == COUNT

    def look(case: Case) -> str:
        try:
            found, sums = read()
        except CacheToolError as error:
            polite(error, made.path.name)
            return "refused"
        same = found == schema and sums.shape == expected.shape
        if same and np.array_equal(sums, expected):
            return "harmless"
        if case.bit is None:
            assert made.records, "a file that was cut is read as another one"
            assert found == schema, "a file that was cut has another schema"
            assert np.array_equal(sums, expected[:, : sums.shape[1]]), "a file that was cut has other samples"
            return "cut between records"
        if made.by_name:
            assert sums.shape[1] == COUNT, "samples are missing"
            for row, each in enumerate(found):
                if each in schema:
                    assert np.array_equal(sums[row], expected[schema.names.index(each.name)]), "a wrong sample"
            return "undetectable: description"
        can = made.can_change(case)
        if can is None:
            return "undetectable: description" if made.values else "undetectable: nothing beside it to compare with"
        assert same, "a changed value changed the schema or the number of samples"
        wrong = set(np.flatnonzero((sums != expected).any(axis=0)).tolist())
        assert wrong <= can, f"samples {sorted(wrong)} differ, {sorted(can)} were damaged"
        return "undetectable: value"

    every = [path for path in sorted(made.path.rglob("*")) if path.is_file()] or [made.path]
    return look_at_all(cases(every, cuts=cuts, flips=flips, seed=seed), look, spare=folder / "spare")


# -- the program -------------------------------------------------------------------------------------------------------


def apart(work: Callable[[], T]) -> T:
    """Return the result of ``work`` from a separate process, so that later forks inherit no threads or sockets of a
    library.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            writer.send(work())
            code = 0
        except BaseException:  # noqa: BLE001 - reported by the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    writer.close()
    with contextlib.suppress(EOFError), reader:
        value: T = reader.recv()
        os.waitpid(pid, 0)
        return value
    raise AssertionError("it could not be made")


def look_at(folder: Path, name: str, *, cuts: int, flips: int, seed: int) -> Report:
    """Check all cases of one kind of file."""
    folder.mkdir(parents=True)
    kind, _, way = name.partition(":")
    numbers = {"cuts": cuts, "flips": flips, "seed": seed}
    try:
        if kind == "cache":
            return look_at_caches(folder, way, **numbers)
        if kind == "out":
            return look_at_folders(folder, way, **numbers)
        return look_at_files(folder, name, **numbers)
    finally:
        shutil.rmtree(folder)


def main(folder: Path, cuts: int, flips: int, seed: int, names: Sequence[str]) -> None:
    """Check these kinds of files, one after another."""
    warnings.simplefilter("ignore")
    for module in ("h5py", "lmdb", "zarr", "zarr.codecs", "numcodecs", "cachetool.sources.guarded"):
        __import__(module)
    for module in ("hdf5", "lmdb", "zarr", "tfrecord"):
        __import__(f"cachetool.formats.{module}")
        __import__(f"cachetool.sources.{module}")
    guard.CPU_SECONDS = 2
    exporting.LocalEngine = Here  # type: ignore[assignment, misc]
    for number, name in enumerate(names):
        report = look_at(folder / str(number), name, cuts=cuts, flips=flips, seed=seed)
        print(json.dumps({"name": name, **report.as_dict()}), flush=True)


if __name__ == "__main__":
    place, cut, flip, start, *wanted = sys.argv[1:]
    main(Path(place), int(cut), int(flip), int(start), wanted or NAMES)
