"""What a sample is made of: named, typed, shaped fields in a fixed order.

A field is one of four kinds, decided by ``dtype`` and ``shape`` alone:

========  =================================  =======================================
kind      declared as                        a sample holds
========  =================================  =======================================
fixed     ``Field("x", "<f4", (3, 64))``     an array of that shape; ``()`` is a scalar
ragged    ``Field("x", "<f4", (None, None))`` an array of that rank, sizes differ by sample
bytes     ``Field("x", "bytes")``            a byte string
str       ``Field("x", "str")``              text, stored as UTF-8
========  =================================  =======================================

Bytes on disk are always little-endian. ``object`` arrays are refused: they could only be pickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from cachetool.core.errors import UsageError
from cachetool.core.text import plain, shown

__all__ = ["KEY", "Field", "Kind", "Schema", "storage_dtype"]

Kind = Literal["fixed", "ragged", "bytes", "str"]
"""What a field is, which decides how every format stores it."""

KEY = "__key__"
"""The field that names a sample by where it came from."""

_NAME = re.compile(r"[A-Za-z0-9_+\- .]+(/[A-Za-z0-9_+\- .]+)*")
# What formats call their own: arrays beside those of a field, Zarr's metadata, the notes in an LMDB file.
_RESERVED = re.compile(r"\.(offsets|shapes)(/|$)|/shape$|(^|/)zarr\.json(/|$)|^__(len|schema)__$")
MAX_RANK = 32
MAX_FIELDS = 4096
"""Of one sample: every shard, row of the catalog and message repeats them."""
MAX_CLASSES = 48_000
"""Bytes of the names of all classes: HDF5 keeps a schema in an attribute, of 64 KiB at most."""
_DTYPE = 100
"""Characters of the longest name of a dtype: NumPy parses what it is given."""


def storage_dtype(dtype: Any) -> np.dtype[Any]:
    """The little-endian dtype that values of ``dtype`` are stored as.

    Raises :class:`UsageError` for dtypes that have no plain bytes (``object``, structured, fixed-width text) or
    none that are the same on every machine (``longdouble``).
    """
    try:
        if len(str(dtype)) > _DTYPE and isinstance(dtype, str):
            raise TypeError("no name is so long")
        parsed = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:  # NumPy reads some names as Python
        if str(dtype)[1:] == "f1":
            raise UsageError(
                f"dtype {str(dtype)!r} is one that NumPy does not read (float8_e5m2 of ml_dtypes is saved so); where"
                " the header says '|u1' in its place, which is as long, its bits come as numbers"
            ) from error
        raise UsageError(f"dtype {str(dtype)[:_DTYPE]!r} is not a NumPy dtype") from error
    if parsed.kind == "O":
        raise UsageError("dtype object cannot be stored: it would have to be pickled; use numbers, bytes or str")
    if parsed.names:
        parts = f"{', '.join(parsed.names[:5])}{', ...' if len(parsed.names) > 5 else ''}"
        raise UsageError(
            f"dtype {str(parsed)[:100]} is a compound type; save each part of it ({parts}) as an array of its own"
        )
    if parsed.kind == "V":
        raise UsageError(_void(parsed.itemsize))
    if parsed.kind not in "biufcmM" or parsed.hasobject or parsed.itemsize > 16 or parsed.char in "gG":
        raise UsageError(f"dtype {parsed} cannot be stored; use bool, int, uint, float, complex or datetime64")
    if parsed.kind in "mM" and np.datetime_data(parsed)[0] == "generic":
        raise UsageError(f"dtype {parsed} has no unit; use one such as datetime64[ns]")
    little: np.dtype[Any] = parsed.newbyteorder("<")
    return little


def _void(size: int) -> str:
    """The error of bytes without a meaning, with the way out."""
    guess = {1: " (float8 of ml_dtypes is saved so)", 2: " (bfloat16 of ml_dtypes is saved so)"}.get(size, "")
    plain = f"uint{8 * size}" if size in (1, 2, 4, 8) else "uint8"
    return f"dtype |V{size} has no meaning to NumPy{guess} and cannot be stored; save its bits: array.view({plain!r})"


def names_of(names: str | Iterable[str]) -> tuple[str, ...]:
    """Names of fields; of one alone when it is given without a list around it. Raises :class:`UsageError` for none, for
    what is no name and for one that comes twice."""
    try:
        listed = (names,) if isinstance(names, str) else () if isinstance(names, Mapping) else tuple(names)
    except TypeError:
        listed = ()
    if not listed or not all(isinstance(name, str) for name in listed):
        raise UsageError(f"fields {shown(names)} cannot be used: the name of a field, or a list of names")
    if twice := [name for name in listed if listed.count(name) > 1]:
        raise UsageError(f"field {shown(twice[0])} is asked for twice; name it once")
    return listed


@dataclass(frozen=True, slots=True)
class Field:
    """One named part of a sample."""

    name: str
    """Letters, digits, ``_ + - .`` and blanks; ``/`` nests. It becomes a dataset or folder name inside a shard."""
    dtype: str
    """A little-endian NumPy dtype string such as ``<f4``, or ``bytes`` or ``str``."""
    shape: tuple[int | None, ...] = ()
    """Sizes of the dimensions; all ``None`` for a ragged field, ``()`` for a scalar, bytes and str."""
    classes: tuple[str, ...] = ()
    """Names of 0, 1, 2, ..., where the field is a whole number that stands for a name."""
    kind: Kind = dataclasses.field(init=False, repr=False, compare=False)
    """``fixed``, ``ragged``, ``bytes`` or ``str``."""
    numpy: np.dtype[Any] = dataclasses.field(init=False, repr=False, compare=False)
    """The dtype of the stored values; ``uint8`` for bytes and str."""
    nbytes: int = dataclasses.field(init=False, repr=False, compare=False)
    """Bytes of one sample's value of a fixed field; 0 for the other kinds, whose values differ in size."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UsageError(f"field name {shown(self.name)} cannot be used: a name is text")
        parts = self.name.split("/")
        if not _NAME.fullmatch(self.name) or any(p.strip(". ") == "" for p in parts) or len(self.name) > 200:
            raise UsageError(
                f"field name {self.name[:300]!r} cannot be used: letters (a to z), digits, _ + - . and blanks, parts"
                " joined by '/'; rename the field with --rename"
            )
        if _RESERVED.search(self.name):
            raise UsageError(f"field name {self.name!r} is reserved; rename the field with --rename {self.name}=NEW")
        if self.dtype in ("bytes", "str"):
            if self.classes:
                raise UsageError(f"field {self.name!r}: only a whole number has classes, not {self.dtype}")
            if self.shape != ():
                raise UsageError(f"field {self.name!r}: {self.dtype} has no shape, got {self.shape}")
            self._derive("bytes" if self.dtype == "bytes" else "str", np.dtype(np.uint8), 0)
            return
        object.__setattr__(self, "dtype", storage_dtype(self.dtype).str)
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) > MAX_RANK:
            raise UsageError(f"field {self.name!r}: {len(self.shape)} dimensions, at most {MAX_RANK}")
        free = sum(size is None for size in self.shape)
        if free not in (0, len(self.shape)) or any(size is not None and size < 0 for size in self.shape):
            raise UsageError(f"field {self.name!r}: shape {self.shape} must be sizes of at least 0, or all None")
        numpy = np.dtype(self.dtype)
        object.__setattr__(self, "classes", tuple(self.classes))
        if self.classes:
            self._check_classes(numpy)
        if free:
            self._derive("ragged", numpy, 0)
        else:
            self._derive("fixed", numpy, math.prod(size or 0 for size in self.shape) * numpy.itemsize)

    def _check_classes(self, numpy: np.dtype[Any]) -> None:
        if self.shape or numpy.kind not in "iu" or not all(isinstance(name, str) for name in self.classes):
            raise UsageError(f"field {self.name!r}: only a whole number has classes, whose names are text")
        nbytes = sum(len(json.dumps(name)) + 1 for name in self.classes)
        if nbytes > MAX_CLASSES:
            raise UsageError(
                f"field {self.name!r}: the names of {len(self.classes)} classes take {nbytes} bytes, at most"
                f" {MAX_CLASSES}; plain --label-from-folder keeps the names as text in each sample"
            )

    def _derive(self, kind: Kind, numpy: np.dtype[Any], nbytes: int) -> None:
        """Known once: loaders ask for it with every batch."""
        for name, value in (("kind", kind), ("numpy", numpy), ("nbytes", nbytes)):
            object.__setattr__(self, name, value)

    @property
    def is_scalar(self) -> bool:
        """Whether a sample holds one number of this field."""
        return self.kind == "fixed" and self.shape == ()

    @property
    def rank(self) -> int:
        """Number of dimensions of one sample's value."""
        return len(self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of a fixed field, as plain sizes. Raises :class:`UsageError` for the other kinds."""
        if self.kind != "fixed":
            raise UsageError(f"field {self.name!r} is {self.kind}: its size differs from sample to sample")
        return cast("tuple[int, ...]", self.shape)

    def describe(self) -> str:
        """Type and shape for people: ``float32 (3, 64)``, ``uint8 ragged rank 3``, ``str``."""
        if self.kind in ("bytes", "str"):
            return self.kind
        name = np.dtype(self.dtype).name
        if self.classes:
            more = ", ..." if len(self.classes) > 3 else ""
            return f"{name}, {len(self.classes)} classes ({', '.join(map(plain, self.classes[:3]))}{more})"
        if self.kind == "ragged":
            return f"{name} ragged rank {self.rank}"
        return f"{name} {self.sizes}" if self.shape else name


@dataclass(frozen=True, slots=True)
class Schema:
    """The ordered fields of a dataset. Equal schemas have equal fingerprints."""

    fields: tuple[Field, ...]
    """At least one field, names unique."""
    _by_name: dict[str, Field] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        if not self.fields:
            raise UsageError("a schema needs at least one field")
        if len(self.fields) > MAX_FIELDS:
            raise UsageError(
                f"{len(self.fields)} fields in one sample, at most {MAX_FIELDS}; choose some with --fields"
            )
        object.__setattr__(self, "_by_name", {field.name: field for field in self.fields})
        counts = Counter(field.name for field in self.fields)
        folders = {name[:at] for name in counts for at, letter in enumerate(name) if letter == "/"}
        for name, count in counts.items():
            if count > 1:
                raise UsageError(f"field {name!r} appears twice in one schema; rename one with --rename")
            if name in folders:
                raise UsageError(f"field {name!r} is also the folder of another field; rename one with --rename")

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Field:
        if (field := self._by_name.get(name)) is not None:
            return field
        raise UsageError(f"no field {shown(name)}; this dataset has {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The field names, in order."""
        return tuple(field.name for field in self.fields)

    @property
    def fixed_nbytes(self) -> int:
        """Bytes that the fixed fields of one sample take."""
        return sum(field.nbytes for field in self.fields)

    @property
    def is_fixed(self) -> bool:
        """Whether every sample has the same size."""
        return all(field.kind == "fixed" for field in self.fields)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits, equal for equal schemas: SHA-256 over the compact JSON form."""
        text = json.dumps(self.to_json(), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the numbers of the first field that has such names; empty where none has."""
        return next((field.classes for field in self.fields if field.classes), ())

    def select(self, names: str | Iterable[str]) -> Schema:
        """The schema of these fields only, in the order given. Raises :class:`UsageError` for an unknown name."""
        return Schema(tuple(self[name] for name in names_of(names)))

    def is_reordered(self, other: Schema) -> bool:
        """Whether these are the fields of ``other`` in another order."""
        return self != other and set(self.fields) == set(other.fields)

    def describe(self) -> str:
        """All fields for people, on one line."""
        return ", ".join(f"{field.name}: {field.describe()}" for field in self.fields)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values for ``shard.json`` and the catalog."""
        return [
            {"name": f.name, "dtype": f.dtype, "shape": list(f.shape)}
            | ({"classes": list(f.classes)} if f.classes else {})
            for f in self.fields
        ]

    @classmethod
    def from_json(cls, value: Any) -> Schema:
        """The schema that :meth:`to_json` wrote. Raises :class:`UsageError` when ``value`` is none."""
        try:
            return cls(
                tuple(
                    Field(str(f["name"]), str(f["dtype"]), tuple(f["shape"]), tuple(f.get("classes", ())))
                    for f in value
                )
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"not a schema: {str(value)[:80]}") from error
