"""What a web server says of its objects: nginx's JSON autoindex, the links of an HTML page, or a manifest.

::

    JSON autoindex   [{"name": "a.npy", "type": "file", "mtime": "Fri, 21 Nov 2025 00:34:00 GMT", "size": 192}, ...]
    of Caddy         [{"name": "a.npy", "is_dir": false, "mod_time": "2025-11-21T00:34:00Z", "size": 192}, ...]
    HTML             <a href="a.npy">a.npy</a>      21-Nov-2025 00:34      192
    manifest .txt    one relative key or http(s) URL a line; blank lines and lines that begin with # left out
    manifest .jsonl  {"key": "a.npy", "size": 192, "etag": "...", "sha256": "..."}; "url" for "key"; the rest optional

Without an ETag, an index's time of modification (``modified:``) or a manifest's checksum (``sha256:``) stands in.

The links of an HTML page that somebody else wrote, found in one walk through it, however it is made.

Nothing here goes back: the quantifiers are possessive, what has no end ends the page, and of a long text nothing is
kept. :class:`html.parser.HTMLParser` is quadratic in unclosed tags, comments and quotes, and raises what it likes.
"""

from __future__ import annotations

import codecs
import contextlib
import email.utils
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from html import unescape
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from cachetool.core.errors import BadObject, SourceError
from cachetool.stores.base import Object
from cachetool.stores.redact import printable, redact, usable_host

__all__ = [
    "Entry",
    "LONGEST",
    "Link",
    "MODIFIED",
    "OtherJson",
    "SHA256",
    "is_absolute",
    "json_objects",
    "links",
    "read_index",
    "read_manifest",
]


LONGEST = 8192
"""Characters of a link that is followed, as most servers have it; of a longer text nothing is kept."""

_OPENED = re.compile("<!--|<[!?]|</(?![A-Za-z])|<(?=/?[A-Za-z])")
# A quote counts behind a "=" alone: elsewhere it is a letter of a name or of a value.
_TAG = re.compile(r"""<(/?)([A-Za-z][^\s/>]*+)((?:[^>=]++|=\s*+(?:"[^"]*+"|'[^']*+'|))*+)>""")
_ATTRIBUTE = re.compile(r"""([^\s/=]++)(?:\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|(\S*+)))?+""")
_RAW = {name: re.compile(f"</{name}", re.IGNORECASE) for name in ("script", "style")}


class Link(NamedTuple):
    """An ``<a href>`` and the text behind it, or the page's ``<base href>``."""

    href: str
    """Too long to be followed when it is longer than :data:`LONGEST`."""
    text: str = ""
    is_base: bool = False


def links(page: str) -> Iterator[Link]:
    """The links of a page, in their order; the text of each is what stands between it and the next one, behind
    its ``</a>`` if it has that."""
    href, texts = "", _Text()
    for tag, attributes, text in _tags(page):
        texts.add(text)
        if tag == "/a":
            texts = _Text()
        elif tag in ("a", "base") and (next_href := _href(attributes)):
            if tag == "base":
                yield Link(next_href, is_base=True)
                continue
            if href:
                yield Link(href, texts.joined())
            href, texts = next_href, _Text()
    if href:
        yield Link(href, texts.joined())


class _Text:
    def __init__(self) -> None:
        self._parts: list[str] = []
        self._left = LONGEST

    def add(self, text: str) -> None:
        if text and self._left >= 0:
            self._left -= len(text)
            self._parts.append(text)

    def joined(self) -> str:
        """Empty when it is long: the end of a number may be missing where it is cut."""
        return _read("".join(self._parts)) if self._left >= 0 else ""


def _tags(page: str) -> Iterator[tuple[str, str, str]]:
    """Name in lower case, with a ``/`` before that of an end, attributes, and the text before it; for the text at the
    end of the page no name."""
    at = 0
    while (opened := _OPENED.search(page, at)) is not None:
        text, here = page[at : opened.start()], opened.start()
        if opened[0] != "<":
            yield "", "", text
            end = "-->" if opened[0] == "<!--" else ">"
            stop = page.find(end, opened.end())
            at = len(page) if stop < 0 else stop + len(end)
        elif (tag := _TAG.match(page, here)) is None:
            yield "", "", text
            return  # it has no end
        else:
            name = tag[1] + tag[2].lower()
            yield name, tag[3], text
            at = tag.end()
            if name in _RAW:
                end_tag = _RAW[name].search(page, at)
                at = len(page) if end_tag is None else end_tag.start()
    yield "", "", page[at:]


