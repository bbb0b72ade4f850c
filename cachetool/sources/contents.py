"""First bytes of files: which kind of files begins so, and words for what else begins so.

A name may say anything: netCDF, AnnData, Loom and MATLAB 7.3 files are HDF5, a ``.record`` is a TFRecord, and what was
fetched as ``train.tar`` may be the page of an error. :mod:`cachetool.sources.kinds` asks here for each kind.
"""

from __future__ import annotations

import zlib

__all__ = ["HEAD", "ZIP", "foreign", "is_hdf5", "is_npz", "is_tar", "is_tfrecord_file"]

HEAD = 16 * 2**10
"""Bytes from which a file is known."""
_HDF5 = b"\x89HDF\r\n\x1a\n"
_USER_BLOCKS = (0, 512, 1024, 2048, 4096, 8192)
"""Where the signature of HDF5 may stand: behind a block of the user's own, 512 bytes in files of MATLAB."""
ZIP = b"PK\x03\x04"
_ZARR = (b".zgroup", b".zarray", b".zattrs", b".zmetadata", b"zarr.json")
_UNZIP = "python3 -m zipfile -e"
_PAGES = (b"<!doctype", b"<html", b"<?xml")


def is_hdf5(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is HDF5."""
    return any(head.startswith(_HDF5, at) for at in _USER_BLOCKS)


def is_npz(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a zip archive whose first member is a ``.npy`` file."""
    return _first_member(head).endswith(b".npy")


def is_tar(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a tar archive, plain or packed with gzip."""
    return head[257:262] == b"ustar" or _unpacked(head)[257:262] == b"ustar"


def is_tfrecord_file(head: bytes) -> bool:
    """Whether a file that begins with ``head`` begins with the length of a record and its checksum, also packed."""
    from cachetool.sources.tfrecord import is_tfrecord

    return is_tfrecord(head[:12]) or is_tfrecord(_unpacked(head)[:12])


def foreign(head: bytes) -> str:
    """What a file is that begins so, in words, if no kind has such files; else empty."""
    if head.lstrip().lower().startswith(_PAGES):
        return "a page of HTML or XML, such as the one of an error that a server answers"
    if head.startswith(ZIP) and not is_npz(head):
        if _first_member(head).rpartition(b"/")[2] in _ZARR or b"/c/" in _first_member(head):
            return f"a Zarr in a zip archive, which is read once it is a folder ({_UNZIP} FILE NAME.zarr)"
        return f"a zip archive, which is read once it is a folder ({_UNZIP} FILE DIR)"
    return ""


def _first_member(head: bytes) -> bytes:
    """The name of a zip archive's first member."""
    return head[30 : 30 + int.from_bytes(head[26:28], "little")] if head.startswith(ZIP) else b""


def _unpacked(head: bytes) -> bytes:
    """The first bytes of what gzip or zlib packed; none of anything else."""
    if head[:2] != b"\x1f\x8b" and head[:1] != b"\x78":
        return b""
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(head, 512)
    except zlib.error:
        return b""
