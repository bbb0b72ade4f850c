"""The first bytes of files: which kind of files begins with them, and a description of unsupported files.

The name of a file may be misleading. netCDF-4, AnnData, Loom and MATLAB 7.3 files are HDF5, a ``.record`` is a
TFRecord, and a download named ``train.tar`` may be a server's error page. :mod:`cachetool.sources.kinds` asks here
for each kind.
"""

from __future__ import annotations

import zlib

__all__ = ["HEAD", "ZIP", "foreign", "is_hdf5", "is_netcdf3", "is_npz", "is_tar", "is_tfrecord_file"]

HEAD = 16 * 2**10
"""Bytes at the beginning of a file that are enough to tell its kind."""
_HDF5 = b"\x89HDF\r\n\x1a\n"
_USER_BLOCKS = (0, 512, 1024, 2048, 4096, 8192)
"""Offsets in bytes where the signature of HDF5 may be, behind a block for the user. Files of MATLAB have 512 bytes
there."""
_NETCDF3 = (b"CDF\x01", b"CDF\x02", b"CDF\x05")
ZIP = b"PK\x03\x04"
_ZARR = (b".zgroup", b".zarray", b".zattrs", b".zmetadata", b"zarr.json")
_UNZIP = "python3 -m zipfile -e"
_PAGES = (b"<!doctype", b"<html", b"<?xml")


def is_hdf5(head: bytes) -> bool:
    """Return True if a file that begins with ``head`` is HDF5."""
    return any(head.startswith(_HDF5, at) for at in _USER_BLOCKS)


def is_netcdf3(head: bytes) -> bool:
    """Return True if a file that begins with ``head`` is classic netCDF: CDF-1, CDF-2 or CDF-5."""
    return head.startswith(_NETCDF3)


def is_npz(head: bytes) -> bool:
    """Return True if a file that begins with ``head`` is a zip archive whose first member is a ``.npy`` file."""
    return _first_member(head).endswith(b".npy")


def is_tar(head: bytes) -> bool:
    """Return True if a file that begins with ``head`` is a tar archive, plain or compressed with gzip."""
    return head[257:262] == b"ustar" or _unpacked(head)[257:262] == b"ustar"


def is_tfrecord_file(head: bytes) -> bool:
    """Return True if a file begins with the length of a TFRecord and the checksum of this length, plain or
    compressed."""
    from cachetool.sources.tfrecord import is_tfrecord

    return is_tfrecord(head[:12]) or is_tfrecord(_unpacked(head)[:12])


def foreign(head: bytes) -> str:
    """Return a description of a file that no kind can read, or an empty text."""
    if head.lstrip().lower().startswith(_PAGES):
        return "an HTML or XML page, for example the error page of a server"
    # The description contains the command that unpacks the file, because its folder can be read and the archive cannot.
    if head.startswith(ZIP) and not is_npz(head):
        if _first_member(head).rpartition(b"/")[2] in _ZARR or b"/c/" in _first_member(head):
            return f"a Zarr in a zip archive; unpack it into a folder first: {_UNZIP} FILE NAME.zarr"
        return f"a zip archive; unpack it into a folder first: {_UNZIP} FILE DIR"
    return ""


def _first_member(head: bytes) -> bytes:
    """Return the name of the first member of a zip archive, or nothing."""
    # Local file header of a zip member: the name begins at byte 30, and its length is in bytes 26 and 27. The directory
    # at the file's end is not in these first bytes.
    return head[30 : 30 + int.from_bytes(head[26:28], "little")] if head.startswith(ZIP) else b""


def _unpacked(head: bytes) -> bytes:
    """Return the first bytes of data that gzip or zlib compressed, or nothing."""
    if head[:2] != b"\x1f\x8b" and head[:1] != b"\x78":
        return b""
    try:
        # Adding 32 to MAX_WBITS lets zlib detect gzip or zlib by itself. 512 bytes are one tar header, and the limit
        # stops a decompression bomb.
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(head, 512)
    except zlib.error:
        return b""