def _href(attributes: str) -> str:
    for match in _ATTRIBUTE.finditer(attributes):
        if match[1].lower() == "href":
            written = match[2] or match[3] or match[4] or ""
            return (written if len(written) > LONGEST else _read(written)).strip(" \t\r\n\f")
    return ""


def _read(text: str) -> str:
    """The text with its character references replaced."""
    try:
        return unescape(text) if "&" in text else text
    except ValueError:  # &#999... of thousands of digits
        return text


MODIFIED = "modified:"
SHA256 = "sha256:"
_BATCH = 1000
_WRITTEN = re.compile("[!-~]+")
_NGINX_DATE, _NGINX_SIZE = re.compile(r"[0-9]{2}-[A-Z][a-z]{2}-[0-9]{4} [0-9]{2}:[0-9]{2}"), re.compile("[0-9]{1,18}")
_BLANK = re.compile(r"[ \t\r\n]*+")
_PIECE = 2**20
_LINE = 2**16
"""Bytes of a line of a manifest, at most."""
_PLAIN = re.compile(r"(?:\./)?+(?!.*%2[Ff])([^\x00- /?#:;\\](?:[^\x00-\x1f/?#:;\\]*[^\x00- /?#:;\\])?)(/?)")
"""A link to what lies in the folder itself, which needs no joining of URLs."""
_JOINED = 16
"""Characters of URLs that are joined for each one of a page: a long one could be joined to each of a million links."""


class OtherJson(SourceError):
    """JSON that no server known here sends as an index."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of an index page."""

    name: str
    """Empty, or with a ``/`` in it, for an object that no key can name."""
    is_folder: bool
    size: int = -1
    etag: str | None = None
    left_out: str = ""
    """Why it is no object."""


def is_absolute(key: str) -> bool:
    """Whether the key is a URL of its own."""
    return key.startswith(("http://", "https://"))


def read_index(body: memoryview, content_type: str, *, page: str, asked: str = "") -> Iterator[Entry]:
    """The entries of an index page of the folder at ``page``, which may be another one than was ``asked`` for. Raises
    :class:`SourceError` when it is none."""
    if "json" in content_type.lower():
        return _autoindex(body, page)
    if "html" in content_type.lower():
        return _links(body, page, asked or page)
    raise SourceError(
        f"{redact(page)}: no index page (it is {printable(content_type[:60]) or 'of no type'});\n"
        "turn on the server's autoindex or give a manifest (.txt, .jsonl)"
    )


def _autoindex(body: memoryview, page: str) -> Iterator[Entry]:
    try:
        for entry in json_objects(body):
            if "is_dir" in entry:
                folder, modified = entry["is_dir"] is True, _http_date(entry.get("mod_time"))
            else:
                folder, modified = entry["type"] == "directory", entry.get("mtime")
            name = str(entry["name"])
            yield Entry(
                name.removesuffix("/") if folder else name,
                folder,
                -1 if folder else int(entry.get("size", -1)),
                f"{MODIFIED}{modified}" if modified and not folder else None,
            )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise OtherJson(
            f"{redact(page)}: the JSON is not an nginx autoindex; expected a list of name, type, size"
        ) from error


