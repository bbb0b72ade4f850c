"""What a file that others made looks like once its kind's reader has opened it: schema, count, and samples as blocks.

Files hold their samples in one of two ways:

- columns (``.npy``, ``.npz``, HDF5, Zarr): arrays whose rows are samples, :mod:`cachetool.sources.rows`. An array
  becomes a field when its first dimension is the file's number of samples; the others are left out and named;
- records (tar, TFRecord, LMDB): one sample after another, the schema found by looking at all of them.

What a file says of itself is not believed before it is compared with the bytes that are there
(:mod:`cachetool.sources.limits`): a few bytes can claim any shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from cachetool.core.block import BLOCK_BYTES, Block
from cachetool.core.errors import AccessDenied, BadObject, CacheToolError, NotFound, SourceError, UsageError
from cachetool.core.schema import KEY, Field, Schema
from cachetool.sources.limits import quoted
from cachetool.sources.options import SourceOptions
from cachetool.stores.base import EXHAUSTED

__all__ = [
    "NOTE",
    "NOT_ASKED",
    "EmptyFile",
    "LeftOut",
    "LimitedAccess",
    "MisfitRows",
    "RandomAccess",
    "RecordFile",
    "because",
    "bounded",
    "checked_key",
    "field_names",
    "make_schema",
    "notes_of",
    "of_file",
    "reading",
]

MAX_SKIPPED = 100
"""Names that :attr:`RandomAccess.skipped` lists; more are counted."""
NOT_ASKED = "not asked for"
NOTE = ""
"""Stands for a name among what is not taken: the reason is a note on how the file is read."""


class EmptyFile(BadObject):
    """A sound file without samples: an error where it is the only file, but not among others.

    Whoever opens files turns it into a plain :class:`BadObject`, because only that class crosses processes.
    """


class MisfitRows(BadObject):
    """Some rows of a file hold no sample, and the others do.

    A caller that does not know this class takes it for an error of the whole file. The guarded process hands it on as
    its parts.
    """

    def __init__(self, where: object, block: Block, misfits: Mapping[int, str]) -> None:
        self.block = block
        """All rows that were asked for; the values of a misfit mean nothing."""
        self.misfits = dict(misfits)
        """By the number of the row in its file: why, to be said behind that number."""
        self._where = where
        row = min(self.misfits)
        super().__init__(f"{where}: row {row}: {self.misfits[row]}")

    def of(self, rows: Iterable[int]) -> MisfitRows:
        """The same error of these misfits alone."""
        return MisfitRows(self._where, self.block, {row: self.misfits[row] for row in rows})


class RandomAccess(Protocol):
    """A file, or several of one kind, any run of whose samples can be read. Used by one thread of one process.

    Opens what it needs when it needs it: after :meth:`close` it can be read again.
    """

    schema: Schema
    samples: int
    skipped: tuple[tuple[str, str], ...]
    """What of the file is not taken: (name, reason)."""

    def read(self, start: int, stop: int) -> Block:
        """Samples ``start`` to ``stop``; cheapest when each call goes on where the last one ended.

        Raises :class:`BadObject` naming the file and the dataset, record or member, :class:`MisfitRows` where some
        samples are good.
        """
        ...

    def close(self) -> None:
        """Let go of files and processes; blocks handed out stay valid. May be called twice."""
        ...


class LimitedAccess(RandomAccess, Protocol):
    """The same in the guarded process, whose memory is limited."""

    piece: int
    """Bytes of the largest row or chunk, which is in memory as a whole while it is read."""


class RecordFile(Protocol):
    """A file of one sample after another, all of which were looked at unless its schema was known before."""

    schema: Schema
    samples: int
    """How many there are; 0 where they were not looked at."""
    skipped: tuple[tuple[str, str], ...]
    """What of the file is not taken: (name, reason)."""
    names: dict[str, str]
    """For each field what the file calls it, if that is another name."""
    places: list[tuple[int, int]]
    """Where each sample begins and ends in the file; empty where they lie packed as a whole."""

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """All samples in order, in blocks of about ``block_bytes``; a single sample may be larger.

        Raises :class:`BadObject` naming the file and the record or member.
        """
        ...


def field_names(
    path: object, present: Sequence[str], skipped: list[tuple[str, str]], options: SourceOptions
) -> dict[str, str]:
    """What each of ``present`` shall be called, ``{name in the file: name of the field}``, in the order asked for.

    The others are added to ``skipped``. Raises :class:`UsageError` for a name that is asked for and not there.
    """
    names = {name: options.rename.get(name, name) for name in present}
    left_out = {options.rename.get(name, name): reason for name, reason in skipped}
    for name in options.rename:
        if name not in names and name not in dict(skipped):
            raise UsageError(f"{path}: --rename {name}: there is {_listed([*names, *dict(skipped)])}")
    twice = [name for name in names.values() if list(names.values()).count(name) > 1]
    if twice:
        raise UsageError(f"{path}: two fields would be called {twice[0]!r}; rename one with --rename")
    by_name = {new: name for name, new in names.items()}
    if options.chosen is None:
        skipped += [(name, NOT_ASKED) for new, name in by_name.items() if new in options.dropped]
        return {name: new for new, name in by_name.items() if new not in options.dropped}
    for new in options.chosen:
        if new in left_out:
            raise UsageError(f"{path}: field {new!r} cannot be taken: {left_out[new]}")
        if new not in by_name:
            raise UsageError(f"{path}: no field {new!r}; there is {_listed([*by_name, *left_out])}")
    skipped += [(name, NOT_ASKED) for new, name in by_name.items() if new not in options.chosen]
    return {by_name[new]: new for new in options.chosen}


def make_schema(path: object, fields: Sequence[Field], skipped: Sequence[tuple[str, str]]) -> Schema:
    """The schema of ``fields``. Raises :class:`UsageError` saying why nothing is left when there is none."""
    if not fields:
        raise UsageError(f"{path}: nothing in it can be taken as samples{because(skipped)}")
    try:
        return Schema(tuple(fields))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def checked_key(field: Field) -> Field:
    """The field itself. Raises :class:`UsageError` for one that has the name of the samples' keys and is no text: it
    would take their place."""
    if field.name == KEY and field.kind not in ("str", "bytes"):
        raise UsageError(f"keys of samples have this name, and they are text; it is {field.describe()}")
    return field


def because(skipped: Iterable[tuple[str, str]]) -> str:
    """The first three reasons, as the end of a message."""
    reasons = [f"{quoted(name)}: {reason}" for name, reason in skipped if name != NOTE]
    return f";\n{'; '.join(reasons[:3])}" if reasons else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(quoted(name) for name in list(names)[:20]) or "none"


class LeftOut:
    """Collects what of a file is not taken: the first ``MAX_SKIPPED`` by name, the rest as a number."""

    def __init__(self) -> None:
        self._names: list[tuple[str, str]] = []
        self._more = 0

    def add(self, name: str, reason: str) -> None:
        """One more."""
        if len(self._names) < MAX_SKIPPED:
            self._names.append((name, reason))
        else:
            self._more += 1

    def update(self, skipped: Iterable[tuple[str, str]]) -> None:
        """Add those that are not there yet."""
        for name, reason in skipped:
            if (name, reason) not in self._names:
                self.add(name, reason)

    def listed(self) -> tuple[tuple[str, str], ...]:
        """For :attr:`RandomAccess.skipped`."""
        return (*self._names, ("...", f"and {self._more} more")) if self._more else tuple(self._names)

    def because(self) -> str:
        """The first three, for messages."""
        return because(self._names)


def of_file(name: str, skipped: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """What is not taken of one file of several; notes stay as they are."""
    return [(entry if entry == NOTE else f"{name}: {entry}", why) for entry, why in skipped]


def notes_of(skipped: Iterable[tuple[str, str]]) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """What is really not taken, and the notes among it, each once."""
    entries = tuple(skipped)
    return tuple(e for e in entries if e[0] != NOTE), tuple(dict.fromkeys(why for name, why in entries if name == NOTE))


def bounded(skipped: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """At most ``MAX_SKIPPED`` of them, the rest as a number."""
    out = LeftOut()
    for name, reason in skipped:
        out.add(name, reason)
    return out.listed()


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever a library says about a damaged file into :class:`BadObject`, "``what``: its message".

    Errors of cachetool pass through: they name the file already.
    """
    try:
        yield
    except (CacheToolError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise NotFound(f"{what}: it is not there") from error
    except PermissionError as error:
        raise AccessDenied(f"{what}: permission denied") from error
    except Exception as error:  # codecs and parsers raise classes of their own for damaged bytes
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            raise SourceError(f"{what}: {error.strerror}") from error
        lines = str(error).strip().splitlines() or [""]
        text = lines[0][:200] if lines[0].isprintable() and lines[0] else type(error).__name__
        raise BadObject(f"{what}: {text}") from error
