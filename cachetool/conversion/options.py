"""The options of a conversion: one frozen value that checks itself before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cachetool.core.errors import UsageError
from cachetool.core.options import OnError, Option, RoomWait, Workers, declared
from cachetool.core.progress import Report, silent
from cachetool.core.units import parse_size, parse_text
from cachetool.pull.options import Compression, ShardSize
from cachetool.sources.options import SourceOptions

if TYPE_CHECKING:
    from cachetool.formats.base import Format

__all__ = ["DEFAULT_PART", "ConvertCall", "ConvertOptions"]

DEFAULT_PART = 64 * 10**6
"""Bytes of values in a file, unless ``--shard-size`` says otherwise."""


def _folder(value: Any, *, what: str) -> Path:
    """Return the folder that a user named.

    Raises :class:`UsageError` for an empty name, because ``Path`` takes an empty name for the current folder.
    """
    # Imported here, because `convert --help` loads this module and needs no disk.
    from cachetool.proc.disk import parse_location

    if not str(value).strip():
        raise UsageError("the name of the folder to write is empty; name one with --out")
    return Path(parse_location(value, what=what))


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(SourceOptions):
    """The options of a conversion."""

    to: Annotated[str, Option("Format of the new shards: lmdb, hdf5, zarr or tfrecord.", "FORMAT", parse_text)]
    dataset: Annotated[str | None, Option("Convert only this dataset of the cache.", "NAME", parse_text)] = None
    shard_size: ShardSize = None
    compression: Compression = None
    workers: Workers = 2
    verify: Annotated[bool, Option("Read every new shard with the library of its format and compare checksums.")] = (
        False
    )
    wait: RoomWait = "60s"
    on_error: OnError = "error"
    runs: Annotated[int | None, Option("Not for conversions, which read all rows in order.", command_line=False)] = None

    def _check(self) -> None:
        super()._check()
        if self.runs is not None:
            raise UsageError("runs= is for pull; a conversion reads all rows in order, so leave runs= out")
        # The options check themselves, so a wrong name ends the command before a cache is opened or a source is listed.
        _ = self.kind

    @property
    def kind(self) -> Format:
        """Return the target format. It does not compress if the first samples decide; see :attr:`probes`."""
        from cachetool.formats.compression import AUTO, compressed

        name = self._compression()
        return compressed(self.to, None if name == AUTO else name)

    @property
    def probes(self) -> bool:
        """Return True if the first samples decide whether the new shards are compressed."""
        from cachetool.formats.compression import AUTO

        return self._compression() == AUTO

    def _compression(self) -> str | None:
        from cachetool.formats import get_format
        from cachetool.formats.compression import check_compression

        return check_compression(get_format(self.to), self.compression)

    @property
    def source(self) -> SourceOptions:
        """Return the options that say how an input is read."""
        return self.only(SourceOptions)

    def part_bytes(self) -> int:
        """Return the bytes of values in a shard or file."""
        return DEFAULT_PART if self.shard_size is None else parse_size(self.shard_size, what="--shard-size")

    def refuse_input(self) -> None:
        """Raise :class:`UsageError` if an option was given that says how an input is read."""
        declared_here = declared(SourceOptions).items()
        # A flag with two forms, such as --repull/--no-repull, is named by its last form: that is the one which differs
        # from the default.
        given = [about.flag.rpartition("/")[2] for name, about in declared_here if getattr(self, name) != about.default]
        given += [] if self.on_error == "error" else ["--on-error"]
        if given:
            raise UsageError(
                f"{', '.join(given)}: only for INPUT with --out; the samples of a cache are converted unchanged"
            )


@dataclass(frozen=True, kw_only=True)
class ConvertCall(ConvertOptions):
    """The keywords of a conversion: its options, the folder to write, and a function for reports of progress."""

    out: Annotated[
        Path | str | None,
        Option("Write plain files into this new folder instead of the cache.", "DIR", _folder),
    ] = None
    progress: Annotated[
        Report, Option("Function that is called with the progress of the conversion.", command_line=False)
    ] = silent

    @property
    def folder(self) -> Path | None:
        """Return :attr:`out` as a path."""
        return None if self.out is None else Path(self.out)
