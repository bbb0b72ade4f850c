"""Small objects and files that become large or take forever for a reader that trusts them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

MIB = 2**20


def lying_npz(claimed: bytes, inflated: int) -> bytes:
    """Return an ``.npz`` whose directory declares ``claimed``, followed by ``inflated`` zeros. Even the checksum is
    valid.
    """
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = packed.compress(claimed) + b"".join(packed.compress(bytes(MIB)) for _ in range(inflated // MIB))
    body += packed.flush()
    name, crc = b"a.npy", zlib.crc32(claimed)
    sizes = (crc, len(body), len(claimed), len(name), 0)
    head = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 33, *sizes) + name
    directory = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 8, 0, 33, *sizes, 0, 0, 0, 0, 0) + name
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(directory), len(head) + len(body), 0)
    return head + body + directory + end


def array(values: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, values)
    return out.getvalue()


def crowded_npz(members: int) -> bytes:
    """Return a directory of ``members`` members that do not exist."""
    name = b"a.npy"
    one = struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 33, 0, 0, 0, len(name), 0, 0, 0, 0, 0, 0) + name
    directory = one * members
    return directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(directory), 0, 0)


def many_arrays(count: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(count):
            archive.writestr(f"{number}.npy", array(np.zeros(1, np.uint8)))
    return out.getvalue()


def many_scans(scans: int) -> bytes:
    """Return a progressive JPEG whose last scan is repeated."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("L", (256, 256)).save(out, "JPEG", progressive=True)
    body = out.getvalue()
    return body[:-2] + body[body.rfind(b"\xff\xda") : -2] * scans + body[-2:]


OBJECTS: dict[str, tuple[bytes, str]] = {
    # name: body, the words of its error
    "lying.npz": (lying_npz(array(np.zeros(100, np.uint8)), 400 * MIB), "Bad CRC-32|more bytes than its directory"),
    "crowded.npz": (crowded_npz(200_000), r"its directory has more than \d+ bytes"),
    "many.npz": (many_arrays(5000), "it has more than 4096 fields; choose some with --fields"),
    "fields.json": (json.dumps(dict.fromkeys(map(str, range(20_000)), 0)).encode(), "more than 4096 fields"),
    "large.json": (b'{"a": [' + b'{"":0},' * (3 * MIB) + b"0]}", r"the JSON has 22\.0 MB, but at most 16\.8 MB"),
    "deep.json": (b'{"a":' * MIB, "not JSON"),
    "digits.json": (b'{"a":' + b"9" * 5 * MIB + b"}", "not JSON"),
    "scans.jpg": (many_scans(1000), "a JPEG of 10.. scans is refused; at most 100 are read"),
}  # fmt: skip


def notes_tar(path: Path) -> None:
    """Write attributes of a tar member that never follows."""
    note = b"30 a=bcdefghijklmnopqrstuvwxyz" * 1000
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(200):
            info = tarfile.TarInfo("n")
            info.type, info.size = tarfile.XHDTYPE, len(note)
            file.write(info.tobuf() + note + bytes(-len(note) % 512))


def zarr_of(path: Path, kind: str, chunk: bytes) -> None:
    """Write an array of 8 numbers, version 2, with this single chunk."""
    path.mkdir()
    about = {
        "zarr_format": 2,
        "shape": [8],
        "chunks": [8],
        "dtype": "<f8",
        "fill_value": 0,
        "order": "C",
        "filters": None,
    }
    (path / ".zarray").write_text(json.dumps({**about, "compressor": {"id": kind}}))
    (path / "0").write_bytes(chunk)


def zarr_gzip(path: Path) -> None:
    zarr_of(path, "gzip", gzip.compress(bytes(100 * MIB), 1))


def zarr_zlib(path: Path) -> None:
    zarr_of(path, "zlib", zlib.compress(bytes(100 * MIB), 1))


def zarr_bz2(path: Path) -> None:
    zarr_of(path, "bz2", bz2.compress(bytes(100 * MIB)))


def zarr_lz4(path: Path) -> None:
    zarr_of(path, "lz4", struct.pack("<I", 2**31 - 1) + bytes(20))


def hdf5_chunk(path: Path) -> None:
    """Write a chunk of 8 MiB that inflates to 400 MiB."""
    import h5py

    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (8, 2**17), "f8", chunks=(8, 2**17), compression="gzip")
        data.id.write_direct_chunk((0, 0), zlib.compress(bytes(400 * MIB), 1))


def parquet_page(path: Path) -> None:
    """Write a text of 1 MiB that is repeated by its dictionary number: 1 GiB from a file of 2 kB."""
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(1024, np.int32)), ["x" * MIB])
    pyarrow.parquet.write_table(pyarrow.table({"x": text}), path, compression="zstd", store_schema=False)


FILES = {
    "notes.tar.gz": (notes_tar, "the name or note at byte"),
    "gzip.zarr": (zarr_gzip, "decompresses to more than"),
    "zlib.zarr": (zarr_zlib, "decompresses to more than"),
    "bz2.zarr": (zarr_bz2, "decompresses to more than"),
    "lz4.zarr": (zarr_lz4, "decompresses to more than"),
    "chunk.h5": (hdf5_chunk, "far more memory than a file of this size|Can't synchronously read"),
    "page.parquet": (parquet_page, "far more memory than a file of this size|malloc of size"),
}
