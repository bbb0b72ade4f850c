"""Connection from an address to a Ray cluster that answers, without any output of Ray itself.

::

    HOST:PORT         that cluster, of which this machine must be a node
    auto (default)    $RAY_ADDRESS, else the cluster of this user that runs here, else one that is started here
    local             one that is started here

A cluster runs whatever a driver sends, and a driver unpickles whatever a cluster sends. So ``auto`` follows only a node
process of this user or of root. Ray's address file lies in a folder that every user may write to; it only chooses among
those processes. A cluster that is started here listens on the loopback interface alone, asks for a token of its own,
and has a folder that no other user may read. It ends with the block. A connection that the program has already is used
and left as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cachetool.core.errors import MissingExtra, Unreachable, UsageError
from cachetool.core.text import plain
from cachetool.proc.scratch import scratch

__all__ = ["listens", "opened"]

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would otherwise empty the variables that name the GPUs in tasks that ask for no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_PATIENCE = 5.0
"""Seconds in which a cluster must accept a connection, and again in which it must answer in its protocol."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of a client of HTTP/2, on which gRPC runs (RFC 9113, section 3.4), followed by an empty SETTINGS
frame."""
_DATA, _HEADERS, _RESET, _SETTINGS, _GO_AWAY = 0, 1, 3, 4, 7
"""Kinds of frames (RFC 9113, section 6)."""
_END = 1
"""Flag of the last frame of an answer."""
_UNAUTHENTICATED = b"grpc-status\x0216"
"""Bytes in the headers of an answer of a cluster that answers only to clients with its token."""


_LOOPBACK = "127.0.0.1"
_PRIVATE = "ct-ray-"
"""Beginning of the name of the folder of a cluster that a process started for itself. It is short, because names of
sockets in this folder may have only 107 bytes."""


@contextlib.contextmanager
def opened(address: str | None, notify: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Connect to a Ray cluster for the block.

    ``notify`` gets a line about a cluster that is not used because another user may have made it. The errors are those
    of :func:`cachetool.cluster.engine.connect`.
    """
    place = _place(address)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("work on several nodes (--on ray)", "ray") from error
    # The program of which this process is a part made the connection, so it is also not closed
    # here.
    if ray.is_initialized():
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_silent())
        place = place if place is not None else _running(notify)
        with _keeping_handlers():
            if place == "local":
                stack.enter_context(_started())
            else:
                _join(place)
        try:
            yield
        finally:
            with _keeping_handlers():
                ray.shutdown()


def _place(address: str | None) -> str | None:
    """Return the requested address, ``local``, or None for a cluster that runs here. Raises :class:`UsageError`."""
    if address is None or address == "auto":
        address = os.environ.get("RAY_ADDRESS") or None
    if address in (None, "auto", "local"):
        return None if address == "auto" else address
    if address.startswith("ray://"):
        raise UsageError(
            f"--address {address} is an address of Ray Client, which cannot be used; run this on a node of the cluster,"
            " with --address auto"
        )
    host, colon, port = address.rpartition(":")
    if not (host and colon and re.fullmatch(r"\d{1,5}", port) and 0 < int(port) < 65536):
        raise UsageError(f"--address must be HOST:PORT, auto or local, got {address!r}")
    return address


def _running(notify: Callable[[str], None]) -> str:
    """Return the address of this user's cluster on this machine, or ``local`` when none runs."""
    own, others = _raylets()
    named, trusted = _address_file()
    for address in sorted(own, key=lambda candidate: (candidate != named if trusted else False, candidate)):
        # A node process may outlive the cluster that it belongs to, and then the next address is
        # tried.
        with contextlib.suppress(Unreachable):
            _greet(address)
            return address
    if unknown := others or ({named} if named is not None and not trusted else set()):
        shown = plain(min(unknown))[:80]
        notify(
            f"the Ray cluster at {shown} is not used because another user may have started it;"
            " if you trust it, choose it with --address HOST:PORT"
        )
    return "local"


def _raylets() -> tuple[set[str], set[str]]:
    """Return the addresses of the clusters that have a node on this machine: those of node processes of this user or
    root, and those of other users."""
    import psutil  # type: ignore[import-untyped]  # Ray brings its own

    own: set[str] = set()
    others: set[str] = set()
    # The kernel's table of processes is the only source that another user cannot forge; a file can
    # be forged.
    for process in psutil.process_iter(["cmdline", "uids"]):
        words = process.info["cmdline"] or [""]
        if os.path.basename(words[0].split(" ")[0]) != "raylet" or process.info["uids"] is None:
            continue
        # Another program started this cluster for itself, and the cluster ends with that program.
        if any(word.startswith("--session_dir=") and f"/{_PRIVATE}" in word for word in words):
            continue
        uids = {process.info["uids"].real, process.info["uids"].effective}
        addresses = (word.removeprefix("--gcs-address=") for word in words if word.startswith("--gcs-address="))
        (own if uids <= {0, os.geteuid()} else others).update(address for address in addresses if address)
    return own, others


def _address_file() -> tuple[str | None, bool]:
    """Return the address that ``ray start`` wrote for this machine, and True if this user or root wrote it."""
    from ray._common.utils import get_ray_address_file

    try:
        # The file lies in a folder that every user may write to: no link is followed, and a pipe
        # must not block (O_NONBLOCK).
        fd = os.open(get_ray_address_file(None), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None, False
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None, False
        address = file.read(256).decode("utf-8", "replace").strip()
    # One name only: a hard link to another file of this user could bring its content here.
    trusted = status.st_uid in (0, os.geteuid()) and status.st_nlink == 1 and not status.st_mode & 0o022
    return address or None, trusted


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "cachetool"}


def _join(address: str) -> None:
    import ray

    with _naming(address):
        _greet(address)
        ray.init(address, **_QUIET)


