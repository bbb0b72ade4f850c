"""The decision which names of a folder of objects make its samples. It is taken when all names are known.

Files that are no samples
    A *field* is what :class:`~cachetool.sources.keys.Stem` makes of a name. A field belongs to samples if it occurs
    more than twice, and more than a tenth as often as the most frequent field. For two fields that are both images,
    or both audio, video or volumes, a hundredth is enough: these may be samples that were saved in another way.
    A key without any such field is left out and named, if these keys are few: at most a third of the others.
    ``README.md`` and other names that only describe files never count. Lists such as ``labels.csv`` do not count if
    there are one or two. With ``--fields`` a key that can have none of the chosen fields is left out, too.

Names with more dots
    Without ``--stem`` names are cut at the first dot. They are cut at the last dot, and a note says so, if two
    things hold. All names have one extension. The texts between the first and the last dot are numbers
    (``2024.01.05.npy``, ``t=0.5.npy``), or there are nearly as many texts as names. A reading that would make no
    sense is an error.

Later parts of a listing, and a refreshed one, keep the fields that the first part kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from cachetool.core.errors import BadObject, UsageError
from cachetool.core.text import shown
from cachetool.sources.keys import CONTAINERS, Part, Stem
from cachetool.sources.names import NamedPage, describes
from cachetool.sources.options import LABEL, SourceOptions
from cachetool.stores.base import LeftOut

__all__ = ["ALIEN", "Dots", "Grouping", "Kept", "Record", "describes", "family"]

Record = tuple[bytes, bytes, int, bytes]
"""Sample key, key, size in bytes, ETag. Keys and ETags are bytes, because records are sorted by bytes."""
_Fields = frozenset[tuple[str, str]]
Kept = tuple[tuple[str, str], ...]
"""Fields of samples: name, and the kind of objects that hold several fields, or an empty text."""

ALIEN = "shares no field with the samples"
_DESCRIBES = "describes other files"
_NOT_ASKED = "has none of the fields asked for"
_MOST = 2**16
"""Number of different fields that are counted. If there are more, no name is left out."""
_MOST_KEPT = 1000
_FEW = 2
"""Number of files of one name or field that may be no samples, however few samples there are."""
_MANY = 20
"""Number of different texts between dots that can no longer be names of fields, if most occur once."""

_LIST = re.compile(
    r"(labels?|classes|class_?names|names|categories|annotations?|captions|metadata|manifest|meta|index|stats|info"
    r"|splits?|train|val|valid|validation|test|notes|predefined_classes|wnids|words)\.[a-z]{2,5}",
    re.IGNORECASE,
)
"""Names that often list or describe samples. Such a file is no sample if it has only some of the samples' fields."""
_LIST_STARTS = frozenset(
    ("la", "cl", "na", "ca", "an", "me", "ma", "in", "st", "sp", "tr", "va", "te", "no", "pr", "wn", "wo")
)
"""The first two letters of the names of ``_LIST``."""
_FAMILIES = (
    frozenset(("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "jp2", "heic", "avif")),
    frozenset(("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac", "wma", "aiff")),
    frozenset(("mp4", "mkv", "avi", "webm", "mov", "m4v", "mpg", "mpeg", "wmv")),
    frozenset(("nii", "nii.gz", "mha", "mhd", "nrrd", "dcm", "mgz")),
)
_NUMBER = re.compile(r"[0-9][0-9._+:TZ -]*(e[+-]?[0-9]+)?")


def family(extension: str) -> int | None:
    """Return the number of the extension's family: images, audio, video or volumes. Return None for other
    extensions."""
    return next((number for number, names in enumerate(_FAMILIES) if extension.lower() in names), None)


class Grouping:
    """The counts of the names of a listing, and the decision which names make samples."""

    def __init__(self, options: SourceOptions, *, kept: Kept | None = None, bounded: bool = True) -> None:
        """Start to count. ``kept``: fields of an earlier part of the listing, which decide.

        ``bounded``: raise if most of the later samples have none of these fields.
        """
        self.stem = Stem(options.stem or "first")
        self.note = ""
        """The decision about the stem, and the option that decides otherwise."""
        self.left_out = LeftOut()
        """The names that make no sample, by reason."""
        self._parts: Counter[tuple[str, str]] = Counter()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._families: dict[tuple[str, str], int | None] = {}
        self._is_sifted = True
        self._lists: Counter[tuple[str, str, str]] = Counter()
        self._rename = options.rename
        asked = set(options.chosen or ()) - ({LABEL} if options.label_from_folder else set())
        self._asked = frozenset(asked) or None
        self._dots = Dots() if options.stem is None and kept is None else None
        self._about = 0
        self._given, self._bounded = kept, bounded

    def count(self, key: str, part: Part) -> None:
        """Count a name, and the part of a sample that it stands for."""
        name = key.rpartition("/")[2]
        if describes(name):
            self._about += 1
            return
        field = part.field, part.kind
        # The number of counters is limited, because names with a number each would make a field of every name.
        if field in self._parts or len(self._parts) <= _MOST:
            self._parts[field] += 1
        if name[:2].lower() in _LIST_STARTS and _LIST.fullmatch(name):
            self._lists[(name.lower(), *field)] += 1
        if self._dots is not None:
            self._dots.count(name)

    def one_by_one(self, page: NamedPage) -> list[int]:
        """Return the positions of the names that :meth:`count_all` may not count."""
        some = page.starting(_LIST_STARTS)
        lists = [at for at, name in enumerate(page.names) if name[:2] in some and _LIST.fullmatch(name)] if some else []
        return page.describing + lists

    def count_all(self, names: Sequence[str], parts: Counter[tuple[str, str]]) -> None:
        """Count names as :meth:`count` does, and the parts of samples that they stand for."""
        for field, number in parts.items():
            if field in self._parts or len(self._parts) <= _MOST:
                self._parts[field] += number
        if self._dots is not None:
            self._dots.count_all(names)

    def field(self, name: str, kind: str) -> tuple[str, str]:
        """Return the field that a part of a sample stands for, under its name after renaming."""
        return (name, kind) if kind in CONTAINERS else (self._rename.get(name, name), "")

    def _count_fields(self) -> None:
        """Add up the counts of parts to counts of fields."""
        for (name, kind), count in sorted(self._parts.items()):
            field = self.field(name, kind)
            self._counts[field] += count
            self._families.setdefault(field, 0 if kind == "image" else family(name))
        # One or two lists, such as labels.csv, must not make their extension a field of samples. The counts stay as
        # they are if nothing else is there: then the lists are the samples.
        without = self._counts.copy()
        for (_, name, kind), count in self._lists.items():
            without[self.field(name, kind)] -= count if count <= _FEW else 0
        self._counts = +without or self._counts

    def restem(self, url: str) -> bool:
        """Decide where names are cut. Return True if the place changes, so that all names must be counted again.

        Raise :class:`UsageError` for names that no rule can decide.
        """
        dots, self._dots = self._dots, None
        if dots is None or not (note := dots.decide(url)):
            return False
        self.stem, self.note = Stem("last"), note
        self._parts.clear()
        self._lists.clear()
        self._about = 0
        return True

    @property
    def kept(self) -> Kept | None:
        """The fields of samples, for later parts of the listing. None if it could not be decided which these are."""
        fields = tuple(sorted(self._chosen(self._frequent())))
        return fields if self._is_sifted and len(fields) <= _MOST_KEPT else None

    def _frequent(self) -> _Fields:
        """Return the fields that nearly all samples share, or those that an earlier part of the listing kept."""
        if self._given is not None:
            return frozenset(self._given)
        if not self._counts:
            return frozenset()
        most = max(self._counts.values())
        relatives = {self._families[field] for field, count in self._counts.items() if count == most} - {None}

        def is_rare(field: tuple[str, str], count: int) -> bool:
            # A dataset of .jpg may have a few .png that are samples, too. So a field of the same family is rare only
            # below a hundredth.
            if self._families[field] in relatives:
                return count <= max(int(most >= 10), most // 100) and count < most
            return count <= _few(most) and count < most

        return frozenset(field for field, count in self._counts.items() if not is_rare(field, count))

    def _chosen(self, frequent: _Fields) -> _Fields:
        """Return the chosen fields if any name has one of them, else ``fields`` as they are.

        Objects of several fields (such as JSON) stay, because their fields are unknown before they are read.
        """
        if self._asked is None or self._given is not None:
            return frequent
        asked = {field for field in self._counts if not field[1] and field[0] in self._asked}
        return frozenset(asked | {field for field in frequent if field[1]}) or frequent

    def sifted(self, records: Callable[[], Iterator[Record]], url: str) -> Iterator[Record] | None:
        """Yield the sorted records of samples, and name the other ones in :attr:`left_out`. Return None if all records
        are samples.

        Raise :class:`BadObject` if a later part of a listing has other fields than its first part.
        """
        self._count_fields()
        frequent = self._frequent()
        kept = self._chosen(frequent)
        others = sum(count for field, count in self._counts.items() if field not in kept)
        self._is_sifted = bool(kept) and len(self._parts) <= _MOST
        # In the common case all names are samples, and the records of a million names need no second pass.
        if not self._is_sifted or not (others or self._about or self._lists):
            return None
        rule = _Rule(self, frequent, kept)
        is_bounded = self._bounded if self._given is not None else kept == frequent
        if is_bounded and 3 * others > sum(self._counts.values()) - others:
            # Counts of names are not counts of keys: a key may have several of these names. So the keys are counted, in
            # a pass of their own, only if the names exceed the bound.
            reasons = Counter(rule.why(group) for group in _groups(records()))
            if 3 * reasons[ALIEN] > reasons[""]:
                if self._given is None:
                    self._is_sifted = False
                    return None
                names = ", ".join(name or kind for name, kind in sorted(kept))[:200]
                raise BadObject(
                    f"{url}: most of the new objects have none of the fields of the objects listed before ({names});\n"
                    "choose the samples with --include or --exclude, and use another --dataset"
                )
        return self._sift(records(), rule)

    def _sift(self, records: Iterator[Record], rule: _Rule) -> Iterator[Record]:
        for group in _groups(records):
            if why := rule.why(group):
                for record in group:
                    self.left_out.add(_decode(record[1]), why, why)
            else:
                yield from group


class _Rule:
    """A rule that decides if the objects of one key are a sample."""

    def __init__(self, grouping: Grouping, frequent: _Fields, kept: _Fields) -> None:
        self._grouping, self._frequent, self._kept = grouping, frequent, kept
        most = max(grouping._counts.values(), default=0)
        self._full = {field for field, count in grouping._counts.items() if 2 * count > most}
        self._lists = {name for (name, _, _), count in grouping._lists.items() if count <= _few(most)}

    def why(self, group: Sequence[Record]) -> str:
        """Return why they are no sample, or an empty text for a sample."""
        fields: set[tuple[str, str]] = set()
        are_lists = True
        for _, key, _, _ in group:
            text = _decode(key)
            name = text.rpartition("/")[2]
            if describes(name):
                continue
            part = self._grouping.stem.split(text)
            assert not isinstance(part, str), f"{key!r} was listed as part of a sample"
            fields.add(self._grouping.field(part.field, part.kind))
            are_lists = are_lists and name.lower() in self._lists
        if not fields:
            return _DESCRIBES
        if not fields & self._kept:
            why = _NOT_ASKED if fields & self._frequent else ALIEN
            return _DESCRIBES if are_lists else why
        return _DESCRIBES if are_lists and not fields >= self._full else ""


def _few(most: int) -> int:
    """Return how often a field that is not of samples may occur, if the most frequent field occurs ``most`` times."""
    return max(_FEW, most // 10)


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    for _, group in groupby(records, key=lambda record: record[0]):
        yield list(group)


class Dots:
    """The counts of the texts that names have between their first and their last dot."""

    def __init__(self) -> None:
        self._suffixes: Counter[str] = Counter()
        self._stems: set[str] = set()
        self._beside: set[tuple[str, str]] = set()

    def count(self, name: str) -> None:
        """Count a name."""
        stem, _, suffix = name.partition(".")
        # Limits of 2^16 entries keep the memory small, for names that are all different. Beyond them the counts are a
        # sample of the names.
        if suffix in self._suffixes or len(self._suffixes) <= _MOST:
            self._suffixes[suffix] += 1
        if "." in suffix:
            if len(self._stems) <= _MOST:
                self._stems.add(stem)
        elif len(self._beside) <= _MOST:
            self._beside.add((stem, suffix))

    def count_all(self, names: Sequence[str]) -> None:
        """Count names as :meth:`count` does."""
        cut = [name.partition(".") for name in names]
        counts = Counter([suffix for _, _, suffix in cut])
        # All of the counters may be full soon; then each further name must be looked at alone.
        if len(self._suffixes) + len(counts) > _MOST:
            for name in names:
                self.count(name)
            return
        self._suffixes.update(counts)
        dotted = {suffix for suffix in counts if "." in suffix}
        if len(self._stems) <= _MOST and dotted:
            for stem, _, suffix in cut:
                if suffix in dotted and len(self._stems) <= _MOST:
                    self._stems.add(stem)
        if len(self._beside) <= _MOST and len(dotted) < len(counts):
            for stem, _, suffix in cut:
                if suffix not in dotted and len(self._beside) <= _MOST:
                    self._beside.add((stem, suffix))

    def decide(self, url: str) -> str:
        """Return a note if names must be cut at the last dot, else an empty text.

        Raise :class:`UsageError` for names that make no sense with either cut.
        """
        extensions: Counter[str] = Counter()
        plain: Counter[str] = Counter()
        numbers = dated = 0
        for suffix, number in self._suffixes.items():
            middle, _, extension = suffix.rpartition(".")
            (extensions if middle else plain)[extension.lower()] += number
            numbers += number if middle and _NUMBER.fullmatch(middle) else 0
            dated += number if _NUMBER.fullmatch(middle.partition(".")[0]) else 0
        ending = [text for text in plain if text.isdecimal()]
        count, numbered = extensions.total(), sum(plain[text] for text in ending)
        if numbered >= _MANY and 2 * len(plain) > numbered > 9 * count:
            raise UsageError(
                f"{url}: {numbered} names end in numbers, such as {shown(min(ending))}, and each number would"
                " become a field;\nto make each name a sample: --stem '(?P<key>.*?(?P<field>[^/.]+)[.][^/]*)'"
            )
        if not count:
            return ""
        different, are_many = self.different, self.are_many
        (extension, most), *others = extensions.most_common(2)
        if different + any(stem in self._stems for stem, other in self._beside if other == extension) < 2:
            return ""
        beside = [number for other, number in plain.items() if other != extension]
        are_few = max(beside, default=0) <= _few(count) and 3 * sum(beside) <= count
        is_single = most == count and not others and are_few
        are_numbers = numbers == count
        # Two examples that this accepts: 2024.01.05.rain.npy, and 2024.01.05.npy beside 2024.01.05.json.
        is_dated = dated == count and different > 2
        if not are_many and (self._are_grouped or not (is_dated or (are_numbers and is_single))):
            return ""
        example = shown(min(self._middles))
        if not is_single or not (are_many or are_numbers):
            raise UsageError(
                f"{url}: names cut at the first dot would give {different} different fields, such as {example};\n"
                "use --stem last to cut names at the last dot"
            )
        fields = (
            f"fields named by numbers such as {example}" if are_numbers else f"{different} fields such as {example}"
        )
        return (
            f"names are cut at the last dot, because the first dot would give {fields};"
            " to cut at the first dot: --stem first"
        )

    @property
    def _middles(self) -> set[str]:
        """The texts between the first and the last dot."""
        return {suffix.rpartition(".")[0] for suffix in self._suffixes} - {""}

    @property
    def different(self) -> int:
        """The number of different texts between the first and the last dot."""
        return len(self._middles)

    @property
    def are_dates(self) -> bool:
        """True if these texts are numbers with dots between them, as in ``2024.01.05.npy``."""
        middles = self._middles
        return len(middles) > 2 and all("." in text and _NUMBER.fullmatch(text) for text in middles)

    @property
    def are_many(self) -> bool:
        """True if there are so many of these texts that they cannot be names of fields."""
        different = self.different
        if different < _MANY:
            return False
        dotted = {suffix: number for suffix, number in self._suffixes.items() if "." in suffix}
        extensions = {suffix.rpartition(".")[2].lower() for suffix in dotted}
        return 2 * different * len(extensions) > sum(dotted.values()) and (
            different >= 5 * _MANY or not self._are_grouped
        )

    @property
    def _are_grouped(self) -> bool:
        """True if other names share the text before the first dot, so that this text is the key of a sample."""
        extensions = {suffix.rpartition(".")[2] for suffix in self._suffixes if "." in suffix}
        return any(stem in self._stems and other not in extensions for stem, other in self._beside)


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
