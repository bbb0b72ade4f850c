"""The interface of foreign files once the reader of their kind has opened them: schema, number of samples, and samples
as blocks.

Files hold their samples in one of two ways:

- columns (``.npy``, ``.npz``, HDF5, Zarr): arrays whose rows are samples, :mod:`cachetool.sources.rows`. An array
  becomes a field if its first dimension is the file's number of samples; other arrays are left out and named;
- records (tar, TFRecord, LMDB): one sample after another. The schema is found by reading all of them.

The statements of a file about itself are compared with its bytes before they are believed
(:mod:`cachetool.sources.limits`), because a few bytes can claim any shape.
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
"""Most names that :attr:`RandomAccess.skipped` lists; more are counted."""
NOT_ASKED = "not asked for"
NOTE = ""
"""The name of an entry among the names left out whose reason is only a note on how the file is read."""


class EmptyFile(BadObject):
    """A sound file without samples: an error if it is the only file, but not among others.

    Callers that open files turn it into a plain :class:`BadObject`, because only that class crosses processes.
    """


class MisfitRows(BadObject):
    """Some rows of a file hold no sample, and the others do.

    A caller that does not know this class treats it as an error of the whole file. The guarded process sends its parts
    to the worker instead of the error.
    """

    def __init__(self, where: object, block: Block, misfits: Mapping[int, str]) -> None:
        self.block = block
        """All rows that were asked for; the values of a misfit have no meaning."""
        self.misfits = dict(misfits)
        """The reason for each misfit, by the number of the row in its file; a message names the row before it."""
        self._where = where
        row = min(self.misfits)
        super().__init__(f"{where}: row {row}: {self.misfits[row]}")

    def of(self, rows: Iterable[int]) -> MisfitRows:
        """Return the same error for these misfits alone."""
        return MisfitRows(self._where, self.block, {row: self.misfits[row] for row in rows})


class RandomAccess(Protocol):
    """A file, or several of one kind, any run of whose samples can be read. Used by one thread of one process.

    It opens what it needs when it needs it, so it can be read again after :meth:`close`.
    """

    schema: Schema
    samples: int
    skipped: tuple[tuple[str, str], ...]
    """The parts of the file that are not taken: (name, reason)."""

    def read(self, start: int, stop: int) -> Block:
        """Return the samples from ``start`` to ``stop``. Cheapest when each call continues where the last one ended.

        Raises :class:`BadObject` naming the file and the dataset, record or member, :class:`MisfitRows` if some samples
        are good.
        """
        ...

    def close(self) -> None:
        """Close files and end processes. Blocks that were returned stay valid. May be called twice."""
        ...


class LimitedAccess(RandomAccess, Protocol):
    """A :class:`RandomAccess` in the guarded process, whose memory is limited."""

    piece: int
    """Bytes of the largest row or chunk, which is completely in memory while it is read."""


class RecordFile(Protocol):
    """A file of one sample after another. All samples were read for the schema, unless the schema was known before."""

    schema: Schema
    samples: int
    """Number of samples; 0 if they were not read."""
    skipped: tuple[tuple[str, str], ...]
    """The parts of the file that are not taken: (name, reason)."""
    names: dict[str, str]
    """Names in the file, for fields that have another name."""
    places: list[tuple[int, int]]
    """First and last byte of each sample in the file; empty if the file is compressed as a whole."""

    def blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield all samples in order, in blocks of about ``block_bytes``; a single sample may be larger.

        Raises :class:`BadObject` naming the file and the record or member.
        """
        ...


def field_names(
    path: object, present: Sequence[str], skipped: list[tuple[str, str]], options: SourceOptions
) -> dict[str, str]:
    """Return the new name of each field to take, ``{name in the file: name of the field}``, in the order asked for.

    Names that are not taken are added to ``skipped``. Raises :class:`UsageError` for a name that is asked for and
    missing.
    """
    names = {name: options.rename.get(name, name) for name in present}
    left_out = {options.rename.get(name, name): reason for name, reason in skipped}
    for name in options.rename:
        if name not in names and name not in dict(skipped):
            raise UsageError(
                f"{path}: --rename {name}: unknown field; the file has {_listed([*names, *dict(skipped)])}"
            )
    twice = [name for name in names.values() if list(names.values()).count(name) > 1]
    if twice:
        raise UsageError(f"{path}: two fields would have the name {twice[0]!r}; rename one with --rename")
    by_name = {new: name for name, new in names.items()}
    if options.chosen is None:
        skipped += [(name, NOT_ASKED) for new, name in by_name.items() if new in options.dropped]
        return {name: new for new, name in by_name.items() if new not in options.dropped}
    for new in options.chosen:
        if new in left_out:
            raise UsageError(f"{path}: field {new!r} cannot be read: {left_out[new]}")
        if new not in by_name:
            raise UsageError(f"{path}: unknown field {new!r}; the file has {_listed([*by_name, *left_out])}")
    skipped += [(name, NOT_ASKED) for new, name in by_name.items() if new not in options.chosen]
    return {by_name[new]: new for new in options.chosen}


