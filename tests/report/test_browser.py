"""The page of ``stats --html`` in a real browser, with malicious names.

Without Chromium (Debian's package ``chromium``) these tests are skipped; ``test_page`` then parses the page as browsers
do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cachetool.cache import SourceRow, open_cache
from cachetool.cache.history import Delivered
from cachetool.core.names import Id
from cachetool.report.numbers import figures
from cachetool.report.page import page
from tests.cache.conftest import SCHEMA, put_shard

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TAKEN = "TAKEN-OVER"
SCRIPT = f"document.documentElement.setAttribute('data-x', '{TAKEN}'); document.title = '{TAKEN}'"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")


@pytest.fixture
def outside() -> Iterator[tuple[str, Callable[[], int]]]:
    """Return the address of a server, and the number of connections to it."""
    came: list[str] = []

    class Counting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            came.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Counting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", lambda: len(came)
        server.shutdown()


def hostile(place: str) -> list[str]:
    """Return names with which a page would run a script or send a request."""
    return [
        f"</script><script>{SCRIPT}</script>",
        f"</title></style></svg></textarea><script>{SCRIPT}</script>",
        f"\"><img src=x onerror=\"{SCRIPT}\">'><img src='{place}/i'>",
        f"<svg/onload=\"{SCRIPT}\"><image href='{place}/s'/></svg><link rel=stylesheet href={place}/l>",
        f"<iframe srcdoc='<script>parent.{SCRIPT}</script>'></iframe><iframe src={place}/f></iframe>",
        f"<meta http-equiv=refresh content='0;url={place}/r'><base href={place}/>",
        f"</style><style>@import '{place}/c'; * {{ background: url({place}/b) }}</style>",
        f"<!--\u2028-->\u2029<script>{SCRIPT}</script>\x00\x1b[2J\u202e&lt;script&gt;{SCRIPT}",
        f"{{{{constructor.constructor(`{SCRIPT}`)()}}}}`${{{SCRIPT}}}`",
    ]


def shown(path: Path, home: Path) -> str:
    """Return the document after the browser has loaded it and run its scripts."""
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    done = subprocess.run(
        [BROWSER, *flags, f"--user-data-dir={home / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=180, check=False, env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    if "</html>" not in done.stdout:
        pytest.skip(f"Chromium does not run here: {done.stderr[-200:]}")
    return done.stdout


def made(root: Path, names: list[str]) -> str:
    """Create the page of a cache whose datasets, sources, runs, programs, errors and reasons have these names."""
    with open_cache(root, max_size="8MB") as cache:
        for number, name in enumerate(names):
            dataset = name.replace("\x00", "")
            cache.declare(dataset, SCHEMA)
            (listing := root.parent / f"listing{number}").mkdir()
            cache.add_source(
                SourceRow(Id(f"{number:016x}"), f"s3://b/{name}", {}, "i", dataset, 9, 9, 0, 0, 0), listing
            )
            put_shard(cache, 20_000, dataset=dataset)
            with cache.snapshot(dataset=dataset, run=dataset, epoch=1) as snapshot:
                snapshot.served(Delivered(1.0, 1, 1, 0.5))
            cache.catalog.note_error(name, name, dataset=dataset)
        with cache.catalog.write() as connection:
            connection.execute("UPDATE holders SET what = ?", (names[0],))
        with cache.snapshot(dataset=names[0]), open_cache(root) as other:
            return page(figures(other))


def test_no_name_runs_a_script_or_sends_a_request(tmp_path: Path, outside: tuple[str, Callable[[], int]]) -> None:
    place, connections = outside
    names = hostile(place)
    (tmp_path / "page.html").write_text(made(tmp_path / "cache", names), encoding="utf-8")
    text = shown(tmp_path / "page.html", tmp_path)

    assert not re.search(r"<(script|img|iframe|image|link|base)\b", text)
    assert f'data-x="{TAKEN}"' not in text
    assert f"<title>{TAKEN}" not in text
    assert text.count("&lt;script&gt;") >= len(names)  # they are displayed as text
    assert connections() == 0


@pytest.mark.soak
def test_unescaped_names_would_run_scripts_and_the_pages_policy_stops_them(
    tmp_path: Path, outside: tuple[str, Callable[[], int]]
) -> None:
    """The same names are not escaped: without the page's policy they run and send requests, with the policy they do
    neither.
    """
    place, connections = outside
    text = made(tmp_path / "cache", ["plain"])
    bare = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    attack = f"<img src={place}/i><script>{SCRIPT}</script></main>"
    (tmp_path / "bare.html").write_text(bare.replace("</main>", attack), encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace("</main>", attack), encoding="utf-8")

    assert f'data-x="{TAKEN}"' in shown(tmp_path / "bare.html", tmp_path)
    asked = connections()
    assert asked > 0
    assert f'data-x="{TAKEN}"' not in shown(tmp_path / "page.html", tmp_path)
    assert connections() == asked
