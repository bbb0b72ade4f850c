"""Which store serves which scheme. Names here, imports at first use."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from cachetool.core.errors import UsageError
from cachetool.stores.base import HTTP_SCHEMES, OBJECT_SCHEMES, SCHEMES, Limits, Store
from cachetool.stores.redact import redact, refuse_hidden_user, split_url

__all__ = ["local_path", "open_store"]


def open_store(
    url: str, *, limits: Limits | None = None, follow_links: bool | str = False, skip_unusable: bool = False
) -> Store:
    """The store at ``url``: a path, ``file://``, an object store's or a server's URL. Nothing is fetched yet.

    ``follow_links``, of folders here or over SFTP: links to files are followed wherever they lead, or the one link of
    this name is; see :mod:`cachetool.stores.local` for those that are followed anyway. ``skip_unusable``: a listing
    leaves out, by name, keys that no request can name, and does not fail for them.

    Raises :class:`UsageError` for a scheme nobody knows (:class:`MissingExtra` when a package would serve it),
    :class:`NotFound` for a local folder that is not there, :class:`AccessDenied` when credentials are missing.
    """
    refuse_hidden_user(url)
    scheme, _ = split_url(url)
    if not scheme and "://" in url:
        raise UsageError(f"{redact(url)!r} is neither a path nor a URL; known are a path and {', '.join(SCHEMES)}")
    if not scheme or scheme == "file":
        from cachetool.stores.local import open_local_store

        return open_local_store(local_path(url), follow_links=follow_links)
    if scheme in OBJECT_SCHEMES:
        from cachetool.stores.object import open_object_store

        return open_object_store(url, limits or Limits(), skip_unusable=skip_unusable)
    if scheme in HTTP_SCHEMES:
        from cachetool.stores.http import open_http_store

        return open_http_store(url, limits or Limits())
    if scheme == "hf":
        from cachetool.stores.hub import open_hub_store

        return open_hub_store(url, limits or Limits())
    if scheme == "sftp":
        from cachetool.stores.sftp import open_sftp_store

        return open_sftp_store(url, limits or Limits(), follow_links=follow_links is True)
    from cachetool.stores.other import open_fsspec_store

    return open_fsspec_store(url)


def local_path(url: str) -> Path:
    """The path that a path or a ``file://`` URL names. Raises :class:`UsageError` for another machine's."""
    scheme, location = split_url(url)
    if not scheme:
        return Path(url)
    host, slash, path = location.partition("/")
    if host not in ("", "localhost") or not slash:
        raise UsageError(f"{redact(url)}: a file URL is file:///absolute/path")
    return Path(unquote("/" + path))