def json_objects(body: memoryview) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list of them, decoded one after another: together they would take some 30 times the memory
    of their text. Raises :class:`ValueError`, also for one of more than 1 MiB."""
    unpack, decode = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder().raw_decode
    text, at, due = "", 0, "["
    for start in range(0, max(1, len(body)), _PIECE):
        ended = start + _PIECE >= len(body)
        if len(text) - at > 2 * _PIECE:
            break
        text, at = text[at:] + unpack.decode(bytes(body[start : start + _PIECE]), ended), 0
        while (at := _BLANK.match(text, at).end()) < len(text):  # type: ignore[union-attr]  # it matches anything
            mark = text[at]
            if mark == "{" and due in ("{]", "{"):
                try:
                    value, at = decode(text, at)
                except ValueError:
                    if ended:
                        raise
                    break  # its end is to come
                yield value
                due = ",]"
            elif mark in due and mark != "{":
                at, due = at + 1, {"[": "{]", ",": "{", "]": ""}[mark]
            else:
                raise ValueError("no list of objects")
    if due or at < len(text):
        raise ValueError("no list of objects, or one without end")


def _http_date(written: str | None) -> str | None:
    """A time as the header ``Last-Modified`` has it, which it is compared with."""
    if not written:
        return None
    return email.utils.format_datetime(datetime.fromisoformat(written).astimezone(UTC), usegmt=True)


_SCHEMES = frozenset(
    {"http", "https", "ftp", "file", "mailto", "javascript", "data", "tel", "sms", "about", "blob", "magnet", "news"}
)
"""What a link to another place may begin with; before any other colon stands a name that was not escaped."""


def _site(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _one_slash(path: str) -> str:
    """Empty parts of a path say nothing, and drop out where a link is joined to a page."""
    return re.sub("/{2,}", "/", path)


def _links(body: memoryview, page: str, asked: str) -> Iterator[Entry]:
    place = _Place(page, asked, most=_JOINED * len(body) + 2**20)
    seen: set[tuple[str, str, bool]] = set()
    with_query: dict[tuple[str, str, bool], Entry] = {}
    for link in links(str(body, "utf-8", "replace")):
        if link.is_base:
            place.begin_at(link.href)
            continue
        if len(link.href) > LONGEST:
            yield Entry("", False, left_out=f"links of more than {LONGEST} characters")
            continue
        target = place.named(link.href)
        if target is None:
            continue
        this = target.scheme, target.name or link.href, target.is_folder
        if target.has_query:
            if not target.is_folder:
                with_query[this] = Entry(target.name, target.is_folder, left_out="links with a query")
            continue
        if this in seen:
            continue
        seen.add(this)
        yield Entry(target.name, target.is_folder, -1 if target.is_folder else _nginx_size(link.text))
    yield from (entry for key, entry in with_query.items() if key not in seen)


class _Target(NamedTuple):
    scheme: str
    name: str
    is_folder: bool
    has_query: bool = False


class _Place:
    """The folder of a page, and what links on it name there."""

    def __init__(self, page: str, asked: str, *, most: int) -> None:
        """Both are URLs of that folder. ``most``: characters that may be joined to follow all links."""
        self._page, self._left = page, most
        self._bases = [
            (_site(address), unquote(_one_slash(address.path), errors="surrogateescape"))
            for address in map(urlsplit, (page, asked))
        ]
        self._start, self._told = page, False
        self._scheme = self._here()

    def begin_at(self, base: str) -> None:
        """What links are relative to; the first one counts."""
        if not self._told:
            self._told = True
            with contextlib.suppress(ValueError):  # a base that is no URL says nothing
                self._start = self._join(self._page, base)
            self._scheme = self._here()

    def named(self, href: str) -> _Target | None:
        """What a link names; None when it leads elsewhere."""
        if self._scheme and (plain := _PLAIN.fullmatch(href)) is not None and plain[1] not in (".", ".."):
            return _Target(self._scheme, unquote(plain[1], errors="surrogateescape"), bool(plain[2]))
        try:
            target = urlsplit(self._join(self._start, href))
            folders = self._folders(target)
        except ValueError:
            return None
        if folders:
            path = unquote(_one_slash(target.path), errors="surrogateescape")
            folder = next((folder for folder in folders if path.startswith(folder)), folders[0])
            last = unquote(target.path.removesuffix("/").rpartition("/")[2], errors="surrogateescape")
            is_folder, name = path.endswith("/"), path[len(folder) :].removesuffix("/")
            # Parents and other places are not below this folder; what is deeper is on a page of its own. A slash that
            # is escaped is part of the name.
            if not path.startswith(folder) or not name or name != last.removesuffix("/"):
                return None
            return _Target(target.scheme, name, is_folder, bool(target.query))
        if target.netloc or target.scheme in _SCHEMES or target.query:
            return None
        return _Target(target.scheme, "", is_folder=False)  # "c:d.npy", which a browser takes for a scheme as well

    def _here(self) -> str:
        """The scheme of what links are relative to, if that is the folder itself; else empty."""
        try:
            start = urlsplit(self._start)
            folders = self._folders(start)
        except ValueError:
            return ""
        above = unquote(_one_slash(start.path.rpartition("/")[0] + "/"), errors="surrogateescape")
        return start.scheme if next((folder for folder in folders if above.startswith(folder)), "") == above else ""

    def _folders(self, target: SplitResult) -> list[str]:
        site = _site(target)
        return [folder for at, folder in self._bases if at == site]

    def _join(self, start: str, href: str) -> str:
        self._left -= len(start) + len(href)
        if self._left < 0:
            raise SourceError(f"{redact(self._page)}: its links take too long to be followed; give a manifest (.jsonl)")
        return urljoin(start, href)


def _nginx_size(text: str) -> int:
    """The size behind a link of nginx: date, time, and bytes or "-"; other servers round it, which tells nothing
    exact."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3 and _NGINX_DATE.fullmatch(" ".join(words[-3:-1])) and _NGINX_SIZE.fullmatch(words[-1]):
            return int(words[-1])
    return -1