def make_schema(path: object, fields: Sequence[Field], skipped: Sequence[tuple[str, str]]) -> Schema:
    """Return the schema of ``fields``. Raises :class:`UsageError` with the reasons if no field is left."""
    if not fields:
        raise UsageError(f"{path}: nothing in it can be read as samples{because(skipped)}")
    try:
        return Schema(tuple(fields))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def checked_key(field: Field) -> Field:
    """Return the field itself. Raises :class:`UsageError` for a field called ``__key__`` that is no text."""
    # The field would take the place of the samples' keys, which all commands expect to be text.
    if field.name == KEY and field.kind not in ("str", "bytes"):
        raise UsageError(
            f"the name is reserved for keys of samples, which are text, but the values are {field.describe()}"
        )
    return field


def because(skipped: Iterable[tuple[str, str]]) -> str:
    """Return the first three reasons as the end of a message."""
    reasons = [f"{quoted(name)}: {reason}" for name, reason in skipped if name != NOTE]
    return f";\n{'; '.join(reasons[:3])}" if reasons else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(quoted(name) for name in list(names)[:20]) or "none"


class LeftOut:
    """A bounded list of the parts of a file that are not taken: the first ``MAX_SKIPPED`` by name, the others as a
    number."""

    def __init__(self) -> None:
        self._names: list[tuple[str, str]] = []
        self._more = 0

    def add(self, name: str, reason: str) -> None:
        """Add one entry."""
        if len(self._names) < MAX_SKIPPED:
            self._names.append((name, reason))
        else:
            self._more += 1

    def update(self, skipped: Iterable[tuple[str, str]]) -> None:
        """Add the entries that are not listed yet."""
        for name, reason in skipped:
            if (name, reason) not in self._names:
                self.add(name, reason)

    def listed(self) -> tuple[tuple[str, str], ...]:
        """Return the entries as :attr:`RandomAccess.skipped` has them."""
        return (*self._names, ("...", f"and {self._more} more")) if self._more else tuple(self._names)

    def because(self) -> str:
        """Return the first three reasons for a message."""
        return because(self._names)


def of_file(name: str, skipped: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the entries of one file of several, with the file's name in front; notes stay as they are."""
    return [(entry if entry == NOTE else f"{name}: {entry}", why) for entry, why in skipped]


def notes_of(skipped: Iterable[tuple[str, str]]) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the entries that are really left out, and the notes among them, each once."""
    entries = tuple(skipped)
    return tuple(e for e in entries if e[0] != NOTE), tuple(dict.fromkeys(why for name, why in entries if name == NOTE))


def bounded(skipped: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return at most ``MAX_SKIPPED`` of the entries, and the others as a number."""
    out = LeftOut()
    for name, reason in skipped:
        out.add(name, reason)
    return out.listed()


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn every error of a library about a damaged file into :class:`BadObject`, "``what``: its message".

    Errors of cachetool pass through, because they name the file already.
    """
    try:
        yield
    except (CacheToolError, MemoryError):
        # MemoryError is left to the guarded process, which names the limit that the file has exceeded.
        raise
    except FileNotFoundError as error:
        raise NotFound(f"{what}: it does not exist") from error
    except PermissionError as error:
        raise AccessDenied(f"{what}: permission denied") from error
    except Exception as error:
        # Every class: codecs and parsers raise classes of their own for damaged bytes, such as zlib.error and
        # struct.error.
        # The machine lacks descriptors, memory or disk space; the file must not be skipped as a bad one.
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            raise SourceError(f"{what}: {error.strerror}") from error
        lines = str(error).strip().splitlines() or [""]
        text = lines[0][:200] if lines[0].isprintable() and lines[0] else type(error).__name__
        raise BadObject(f"{what}: {text}") from error
