"""Globs that choose among the names of a place: ``--include`` and ``--exclude``, and ``DIR/*.tar`` as a source.

===================  ===============================================================================
``*.jpg``            without a slash: the last part of a name, in any folder
``train/*.jpg``      with a slash: the whole name below the source; ``*`` and ``?`` match no slash
``/*.jpg``           the same, directly in the source
``train/**``         ``**`` matches any number of folders: all below ``train``
``thumbs/``          all below each folder of this name
``[a-f]``, ``[!a]``  one of these characters, or one that is none of them
===================  ===============================================================================

A name is taken if it matches one of the ``--include`` globs (or none is given) and none of the ``--exclude`` globs.
A folder ``NAME.zarr`` is one file: globs match its own name, and never the names in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cachetool.core.errors import UsageError
from cachetool.core.text import shown
from cachetool.core.units import parse_text
from cachetool.stores import local_path, redact, split_url
from cachetool.stores.base import HTTP_SCHEMES, Batch, Page
from cachetool.stores.redact import printable

if TYPE_CHECKING:
    from cachetool.sources.options import SourceOptions

__all__ = ["Selection", "checked_globs", "split_glob", "with_glob"]

_TOKENS = re.compile(r"(\*\*/|/\*\*\Z|\*+|\?|\[!?\]?[^\]]*\])")
_MEANING = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "*": "[^/]*", "?": "[^/]"}
_ROOT = frozenset(("zarr.json", ".zarray", ".zgroup"))
_ZARR = re.compile(r"\.zarr/", re.IGNORECASE)


def checked_globs(given: object, *, what: str) -> tuple[str, ...]:
    """Return globs as a tuple; a single text is accepted, too. Raise :class:`UsageError` for a value that is no
    glob."""
    globs = (given,) if isinstance(given, str) else given
    if not isinstance(globs, list | tuple):
        raise UsageError(f"{what} {shown(given)} cannot be used; give a list of globs, such as *.jpg")
    for glob in globs:
        if not parse_text(glob, what=what).strip("/"):
            raise UsageError(f"{what} {shown(glob)} matches no name; give a glob such as *.jpg or train/**")
        _compiled([glob])
    return tuple(dict.fromkeys(globs))


def _compiled(globs: Iterable[str]) -> re.Pattern[str]:
    texts = list(globs)
    try:
        return re.compile("|".join(map(_expression, texts)), re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"the glob {shown(texts[0])} cannot be used: {error}") from None


def _expression(glob: str) -> str:
    """Return the regular expression of one glob."""
    anywhere = "" if "/" in glob.rstrip("/") else "(?:.*/)?"
    if glob.endswith("/"):
        glob += "**"
    return anywhere + "".join(map(_token, _TOKENS.split(glob.lstrip("/"))))


def _token(text: str) -> str:
    if text.startswith("[") and text.endswith("]") and len(text) > 2:
        # A backslash, [ and ^ have a meaning in a regular expression that they do not have in a glob.
        inner = text[1:-1].replace("\\", "\\\\").replace("[", "\\[")
        inner = f"^{inner[1:]}" if inner[0] == "!" else inner.replace("^", "\\^", 1) if inner[0] == "^" else inner
        # A negated class such as [!a] would match a slash, too, and so reach into folders.
        return f"(?!/)[{inner}]"
    if set(text) == {"*"}:
        return _MEANING["*"] if len(text) == 1 else ".*"
    return _MEANING.get(text) or re.escape(text)


class Selection:
    """The names of one place that ``--include`` and ``--exclude`` take, counted while a listing is read."""

    def __init__(self, options: SourceOptions) -> None:
        self.globs = [f"--include {glob}" for glob in options.include]
        self.globs += [f"--exclude {glob}" for glob in options.exclude]
        self._include = _compiled(options.include) if options.include else None
        self._exclude = _compiled(options.exclude) if options.exclude else None
        self.taken = self.not_taken = 0
        self._example, self._is_zarr = "", False

    def of(self, pages: Iterable[Batch], *, more: bool = False) -> Iterator[Batch]:
        """Yield the pages without the names that are not taken. ``more``: the counts continue those of the last
        call."""
        if not self.globs:
            yield from pages
            return
        if not more:
            self.taken = self.not_taken = 0
        for page in map(Page.of, filter(None, pages)):
            chosen = [at for at, key in enumerate(page.keys) if self._takes(key)]
            self.taken += len(chosen)
            self.not_taken += len(page) - len(chosen)
            # The error about globs that match nothing shows one name of the place, so that the user sees its form.
            self._example = self._example or page.keys[0]
            self._is_zarr = self._is_zarr or not _ROOT.isdisjoint(page.keys)
            if chosen:
                yield page if len(chosen) == len(page) else page.at(chosen)

    def _takes(self, key: str) -> bool:
        # A Zarr without some of its chunks would be read with fill values in their place. So a glob decides about the
        # complete folder.
        inside = _ZARR.search(key)
        name = key if inside is None else key[: inside.end() - 1]
        included = self._include is None or self._include.fullmatch(name) is not None
        return included and (self._exclude is None or self._exclude.fullmatch(name) is None)

    def left_out(self, before: int = 0) -> dict[str, int]:
        """Return the number of names that are not taken, as a count by reason, without the first ``before`` of them."""
        number = self.not_taken - before
        return {"not chosen by --include and --exclude": number} if number else {}

    def refuse_nothing(self, url: str, *, is_zarr: bool = False) -> None:
        """Raise :class:`UsageError` if the globs take none of the names, or not all names of a place that is a Zarr."""
        if self.not_taken and (is_zarr or self._is_zarr):
            raise UsageError(
                f"{url} is a Zarr, and --include and --exclude cannot choose parts of a Zarr; leave them out"
            )
        if self.not_taken and not self.taken:
            names = "1 name" if self.not_taken == 1 else f"{self.not_taken} names"
            raise UsageError(
                f"{url}: {' '.join(self.globs)} selects none of the {names} there, such as"
                f" {printable(self._example[:80])!r};\na glob without / must match the last part of a name, a glob with"
                " / the whole name below the source; --exclude overrides --include"
            )


def split_glob(url: str) -> tuple[str, str] | None:
    """Return a path or URL with a glob as its folder and the glob below the folder. Return None for a name without a
    glob.

    On this machine a name that exists is no glob. On other stores only ``*`` makes a glob, since ``?`` and ``[``
    belong to names there. An object with a ``*`` in its name is chosen by ``--include`` with ``[*]``.
    """
    scheme, _ = split_url(url)
    place, mark, query = url.partition("?") if scheme in HTTP_SCHEMES else (url, "", "")
    if scheme in ("", "file"):
        if os.path.lexists(local_path(url)):
            return None
        match = re.search(r"[*?\[]", place)
    else:
        match = re.search(r"\*", place)
    if match is None:
        return None
    cut = place.rfind("/", 0, match.start()) + 1
    # No folder is left before the glob: a glob cannot choose hosts or buckets, because they cannot be listed.
    if scheme and cut <= len(scheme) + len("://"):
        return None
    return f"{place[:cut] or '.'}{mark}{query}", f"/{place[cut:]}"


def with_glob(url: str, options: SourceOptions) -> tuple[str, SourceOptions]:
    """Return the folder of a source that is named by a glob, and options that include what the glob matches.

    A source that is no glob is returned with its options unchanged. Raise :class:`UsageError` if a glob and
    ``--include`` are combined.
    """
    parts = split_glob(url)
    if parts is None:
        return url, options
    if options.include:
        raise UsageError(
            f"{redact(url)} has a glob, so --include cannot be added; give the folder as SOURCE, or leave --include out"
        )
    return parts[0], replace(options, include=(parts[1],))
