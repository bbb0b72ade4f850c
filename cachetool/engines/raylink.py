"""From an address to a Ray that answers, without a word of Ray's own on our output.

::

    HOST:PORT         that cluster, of which this machine must be a node
    auto (default)    $RAY_ADDRESS, else the cluster that runs on this machine, else one that is started here
    local             one that is started here

What is started here ends with the block; a connection that the program has already is used and left as it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cachetool.errors import MissingExtra, Unreachable, UsageError

__all__ = ["listens", "opened"]

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # tasks without a GPU keep the variables that name it
}
_PATIENCE = 5.0
"""Seconds in which a cluster must take a connection, and then say that it speaks its protocol."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client of HTTP/2 begins, which gRPC runs on: RFC 9113, section 3.4; an empty SETTINGS frame follows."""
_DATA, _HEADERS, _RESET, _SETTINGS, _GO_AWAY = 0, 1, 3, 4, 7
"""Kinds of frames: section 6 of it."""
_END = 1
"""The flag of the last one of an answer."""
_UNAUTHENTICATED = b"grpc-status\x0216"
"""In the headers of an answer: only who is known has one."""


@contextlib.contextmanager
def opened(address: str | None) -> Iterator[str]:
    """A connection for the block; gives the id of the node that this process is on. Errors are those of
    :func:`cachetool.engines.ray.connect`."""
    place = _place(address)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("work on several nodes (--on ray)", "ray") from error
    if ray.is_initialized():  # by the program that we are a part of
        yield str(ray.get_runtime_context().get_node_id())
        return
    with _silent():
        with _keeping_handlers():
            _init(place if place is not None else _running())
        try:
            yield str(ray.get_runtime_context().get_node_id())
        finally:
            with _keeping_handlers():
                ray.shutdown()


def _place(address: str | None) -> str | None:
    """What was asked for: an address, ``local``, or None for whatever runs here. Raises :class:`UsageError`."""
    if address is None or address == "auto":
        address = os.environ.get("RAY_ADDRESS") or None
    if address in (None, "auto", "local"):
        return None if address == "auto" else address
    if address.startswith("ray://"):
        raise UsageError(
            f"--address {address} is that of Ray Client, which is no node; run this on a node of the cluster, with"
            " --address auto"
        )
    host, colon, port = address.rpartition(":")
    if not (host and colon and re.fullmatch(r"\d{1,5}", port) and 0 < int(port) < 65536):
        raise UsageError(f"--address is HOST:PORT, auto or local, got {address!r}")
    return address


def _running() -> str:
    """The address of the cluster that runs on this machine; ``local`` when there is none."""
    from ray._private import services

    muted, services.logger.disabled = services.logger.disabled, True  # it warns of each that it does not take
    try:
        found = services.canonicalize_bootstrap_address("auto")
    except ConnectionError:  # there is none
        return "local"
    finally:
        services.logger.disabled = muted
    if found is None or found == "auto":
        return "local"
    with contextlib.suppress(Unreachable):  # a file that names one may be left from long ago
        _greet(found)
        return str(found)
    return "local"


def _init(address: str) -> None:
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "cachetool"}
    try:
        if address == "local":
            ray.init("local", include_dashboard=False, num_cpus=len(os.sched_getaffinity(0)), **quiet)
            return
        _greet(address)
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise Unreachable(f"Ray at {address} cannot be used: {what}") from error


def _greet(address: str) -> None:
    """Raise :class:`Unreachable` unless something at the address answers as Ray does: Ray itself would wait for a
    minute, and then write about it."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE) as line:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # that it listens is all that can be seen from outside
            line.sendall(_GREETING)
            if _knows_clusters(line, time.monotonic() + _PATIENCE):
                return
    except OSError as error:
        why = str(error) if error.strerror is None else error.strerror
        raise Unreachable(
            f"no Ray cluster answers at {address}: {why}; see: ray status, or leave --address out"
        ) from error
    raise Unreachable(f"what answers at {address} is no Ray cluster; see: ray status, or leave --address out")


def _knows_clusters(line: socket.socket, deadline: float) -> bool:
    """Whether it answers the question with which Ray's own client begins, or wants to know first who asks. Others, the
    servers of a cluster's nodes among them, speak the same protocol; of them Ray would ask it for 20 s."""
    path = _first_question()
    asked = False
    while head := _exactly(line, 9, deadline):
        length, kind, flags, stream = int.from_bytes(head[:3]), head[3], head[4], int.from_bytes(head[5:])
        if not asked:
            if kind != _SETTINGS:  # with which all that is HTTP/2 begins
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
        if stream == 1 and kind == _DATA:  # a message of gRPC, not the page of a web server
            return body[:1] == b"\0" and int.from_bytes(body[1:5]) == len(body) - 5
    return False


def _first_question() -> str | None:
    """The path of the call; None where this Ray begins in another way."""
    try:
        from ray.core.generated import gcs_service_pb2
    except ImportError:
        return None
    service = gcs_service_pb2.DESCRIPTOR.services_by_name.get("NodeInfoGcsService")
    known = service is not None and "GetClusterId" in service.methods_by_name
    return f"/{service.full_name}/GetClusterId" if known else None


def _exactly(line: socket.socket, count: int, deadline: float) -> bytes:
    """So many bytes; none where the connection ends before. Raises :class:`TimeoutError`."""
    found = b""
    while len(found) < count:
        line.settimeout(max(1e-3, deadline - time.monotonic()))
        if not (part := line.recv(count - len(found))):
            break
        found += part
    return found if len(found) == count else b""


def _question(path: str) -> bytes:
    """A call of gRPC without arguments, on stream 1: its headers, as RFC 7541 has them, and an empty message."""

    def text(value: str) -> bytes:
        return bytes((len(value),)) + value.encode()

    fields = b"\x83\x86\x04" + text(path) + b"\x01" + text("ray")  # POST, http, :path, :authority
    fields += b"\x0f\x10" + text("application/grpc") + b"\x00" + text("te") + text("trailers")  # content-type
    return _frame(1, 4, fields) + _frame(0, 1, bytes(5))


def _frame(kind: int, flags: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + bytes((kind, flags, 0, 0, 0, 1)) + body


def listens(row: Mapping[str, Any]) -> bool:
    """Whether a node of ``ray.nodes()`` takes a connection, as no dead one does."""
    with contextlib.suppress(OSError):
        socket.create_connection((row["NodeManagerAddress"], row["NodeManagerPort"]), timeout=_PATIENCE).close()
        return True
    return False


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep from our stdout what Ray says of nodes that die, which ``log_to_driver`` does not."""
    from ray._private import worker

    said = getattr(worker, "print_to_stdstream", None)
    worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        worker.print_to_stdstream = said


@contextlib.contextmanager
def _keeping_handlers() -> Iterator[None]:
    """Signals end this program as before: Ray sets a handler of its own."""
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
