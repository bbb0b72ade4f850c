"""The options of a conversion: one frozen value that checks itself before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cachetool.core.errors import UsageError
from cachetool.core.options import OnError, Option, RoomWait, Workers, declared
from cachetool.core.progress import Report, silent
from cachetool.core.text import shown
from cachetool.core.units import is_one_of, parse_size, parse_text
from cachetool.pull.options import ShardSize
from cachetool.sources.options import SourceOptions

if TYPE_CHECKING:
    from cachetool.formats.base import Format

__all__ = ["DEFAULT_PART", "ConvertCall", "ConvertOptions"]

DEFAULT_PART = 64 * 10**6
"""Bytes of values in a file."""


def _compression(value: object, *, what: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{what} {shown(value)} cannot be used: the name of a compression")
    return value


def _folder(value: Any, *, what: str) -> Path:
    """A folder that a user names. Raises :class:`UsageError` for an empty name, which ``Path`` takes for the present
    folder."""
    from cachetool.proc.disk import parse_location

    if not str(value).strip():
        raise UsageError("the name of the folder to write is empty; name one with --out")
    return Path(parse_location(value, what=what))


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(SourceOptions):
    """How to convert."""

    to: Annotated[str, Option("Format of the new shards: lmdb, hdf5, zarr or tfrecord.", "FORMAT", parse_text)]
    dataset: Annotated[str | None, Option("Only this dataset of the cache.", "NAME", parse_text)] = None
    shard_size: ShardSize = None
    compression: Annotated[
        str | None, Option("gzip or lzf (hdf5); zstd, blosc or gzip (zarr); gzip (tfrecord).", "NAME", _compression)
    ] = None
    workers: Workers = 2
    verify: Annotated[bool, Option("Read every shard back through its own library and compare checksums.")] = False
    wait: RoomWait = "60s"
    on_error: OnError = "error"

    def _check(self) -> None:
        super()._check()
        kind = self.kind
        if not is_one_of(self.compression, (None, *kind.compressions)):
            have = f"it has {', '.join(kind.compressions)}" if kind.compressions else "it has none"
            raise UsageError(f"{self.to} has no compression {shown(self.compression)}; {have}")

    @property
    def kind(self) -> Format:
        """The target's format."""
        from cachetool.formats import get_format

        return get_format(self.to)

    @property
    def source(self) -> SourceOptions:
        """The options of an input alone."""
        return self.only(SourceOptions)

    def part_bytes(self) -> int:
        """Bytes of values in a shard or file."""
        return DEFAULT_PART if self.shard_size is None else parse_size(self.shard_size, what="--shard-size")

    def refuse_input(self) -> None:
        """Raise :class:`UsageError` for options that say how an input is read."""
        declared_here = declared(SourceOptions).items()
        given = [about.flag.rpartition("/")[2] for name, about in declared_here if getattr(self, name) != about.default]
        given += [] if self.on_error == "error" else ["--on-error"]
        if given:
            raise UsageError(
                f"{', '.join(given)}: for an INPUT with --out only; the samples of a cache are taken as they are"
            )


@dataclass(frozen=True, kw_only=True)
class ConvertCall(ConvertOptions):
    """The keywords of a conversion: its options, the folder to write, and the function that hears of progress."""

    out: Annotated[
        Path | str | None,
        Option("Write plain files into this new folder instead of the cache.", "DIR", _folder),
    ] = None
    progress: Annotated[Report, Option("A function that is told how far the conversion is.", command_line=False)] = (
        silent
    )

    @property
    def folder(self) -> Path | None:
        """:attr:`out` as a path."""
        return None if self.out is None else Path(self.out)