@contextlib.contextmanager
def _started() -> Iterator[None]:
    """Start a cluster of this machine alone, which no other machine and no other user can reach.

    Its folder and its token are deleted at the end of the block.
    """
    import ray
    from ray._private import ray_constants

    with scratch(Path(tempfile.gettempdir()), _PRIVATE) as folder, _token():
        # Otherwise Ray does not accept the loopback address.
        asked, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
        try:
            with _naming("local"):
                ray.init(
                    "local",
                    include_dashboard=False,
                    num_cpus=len(os.sched_getaffinity(0)),
                    _node_ip_address=_LOOPBACK,
                    # Ray gives every user write access to its folder, so the outer folder, which is
                    # this user's alone, protects it.
                    _temp_dir=str(folder / "ray"),
                    **_QUIET,
                )
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = asked
        yield


@contextlib.contextmanager
def _token() -> Iterator[None]:
    """Set a token for what is started in the block."""
    from ray import _raylet

    # A token of its own: Ray would keep one token for all clusters in the user's home, at times
    # readable to other users.
    settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        _reload_token(_raylet)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _reload_token(_raylet)


def _reload_token(raylet: Any) -> None:
    """Let Ray read the environment again."""
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _naming(address: str) -> Iterator[None]:
    """Turn errors of Ray into :class:`Unreachable`, in one line."""
    import ray

    try:
        yield
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unreachable(f"Ray at {address} cannot be used: {what}") from error


def _greet(address: str) -> None:
    """Raise :class:`Unreachable` unless the process at the address answers as Ray does."""
    host, _, port = address.rpartition(":")
    try:
        # Ray itself would wait for a minute, and then write about the failure to our output.
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE) as line:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                # With TLS, only the open port can be seen from outside.
                return
            line.sendall(_GREETING)
            if _knows_clusters(line, time.monotonic() + _PATIENCE):
                return
    except OSError as error:
        why = str(error) if error.strerror is None else error.strerror
        raise Unreachable(
            f"no Ray cluster answers at {address}: {why}; see: ray status, or leave --address out"
        ) from error
    raise Unreachable(f"the server at {address} is not a Ray cluster; see: ray status, or leave --address out")


def _knows_clusters(line: socket.socket, deadline: float) -> bool:
    """Return True if the server answers the first question of Ray's own client, or asks for a token first."""
    # Other servers speak HTTP/2 too, the ones of a cluster's nodes among them. Ray would ask such a
    # server for 20 s.
    path = _first_question()
    asked = False
    while head := _exactly(line, 9, deadline):
        length, kind, flags, stream = int.from_bytes(head[:3]), head[3], head[4], int.from_bytes(head[5:])
        if not asked:
            # Everything that speaks HTTP/2 sends this frame first.
            if kind != _SETTINGS:
                return False
            if path is None:
                return True
            line.sendall(_question(path))
            asked = True
        body = _exactly(line, length, deadline)
        if kind == _GO_AWAY or (stream == 1 and kind == _RESET):
            return False
        if stream == 1 and kind == _HEADERS and flags & _END:
            return _UNAUTHENTICATED in body
        # A message of gRPC begins with a zero byte and its length. The page of a web server does
        # not.
        if stream == 1 and kind == _DATA:
            return body[:1] == b"\0" and int.from_bytes(body[1:5]) == len(body) - 5
    return False


def _first_question() -> str | None:
    """Return the path of the first call, or None if this version of Ray begins in another way."""
    try:
        from ray.core.generated import gcs_service_pb2
    except ImportError:
        return None
    service = gcs_service_pb2.DESCRIPTOR.services_by_name.get("NodeInfoGcsService")
    has_method = service is not None and "GetClusterId" in service.methods_by_name
    return f"/{service.full_name}/GetClusterId" if has_method else None


def _exactly(line: socket.socket, count: int, deadline: float) -> bytes:
    """Return ``count`` bytes, or none if the connection ends before. Raises :class:`TimeoutError`."""
    received = b""
    while len(received) < count:
        # Set before each read, because a server that sends one byte at a time would otherwise
        # extend the deadline with each byte. 0 would mean non-blocking.
        line.settimeout(max(1e-3, deadline - time.monotonic()))
        if not (part := line.recv(count - len(received))):
            break
        received += part
    return received if len(received) == count else b""


def _question(path: str) -> bytes:
    """Return a call of gRPC without arguments on stream 1: its headers (RFC 7541) and an empty message."""

    def text(value: str) -> bytes:
        return bytes((len(value),)) + value.encode()

    fields = b"\x83\x86\x04" + text(path) + b"\x01" + text("ray")  # POST, http, :path, :authority
    fields += b"\x0f\x10" + text("application/grpc") + b"\x00" + text("te") + text("trailers")  # content-type
    return _frame(1, 4, fields) + _frame(0, 1, bytes(5))


def _frame(kind: int, flags: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + bytes((kind, flags, 0, 0, 0, 1)) + body


def listens(row: Mapping[str, Any]) -> bool:
    """Return True if a node of ``ray.nodes()`` accepts a connection, as no dead node does."""
    with contextlib.suppress(OSError):
        socket.create_connection((row["NodeManagerAddress"], row["NodeManagerPort"]), timeout=_PATIENCE).close()
        return True
    return False


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep Ray's messages about dead nodes from our stdout, which ``log_to_driver`` does not do."""
    from ray._private import worker

    said = getattr(worker, "print_to_stdstream", None)
    worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        worker.print_to_stdstream = said


@contextlib.contextmanager
def _keeping_handlers() -> Iterator[None]:
    """Restore the signal handlers after the block, so that signals end this program as before: Ray sets a handler of
    its own."""
    # Python lets only the main thread set handlers, so another thread has nothing to restore.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
