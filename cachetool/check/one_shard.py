"""The check of one shard: every byte is compared with what was written, and its row with ``shard.json``.

A shard is read once, in pieces, so memory does not grow with its size. Nothing is changed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cachetool.cache import repair as mend
from cachetool.cache.catalog import Row
from cachetool.cache.layout import SHARD_FILE
from cachetool.cache.records import Record, read_shard_json
from cachetool.core.errors import CorruptError
from cachetool.core.extents import EXTENTS_FILE
from cachetool.core.schema import Schema
from cachetool.formats.digest import digest_of, file_digests
from cachetool.formats.files import refused_link
from cachetool.formats.shard import CHECKSUMS_FILE, stored_checksums
from cachetool.formats.tfrecord_package import PackageReader
from cachetool.proc.disk import DISK_BLOCK, limit_error
from cachetool.proc.folders import tree_bytes

__all__ = ["Fault", "bad_files", "faults_of"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one shard, or of its row in the catalog."""

    kind: Literal["gone", "data", "row", "charge"]
    """``gone``: the folder or its ``shard.json`` is missing, so nothing was read. ``data``: the shard is damaged.
    ``row``, ``charge``: the shard is sound, and its row or its number of bytes in the catalog is wrong."""
    what: str
    file: str | None = None


def faults_of(folder: Path, row: Row, package: PackageReader, *, every_byte: bool) -> list[Fault]:
    """Return the faults of the shard in ``folder``, whose row in the catalog is ``row``.

    ``every_byte`` reads all of its bytes, and with ``package`` also every record of a TFRecord file.
    """
    # A link in the place of a shard is planted or a mistake. Following it would read files outside of the cache.
    if folder.is_symlink():
        return [Fault("data", str(refused_link(folder)))]
    try:
        value = read_shard_json(folder)
    except FileNotFoundError:
        return [Fault("gone", "it is missing", SHARD_FILE if folder.is_dir() else None)]
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        # The machine lacks memory or descriptors, which says nothing about the shard: it must not be given up for that.
        if limit_error(error) is not None:
            raise
        return [Fault("data", f"it cannot be used: {error}", SHARD_FILE)]
    real = tree_bytes(folder)
    # ntfs-3g shrinks the sizes of folders by itself, so up to one block less than charged is allowed.
    miscounted = not 0 <= row["bytes"] - real < DISK_BLOCK
    # If the bytes on disk differ from the charge, the shard is read completely in any case, to find out if its data
    # differs.
    faults = bad_files(folder, value) if every_byte or miscounted else []
    # Only if the bytes are as written: a fault above would be reported a second time, in the package's words.
    if every_byte and not faults and value["format"] == "tfrecord":
        faults = _unreadable(folder, value, package)
    if not faults and miscounted:
        faults.append(Fault("charge", f"{real} bytes on disk, but {row['bytes']} are charged in the catalog"))
    if wrong := mend.row_differs(row, value):
        faults.append(Fault("row", f"{', '.join(wrong)} in the catalog differ from {SHARD_FILE}", SHARD_FILE))
    return faults


def bad_files(folder: Path, value: Record) -> list[Fault]:
    """Read every byte of a shard and compare it with the digests in ``shard.json``."""
    wanted: dict[str, str] = value["files"]
    try:
        digests = file_digests(folder)
    except PermissionError:
        # A missing right says nothing about the bytes: the shard must not be pulled again for that.
        raise
    except (OSError, CorruptError) as error:
        if limit_error(error) is not None:
            raise
        return [Fault("data", str(error))]
    missing = [Fault("data", "it is missing", name) for name in wanted if name not in digests]
    more = [
        Fault("data", "it did not exist when the shard was committed", name) for name in digests if name not in wanted
    ]
    other = [
        Fault("data", "its bytes are not those that were written", name)
        for name, digest in wanted.items()
        if digests.get(name, digest) != digest
    ]
    # The checksums are compared only if all files are as written: otherwise they belong to a file that is already
    # named.
    return missing + more + other or _bad_checksums(folder, value)


def _unreadable(folder: Path, value: Record, package: PackageReader) -> list[Fault]:
    """Return a fault if the ``tfrecord`` package reads other samples from the shard's file than were committed."""
    schema = Schema.from_json(value["schema"])
    try:
        package.check(folder / value["data"], schema, stored_checksums(folder, schema))
    except CorruptError as error:
        return [Fault("data", str(error), value["data"])]
    return []


def _bad_checksums(folder: Path, value: Record) -> list[Fault]:
    """Return a fault if the checksums beside the data are not those of the committed samples."""
    name = EXTENTS_FILE if EXTENTS_FILE in value["files"] else CHECKSUMS_FILE
    schema = Schema.from_json(value["schema"])
    try:
        content = digest_of(schema, [stored_checksums(folder, schema)])
    except CorruptError as error:
        return [Fault("data", str(error), name)]
    if content != value["content"]:
        return [Fault("data", "these are not the checksums of the samples that were committed", name)]
    return []
