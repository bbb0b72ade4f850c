"""From the parts of one sample to its fields: which parts are needed, what their fields are called, what is added.

Used for objects of a store and for members of tar files, and for values as well as for the shapes that stand for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cachetool.core.errors import BadObject
from cachetool.core.schema import KEY, MAX_FIELDS
from cachetool.sources.decode import Unusable
from cachetool.sources.keys import CONTAINERS, Part
from cachetool.sources.options import SourceOptions

__all__ = ["Assembled", "Assembler"]

LABEL = "label"

T = TypeVar("T")
V = TypeVar("V")


@dataclass(slots=True)
class Assembled(Generic[V]):
    """The fields of one sample."""

    key: str
    values: dict[str, V] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    """All field names that were met, those not asked for as well."""


class Assembler:
    """Makes samples as the options of a source say."""

    def __init__(self, options: SourceOptions, where: str) -> None:
        """``where`` the samples lie, for messages."""
        self._options, self._where = options, where
        self._wanted = None if options.fields is None else frozenset(options.fields)

    def takes(self, sample: Assembled[V], part: Part) -> bool:
        """Whether a part of ``sample`` can hold a field asked for: it is named so, or is a file of many fields."""
        if self._wanted is None or part.kind in CONTAINERS:
            return True
        name = self._options.rename.get(part.field, part.field)
        if name not in self._wanted:
            sample.names.append(name)
        return name in self._wanted

    def needed(self, sample: Assembled[V], parts: Sequence[tuple[T, Part]]) -> list[tuple[T, Part]]:
        """Those of all parts of ``sample`` that it takes; files of many fields only if some are still missing."""
        taken = [pair for pair in parts if self.takes(sample, pair[1])]
        named = [pair for pair in taken if pair[1].kind not in CONTAINERS]
        return named if self._wanted is not None and len(named) == len(self._wanted) else taken

    def add(self, sample: Assembled[V], name: str, fields: Iterable[tuple[str, V]]) -> None:
        """Add the fields of the part ``name``. Raises :class:`BadObject` naming it."""
        try:
            for found, value in fields:
                new = self._options.rename.get(found, found)
                sample.names.append(new)
                if self._wanted is not None and new not in self._wanted:
                    continue
                if isinstance(value, Unusable):
                    raise BadObject(f"{found[:100]!r}{value.why}; choose other fields with --fields")
                _set(sample, new, value)
                if len(sample.values) > MAX_FIELDS:
                    raise BadObject(f"it brings more than {MAX_FIELDS} fields; choose some with --fields")
        except BadObject as error:
            raise BadObject(f"{name!r}: {error}") from error.__cause__

    def finish(self, sample: Assembled[V], text: Callable[[str], V]) -> None:
        """Add the label and the key, ``text`` making values of them. Raises :class:`BadObject` without a folder."""
        if self._options.label_from_folder:
            folder = sample.key.rpartition("/")[0]
            if not folder:
                raise BadObject(
                    f"{sample.key!r} lies in no folder below {self._where}, which --label-from-folder could take"
                )
            _set(sample, LABEL, text(folder.rpartition("/")[2]))
        if self._options.key:
            sample.values[KEY] = text(sample.key)


def _set(sample: Assembled[V], name: str, value: V) -> None:
    if name in sample.values or name == KEY:
        raise BadObject(
            f"sample {sample.key!r} has field {name[:100]!r} twice; rename one with --rename, or see --stem"
        )
    sample.values[name] = value
