"""Grouping of the entries of a foreign LMDB file into samples: each entry by itself, or entries of several streams
under one key.

==========================================  ==========================================  ==========================
entries                                     sample                                      a stream is
==========================================  ==========================================  ==========================
``0001``, ``0002``                          each, with the field ``value``              all entries
``image-0001``, ``label-0001``              ``0001``, with the fields image and label   those of one beginning
``0001.jpg``, ``0001.txt``                  ``0001``, with the fields jpg and txt       those of one ending
``0001_image``, ``0001_label``              ``0001``, with the fields image and label   those of one ending
databases ``images`` and ``labels``         each key, with the fields images, labels    a named database
==========================================  ==========================================  ==========================

Entries with different beginnings, or different endings without a dot, are fields in two cases: all names are usual
names of fields, or the file notes that it has as many samples as one of these streams has entries (``num-samples``).
Otherwise ``cat-0001`` and ``dog-0001`` are two samples. ``--read-as groups|rows`` decides otherwise.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachetool.core.errors import UsageError
from cachetool.sources.limits import quoted
from cachetool.sources.options import SourceOptions
from cachetool.sources.readers import NOTE
from cachetool.sources.value_format import VALUE

__all__ = ["KeyFacts", "Stream", "is_note", "streams_of"]

_NOTES = (b"length", b"num-samples", b"num_samples")
_MOST = 16
"""Most different beginnings or endings. With more, the keys do not name fields."""
# The greedy group ends at the last character that is not a digit, so the whole number at the end is the sample's key.
_NUMBERED = re.compile(rb"(.*[^0-9])[0-9]+", re.DOTALL)
_ENDING = re.compile(rb"(?:.*/)?[^./]+(\.[A-Za-z0-9_.]{1,32})|.*[0-9]([-_/:][A-Za-z_]{1,32})", re.DOTALL)
_SEPARATORS = "-_/.: "
_FIELD = re.compile(
    "(image|img|picture|photo|frame|video|audio|wav|label|lbl|cls|class|target|gt|text|txt|caption|transcript|mask|seg|"
    "depth|flow|feature|feat|latent|embedding|path|name|meta|info|data|key|id|bbox|box|boxes|x|y|input|output)s?",
    re.IGNORECASE,
)
"""Usual names of fields."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The entries that are one field of all samples, in the order of their keys."""

    name: str
    prefix: bytes = b""
    suffix: bytes = b""
    database: Any = None
    """The name or handle of a named database; None for the database without a name."""
    entries: int = 0
    without: frozenset[bytes] = frozenset()
    """Keys that are skipped: the names of databases."""

    def of(self, txn: Any, first: bytes | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield keys, without the stream's prefix or suffix, and values; from the key ``first`` on."""
        cursor = txn.cursor() if self.database is None else txn.cursor(db=self.database)
        start = self.prefix if first is None else self.prefix + first + self.suffix
        if start:
            cursor.set_range(start)
        if not self.prefix and not self.suffix:
            without = self.without
            return ((k, value) for k, value in cursor if not is_note(k) and not (without and bytes(k) in without))
        return self._cut(cursor)

    def _cut(self, cursor: Any) -> Iterator[tuple[Any, Any]]:
        first, last = len(self.prefix), len(self.suffix)
        for key, value in cursor:
            # Keys are sorted, so all keys of a prefix stand together. Keys of a suffix are spread over the whole file.
            if key[:first] != self.prefix:
                return
            # The affix is computed again, because a key may end in the suffix of this stream and yet belong to a longer
            # one.
            if last and key[-last:] == self.suffix and _affix(_ENDING, bytes(key)) == self.suffix:
                yield key[:-last], value
            elif not last and _affix(_NUMBERED, bytes(key)) == self.prefix:
                yield key[first:], value


def _affix(pattern: re.Pattern[bytes], key: bytes) -> bytes:
    """Return the part of a key before its number, or after its name; empty if the key has no such part."""
    match = pattern.fullmatch(key)
    return b"" if match is None else match[match.lastindex or 0]


@dataclass(slots=True)
class KeyFacts:
    """Facts about the keys of a file, collected while its entries are read."""

    count: int = 0
    noted: list[int] = field(default_factory=list)
    """Numbers in notes such as ``num-samples``."""
    tables: list[bytes] = field(default_factory=list)
    """Keys that are names of databases."""
    _prefixes: Counter[bytes] | None = field(default_factory=Counter)
    """Number of entries of each beginning, and of each ending below; None once some key has none, or there are too
    many."""
    _suffixes: Counter[bytes] | None = field(default_factory=Counter)

    def note(self, value: bytes) -> None:
        """Add the value of a note, which may be a number."""
        # Fewer than 19 digits fit int64, and int() raises ValueError for a hostile text of more than 4,300 digits.
        if value.isdigit() and len(value) < 19:
            self.noted.append(int(value))

    def add(self, key: bytes) -> None:
        """Add the key of one entry."""
        self.count += 1
        if self._prefixes is not None:
            self._prefixes = _counted(self._prefixes, _affix(_NUMBERED, key))
        if self._suffixes is not None:
            self._suffixes = _counted(self._suffixes, _affix(_ENDING, key))

    def streams(self) -> list[Stream]:
        """Return the streams that entries of one number or name may form; none or several."""
        if len(self._prefixes or ()) > 1:
            streams = [
                Stream(_text(prefix).strip(_SEPARATORS), prefix, entries=count)
                for prefix, count in (self._prefixes or {}).items()
            ]
        else:
            streams = [
                Stream(_text(suffix).strip(_SEPARATORS), b"", suffix, entries=count)
                for suffix, count in (self._suffixes or {}).items()
            ]
        names = {stream.name for stream in streams}
        return streams if 1 < len(names) == len(streams) and "" not in names else []

    def are_fields(self, streams: Sequence[Stream]) -> bool:
        """Return True if these streams are fields for certain."""
        counts = {stream.entries for stream in streams}
        if len(counts) == 1 and all(stream.suffix.startswith(b".") for stream in streams):
            return True
        return bool(counts & set(self.noted)) or all(_FIELD.fullmatch(stream.name) for stream in streams)


def _counted(counts: Counter[bytes], affix: bytes) -> Counter[bytes] | None:
    """Return the counts with one more; None if the counts no longer tell anything."""
    if not affix:
        return None
    counts[affix] += 1
    return counts if len(counts) <= _MOST else None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def is_note(key: Any) -> bool:
    """Return True if an entry is a note on the file, not a sample."""
    text = bytes(key)
    return text in _NOTES or (len(text) > 4 and text.startswith(b"__") and text.endswith(b"__"))


def streams_of(
    path: object, facts: KeyFacts, tables: Mapping[str, Stream | str], options: SourceOptions,
    skipped: list[tuple[str, str]],
) -> list[Stream]:  # fmt: skip
    """Return the streams to read, one for each field. ``tables`` are the named databases, or why one cannot be read.

    Raises :class:`UsageError` for streams with different numbers of entries, naming the fields that go together.
    """
    if tables:
        streams = [table for table in tables.values() if isinstance(table, Stream)]
        skipped += [(name, table) for name, table in tables.items() if isinstance(table, str)]
        if facts.count:
            streams.append(Stream(VALUE, entries=facts.count, without=frozenset(facts.tables)))
        if not streams:
            why = "; ".join(f"{quoted(name)}: {table}" for name, table in list(tables.items())[:3])
            raise UsageError(f"{path} holds named databases that cannot be read:\n{why}")
        return _alike(path, "named databases", streams, options, rows=False)
    whole = [Stream(VALUE, entries=facts.count)]
    streams = facts.streams() if options.read_as != "rows" else []
    if options.read_as == "groups" and not streams:
        raise UsageError(
            f"{path}: --read-as groups needs keys that show which entries belong together; its keys do not"
        )
    if not streams:
        return whole
    wanted = {options.rename.get(stream.name, stream.name) for stream in streams} & set(options.chosen or ())
    if VALUE not in (options.chosen or ()) and (wanted or options.read_as == "groups" or facts.are_fields(streams)):
        if options.read_as != "groups":
            skipped.append(
                (NOTE, _note(streams, "are fields of samples; to read each entry as a sample: --read-as rows"))
            )
        return _alike(path, "keys", streams, options, rows=True)
    # Equal counts may be chance, so each entry stays a sample, and the note names the option that joins them.
    if len({stream.entries for stream in streams}) == 1:
        skipped.append((NOTE, _note(streams, "are separate samples; to read them as fields of one: --read-as groups")))
    return whole


def _note(streams: Sequence[Stream], what: str) -> str:
    verb = "end" if streams[0].suffix else "begin"
    keys = [_text(stream.prefix + stream.suffix) for stream in streams]
    return f"entries whose keys {verb} with {_names(keys)} {what}"


def _alike(path: object, what: str, streams: list[Stream], options: SourceOptions, *, rows: bool) -> list[Stream]:
    """Return the streams that are asked for. Raises :class:`UsageError` if one has more entries than another."""
    names = {stream.name: options.rename.get(stream.name, stream.name) for stream in streams}
    chosen = [s for s in streams if names[s.name] in (options.chosen or ())] or streams
    counts = Counter(stream.entries for stream in chosen)
    if len(counts) > 1:
        most = max(counts, key=lambda count: (counts[count], count))
        fields = ",".join(names[stream.name] for stream in chosen if stream.entries == most)
        entries = ", ".join(f"{quoted(stream.name)} {stream.entries}" for stream in chosen[:_MOST])
        other = ", or read each entry as a sample with --read-as rows" if rows else ""
        raise UsageError(
            f"{path}: the fields made from its {what} have different numbers of entries ({entries});\n"
            f"choose some with --fields {fields}{other}"
        )
    return chosen


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(map(quoted, names[:4])) + more
