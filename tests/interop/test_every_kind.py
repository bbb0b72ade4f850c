"""Every kind of input, by ``pull`` and ``convert``, from every place: all cells have the same samples and content
digest.

By default each command reads each kind from this machine and from one of the two servers; ``-m soak`` runs all cells
and prints the table.
"""

from __future__ import annotations

import io
import ssl
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest
import zarr

import cachetool
from cachetool.conversion.run import content_digest
from cachetool.core.block import Block
from cachetool.core.schema import Field, Schema
from cachetool.formats.digest import ContentDigest, checksums
from tests.servers import Moto, certificates, folder_server
from tests.sources.classic import classic
from tests.sources.test_files_tfrecord import example
from tests.sources.test_files_tfrecord import write as write_records

X = np.arange(40 * 6, dtype="<f4").reshape(40, 6)
RAGGED = [np.arange(number % 5, dtype="<f4") for number in range(40)]
BUCKET = "every-kind"


def npy_bytes(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def write_hdf5(path: Path, **how: Any) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, **how)


def write_ragged_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("x", (40,), dtype=h5py.vlen_dtype("<f4"))
        for number, row in enumerate(RAGGED):
            rows[number] = row


def write_netcdf3(path: Path, *, records: bool) -> None:
    other = np.arange(40 if records else 6, dtype="i2")
    variables = {"x": (("time", "six"), X, {}), "other": (("time" if records else "six",), other, {})}
    path.write_bytes(classic(variables, {"time": None if records else 40, "six": 6}))


def write_zarr(path: Path, version: int, **how: Any) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=version)
    group.create_array("x", shape=X.shape, dtype="f4", chunks=(7, 6), **how)[:] = X


def write_parquet(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(X.reshape(-1)), 6)
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"x": rows}), path, row_group_size=9)


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number, row in enumerate(X):
            body = npy_bytes(row)
            info = tarfile.TarInfo(f"{number:03d}.x.npy")
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))


def write_tfrecord(path: Path, *, index: bool) -> None:
    write_records(path, *[example(x=b"\x12\x1a\x0a\x18" + row.tobytes()) for row in X])
    if index:
        size = path.stat().st_size // len(X)
        lines = "".join(f"{number * size} {size}\n" for number in range(len(X)))
        path.with_name(f"{path.name}.idx").write_text(lines)


def write_lmdb(path: Path) -> None:
    env = lmdb.open(str(path), lib_version=0)
    with env.begin(write=True) as txn:
        for number, row in enumerate(X):
            txn.put(b"%03d" % number, row.tobytes())
    env.close()


def write_objects(path: Path) -> None:
    path.mkdir()
    for number, row in enumerate(X):
        (path / f"{number:03d}.x.npy").write_bytes(npy_bytes(row))


def export(path: Path, rows: list[np.ndarray] | None = None, **how: Any) -> None:
    objects = path.with_name(f"{path.name}-objects")
    objects.mkdir()
    for number, row in enumerate(X if rows is None else rows):
        (objects / f"{number:03d}.x.npy").write_bytes(npy_bytes(row))
    cachetool.convert(objects, out=path, shard_size=500, workers=1, **how)


def of_values(rows: list[np.ndarray], shape: tuple[int | None, ...]) -> str:
    """Return the digest of these values, computed without a file."""
    schema = Schema((Field("x", "<f4", shape),))
    content = ContentDigest(schema)
    content.update(checksums(Block.from_samples(schema, [{"x": row} for row in rows])))
    return content.hexdigest()


