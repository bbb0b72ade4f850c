"""``cachetool metrics``: the figures of a cache for Prometheus."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachetool.cli.options import CacheOption, JsonOption, QuietOption
from cachetool.cli.output import Output
from cachetool.core.errors import CacheToolError, UsageError
from cachetool.proc.disk import parse_location

if TYPE_CHECKING:
    from cachetool.cache import CacheDir

__all__ = ["metrics"]

_EVERY = 15.0
"""Seconds between two writings of a text file, and between two looks for new metrics with ``--otel``."""


def metrics(
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Answer Prometheus at http://HOST:PORT/metrics; 0: a free port."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on, with --port.")] = "127.0.0.1",
    textfile: Annotated[
        str | None,
        typer.Option(
            "--textfile", metavar="FILE", help="Write a file NAME.prom for node_exporter, again every 15 seconds."
        ),
    ] = None,
    otel: Annotated[
        bool, typer.Option("--otel", help="Send them by OpenTelemetry, as the variables OTEL_... say.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Write --textfile once and end.")] = False,
    cache: CacheOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show the figures of the cache as metrics of Prometheus.

    They are the fill, evictions, pulls, and the waits of trainings by cause.

    Without --port, --textfile and --otel, the metrics are printed once.

    \b
    Examples:
      cachetool metrics
      cachetool metrics --port 9400
      cachetool metrics --textfile /var/lib/node_exporter/cachetool.prom
    """
    # Imported here, so that `cachetool metrics --help` does not load the catalog.
    from cachetool.api import open_cache

    ways = {"--port": port is not None, "--textfile": textfile is not None, "--otel": otel}
    if len(several := [name for name, given in ways.items() if given]) > 1:
        raise UsageError(f"{' and '.join(several)} cannot be used together; run the command once for each")
    if once and textfile is None:
        raise UsageError("--once needs --textfile")
    if as_json and any(ways.values()):
        raise UsageError("--json prints the metrics once; leave out --port, --textfile and --otel")
    out = Output(as_json=as_json, quiet=quiet)
    with open_cache(cache, create=False, notify=out.note) as opened:
        # Ctrl-C is the way to end these, so it is no error.
        try:
            if port is not None:
                _serve(opened, host, port, out)
            elif textfile is not None:
                _write(opened, Path(parse_location(textfile, what="--textfile")), out, once=once)
            elif otel:
                _send(opened, out)
            elif as_json:
                out.document(_document(opened))
            else:
                for line in _page(opened).splitlines():
                    out.line(line)
        except KeyboardInterrupt:
            return


def _page(cache: CacheDir) -> str:
    from cachetool.report.metrics import metrics, text

    return text(metrics(cache.stats().as_dict()))


def _document(cache: CacheDir) -> dict[str, Any]:
    from cachetool.report.metrics import metrics

    return {
        metric.name: {
            "kind": metric.kind,
            "help": metric.help,
            "values": [{"labels": labels, "value": value} for labels, value in metric.values],
        }
        for metric in metrics(cache.stats().as_dict())
    }


def _serve(cache: CacheDir, host: str, port: int, out: Output) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from cachetool.report.metrics import CONTENT_TYPE

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/metrics", "/"):
                self.send_error(404, "the metrics are at /metrics")
                return
            try:
                body = _page(cache).encode()
            except CacheToolError as error:
                self.send_error(503, "the cache cannot be read", str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: a scrape every few seconds is no news."""

    # One request at a time, because the catalog has one connection here. A scrape takes milliseconds.
    try:
        server = HTTPServer((host, port), Handler)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host") from None
    with server:
        out.note(f"metrics at http://{host}:{server.server_port}/metrics, Ctrl-C ends")
        server.serve_forever()


def _send(cache: CacheDir, out: Output) -> None:
    from cachetool.report.otel import sending

    with sending(lambda: cache.stats().as_dict()) as again:
        out.note("sending metrics by OpenTelemetry, Ctrl-C ends")
        while True:
            time.sleep(_EVERY)
            again()


def _write(cache: CacheDir, path: Path, out: Output, *, once: bool) -> None:
    from cachetool.cache.layout import refuse_in_cache
    from cachetool.proc.folders import replacing

    # A file in the cache would not be charged.
    refuse_in_cache(path, "--textfile")
    while True:
        try:
            # Replaced as a whole: node_exporter may read at any moment.
            with replacing(path, durable=False) as file:
                file.write(_page(cache).encode())
        except OSError as error:
            raise UsageError(f"cannot write --textfile {str(path)!r}: {error.strerror}") from error
        if once:
            out.line(f"wrote {path}")
            return
        time.sleep(_EVERY)
