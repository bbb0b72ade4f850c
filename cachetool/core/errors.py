"""All errors that cachetool raises on purpose, with the exit code of the command line for each.

::

    CacheToolError                1   a bug, when raised as such
    ├── UsageError                2   a wrong option, name, size or schema: the user changes the command
    │   └── MissingExtra          2   an optional dependency is not installed
    ├── SourceError               3   the remote side: store, listing, object
    │   ├── NotFound              3   bucket, prefix or object does not exist
    │   ├── AccessDenied          3   credentials missing, wrong or expired
    │   ├── Unreachable           3   no answer in time
    │   └── BadObject             3   an object is not what its name or the schema says
    ├── CapacityError             4   cap, free disk or inodes
    │   ├── CapTooSmall           4   the cap cannot hold what was asked, ever
    │   └── CapBlocked            4   space exists but is held by processes
    ├── CorruptError              5   bytes on disk that do not match their checksum or layout
    ├── CatalogError              6   the cache's catalog or layout cannot be used
    └── Interrupted             130   Ctrl-C or SIGTERM

A message has one or two lines: what happened, with which value, and what to do next. The error of a library that caused
it is chained with ``from``. Names in a message may come from a store or from a foreign file, so every character that is
not printable is escaped: a name cannot move the cursor of a terminal.
"""

from __future__ import annotations

from typing import Any

from cachetool.core.text import plain

# The end of a line is kept because it says what to do next. The middle is often a name or a schema, which may have any
# length.
_LONGEST, _END = 2000, 400
"""Longest line of a message, in characters, and how many characters of its end are kept when it is cut."""

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
    """The base class of all errors of cachetool; ``str(error)`` can be shown to a user.

    Args:
        message: One or two lines: what happened, with which value, and what to do.

    Attributes:
        exit_code: The exit code with which the command line ends for this error.

    Example:
        >>> import cachetool
        >>> try:
        ...     cachetool.open_cache("data/none", create=False)
        ... except cachetool.CacheToolError as error:
        ...     print(type(error).__name__, error.exit_code)
        UsageError 2
    """

    exit_code = 1
    """Exit code of the command line for this error."""

    def __init__(self, message: str = "") -> None:
        super().__init__("\n".join(map(_line, message.split("\n"))))


def _line(text: str) -> str:
    """Return a line of a message with escapes for characters that are not printable, cut if it is too long."""
    shown = plain(text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - _END]} ... {shown[-_END:]}"


class UsageError(CacheToolError, ValueError):
    """An option, name, size or schema cannot be used; the user has to change the call. Also a ``ValueError``."""

    exit_code = 2


class MissingExtra(UsageError):
    """An optional dependency is not installed; the message names the extra that installs it.

    Args:
        what: What needs the dependency; without ``extra`` the whole message.
        extra: The extra of the package. Default: none.
    """

    def __init__(self, what: str, extra: str | None = None) -> None:
        """Build the message from both arguments, or take ``what`` as the message."""
        if extra is not None:
            what = f"{what} needs the extra '{extra}': pip install 'cachetool[{extra}]'"
        super().__init__(what)


def without(library: str, extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error to raise when an ``import`` fails with ``error``.

    If ``library`` itself is missing, the returned error names the extra that installs it. Otherwise ``error`` is
    returned unchanged, because an installed library that fails to import one of its own dependencies needs another
    answer.
    """
    if error.name != library:
        return error
    return ModuleNotFoundError(f"this needs {library}: pip install 'cachetool[{extra}]'", name=library)


class SourceError(CacheToolError):
    """A failure of the remote side: a store, a listing or an object."""

    exit_code = 3


class NotFound(SourceError):
    """A bucket, prefix or object that does not exist."""


class AccessDenied(SourceError):
    """Credentials that are missing, wrong or expired."""


class Unreachable(SourceError):
    """A store that did not answer in time."""

    answered = False
    """True if the store did answer, but each time with an error of its own, such as 503."""


class BadObject(SourceError):
    """An object that does not match its name, its size or the schema of the dataset."""


class CapacityError(CacheToolError):
    """The cap, the free disk or the inodes are used up.

    Attributes:
        done: A line about the work that was done before the error; empty if there was none.
    """

    exit_code = 4
    done = ""
    """One line about the part of the work that was done before the error; empty if none was."""


class CapTooSmall(CapacityError):
    """The cap is too small for the request even when the cache is empty; the message names the minimum."""


class CapBlocked(CapacityError):
    """The cap is large enough, but running processes keep the space in use; the message names them."""


class CorruptError(CacheToolError):
    """Bytes on the disk that do not match their checksum or layout."""

    exit_code = 5


class CatalogError(CacheToolError):
    """The catalog or the layout of the cache folder cannot be used.

    Attributes:
        readable: True if the cache can be read all the same, because only writing is refused.
    """

    exit_code = 6
    readable = False
    """True if this user may not write to the cache, but may read it."""


class Interrupted(CacheToolError):
    """Work was stopped by Ctrl-C or SIGTERM; committed shards stay."""

    exit_code = 130


def to_json(error: CacheToolError) -> dict[str, Any]:
    """Convert an error to plain values that can be sent to another process.

    Args:
        error: The error. A subclass that another module defines is sent as its nearest base class in this module.

    Returns:
        ``{"error": class name, "message": text}``.

    Example:
        >>> to_json(NotFound("no bucket 'a'"))
        {'error': 'NotFound', 'message': "no bucket 'a'"}
    """
    # The receiving process looks the class up in this module, so the name of a class of another module would
    # mean nothing there.
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
    return {"error": kind.__name__, "message": str(error)}


def from_json(value: dict[str, Any]) -> CacheToolError:
    """Rebuild the error that :func:`to_json` described.

    Args:
        value: A dict with the entries ``error`` and ``message``.

    Returns:
        An error of the named class; of ``CacheToolError`` if the name is unknown.

    Example:
        >>> from_json({"error": "NotFound", "message": "no bucket 'a'"})
        NotFound("no bucket 'a'")
    """
    kind = globals().get(str(value.get("error")))
    # The value may come from another version of cachetool or be garbled. The check keeps it from naming any other
    # global of this module, such as a function.
    if not (isinstance(kind, type) and issubclass(kind, CacheToolError)):
        kind = CacheToolError
    return kind(str(value.get("message")))
