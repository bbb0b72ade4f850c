"""Every error that cachetool raises on purpose, with the exit code the command line ends with.

::

    CacheToolError                1   a bug, when raised as such
    ├── UsageError                2   a wrong option, name, size or schema: the user changes the command
    │   └── MissingExtra          2   an optional dependency is not installed
    ├── SourceError               3   the remote side: store, listing, object
    │   ├── NotFound              3   bucket, prefix or object is not there
    │   ├── AccessDenied          3   credentials missing, wrong or expired
    │   ├── Unreachable           3   no answer in time
    │   └── BadObject             3   an object is not what its name or the schema says
    ├── CapacityError             4   cap, free disk or inodes
    │   ├── CapTooSmall           4   the cap cannot hold what was asked, ever
    │   └── CapBlocked            4   room exists but is held by somebody
    ├── CorruptError              5   bytes on disk that do not match their checksum or layout
    ├── CatalogError              6   the cache's catalog or layout cannot be used
    └── Interrupted             130   Ctrl-C or SIGTERM

A message is one or two lines: what, which value, what to do next. Lower errors are chained with ``from``. Names in it
may come from a store or a foreign file, so what is not printable is escaped: no name moves a terminal's cursor.
"""

from __future__ import annotations

from typing import Any

from cachetool.core.text import plain

_LONGEST, _END = 2000, 400
"""Characters of a line, and those at its end that stay: they say what to do."""

__all__ = [
    "AccessDenied",
    "BadObject",
    "CacheToolError",
    "CapBlocked",
    "CapTooSmall",
    "CapacityError",
    "CatalogError",
    "CorruptError",
    "Interrupted",
    "MissingExtra",
    "NotFound",
    "SourceError",
    "Unreachable",
    "UsageError",
    "from_json",
    "to_json",
]


class CacheToolError(Exception):
    """Base of all errors of cachetool; ``str(error)`` is fit to be shown to a user."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__("\n".join(map(_line, message.split("\n"))))


def _line(text: str) -> str:
    """A line of a message: a name may be of any length, and a schema have any number of names."""
    shown = plain(text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - _END]} ... {shown[-_END:]}"


class UsageError(CacheToolError, ValueError):
    """An option, name, size or schema that cannot be used."""

    exit_code = 2


class MissingExtra(UsageError):
    """An optional dependency is needed; the message names the extra that installs it."""

    def __init__(self, what: str, extra: str | None = None) -> None:
        """``MissingExtra("reading images", "image")`` builds the message; one argument is taken as it is."""
        if extra is not None:
            what = f"{what} needs the extra '{extra}': pip install 'cachetool[{extra}]'"
        super().__init__(what)


def without(library: str, extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """What to raise in place of ``error`` where ``library`` itself is not installed; else the error as it is."""
    if error.name != library:
        return error
    return ModuleNotFoundError(f"this needs {library}: pip install 'cachetool[{extra}]'", name=library)


class SourceError(CacheToolError):
    """The remote side failed: a store, a listing or an object."""

    exit_code = 3


class NotFound(SourceError):
    """A bucket, prefix or object does not exist."""


class AccessDenied(SourceError):
    """Credentials are missing, wrong or expired."""


class Unreachable(SourceError):
    """The store did not answer in time."""

    answered = False
    """Whether it did, again and again, that it fails."""


class BadObject(SourceError):
    """An object is not what its name, its size or the dataset's schema says."""


class CapacityError(CacheToolError):
    """No room: the cap, the free disk or the inodes are used up."""

    exit_code = 4
    done = ""
    """What was done all the same, in a line."""


class CapTooSmall(CapacityError):
    """The cap cannot hold what was asked even when the cache is empty; the message gives the minimum."""


class CapBlocked(CapacityError):
    """Room exists but live holders keep it; the message names them."""


class CorruptError(CacheToolError):
    """Bytes on disk do not match their checksum or layout."""

    exit_code = 5


class CatalogError(CacheToolError):
    """The catalog or the layout of the cache folder cannot be used."""

    exit_code = 6
    readable = False
    """Whether what is there can be read all the same: this user may only not write."""


class Interrupted(CacheToolError):
    """Work was stopped by Ctrl-C or SIGTERM; everything committed is kept."""

    exit_code = 130


def to_json(error: CacheToolError) -> dict[str, Any]:
    """The error as plain values that cross a process boundary: ``{"error": class name, "message": text}``. A class that
    is not of this tree goes as the one that it is made from."""
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    return {"error": kind.__name__, "message": str(error)}


def from_json(value: dict[str, Any]) -> CacheToolError:
    """The error that :func:`to_json` described; an unknown class name becomes ``CacheToolError``."""
    kind = globals().get(str(value.get("error")))
    if not (isinstance(kind, type) and issubclass(kind, CacheToolError)):
        kind = CacheToolError
    return kind(str(value.get("message")))
