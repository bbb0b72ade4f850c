"""The store of each URL scheme. The modules of the stores are imported at first use."""

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
    """Open the store at a URL. No request is made yet.

    Args:
        url: A path, a ``file://`` URL, or the URL of an object store, web server, SFTP server or Hugging Face dataset.
        limits: How long the store is waited for. Default: ``Limits()``.
        follow_links: For local folders and SFTP. True follows every link to a file, wherever it leads. A key follows
            only the link of this name (local folders). Some links are always followed, see
            :mod:`cachetool.stores.local`.
        skip_unusable: If True, a listing leaves out, by name, the keys that no request can name. Otherwise such a key
            is an error.

    Returns:
        The store. The caller closes it.

    Raises:
        UsageError: If nobody knows the scheme, or the URL is malformed.
        MissingExtra: If a package that serves the scheme is not installed.
        NotFound: If a local folder does not exist.
        AccessDenied: If credentials are missing.

    Example::

        store = open_store("s3://bucket/train", limits=Limits(retry=60.0))
        for page in store.list():
            for item in page:
                body = store.get(item)
        store.close()
    """
    # First, before anything splits the URL: a password with a raw `/` would otherwise be taken for a path, and shown in
    # an error message.
    refuse_hidden_user(url)
    scheme, _ = split_url(url)
    if not scheme and "://" in url:
        raise UsageError(f"{redact(url)!r} is neither a path nor a URL; choose a path or one of {', '.join(SCHEMES)}")
    if not scheme or scheme == "file":
        # Each store is imported in its own branch: a local folder then loads none of obstore, asyncssh and fsspec. The
        # last two may not be installed.
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
    """Return the path that a path or a ``file://`` URL names.

    Args:
        url: A path, or ``file:///absolute/path``.

    Returns:
        The path. It need not exist.

    Raises:
        UsageError: If the URL names another machine, or has no absolute path.

    Example:
        >>> local_path("file:///data/my%20samples")
        PosixPath('/data/my samples')
    """
    scheme, location = split_url(url)
    if not scheme:
        return Path(url)
    host, slash, path = location.partition("/")
    if host not in ("", "localhost") or not slash:
        raise UsageError(f"{redact(url)}: a file URL is file:///absolute/path")
    return Path(unquote("/" + path))
