"""``cachetool metrics``: the figures of a cache in the text format of Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.cache import CacheDir
from cachetool.report.metrics import metrics, text

SAMPLE = re.compile(r'^[a-z_]+\{([a-z_]+="(\\.|[^"\\])*",?)+\} [0-9.e+-]+$')


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheDir]:
    for number in range(8):
        path = tmp_path / f"source/s{number}.x.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.zeros(100, np.float32))
    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as opened:
        opened.pull(str(tmp_path / "source"), samples=8)
        yield opened


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cachetool", "metrics", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def served(cache: CacheDir) -> Iterator[str]:
    """Yield the address of a server of metrics."""
    command = [sys.executable, "-m", "cachetool", "metrics", "--port", "0", "--cache", str(cache.root)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        try:
            yield found[0].rstrip(",")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0


def figures(cache: CacheDir, **more: Any) -> dict[str, Any]:
    return {**cache.stats().as_dict(), **more}


def test_every_line_is_a_sample_or_describes_one(cache: CacheDir) -> None:
    trainer = {
        "pid": 1, "what": 'train "a\\b"\n.py', "dataset": "default", "epoch": 2, "seconds": 1.5, "batches": 3,
        "waits": 2, "longest": [0.1, 0.2, 0.3], "causes": {"disk": 0.25},
    }  # fmt: skip
    pull = {
        "pid": 2,
        "url": "s3://b",
        "dataset": "default",
        "samples": 1,
        "bytes": 5,
        "retries": 0,
        "causes": {"store": 2.0},
    }
    page = text(metrics(figures(cache, trainers=[trainer], pulling=[pull])))
    for line in page.splitlines():
        assert line.startswith(("# HELP cachetool_", "# TYPE cachetool_")) or SAMPLE.match(line), line
    assert 'cause="disk"} 0.25' in page
    assert 'cause="gil"} 0.0' in page
    assert 'quantile="0.95"} 0.2' in page
    assert 'step="store"} 2.0' in page
    assert f'cachetool_samples{{cache="{cache.root}",dataset="default",format="lmdb"}} 8' in page


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool of Debian's prometheus is not installed")
def test_promtool_is_content(cache: CacheDir) -> None:
    page = run("--cache", cache.root).stdout
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_server_answers_on_the_loopback_address(cache: CacheDir) -> None:
    with served(cache) as address:
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert b"cachetool_cap_bytes" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/other", timeout=20)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's prometheus is not installed")
def test_a_prometheus_server_scrapes_it(cache: CacheDir, tmp_path: Path) -> None:
    with served(cache) as address:
        target = address.removeprefix("http://").removesuffix("/metrics")
        config = tmp_path / "prometheus.yml"
        config.write_text(
            f"scrape_configs: [{{job_name: cache, scrape_interval: 1s, static_configs: [{{targets: ['{target}']}}]}}]"
        )
        port = 20000 + os.getpid() % 20000
        command = [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]  # fmt: skip
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                asked = f"http://127.0.0.1:{port}/api/v1/query?query=cachetool_samples"
                deadline = time.monotonic() + 60
                found = b""
                while b'"8"' not in found:
                    assert time.monotonic() < deadline, found
                    try:
                        with urllib.request.urlopen(asked, timeout=5) as answer:
                            found = answer.read()
                    except OSError:
                        time.sleep(0.2)
            finally:
                process.terminate()


def test_a_text_file_is_written_as_a_whole(cache: CacheDir, tmp_path: Path) -> None:
    done = run("--textfile", tmp_path / "cachetool.prom", "--once", "--cache", cache.root)
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path / 'cachetool.prom'}\n")
    assert (tmp_path / "cachetool.prom").read_text().endswith("\n")
    inside = run("--textfile", cache.root / "x.prom", "--once", "--cache", cache.root)
    assert inside.returncode == 2


def test_options_that_exclude_each_other_are_named(cache: CacheDir, tmp_path: Path) -> None:
    assert "cannot be used together" in run("--port", 0, "--textfile", tmp_path / "x", "--cache", cache.root).stderr
    assert "--once needs --textfile" in run("--once", "--cache", cache.root).stderr


def test_opentelemetry_sends_to_the_address_of_the_environment(cache: CacheDir) -> None:
    bodies: list[bytes] = []
    came = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            came.set()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {
            **os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
        }  # fmt: skip
        command = [sys.executable, "-m", "cachetool", "metrics", "--otel", "--cache", str(cache.root)]
        with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
            assert came.wait(60)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        server.shutdown()
    assert b"cachetool_used_bytes" in bodies[0]
    assert b"cachetool_fetched_bytes" in bodies[0]


def test_the_dashboard_of_the_examples_asks_for_metrics_that_exist(cache: CacheDir) -> None:
    trainer = {
        "pid": 1, "what": "t", "dataset": "d", "epoch": 2, "seconds": 1.5, "batches": 3, "waits": 2,
        "longest": [0.1, 0.2, 0.3], "causes": {"disk": 0.25},
    }  # fmt: skip
    pull = {"pid": 2, "url": "s3://b", "dataset": "d", "samples": 1, "bytes": 5, "retries": 0, "causes": {"store": 2.0}}
    eviction = {"dataset": "d", "reason": "room", "policy": "oldest", "shards": 1, "bytes": 1}
    there = {
        metric.name for metric in metrics(figures(cache, trainers=[trainer], pulling=[pull], evictions=[eviction]))
    }
    dashboard = json.loads((Path(__file__).parents[2] / "examples/grafana_dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"cachetool_\w+", target["expr"])
    }
    assert asked
    assert asked <= there
