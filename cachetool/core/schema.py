"""Schemas: the named, typed, shaped fields of a sample in a fixed order.

A field has one of four kinds, which only ``dtype`` and ``shape`` decide:

======  ===================================  =================================================
kind    declared as                          a sample holds
======  ===================================  =================================================
fixed   ``Field("x", "<f4", (3, 64))``       an array of that shape; ``()`` is a scalar
ragged  ``Field("x", "<f4", (None, None))``  an array of that rank; its sizes differ by sample
bytes   ``Field("x", "bytes")``              a byte string
str     ``Field("x", "str")``                text, stored as UTF-8
======  ===================================  =================================================

Bytes on the disk are always little-endian. ``object`` arrays are refused, because they could only be stored by pickle.
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

from cachetool.core import cf
from cachetool.core.errors import UsageError
from cachetool.core.text import plain, shown

__all__ = ["KEY", "Field", "Kind", "Schema", "storage_dtype"]

Kind = Literal["fixed", "ragged", "bytes", "str"]
"""The kind of a field, which decides how every format stores it."""

KEY = "__key__"
"""Name of the field that identifies a sample by its origin, such as the key of an object."""

_NAME = re.compile(r"[A-Za-z0-9_+\- .]+(/[A-Za-z0-9_+\- .]+)*")
# Names that formats use inside a shard themselves: the arrays of offsets and shapes beside a field, the metadata files
# of Zarr, the notes in an LMDB file. A field of such a name would overwrite them.
_RESERVED = re.compile(r"\.(offsets|shapes)(/|$)|/shape$|(^|/)zarr\.json(/|$)|^__(len|schema)__$")
MAX_RANK = 32
MAX_DIM = 100
"""Most characters of the name of a dimension."""
MAX_NOTES = 12_000
"""Most bytes of the names of dimensions and the packing of all fields, for the reason of :data:`MAX_CLASSES`."""
MAX_FIELDS = 4096
"""Most fields of one sample, because every shard, every row of the catalog and many messages repeat them."""
MAX_CLASSES = 48_000
"""Most bytes of the names of all classes: HDF5 stores the schema in an attribute, which may have 64 KiB."""
_DTYPE = 100
"""Most characters of the name of a dtype, because NumPy parses any text that it receives."""


def storage_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the little-endian dtype in which values of a dtype are stored.

    Args:
        dtype: A dtype, or a name of one that NumPy knows.

    Returns:
        The dtype in little-endian byte order.

    Raises:
        UsageError: If the values have no plain bytes (``object``, structured, fixed-width text), or bytes that differ
            from machine to machine (``longdouble``).

    Example:
        >>> storage_dtype(">i2").str
        '<i2'
    """
    try:
        if len(str(dtype)) > _DTYPE and isinstance(dtype, str):
            raise TypeError("no name is so long")
        parsed = np.dtype(dtype)
    # SyntaxError, because NumPy evaluates some names, such as those with brackets or commas, as Python literals.
    except (TypeError, ValueError, SyntaxError) as error:
        if str(dtype)[1:] == "f1":
            raise UsageError(
                f"NumPy cannot read dtype {str(dtype)!r} (ml_dtypes writes it for float8_e5m2); to read the bits as"
                " numbers, replace it by '|u1' in the header of the file"
            ) from error
        raise UsageError(f"dtype {str(dtype)[:_DTYPE]!r} is not a NumPy dtype") from error
    if parsed.kind == "O":
        raise UsageError("dtype object cannot be stored: it would have to be pickled; use numbers, bytes or str")
    if parsed.names:
        parts = f"{', '.join(parsed.names[:5])}{', ...' if len(parsed.names) > 5 else ''}"
        raise UsageError(
            f"dtype {str(parsed)[:100]} is a compound type; save each of its fields ({parts}) as a separate array"
        )
    if parsed.kind == "V":
        raise UsageError(_void(parsed.itemsize))
    # "gG" are longdouble and its complex form: they have 80 bits on x86 and other sizes on other machines, so their
    # bytes mean nothing there.
    if parsed.kind not in "biufcmM" or parsed.hasobject or parsed.itemsize > 16 or parsed.char in "gG":
        raise UsageError(f"dtype {parsed} cannot be stored; use bool, int, uint, float, complex or datetime64")
    if parsed.kind in "mM" and np.datetime_data(parsed)[0] == "generic":
        raise UsageError(f"dtype {parsed} has no unit; use one such as datetime64[ns]")
    little: np.dtype[Any] = parsed.newbyteorder("<")
    return little