def read_manifest(body: memoryview, *, place: str) -> Iterator[list[Object]]:
    """The objects a manifest names, in batches.

    Raises :class:`BadObject` naming the line for one that cannot be used: no JSON, another scheme, a query (which may
    carry a signature, and would have to be stored).
    """
    batch: list[Object] = []
    lines = io.BytesIO(body.obj if isinstance(body.obj, bytes) and len(body.obj) == len(body) else body)  # no copy
    for number, raw in enumerate(lines, start=1):
        line = (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).strip()
        if not line or line.startswith(b"#"):
            continue
        where = f"{place}, line {number}"
        if len(line) > _LINE:
            raise BadObject(f"{where}: it has {len(line)} bytes, and at most {_LINE} are read")
        batch.append(_line_object(line, where, as_json=place.endswith(".jsonl") or line.startswith(b"{")))
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _line_object(line: bytes, where: str, *, as_json: bool) -> Object:
    size, etag = -1, None
    if as_json:
        try:
            entry = json.loads(str(line, "utf-8", "surrogatepass"))  # of bytes it would look for other encodings
            name = entry.get("key") or entry.get("url") or entry.get("path")
            size = _whole(entry.get("size"))
            etag = f"{SHA256}{entry['sha256'].lower()}" if entry.get("sha256") else entry.get("etag")
            if not isinstance(name, str) or not isinstance(etag, str | None):
                raise TypeError("key and etag are strings")
            if etag is not None:  # as servers and the clouds' own tools print it
                etag = etag.removeprefix("W/").strip('"')
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise BadObject(f'{where}: not like {{"key": "a.npy", "size": 192, "etag": "..."}}') from error
    else:
        name = line.decode("utf-8", "surrogateescape")
    if is_absolute(name):
        try:
            parts = urlsplit(name)
            usable = parts.port != 0 and _WRITTEN.fullmatch(name) and usable_host(parts.hostname or "")
        except ValueError:
            usable = None
        if not usable:
            raise BadObject(
                f"{where}: {redact(printable(name[:200]))!r} is no URL; blanks and the like are written as %20"
            )
        if parts.query or parts.fragment or "@" in parts.netloc or not parts.hostname:
            got = redact(printable(name[:200]))
            raise BadObject(f"{where}: URLs with a query, a fragment or user info are not taken: {got!r}")
        return Object(name, size, etag)
    if "://" in name:
        got = redact(printable(name[:200]))
        raise BadObject(f"{where}: only http:// and https:// URLs and relative keys are taken, got {got!r}")
    key = name.removeprefix("./")
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise BadObject(f"{where}: {key[:200]!r} is not a key below the manifest's folder")
    return Object(key, size, etag)


def _whole(value: Any) -> int:
    if value is None:
        return -1
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("size is a whole number")
    return value
