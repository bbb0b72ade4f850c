"""Which entries of an LMDB file by others make one sample: each by itself, or those of several streams under one key.

==========================================  ==========================================  ==========================
entries                                     sample                                      a stream is
==========================================  ==========================================  ==========================
``0001``, ``0002``                          each, with the field ``value``              all entries
``image-0001``, ``label-0001``              ``0001``, with the fields image and label   those of one beginning
``0001.jpg``, ``0001.txt``                  ``0001``, with the fields jpg and txt       those of one ending
``0001_image``, ``0001_label``              ``0001``, with the fields image and label   those of one ending
databases ``images`` and ``labels``         each key, with the fields images, labels    a named database
==========================================  ==========================================  ==========================

Beginnings, and endings without a dot, make fields when their names are those of fields, or when the file notes that it
has as many samples (``num-samples``): ``cat-0001`` and ``dog-0001`` are two samples. ``--read-as groups|rows`` decides
otherwise.
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
"""Beginnings, or endings, that are told apart."""
_NUMBERED = re.compile(rb"(.*[^0-9])[0-9]+", re.DOTALL)
_ENDING = re.compile(rb"(?:.*/)?[^./]+(\.[A-Za-z0-9_.]{1,32})|.*[0-9]([-_/:][A-Za-z_]{1,32})", re.DOTALL)
_SEPARATORS = "-_/.: "
_FIELD = re.compile(
    "(image|img|picture|photo|frame|video|audio|wav|label|lbl|cls|class|target|gt|text|txt|caption|transcript|mask|seg|"
    "depth|flow|feature|feat|latent|embedding|path|name|meta|info|data|key|id|bbox|box|boxes|x|y|input|output)s?",
    re.IGNORECASE,
)
"""Names that are those of fields."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The entries that are one field of all samples, in the order of their keys."""

    name: str
    prefix: bytes = b""
    suffix: bytes = b""
    database: Any = None
    """The handle of a named database; None for the one without a name."""
    entries: int = 0
    without: frozenset[bytes] = frozenset()
    """Keys that are passed over: the names of databases."""

    def of(self, txn: Any, first: bytes | None = None) -> Iterator[tuple[Any, Any]]:
        """Keys, without what is the stream's own of them, and values; from the key ``first`` on."""
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
            if key[:first] != self.prefix:
                return
            if last and key[-last:] == self.suffix and _affix(_ENDING, bytes(key)) == self.suffix:
                yield key[:-last], value
            elif not last and _affix(_NUMBERED, bytes(key)) == self.prefix:
                yield key[first:], value


def _affix(pattern: re.Pattern[bytes], key: bytes) -> bytes:
    """What stands before the number, or behind the name, of a key; nothing for one that has no such part."""
    match = pattern.fullmatch(key)
    return b"" if match is None else match[match.lastindex or 0]


@dataclass(slots=True)
class KeyFacts:
    """How the keys of a file look; collected while they pass by."""

    count: int = 0
    noted: list[int] = field(default_factory=list)
    """Numbers that notes such as ``num-samples`` have."""
    tables: list[bytes] = field(default_factory=list)
    """Keys that are names of databases."""
    _prefixes: Counter[bytes] | None = field(default_factory=Counter)
    _suffixes: Counter[bytes] | None = field(default_factory=Counter)

    def note(self, value: bytes) -> None:
        """A note's value, which may be a number."""
        if value.isdigit() and len(value) < 19:
            self.noted.append(int(value))

    def add(self, key: bytes) -> None:
        """One more entry."""
        self.count += 1
        if self._prefixes is not None:
            self._prefixes = _counted(self._prefixes, _affix(_NUMBERED, key))
        if self._suffixes is not None:
            self._suffixes = _counted(self._suffixes, _affix(_ENDING, key))

    def streams(self) -> list[Stream]:
        """The fields that entries under one number, or one name, may be; none or several."""
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
        """Whether these are fields for certain."""
        counts = {stream.entries for stream in streams}
        if len(counts) == 1 and all(stream.suffix.startswith(b".") for stream in streams):
            return True
        return bool(counts & set(self.noted)) or all(_FIELD.fullmatch(stream.name) for stream in streams)


def _counted(counts: Counter[bytes], affix: bytes) -> Counter[bytes] | None:
    """The counts with one more; None once they tell nothing."""
    if not affix:
        return None
    counts[affix] += 1
    return counts if len(counts) <= _MOST else None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def is_note(key: Any) -> bool:
    """Whether an entry is a note on the file."""
    text = bytes(key)
    return text in _NOTES or (len(text) > 4 and text.startswith(b"__") and text.endswith(b"__"))


def streams_of(
    path: object, facts: KeyFacts, tables: Mapping[str, Stream | str], options: SourceOptions,
    skipped: list[tuple[str, str]],
) -> list[Stream]:  # fmt: skip
    """The streams to read: one for each field. ``tables`` are the named databases, or why one cannot be read.

    Raises :class:`UsageError` for streams whose entries are not as many, naming the fields that go together.
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
        raise UsageError(f"{path}: --read-as groups: its keys are not of entries that belong together")
    if not streams:
        return whole
    wanted = {options.rename.get(stream.name, stream.name) for stream in streams} & set(options.chosen or ())
    if VALUE not in (options.chosen or ()) and (wanted or options.read_as == "groups" or facts.are_fields(streams)):
        if options.read_as != "groups":
            skipped.append((NOTE, _note(streams, "are fields of samples; to take each entry as one: --read-as rows")))
        return _alike(path, "keys", streams, options, rows=True)
    if len({stream.entries for stream in streams}) == 1:
        skipped.append((NOTE, _note(streams, "are samples each; to take them as fields of one: --read-as groups")))
    return whole


def _note(streams: Sequence[Stream], what: str) -> str:
    kind = "endings" if streams[0].suffix else "beginnings"
    keys = [_text(stream.prefix + stream.suffix) for stream in streams]
    return f"entries whose keys have the {kind} {_names(keys)} {what}"


def _alike(path: object, what: str, streams: list[Stream], options: SourceOptions, *, rows: bool) -> list[Stream]:
    """Those of ``streams`` that are asked for. Raises :class:`UsageError` where one has more entries than another."""
    names = {stream.name: options.rename.get(stream.name, stream.name) for stream in streams}
    chosen = [s for s in streams if names[s.name] in (options.chosen or ())] or streams
    counts = Counter(stream.entries for stream in chosen)
    if len(counts) > 1:
        most = max(counts, key=lambda count: (counts[count], count))
        fields = ",".join(names[stream.name] for stream in chosen if stream.entries == most)
        entries = ", ".join(f"{quoted(stream.name)} {stream.entries}" for stream in chosen[:_MOST])
        other = ", or each entry with --read-as rows" if rows else ""
        raise UsageError(
            f"{path} holds fields by {what}, not all with as many entries ({entries});\ntake some with --fields"
            f" {fields}{other}"
        )
    return chosen


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(map(quoted, names[:4])) + more