def _void(size: int) -> str:
    """Return the message about values of a dtype ``V``, whose bytes have no type, with the way out."""
    guess = {1: " (ml_dtypes writes it for float8)", 2: " (ml_dtypes writes it for bfloat16)"}.get(size, "")
    plain = f"uint{8 * size}" if size in (1, 2, 4, 8) else "uint8"
    return f"dtype |V{size} has no meaning to NumPy{guess} and cannot be stored; save its bits: array.view({plain!r})"


def names_of(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return names of fields as a tuple; a single name may be given without a list around it.

    Raises :class:`UsageError` if there is no name, if a value is no name, or if a name comes twice.
    """
    try:
        listed = (names,) if isinstance(names, str) else () if isinstance(names, Mapping) else tuple(names)
    except TypeError:
        listed = ()
    if not listed or not all(isinstance(name, str) for name in listed):
        raise UsageError(f"fields {shown(names)} cannot be used; give the name of a field, or a list of names")
    if twice := [name for name in listed if listed.count(name) > 1]:
        raise UsageError(f"field {shown(twice[0])} is asked for twice; name it once")
    return listed


def is_dim(name: object) -> bool:
    """Return True if ``name`` can be the name of a dimension."""
    return isinstance(name, str) and 0 < len(name) <= MAX_DIM and name.isprintable()


@dataclass(frozen=True, slots=True)
class Field:
    """One named field of a sample."""

    name: str
    """Letters, digits, ``_ + - .`` and blanks; ``/`` nests. It becomes the name of a dataset or folder in a shard."""
    dtype: str
    """A little-endian NumPy dtype string such as ``<f4``, or ``bytes`` or ``str``."""
    shape: tuple[int | None, ...] = ()
    """Sizes of the dimensions; all ``None`` for a ragged field, ``()`` for a scalar, bytes and str."""
    classes: tuple[str, ...] = ()
    """Names of the numbers 0, 1, 2, ..., if the field is a whole number that stands for a name."""
    dims: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)
    """Names of the dimensions, as the files of the source name them, such as ``("lat", "lon")``; empty if unknown. Not
    compared: fields with other names of dimensions are equal."""
    packing: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """CF attributes by which the stored numbers stand for other values, such as ``scale_factor``; empty if there are
    none, ``{"differ": True}`` if the samples do not share them. Not compared."""
    kind: Kind = dataclasses.field(init=False, repr=False, compare=False)
    """The kind: ``fixed``, ``ragged``, ``bytes`` or ``str``."""
    numpy: np.dtype[Any] = dataclasses.field(init=False, repr=False, compare=False)
    """Dtype of the stored values; ``uint8`` for bytes and str."""
    nbytes: int = dataclasses.field(init=False, repr=False, compare=False)
    """Bytes of one sample's value of a fixed field; 0 for the other kinds, whose values differ in size."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UsageError(f"field name {shown(self.name)} cannot be used: a name is text")
        parts = self.name.split("/")
        # A part of dots and blanks alone is refused because each part becomes a folder of a Zarr shard, and ".." would
        # lead out of the shard.
        if not _NAME.fullmatch(self.name) or any(p.strip(". ") == "" for p in parts) or len(self.name) > 200:
            raise UsageError(
                f"field name {self.name[:300]!r} cannot be used; a name has letters (a to z), digits, _ + - . and"
                " blanks, and / between its components; rename the field with --rename"
            )
        if _RESERVED.search(self.name):
            raise UsageError(f"field name {self.name!r} is reserved; rename the field with --rename {self.name}=NEW")
        if self.dtype in ("bytes", "str"):
            if self.classes:
                raise UsageError(f"field {self.name!r}: only a field of whole numbers has classes, not {self.dtype}")
            if self.shape != ():
                raise UsageError(f"field {self.name!r}: {self.dtype} has no shape, got {self.shape}")
            self._derive("bytes" if self.dtype == "bytes" else "str", np.dtype(np.uint8), 0)
            self._note({})
            return
        # The dataclass is frozen; its checks may still bring a value into the one form by which schemas are compared.
        object.__setattr__(self, "dtype", storage_dtype(self.dtype).str)
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) > MAX_RANK:
            raise UsageError(f"field {self.name!r}: {len(self.shape)} dimensions, at most {MAX_RANK}")
        free = sum(size is None for size in self.shape)
        if free not in (0, len(self.shape)) or any(size is not None and size < 0 for size in self.shape):
            raise UsageError(f"field {self.name!r}: shape {self.shape} must be sizes of at least 0, or all None")
        numpy = np.dtype(self.dtype)
        self._note(cf.checked(self.packing, numpy))
        object.__setattr__(self, "classes", tuple(self.classes))
        if self.classes:
            self._check_classes(numpy)
        if free:
            self._derive("ragged", numpy, 0)
        else:
            self._derive("fixed", numpy, math.prod(size or 0 for size in self.shape) * numpy.itemsize)

    def _note(self, packing: Mapping[str, Any]) -> None:
        """Keep the facts beside the schema that fit the field. Others are dropped, because the samples are good without
        them."""
        names = self.dims if isinstance(self.dims, list | tuple) else ()
        good = len(names) == len(self.shape) and all(map(is_dim, names))
        object.__setattr__(self, "dims", tuple(names) if good else ())
        object.__setattr__(self, "packing", packing)

    def _check_classes(self, numpy: np.dtype[Any]) -> None:
        if self.shape or numpy.kind not in "iu" or not all(isinstance(name, str) for name in self.classes):
            raise UsageError(
                f"field {self.name!r}: only a field of whole numbers has classes, and their names must be text"
            )
        nbytes = sum(len(json.dumps(name)) + 1 for name in self.classes)
        if nbytes > MAX_CLASSES:
            raise UsageError(
                f"field {self.name!r}: the names of {len(self.classes)} classes take {nbytes} bytes, more"
                f" than {MAX_CLASSES}; --label-from-folder without int stores the name as text in each sample"
            )

    def _derive(self, kind: Kind, numpy: np.dtype[Any], nbytes: int) -> None:
        """Set the fields that follow from the others."""
        # Computed once and stored, because loaders read these values with every batch.
        for name, value in (("kind", kind), ("numpy", numpy), ("nbytes", nbytes)):
            object.__setattr__(self, name, value)

    @property
    def is_scalar(self) -> bool:
        """True if a sample holds one number of this field."""
        return self.kind == "fixed" and self.shape == ()

    @property
    def rank(self) -> int:
        """Number of dimensions of one sample's value."""
        return len(self.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of a fixed field, as plain sizes.

        Raises:
            UsageError: The field is of another kind, so its size differs from sample to sample.
        """
        if self.kind != "fixed":
            raise UsageError(f"field {self.name!r} is {self.kind}: its size differs from sample to sample")
        return cast("tuple[int, ...]", self.shape)

    def describe(self) -> str:
        """Return type and shape for people: ``float32 (3, 64)``, ``uint8 ragged rank 3``, ``str``."""
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
    """The ordered fields of a dataset; iterating gives each :class:`Field`, ``schema[name]`` gives one."""

    fields: tuple[Field, ...]
    """Fields in order: at least one, with different names."""
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
        # HDF5 and Zarr store nested names as folders, so x cannot be an array and at once the folder of x/y.
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
        """Names of the fields, in order."""
        return tuple(field.name for field in self.fields)

    @property
    def fixed_nbytes(self) -> int:
        """Bytes that the fixed fields of one sample take."""
        return sum(field.nbytes for field in self.fields)

    @property
    def is_fixed(self) -> bool:
        """True if every sample has the same size in bytes."""
        return all(field.kind == "fixed" for field in self.fields)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits, equal for equal schemas: from SHA-256 over the compact JSON form."""
        # Without the notes, which are not compared either: the checksums of shards begin with the fingerprint, and a
        # dataset that was begun without notes has equal samples.
        text = json.dumps([_plain_field(field) for field in self.fields], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of the first field that has such names; empty where none has."""
        return next((field.classes for field in self.fields if field.classes), ())

    def select(self, names: str | Iterable[str]) -> Schema:
        """Return the schema of some fields.

        Args:
            names: The name of a field, or a list of names, in the order wanted.

        Returns:
            A :class:`Schema`.

        Raises:
            UsageError: There is no such field, or a name comes twice.
        """
        return Schema(tuple(self[name] for name in names_of(names)))

    def is_reordered(self, other: Schema) -> bool:
        """Return True if ``other`` has the same fields in another order.

        Args:
            other: Another schema.

        Returns:
            True or False.
        """
        return self != other and set(self.fields) == set(other.fields)

    def describe(self) -> str:
        """Return all fields for people, on one line."""
        return ", ".join(f"{field.name}: {field.describe()}" for field in self.fields)

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain values for JSON."""
        notes = [
            ({"dims": list(field.dims)} if field.dims else {})
            | ({"packing": dict(field.packing)} if field.packing else {})
            for field in self.fields
        ]
        if sum(len(json.dumps(note)) for note in notes if note) > MAX_NOTES:
            notes = [{}] * len(notes)
        return [_plain_field(field) | note for field, note in zip(self.fields, notes, strict=True)]

    @classmethod
    def from_json(cls, value: Any) -> Schema:
        """Return the schema that :meth:`to_json` described.

        Args:
            value: The plain values.

        Returns:
            A :class:`Schema`.

        Raises:
            UsageError: ``value`` does not describe a schema.
        """
        try:
            return cls(
                tuple(
                    Field(
                        str(f["name"]),
                        str(f["dtype"]),
                        tuple(f["shape"]),
                        tuple(f.get("classes", ())),
                        f.get("dims", ()),
                        f.get("packing", {}),
                    )
                    for f in value
                )
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"not a schema: {str(value)[:80]}") from error


def _plain_field(field: Field) -> dict[str, Any]:
    """Return the facts of a field by which schemas are compared, as plain values for JSON."""
    plain: dict[str, Any] = {"name": field.name, "dtype": field.dtype, "shape": list(field.shape)}
    return plain | ({"classes": list(field.classes)} if field.classes else {})


def noted(field: Field, one: Field, other: Field) -> Field:
    """Return ``field`` with the facts beside the schema that hold for samples of ``one`` and of ``other``."""
    packing = one.packing if one.packing == other.packing else cf.DIFFER
    return dataclasses.replace(field, dims=one.dims if one.dims == other.dims else (), packing=packing)


def agreed(schema: Schema, other: Schema) -> Schema:
    """Return ``schema`` with the facts beside it that hold for samples of an equal schema ``other`` too."""
    return Schema(tuple(noted(field, field, other[field.name]) for field in schema))


def same_notes(schema: Schema, other: Schema) -> bool:
    """Return True if the facts beside two equal schemas are equal."""
    return all((a.dims, a.packing) == (b.dims, b.packing) for a, b in zip(schema, other, strict=True))
