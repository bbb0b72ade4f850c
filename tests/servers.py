"""Real servers on loopback: S3 by moto and rclone, SFTP by asyncssh, HTTP by the standard library, and a scripted
server, which also simulates the Hugging Face hub.
"""

from __future__ import annotations

import base64
import bisect
import contextlib
import datetime
import email.utils
import functools
import hashlib
import hmac
import html
import http.client
import http.server
import ipaddress
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Http",
    "Moto",
    "Scripted",
    "azurite",
    "certificates",
    "counted_s3",
    "folder_server",
    "free_port",
    "hub_server",
    "key_server",
    "moto_server",
    "rclone_http",
    "rclone_s3",
    "scripted_server",
    "sftp_server",
]

HOST = "127.0.0.1"
KEYS = {"AWS_ACCESS_KEY_ID": "CANARYKEYID", "AWS_SECRET_ACCESS_KEY": "canary/secret+key", "AWS_REGION": "us-east-1"}


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def _process(command: list[str], port: int) -> Iterator[None]:
    """Run a server until the end of the block. It is ready when its port accepts connections."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((HOST, port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    process.kill()
                    raise RuntimeError(f"{command[0]} did not start: {process.communicate()[1]!r}") from None
                time.sleep(0.05)
        threading.Thread(target=process.stderr.read, daemon=True).start()  # type: ignore[union-attr]
        yield
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Moto:
    """An S3 server with correct ranged GETs that accepts any key."""

    env: Mapping[str, str]
    """The endpoint, keys and region."""

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Create the bucket if it does not exist, and put objects into it."""
        client = self.client
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=bucket)
        for key, body in objects.items():
            client.put_object(Bucket=bucket, Key=key, Body=body)

    @functools.cached_property
    def client(self) -> Any:
        """Return a boto3 client of the server."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.env["AWS_ENDPOINT_URL"],
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
            region_name=self.env["AWS_REGION"],
        )


@contextlib.contextmanager
def moto_server() -> Iterator[Moto]:
    """Start moto."""
    port = free_port()
    with _process([sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)], port):
        yield Moto({**KEYS, "AWS_ENDPOINT_URL": f"http://{HOST}:{port}"})


def certificates(folder: Path) -> tuple[Path, Path]:
    """Create an authority. Return its certificate, and a file with the key and the certificate that it signed for this
    machine.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("authority", "server")]
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in names]
    now = datetime.datetime.now(datetime.UTC)
    made = []
    for at, (name, key) in enumerate(zip(names, keys, strict=True)):
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(names[0]).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(1))
        builder = builder.not_valid_after(now + datetime.timedelta(2))
        builder = builder.add_extension(x509.BasicConstraints(ca=at == 0, path_length=None), critical=True)
        if at:
            address = x509.IPAddress(ipaddress.ip_address(HOST))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        made.append(builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    private = keys[1].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "authority.pem").write_bytes(made[0])
    (folder / "server.pem").write_bytes(made[1] + private)
    return folder / "authority.pem", folder / "server.pem"


@contextlib.contextmanager
def rclone_http(folder: Path, *, certificate: Path | None = None) -> Iterator[str]:
    """Serve a folder over HTTP, or over TLS with the certificate and key in a file. Return the URL."""
    port = free_port()
    tls = ["--cert", str(certificate), "--key", str(certificate)] if certificate is not None else []
    command = [_rclone(), "serve", "http", "--addr", f"{HOST}:{port}", *tls, "--vfs-cache-mode", "off"]
    with _process([*command, "--config", os.devnull, str(folder)], port):
        yield f"{'https' if tls else 'http'}://{HOST}:{port}"


def _rclone() -> str:
    return shutil.which("rclone") or str(Path(sys.executable).parent / "rclone")


@contextlib.contextmanager
def rclone_s3(folder: Path, *options: str, auth: bool = True) -> Iterator[dict[str, str]]:
    """Serve the folders of ``folder`` as buckets, only to the right key unless ``auth`` is False. Return endpoint, keys
    and region.
    """
    port = free_port()
    keys = ["--auth-key", f"{KEYS['AWS_ACCESS_KEY_ID']},{KEYS['AWS_SECRET_ACCESS_KEY']}"] if auth else []
    command = [_rclone(), "serve", "s3", "--addr", f"{HOST}:{port}", *keys, "--vfs-cache-mode", "off", *options]
    with _process([*command, "--config", os.devnull, str(folder)], port):
        yield {**KEYS, "AWS_ENDPOINT_URL": f"http://{HOST}:{port}"}


AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own key, the same on every machine."""


@contextlib.contextmanager
def azurite(command: str, container: str) -> Iterator[dict[str, str]]:
    """Start Azure's blob storage with one empty container; ``command`` starts Azurite. Return account, key and
    endpoint.
    """
    port = free_port()
    options = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--inMemoryPersistence"]
    with _process([command, *options, "--blobHost", HOST, "--blobPort", str(port)], port):
        path, date = f"/{AZURE_ACCOUNT}/{container}", email.utils.formatdate(usegmt=True)
        signed = (
            f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:2021-08-06\n/{AZURE_ACCOUNT}{path}\nrestype:container"
        )
        made = hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), "sha256")
        headers = {
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Content-Length": "0",
            "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(made).decode()}",
        }
        connection = http.client.HTTPConnection(HOST, port, timeout=30)
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 201, answer.read()
        connection.close()
        yield {
            "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://{HOST}:{port}/{AZURE_ACCOUNT}",
        }


@contextlib.contextmanager
def counted_s3(folder: Path) -> Iterator[tuple[dict[str, str], Http]]:
    """Run :func:`rclone_s3` behind a proxy that counts the bytes of bodies and sets the status 206 for parts, which
    rclone forgets. Signatures pass through. Return the environment and the counter.
    """
    with rclone_s3(folder, "--etag-hash", "") as env:  # otherwise each request reads the whole file for its hash
        host = urllib.parse.urlsplit(env["AWS_ENDPOINT_URL"]).netloc
        with scripted_server(lambda handler: _forward(handler, host)) as state:
            yield {**env, "AWS_ENDPOINT_URL": state.url}, state


def _forward(handler: Scripted, host: str) -> None:
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.request(handler.command, handler.path, headers=dict(handler.headers))
        found = connection.getresponse()
        body = found.read()
        kept = ("content-type", "content-range", "etag", "last-modified", "accept-ranges")
        headers = {name.replace("-", "_"): value for name, value in found.getheaders() if name.lower() in kept}
        length = found.headers.get("Content-Length", str(len(body)))
        status = 206 if found.status == 200 and found.headers.get("Content-Range") else found.status
        handler.answer(status, body, **{**headers, "Content_Length": length})
    finally:
        connection.close()


@contextlib.contextmanager
def key_server(keys: Sequence[str], *, delay: float = 0.0) -> Iterator[tuple[dict[str, str], Http]]:
    """Serve a bucket ``b`` with very many sorted ``keys``; each key is its own body. A page of a list arrives after
    ``delay`` seconds. Return the environment and the requests.
    """
    keys, known = sorted(keys, key=os.fsencode), set(keys)

    def script(handler: Scripted) -> None:
        url = urllib.parse.urlsplit(handler.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if "list-type" in query:
            time.sleep(delay)
            handler.answer(200, _page_of(keys, query).encode(), Content_Type="application/xml")
        else:
            key = urllib.parse.unquote(url.path.removeprefix("/b/"))
            body, is_there = key.encode(), key in known
            etag = f'"{len(body):032x}"'
            handler.answer(200 if is_there else 404, body, ETag=etag, Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT")

    with scripted_server(script) as state:
        yield {**KEYS, "AWS_ENDPOINT_URL": state.url}, state


def _page_of(keys: Sequence[str], query: Mapping[str, str]) -> str:
    """Return a page of at most 1,000 keys and folders."""
    prefix, after = query.get("prefix", ""), max(query.get("start-after", ""), query.get("continuation-token", ""))
    at = bisect.bisect_right(keys, after) if after > prefix else bisect.bisect_left(keys, prefix)
    out, count = [], 0
    while at < len(keys) and keys[at].startswith(prefix) and count < 1000:
        after, count = keys[at], count + 1
        folder, slash, _ = keys[at][len(prefix) :].partition("/")
        if slash and query.get("delimiter"):
            out.append(f"<CommonPrefixes><Prefix>{html.escape(prefix + folder)}/</Prefix></CommonPrefixes>")
            after = f"{prefix}{folder}0"  # the character after the slash
            at = bisect.bisect_left(keys, after)
            continue
        out.append(
            f"<Contents><Key>{html.escape(after)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"{len(after):032x}"</ETag><Size>{0 if after.endswith("/") else len(after)}</Size></Contents>'
        )
        at += 1
    more = at < len(keys) and keys[at].startswith(prefix)
    token = f"<NextContinuationToken>{html.escape(after)}</NextContinuationToken>" if more else ""
    return f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(out)}</ListBucketResult>"


@dataclass
class Http:
    """A running HTTP server of this process."""

    url: str
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """The path and headers of every request, in order of arrival."""
    sent: int = 0
    """The bytes of all bodies sent."""


Script = Callable[["Scripted"], None]


class Scripted(http.server.BaseHTTPRequestHandler):
    """A handler that passes every request to the server's script. The script answers through the methods below, or raw
    through ``wfile``.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer waits for the client's delayed acknowledgement

    def do_GET(self) -> None:
        state = self.server.state  # type: ignore[attr-defined]
        state.requests.append((self.path, {name.title(): value for name, value in self.headers.items()}))
        self.number = len(state.requests)
        with contextlib.suppress(OSError):  # the client gave up, which a test may expect
            self.server.script(self)  # type: ignore[attr-defined]

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send a whole answer. ``Content_Length`` and similar arguments override the default headers."""
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.server.state.sent += len(body)  # type: ignore[attr-defined]
        self.wfile.write(body)

    def drop(self) -> None:
        """End the connection with a reset."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.wfile.flush()
        self.connection.close()

    def log_message(self, *_: object) -> None:
        """Print no log lines."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has disconnected. Every other error fails the test."""
        if not isinstance(sys.exc_info()[1], ConnectionError | ssl.SSLError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def scripted_server(script: Script, *, tls: ssl.SSLContext | None = None) -> Iterator[Http]:
    """Run a server that answers each request by ``script(handler)``, over TLS if a context is given."""
    server = _Server((HOST, 0), Scripted)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    state = Http(f"{'http' if tls is None else 'https'}://{HOST}:{server.server_address[1]}")
    server.script, server.state = script, state  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def folder_server(
    root: Path, *, index: str = "html", tls: ssl.SSLContext | None = None
) -> contextlib.AbstractContextManager[Http]:
    """Serve a folder as nginx does: ETags, ranges, and an index page as ``html``, ``json`` or ``none``."""
    return scripted_server(lambda handler: serve_file(handler, root, index), tls=tls)


def serve_file(handler: Scripted, root: Path, index: str) -> None:
    path = urllib.parse.unquote(urllib.parse.urlsplit(handler.path).path, errors="surrogateescape")
    found = root / path.lstrip("/")
    if found.is_dir() and path.endswith("/") and index != "none":
        body = _json_index(found) if index == "json" else _html_index(found)
        handler.answer(200, body, Content_Type="application/json" if index == "json" else "text/html; charset=utf-8")
    elif found.is_file():
        _send(handler, found)
    else:
        handler.answer(404, b"<html>not found</html>", Content_Type="text/html")


def _send(handler: Scripted, path: Path) -> None:
    stat = path.stat()
    size = stat.st_size
    headers = {
        "ETag": f'"{int(stat.st_mtime):x}-{stat.st_size:x}"',
        "Last_Modified": email.utils.formatdate(stat.st_mtime, usegmt=True),
        "Content_Type": "application/octet-stream",
    }
    asked = handler.headers.get("Range")
    if asked is None:
        handler.answer(200, path.read_bytes(), **headers)
        return
    first, _, last = asked.removeprefix("bytes=").partition("-")
    start, stop = int(first), min(int(last) + 1 if last else size, size)
    if start >= size:
        handler.answer(416, Content_Range=f"bytes */{size}")
        return
    with path.open("rb") as file:
        body = os.pread(file.fileno(), stop - start, start)
    handler.answer(206, body, Content_Range=f"bytes {start}-{stop - 1}/{size}", **headers)


def _json_index(folder: Path) -> bytes:
    return json.dumps(
        [
            {
                "name": path.name,
                "type": "directory" if path.is_dir() else "file",
                "mtime": email.utils.formatdate(path.stat().st_mtime, usegmt=True),
                **({} if path.is_dir() else {"size": path.stat().st_size}),
            }
            for path in sorted(folder.iterdir())
        ]
    ).encode()


def _html_index(folder: Path) -> bytes:
    lines = ['<html><head><title>Index of /</title></head><body><h1>Index</h1><hr><pre><a href="../">../</a>']
    for path in sorted(folder.iterdir()):
        name = path.name + ("/" if path.is_dir() else "")
        size = "-" if path.is_dir() else str(path.stat().st_size)
        href = urllib.parse.quote(name, errors="surrogateescape")
        shown = html.escape(name.encode("utf-8", "replace").decode())
        lines.append(f'<a href="{href}">{shown}</a>{" " * 20}21-Nov-2025 00:34{" " * 12}{size}')
    return "\r\n".join([*lines, "</pre><hr></body></html>"]).encode()


@contextlib.contextmanager
def sftp_server(
    folder: Path, home: Path, *, more_keys: tuple[str, ...] = (), kind: type[Any] | None = None
) -> Iterator[str]:
    """Serve ``folder`` as ``/`` to the key in ``home/.ssh`` by an ``asyncssh.SFTPServer``, or a ``kind`` of it that
    lies. The client's files know the server's own key, but none of ``more_keys``, the algorithms of its other keys.
    Return the URL.
    """
    import asyncio

    import asyncssh

    keys = home / ".ssh"
    keys.mkdir(parents=True, exist_ok=True)
    host, client = asyncssh.generate_private_key("ssh-ed25519"), asyncssh.generate_private_key("ssh-ed25519")
    client.write_private_key(keys / "id_ed25519")
    (keys / "authorized").write_bytes(client.export_public_key())

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listening = asyncssh.listen(
        HOST,
        0,
        server_host_keys=[host, *(asyncssh.generate_private_key(kind) for kind in more_keys)],
        authorized_client_keys=os.fspath(keys / "authorized"),
        sftp_factory=lambda channel: (kind or asyncssh.SFTPServer)(channel, chroot=os.fsencode(folder)),
    )

    async def start() -> Any:
        return await listening

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    port = server.get_port()
    (keys / "known_hosts").write_text(f"[{HOST}]:{port} {host.export_public_key().decode()}")
    try:
        yield f"sftp://user@{HOST}:{port}"
    finally:

        async def stop() -> None:
            server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def hub_server(
    folder: Path, *, token: str = "", page: int = 3, revisions: Sequence[str] = ("main",), name: str = "name"
) -> contextlib.AbstractContextManager[Http]:
    """Serve the part of the hub's API that reads datasets. ``folder`` is ``owner/name`` at every commit."""
    named = {f"/api/datasets/owner/{name}/revision/{urllib.parse.quote(revision, safe='')}" for revision in revisions}

    def script(handler: Scripted) -> None:
        parts = urllib.parse.urlsplit(handler.path)
        path = urllib.parse.unquote(parts.path, errors="surrogateescape")
        if token and handler.headers.get("Authorization") != f"Bearer {token}":
            handler.answer(401, b"{}")
        elif parts.path in named:
            handler.answer(200, b'{"sha": "c0ffee"}', Content_Type="application/json")
        elif path.startswith(f"/api/datasets/owner/{name}/tree/c0ffee"):
            below = path.removeprefix(f"/api/datasets/owner/{name}/tree/c0ffee").strip("/")
            asked = urllib.parse.parse_qs(parts.query)
            found = _tree(folder, below, recursive=asked["recursive"] == ["true"])
            if found is None:
                handler.answer(404, b"{}")
                return
            start = int(asked.get("cursor", ["0"])[0])
            more = f"{handler.path.partition('&cursor')[0]}&cursor={start + page}"
            link = f'<http://{handler.headers["Host"]}{more}>; rel="next"' if start + page < len(found) else ""
            body = json.dumps(found[start : start + page]).encode()
            handler.answer(200, body, Content_Type="application/json", Link=link)
        elif path.startswith(f"/datasets/owner/{name}/resolve/c0ffee/"):
            file = folder / path.removeprefix(f"/datasets/owner/{name}/resolve/c0ffee/")
            if file.is_file():
                _send(handler, file)
            else:
                handler.answer(404)
        else:
            handler.answer(404)

    return scripted_server(script)


def _tree(folder: Path, below: str, *, recursive: bool) -> list[dict[str, Any]] | None:
    root = folder / below
    if not root.is_dir():
        return None
    out: list[dict[str, Any]] = []
    for path in sorted(root.rglob("*") if recursive else root.iterdir()):
        entry: dict[str, Any] = {"path": str(path.relative_to(folder)), "type": "directory", "size": 0, "oid": "0" * 40}
        if path.is_file():
            body = path.read_bytes()
            entry |= {"type": "file", "size": len(body)}
            entry["oid"] = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
            if len(body) > 5000:
                entry["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body)}
        out.append(entry)
    return out
