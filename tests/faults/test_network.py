"""A bad network, secrets and hostile names through whole commands.

``docs/explanation/reliability.md`` has the counts.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cachetool.core.errors import CacheToolError
from cachetool.stores import Limits, Object, open_store
from tests.commands import run_command
from tests.servers import Scripted, hub_server, scripted_server

LIMITS = Limits(retry=0.3, throttle=0.3, silence=0.5)
Answer = Callable[[Scripted, bytes], None]


def body_of(number: int) -> bytes:
    """Return the real bytes of object ``number``."""
    return random.Random(number).randbytes(3000 + number % 1000)


def _short(handler: Scripted, body: bytes) -> None:
    handler.answer(200, body[: random.randrange(len(body))], Content_Length=str(len(body)))
    handler.close_connection = True


def _reset(handler: Scripted, body: bytes) -> None:
    handler.answer(200, body[: random.randrange(len(body))], Content_Length=str(len(body)), ETag='"v"')
    handler.drop()


def _unsaid(handler: Scripted, body: bytes) -> None:
    handler.answer(200, body[: random.randrange(len(body) + 1)], Content_Length="")
    handler.close_connection = True


def _chunks(handler: Scripted, body: bytes) -> None:
    handler.answer(200, b"zz\r\n" + body, Content_Length="", Transfer_Encoding="chunked")
    handler.close_connection = True


FAULTS: dict[str, Answer] = {
    "39 short": _short,
    "40 longer": lambda handler, body: handler.answer(200, body + b"junk"),
    "40 junk behind it": lambda handler, body: handler.answer(200, body + b"HTTP/1.1", Content_Length=str(len(body))),
    "41 no length": _unsaid,
    "42 reset": _reset,
    "43 another range": lambda handler, body: handler.answer(
        206, body[1:], Content_Range=f"bytes 1-{len(body) - 1}/{len(body)}"
    ),
    "44 replaced": lambda handler, body: handler.answer(200, body[::-1], ETag='"new"'),
    "45 replaced under its ETag": lambda handler, body: handler.answer(200, body[::-1], ETag='"v"'),
    "46 gone": lambda handler, body: handler.answer(random.choice([403, 404, 410])),
    "47 slow down": lambda handler, body: handler.answer(random.choice([429, 503]), Retry_After=""),
    "48 absurd Retry-After": lambda handler, body: handler.answer(503, Retry_After="-5"),
    "50 bad chunks": _chunks,
    "53 a page": lambda handler, body: handler.answer(200, b"<html>log in</html>", Content_Type="text/html"),
    "54 encoded": lambda handler, body: handler.answer(200, gzip.compress(body), Content_Encoding="gzip"),
    "none": lambda handler, body: handler.answer(200, body, ETag='"v"'),
}


@pytest.mark.parametrize(
    "count", [pytest.param(150, id="short"), pytest.param(15_000, id="all", marks=pytest.mark.soak)]
)
@pytest.mark.timeout(1800)
def test_no_wrong_object_is_accepted_from_any_answer_of_a_server(count: int) -> None:
    """Rows 39 to 48, 50, 53, 54: an object matches the manifest's checksum, or the pull fails. One fault answers the
    first requests for an object, an honest server answers later requests; for some objects every answer is faulty.
    """
    names = sorted(FAULTS)
    asked: collections.Counter[int] = collections.Counter()

    def script(handler: Scripted) -> None:
        number = int(handler.path.rpartition("/")[2].partition(".")[0])
        asked[number] += 1
        fault = names[number % len(names)]
        honest = asked[number] > 1 + number // len(names) % 3 and number % 2
        FAULTS["none" if honest else fault](handler, body_of(number))

    taken: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    wrong = []
    with scripted_server(script) as server, contextlib.closing(open_store(f"{server.url}/d/", limits=LIMITS)) as store:

        def fetch(number: int) -> None:
            body = body_of(number)
            item = Object(f"{number}.bin", len(body), "sha256:" + hashlib.sha256(body).hexdigest())
            try:
                found = bytes(store.get(item))
            except CacheToolError:
                refused[names[number % len(names)]] += 1
                return
            taken[names[number % len(names)]] += 1
            if found != body:
                wrong.append(number)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(fetch, range(count)))
    assert wrong == []
    assert taken.total() + refused.total() == count
    assert taken["none"] == -(-(count - names.index("none")) // len(names))
    assert refused["45 replaced under its ETag"] > 0
    assert sum(1 for name in names if refused[name]) >= 10
    print(f"{sum(asked.values())} answers, {taken.total()} objects taken, {refused.total()} refused, 0 wrong")


def _npy(number: int) -> bytes:
    out = io.BytesIO()
    np.save(out, np.full(50, number))
    return out.getvalue()


def _command(*args: str, cwd: Path, env: dict[str, str]) -> tuple[int, str]:
    done = run_command(*args, folder=cwd, environment={**os.environ, **env})
    return done.returncode, done.stdout + done.stderr


def _everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.soak  # half a minute of waiting; tests/stores tests the same with simulated clocks
def test_a_pull_whose_first_requests_are_all_throttled_finishes(tmp_path: Path) -> None:
    """Row 47: two workers with 32 requests in flight each. The server refuses all of them at first, with and without a
    Retry-After. Each object is then fetched once.
    """
    refused: collections.Counter[str] = collections.Counter()

    def script(handler: Scripted) -> None:
        name = handler.path.rpartition("/")[2]
        if name == "list.txt":
            handler.answer(200, "".join(f"{number}.x.npy\n" for number in range(256)).encode())
            return
        refused[name] += 1
        if refused[name] <= 2:
            handler.answer(random.choice([429, 503]), Retry_After=random.choice(["", "0", "1"]))
        else:
            handler.answer(200, _npy(int(name.partition(".")[0])))

    with scripted_server(script) as server:
        url, cache = f"{server.url}/d/list.txt", ("--cache", str(tmp_path / "cache"))
        code, text = _command(
            *("pull", url, *cache, "--all", "--workers", "2", "--concurrency", "32", "--shard-size", "4kB"),
            cwd=tmp_path,
            env={},
        )
    assert code == 0, text
    assert len(_samples(tmp_path / "cache")) == 256
    assert len(refused) == 256
    assert {times for name, times in refused.items() if times != 3} <= {4}, "the first draws are looked at before"


def test_no_secret_is_in_any_output_or_file(tmp_path: Path) -> None:
    """Rows 85 and 86: user and password, a signed query, a token; pulls that succeed and fail; all their output. A URL
    with another signature is the same source.
    """

    def script(handler: Scripted) -> None:
        name = handler.path.partition("?")[0].rpartition("/")[2]
        if "bad" in handler.path:
            handler.answer(200, b"no array")
        elif name == "list.txt":
            handler.answer(200, "".join(f"{number}.x.npy\n" for number in range(8)).encode())
        elif name == "":
            handler.answer(
                200, b'<a href="1.bad.npy">1</a>' if "/worse/" in handler.path else b"", Content_Type="text/html"
            )
        else:
            handler.answer(200, _npy(int(name.partition(".")[0])))

    said = []
    (tmp_path / "data" / "train").mkdir(parents=True)
    for number in range(4):
        (tmp_path / "data" / "train" / f"{number}.x.npy").write_bytes(_npy(number))
    with scripted_server(script) as server, hub_server(tmp_path / "data", token="hf_CANARY7") as hub:
        env = {
            "CACHETOOL_CACHE": str(tmp_path / "cache"),
            "CACHETOOL_DEBUG": "1",
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "hf_CANARY7",
        }
        place = server.url.replace("//", "//user:CANARY1@")
        for query in ("sig=CANARY2", "sig=CANARY3"):
            code, text = _command("pull", f"{place}/d/list.txt?{query}", "--samples", "4", cwd=tmp_path, env=env)
            said.append(text)
            assert code == 0, text
        hf = "hf://datasets/owner/name/train/"
        code, text = _command("pull", hf, "--dataset", "hub", "--all", cwd=tmp_path, env=env)
        assert code == 0, text
        said.append(text)
        for url in (f"{place}/worse/?sig=CANARY4", f"{place}/missing/?sig=CANARY5", "s3://u:CANARY6@bucket/x"):
            code, text = _command("pull", url, "--dataset", "other", cwd=tmp_path, env=env)
            assert code != 0
            said.append(text)
        assert _command("stats", "--html", "page.html", cwd=tmp_path, env=env)[0] == 0
        said.append((tmp_path / "page.html").read_text())
        for command in (["stats", "--json"], ["ls"], ["doctor"], ["verify"]):
            said.append(_command(*command, cwd=tmp_path, env=env)[1])
    stats = json.loads(said[-4][: said[-4].rindex("}") + 1])
    assert len(stats["sources"]) == 2, "one place whatever its signature, and the hub"
    assert "CANARY" not in "".join(said)
    assert b"CANARY" not in _everything(tmp_path / "cache")


def test_hostile_names_write_nothing_outside_the_cache_and_are_shown_harmlessly(tmp_path: Path) -> None:
    """Rows 71, 72, 84 and 88: names that lead outside, move the cursor, or run in a spreadsheet. Files are private for
    any umask.
    """
    keys = ["=cmd|'calc'!A0.x.npy", "\x1b[2J\x1b]0;owned\x07.x.npy", "a\r\nb.x.npy", "é.x.npy", "e\u0301.x.npy"]
    keys += ["-rf.x.npy", "a\\b.x.npy", "\u202egpj.x.npy", "%2e%2e.x.npy"]
    folder, outside = tmp_path / "data", tmp_path / "cwd"
    for each in (folder, outside):
        each.mkdir()
    for number, key in enumerate(keys):
        (folder / key).write_bytes(_npy(number))
    (folder / "bad\x1b[31m.x.npy").write_bytes(b"no array")
    env = {"CACHETOOL_CACHE": str(tmp_path / "cache"), "HOME": str(outside)}
    before = os.umask(0)
    try:
        code, text = _command("pull", str(folder), "--all", "--on-error", "skip", cwd=outside, env=env)
        assert code == 0, text
        shown = [
            _command("show", f"{shard}:{at}", cwd=outside, env=env)[1] for shard, at in _samples(tmp_path / "cache")
        ]
        code, document = _command("pull", str(folder), "--on-error", "skip", "--json", cwd=outside, env=env)
    finally:
        os.umask(before)
    assert code == 0
    json.loads(document[document.index("{") :])
    assert len(shown) == len(keys)
    assert not any(ord(c) < 32 and c not in "\r\n\t" for c in text + "".join(shown))
    assert "\r" not in text + "".join(shown)
    assert list(outside.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"data", "cwd", "cache"}
    private = [tmp_path / "cache", *(path for path in (tmp_path / "cache").iterdir() if path.is_dir())]
    assert len(private) == 4
    assert [oct(path.stat().st_mode & 0o777) for path in private] == ["0o700"] * 4


def _samples(root: Path) -> list[tuple[str, int]]:
    from cachetool.cache import open_cache

    with open_cache(root, create=False) as cache:
        return [(shard.id, at) for shard in cache.shards() for at in range(shard.samples)]


def test_an_object_larger_than_memory_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    """Row 70, and row 69 too: an object of 0 bytes is a value like any other."""
    (tmp_path / "data").mkdir()
    for number in range(10):
        (tmp_path / "data" / f"{number}.bin").write_bytes(bytes(5000 if number else 0))
    env = {"CACHETOOL_CACHE": str(tmp_path / "cache")}
    code, text = _command("pull", str(tmp_path / "data"), "--all", "--max-size", "9MB", cwd=tmp_path, env=env)
    assert code == 0, text
    with (tmp_path / "data" / "huge.bin").open("wb") as file:
        file.truncate(5 * 2**30)  # a sparse file of zeros takes no space
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30,) * 2);"
        "from cachetool.__main__ import main; sys.argv[0] = 'cachetool'; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "pull", str(tmp_path / "data"), "--refresh", "--all"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    assert "object 'huge.bin' has 5.4 GB, but at most 4.3 GB can be read; skip it" in done.stderr
    assert len(_samples(tmp_path / "cache")) == 10
    assert _command("verify", cwd=tmp_path, env=env)[0] == 0
