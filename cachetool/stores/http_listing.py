"""Listings of web servers: nginx's JSON autoindex, the links of an HTML page, or a manifest.

::

    JSON autoindex   [{"name": "a.npy", "type": "file", "mtime": "Fri, 21 Nov 2025 00:34:00 GMT", "size": 192}, ...]
    of Caddy         [{"name": "a.npy", "is_dir": false, "mod_time": "2025-11-21T00:34:00Z", "size": 192}, ...]
    HTML             <a href="a.npy">a.npy</a>      21-Nov-2025 00:34      192
    manifest .txt    one relative key or http(s) URL a line; blank lines and lines that begin with # left out
    manifest .jsonl  {"key": "a.npy", "size": 192, "etag": "...", "sha256": "..."}; "url" for "key"; the rest optional

Without an ETag, an index's time of modification (``modified:``) or a manifest's checksum (``sha256:``) takes its place.

HTML pages are foreign text. They are read in one pass that never goes back: all quantifiers are possessive, markup
without an end ends the page, and long texts are dropped. :class:`html.parser.HTMLParser` is not used, because it takes
quadratic time for unclosed tags, comments and quotes, and raises errors of many classes.
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
"""Most characters of a link that is followed; most servers have this limit. Longer texts are dropped."""

_OPENED = re.compile("<!--|<[!?]|</(?![A-Za-z])|<(?=/?[A-Za-z])")
# A quote has a meaning only behind a `=`: otherwise it is a letter of a name or of a value.
_TAG = re.compile(r"""<(/?)([A-Za-z][^\s/>]*+)((?:[^>=]++|=\s*+(?:"[^"]*+"|'[^']*+'|))*+)>""")
_ATTRIBUTE = re.compile(r"""([^\s/=]++)(?:\s*+=\s*+(?:"([^"]*+)"|'([^']*+)'|(\S*+)))?+""")
# Inside these elements `<a` is no tag. A script that builds links would otherwise add objects.
_RAW = {name: re.compile(f"</{name}", re.IGNORECASE) for name in ("script", "style")}


class Link(NamedTuple):
    """An ``<a href>`` and the text behind it, or the page's ``<base href>``."""

    href: str
    """The target. A target of more than :data:`LONGEST` characters is not followed."""
    text: str = ""
    is_base: bool = False


def links(page: str) -> Iterator[Link]:
    """Yield the links of a page, in their order.

    The text of a link is the text up to the next link, behind its own ``</a>`` if it has one.
    """
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
        """Return the text; empty if it is too long."""
        # A text that was cut may lack the end of a number, which would then be a wrong size.
        return _read("".join(self._parts)) if self._left >= 0 else ""


def _tags(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, attributes and preceding text of each tag.

    The name is in lower case; an end tag's name begins with ``/``. The text at the end of the page has no name.
    """
    at = 0
    while (opened := _OPENED.search(page, at)) is not None:
        text, here = page[at : opened.start()], opened.start()
        if opened[0] != "<":
            yield "", "", text
            end = "-->" if opened[0] == "<!--" else ">"
            stop = page.find(end, opened.end())
            at = len(page) if stop < 0 else stop + len(end)
        # The tag has no end, so the rest of the page is inside of it. Searching for another tag would take quadratic
        # time.
        elif (tag := _TAG.match(page, here)) is None:
            yield "", "", text
            return
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
            # A link that is not followed needs no decoding, which may be expensive.
            return (written if len(written) > LONGEST else _read(written)).strip(" \t\r\n\f")
    return ""


def _read(text: str) -> str:
    """Return the text with its character references replaced."""
    try:
        return unescape(text) if "&" in text else text
    # A reference such as &#999... with thousands of digits, which int() refuses.
    except ValueError:
        return text


MODIFIED = "modified:"
SHA256 = "sha256:"
_BATCH = 1000
_WRITTEN = re.compile("[!-~]+")
_NGINX_DATE, _NGINX_SIZE = re.compile(r"[0-9]{2}-[A-Z][a-z]{2}-[0-9]{4} [0-9]{2}:[0-9]{2}"), re.compile("[0-9]{1,18}")
_BLANK = re.compile(r"[ \t\r\n]*+")
_PIECE = 2**20
_LINE = 2**16
"""Most bytes of a line of a manifest."""
_PLAIN = re.compile(r"(?:\./)?+(?!.*%2[Ff])([^\x00- /?#:;\\](?:[^\x00-\x1f/?#:;\\]*[^\x00- /?#:;\\])?)(/?)")
"""Pattern of a link to a name in the folder itself, for which no URLs need to be joined."""
# The budget keeps a hostile page linear: a long base URL could be joined to each of a million short links.
_JOINED = 16
"""Characters of URLs that may be joined for each character of a page."""


class OtherJson(SourceError):
    """JSON that no known server sends as an index."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of an index page."""

    name: str
    """The name. It is empty, or has a ``/`` in it, if no key can name the object."""
    is_folder: bool
    size: int = -1
    etag: str | None = None
    left_out: str = ""
    """The reason why the line is no object; empty for objects and folders."""


def is_absolute(key: str) -> bool:
    """Return True if the key is itself a URL."""
    return key.startswith(("http://", "https://"))


def read_index(body: memoryview, content_type: str, *, page: str, asked: str = "") -> Iterator[Entry]:
    """Yield the entries of an index page of the folder at ``page``, which may differ from the URL ``asked`` for.

    Raises:
        SourceError: If the page is no index.
    """
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
    # A server may send any JSON: sizes that are no numbers, times beyond the calendar, brackets nested a thousand deep.
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise OtherJson(
            f"{redact(page)}: the JSON is not an nginx autoindex; expected a list of name, type, size"
        ) from error


def json_objects(body: memoryview) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON list, decoded one after another.

    Raises:
        ValueError: If the text is no list of objects, or an object has more than 1 MiB.
    """
    # Objects are decoded one by one, because together they take about 30 times the memory of their text. utf-8-sig:
    # some servers begin with a byte order mark.
    unpack, decode = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder().raw_decode
    text, at, due = "", 0, "["
    for start in range(0, max(1, len(body)), _PIECE):
        ended = start + _PIECE >= len(body)
        # No object has this size. Without the limit each piece would decode the unfinished object again, in quadratic
        # time.
        if len(text) - at > 2 * _PIECE:
            break
        text, at = text[at:] + unpack.decode(bytes(body[start : start + _PIECE]), ended), 0
        while (at := _BLANK.match(text, at).end()) < len(text):  # type: ignore[union-attr]  # it matches anything
            mark = text[at]
            if mark == "{" and due in ("{]", "{"):
                try:
                    value, at = decode(text, at)
                except ValueError:
                    # The object may be cut at the end of this piece. Only at the end of the body the error is final.
                    if ended:
                        raise
                    break
                yield value
                due = ",]"
            elif mark in due and mark != "{":
                at, due = at + 1, {"[": "{]", ",": "{", "]": ""}[mark]
            else:
                raise ValueError("no list of objects")
    if due or at < len(text):
        raise ValueError("no list of objects, or one without end")


def _http_date(written: str | None) -> str | None:
    """Return an ISO time in the form of the header ``Last-Modified``, with which it is compared."""
    if not written:
        return None
    return email.utils.format_datetime(datetime.fromisoformat(written).astimezone(UTC), usegmt=True)


_SCHEMES = frozenset(
    {"http", "https", "ftp", "file", "mailto", "javascript", "data", "tel", "sms", "about", "blob", "magnet", "news"}
)
"""Schemes of links to other places. Any other text before a colon is a name that was not escaped."""


def _site(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _one_slash(path: str) -> str:
    """Return a path without its empty parts."""
    # Empty parts disappear when a link is joined to a page, so they must not count when paths are compared.
    return re.sub("/{2,}", "/", path)


def _links(body: memoryview, page: str, asked: str) -> Iterator[Entry]:
    place = _Place(page, asked, most=_JOINED * len(body) + 2**20)
    seen: set[tuple[str, str, bool]] = set()
    with_query: dict[tuple[str, str, bool], Entry] = {}
    for link in links(str(body, "utf-8", "replace")):
        # A base may lead to another folder: names below that folder are not objects of this one.
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
                # A query selects something that a key cannot name. If another link has the same name without a query,
                # nothing is missing, so these links are named at the end.
                with_query[this] = Entry(target.name, target.is_folder, left_out="links with a query")
            continue
        # Pages often link to a file twice, by its icon and by its name.
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
    """The folder of a page, and the names that links on the page have there.

    ``page`` and ``asked`` are URLs of that folder. ``most`` is the number of characters that may be joined for all
    links.
    """

    def __init__(self, page: str, asked: str, *, most: int) -> None:
        self._page, self._left = page, most
        self._bases = [
            (_site(address), unquote(_one_slash(address.path), errors="surrogateescape"))
            for address in map(urlsplit, (page, asked))
        ]
        self._start, self._told = page, False
        self._scheme = self._here()

    def begin_at(self, base: str) -> None:
        """Set the URL that links are relative to; only the first call counts."""
        if not self._told:
            self._told = True
            # Safe to suppress: a base that is no URL changes nothing, as in a browser.
            with contextlib.suppress(ValueError):
                self._start = self._join(self._page, base)
            self._scheme = self._here()

    def named(self, href: str) -> _Target | None:
        """Return the target of a link; None if the link leads out of the folder."""
        # Nearly all links of an index are plain names. Joining URLs would take most of the time for a million of them.
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
            # Parents and other places are not below this folder, and deeper files are on a page of their own. An
            # escaped slash is part of a name, so the name is compared with the last part before unescaping.
            if not path.startswith(folder) or not name or name != last.removesuffix("/"):
                return None
            return _Target(target.scheme, name, is_folder, bool(target.query))
        if target.netloc or target.scheme in _SCHEMES or target.query:
            return None
        # A name such as `c:d.npy`, which a browser takes for a scheme as well. It is left out by name.
        return _Target(target.scheme, "", is_folder=False)

    def _here(self) -> str:
        """Return the scheme of the URL that links are relative to if that is the folder itself; otherwise an empty
        text."""
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
        # Ends the page instead of following links for hours.
        if self._left < 0:
            raise SourceError(f"{redact(self._page)}: its links take too long to be followed; give a manifest (.jsonl)")
        return urljoin(start, href)


def _nginx_size(text: str) -> int:
    """Return the exact size in the text behind a link of nginx; -1 if there is none."""
    for line in text.splitlines():
        # Only nginx writes exact bytes. Other servers round sizes (`1.2M`), and a rounded size would refuse each object
        # as changed.
        words = line.split()
        if len(words) >= 3 and _NGINX_DATE.fullmatch(" ".join(words[-3:-1])) and _NGINX_SIZE.fullmatch(words[-1]):
            return int(words[-1])
    return -1


def read_manifest(body: memoryview, *, place: str) -> Iterator[list[Object]]:
    """Yield the objects that a manifest names, in batches.

    Raises:
        BadObject: For a line that cannot be used: no JSON, another scheme, or a query. The message names the line.
    """
    batch: list[Object] = []
    # No copy of a manifest of up to 1 GiB: BytesIO shares the bytes object.
    lines = io.BytesIO(body.obj if isinstance(body.obj, bytes) and len(body.obj) == len(body) else body)
    for number, raw in enumerate(lines, start=1):
        # Editors on Windows write a byte order mark, which would become part of the first key.
        line = (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).strip()
        if not line or line.startswith(b"#"):
            continue
        where = f"{place}, line {number}"
        # A manifest without line ends would otherwise be parsed as one line of a gigabyte.
        if len(line) > _LINE:
            raise BadObject(f"{where}: the line has {len(line)} bytes; at most {_LINE} are allowed")
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
            # Decoded here: json.loads() of bytes would guess between UTF-8, UTF-16 and UTF-32.
            entry = json.loads(str(line, "utf-8", "surrogatepass"))
            name = entry.get("key") or entry.get("url") or entry.get("path")
            size = _whole(entry.get("size"))
            etag = f"{SHA256}{entry['sha256'].lower()}" if entry.get("sha256") else entry.get("etag")
            if not isinstance(name, str) or not isinstance(etag, str | None):
                raise TypeError("key and etag are strings")
            # Servers and the clouds' own tools print ETags with quotes, and answers are compared without them.
            if etag is not None:
                etag = etag.removeprefix("W/").strip('"')
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise BadObject(f'{where}: expected JSON such as {{"key": "a.npy", "size": 192, "etag": "..."}}') from error
    else:
        name = line.decode("utf-8", "surrogateescape")
    if is_absolute(name):
        try:
            parts = urlsplit(name)
            # http.client would refuse blanks, port 0 and such hosts at each request; here the line number is known.
            usable = parts.port != 0 and _WRITTEN.fullmatch(name) and usable_host(parts.hostname or "")
        except ValueError:
            usable = None
        if not usable:
            raise BadObject(
                f"{where}: {redact(printable(name[:200]))!r} is not a URL;"
                " write a blank as %20, and escape other special characters in the same way"
            )
        # A query may carry a signature and would have to be stored with the listing. User info is a secret.
        if parts.query or parts.fragment or "@" in parts.netloc or not parts.hostname:
            got = redact(printable(name[:200]))
            raise BadObject(f"{where}: a URL must have no query, no fragment and no user info, got {got!r}")
        return Object(name, size, etag)
    if "://" in name:
        got = redact(printable(name[:200]))
        raise BadObject(f"{where}: expected an http:// or https:// URL or a relative key, got {got!r}")
    key = name.removeprefix("./")
    # Such a key would lead out of the manifest's folder when it is joined to the URL.
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise BadObject(f"{where}: {key[:200]!r} is not a key below the manifest's folder")
    return Object(key, size, etag)


def _whole(value: Any) -> int:
    if value is None:
        return -1
    # In Python True is an int, and would be a size of 1.
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("size is a whole number")
    return value