KINDS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "npy": ("x.npy", lambda path: np.save(path, X)),
    "npz": ("a.npz", lambda path: np.savez_compressed(path, x=X)),
    "hdf5 contiguous": ("contiguous.h5", write_hdf5),
    "hdf5 chunked": ("chunked.h5", lambda path: write_hdf5(path, chunks=(7, 6), compression="gzip")),
    "hdf5 ragged": ("ragged.h5", write_ragged_hdf5),
    "netcdf3": ("fixed.nc", lambda path: write_netcdf3(path, records=False)),
    "netcdf3 records": ("records.nc", lambda path: write_netcdf3(path, records=True)),
    "zarr v2": ("v2.zarr/", lambda path: write_zarr(path, 2)),
    "zarr v3": ("v3.zarr/", lambda path: write_zarr(path, 3)),
    "zarr sharded": ("sharded.zarr/", lambda path: write_zarr(path, 3, shards=(14, 6))),
    "parquet": ("a.parquet", write_parquet),
    "tar": ("a.tar", write_tar),
    "tfrecord": ("a.tfrecord", lambda path: write_tfrecord(path, index=False)),
    "tfrecord with index": ("indexed.tfrecord", lambda path: write_tfrecord(path, index=True)),
    "lmdb": ("a.lmdb/", write_lmdb),
    "objects": ("objects/", write_objects),
    "exported folder": ("exported/", lambda path: export(path, to="lmdb")),
}
MORE: dict[str, tuple[str, Callable[[Path], None]]] = {
    f"exported {to}, {what}": (f"{to}-{what}/", lambda path, to=to, rows=rows: export(path, rows, to=to))
    for to in ("lmdb", "hdf5", "zarr", "tfrecord")
    for what, rows in (("fixed", None), ("ragged", RAGGED))
    if (to, what) != ("lmdb", "fixed")
}
"""The inputs besides the kinds above: exported folders in every format."""
OPTIONS: dict[str, dict[str, Any]] = {
    "netcdf3 records": {"fields": ("x",)},
    "lmdb": {"value_format": "raw:float32,6", "rename": {"value": "x"}},
}
PLACES = ("local", "https", "s3")
VERBS = ("pull", "convert")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def made(root: Path) -> Callable[[str], str]:
    """Create an input at its first request, and return its name."""

    def make(kind: str) -> str:
        name, write = (KINDS | MORE)[kind]
        if not (root / name).exists():
            write(root / name.rstrip("/"))
        return name

    return make


@pytest.fixture(scope="module")
def web(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Serve the inputs. Return the URL and the file with the authority of the certificate."""
    authority, own = certificates(tmp_path_factory.mktemp("certificates"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own)
    with folder_server(root, index="json", tls=context) as server:
        yield server.url, authority


@pytest.fixture
def place(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Return the URL of an input at one of the places."""

    def of(where: str, name: str) -> str:
        if where == "local":
            return str(root / name)
        if where == "https":
            url, authority = request.getfixturevalue("web")
            monkeypatch.setenv("SSL_CERT_FILE", str(authority))
            return f"{url}/{name}"
        moto: Moto = request.getfixturevalue("moto")
        for variable, value in moto.env.items():
            monkeypatch.setenv(variable, value)
        beside = [root / name, root / f"{name}.idx", *(root / name).rglob("*")]
        moto.put(BUCKET, {str(path.relative_to(root)): path.read_bytes() for path in beside if path.is_file()})
        return f"s3://{BUCKET}/{name}"

    return of


def digest(verb: str, url: str, folder: Path, kind: str) -> str:
    """Return the content digest of all samples in order, read by one of the commands."""
    options: dict[str, Any] = {**OPTIONS.get(kind, {}), "key": False, "workers": 1}
    if verb == "convert":
        return cachetool.convert(url, to="hdf5", out=folder / "out", shard_size=300, **options).digest
    with cachetool.open_cache(folder / "cache", max_size="20MB") as cache:
        cache.pull(url, all=True, order="sequential", shard_size=300, **options)
        with cache.snapshot(dataset="default", peek=True) as snapshot:
            return content_digest(snapshot.shards)


def cells(kinds: dict[str, Any]) -> list[Any]:
    out = []
    for number, kind in enumerate(kinds):
        for verb in VERBS:
            server = PLACES[1 + (number + VERBS.index(verb)) % 2]
            out += [
                pytest.param(kind, verb, where, marks=[pytest.mark.soak] * (where not in ("local", server)))
                for where in PLACES
            ]
    return out


@pytest.mark.parametrize(("kind", "verb", "where"), [*cells(KINDS), *cells(MORE)])
def test_all_kinds_commands_and_places_have_the_same_digest(
    kind: str,
    verb: str,
    where: str,
    made: Callable[[str], str],
    place: Callable[[str, str], str],
    tmp_path: Path,
) -> None:
    found = digest(verb, place(where, made(kind)), tmp_path, kind)

    print(f"{kind:28}{verb:10}{where:8}{found[:16]}")
    assert found == (of_values(RAGGED, (None,)) if "ragged" in kind else of_values(list(X), (6,)))
