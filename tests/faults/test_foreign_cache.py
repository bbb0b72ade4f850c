"""A cache folder that somebody else created: paths in its catalog and its ``shard.json`` never lead outside the
folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.api import read_sample
from cachetool.cache import open_cache
from cachetool.cache.layout import Layout
from cachetool.cache.records import seal, unseal
from cachetool.check.verify import verify
from cachetool.cli import app
from cachetool.core.errors import CacheToolError, CatalogError, CorruptError
from cachetool.core.names import Id, Name
from cachetool.formats import get_format
from cachetool.formats.shard import open_shard
from cachetool.loaders.numpy import Loader
from cachetool.loaders.view import View
from cachetool.proc.folders import remove
from tests.commands import run_command

HERE = Path(__file__).parents[2]
DEAD = "0" * 16
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and files of another user need root")


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """Create a folder of the user beside the cache. It must not change."""
    folder = tmp_path / "thesis"
    folder.mkdir()
    for name in ("thesis.txt", "shard.json", "x.lock", "x.json"):
        (folder / name).write_text("precious")
    yield folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        ("thesis.txt", "shard.json", "x.lock", "x.json"), "precious"
    )


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a cache of some shards."""
    folder = tmp_path_factory.mktemp("pulled")
    (folder / "source").mkdir()
    for number in range(48):
        np.save(folder / "source" / f"{number}.npy", np.full(1000, number, "f8"))
    with cachetool.open_cache(folder / "cache", max_size="8MB") as made:
        made.pull(folder / "source", all=True, shard_size="100kB", workers=1)
    return folder / "cache"


@pytest.fixture
def cache(pulled: Path, tmp_path: Path) -> Path:
    """Return a copy of that cache, which no process has open."""
    shutil.copytree(pulled, tmp_path / "cache")
    return tmp_path / "cache"


def edit(root: Path, *statements: str) -> None:
    """Change a catalog as an attacker who knows its tables would."""
    with contextlib.closing(sqlite3.connect(root / "catalog.sqlite3")) as connection:
        for each in statements:
            connection.execute(each)
        connection.commit()


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return run_command(*args, folder=Path.cwd(), environment={**os.environ, "PYTHONPATH": str(HERE)})


def names(path: Path, how: str, root: Path) -> str:
    """Return a name that leads from the cache's folder of shards to ``path``."""
    return {"absolute": str(path), "above": os.path.relpath(path, root / "shards")}[how]


@pytest.mark.parametrize("how", ["absolute", "above"])
@pytest.mark.parametrize("state", ["trash", "staging", "retiring"])
def test_a_shard_named_by_a_path_is_refused_and_nothing_is_deleted(
    cache: Path, victim: Path, how: str, state: str
) -> None:
    name = names(victim, how, cache)
    edit(
        cache,
        "INSERT INTO shards (id, seq, dataset, format, state, samples, payload, bytes, since, until, holder, created,"
        f" draws, content, digest) VALUES ('{name}', 99, 'default', 'lmdb', '{state}', 1, 1, 1, 1, 2, '{DEAD}', 1,"
        " '[]', '', '')",
    )
    before = sorted(cache.rglob("*"))

    for verb in ("stats", "ls", "doctor", "evict"):
        found = run(verb, "--cache", str(cache), *(["--max-size", "1MB"] if verb == "evict" else []))
        assert found.returncode != 0 or verb == "doctor", (verb, found)
        assert "Traceback" not in found.stderr
        assert "a bug in cachetool" not in found.stderr
    with pytest.raises(CatalogError, match="is no name of a shard"), open_cache(cache):
        pass
    assert [path for path in before if not path.exists()] == []

    mended = run("verify", "--repair", "--no-repull", "--cache", str(cache))
    assert mended.returncode in (0, 1), mended
    assert run("stats", "--cache", str(cache)).returncode == 0


@pytest.mark.parametrize("how", ["absolute", "above"])
def test_a_source_named_by_a_path_moves_no_record_there(cache: Path, victim: Path, how: str) -> None:
    """The record of a deleted shard is renamed to the place of its source's record."""
    name = names(victim / "x", how, cache)
    edit(
        cache,
        "PRAGMA foreign_keys = OFF",
        f"UPDATE sources SET id = '{name}'",
        f"UPDATE shards SET source = '{name}', since = 1",
        f"UPDATE shards SET state = 'trash', holder = '{DEAD}' WHERE seq = 1",
    )
    with pytest.raises(CatalogError, match="is no name of"), open_cache(cache) as opened:
        opened.evict(1_000_000)


@pytest.mark.parametrize("how", ["absolute", "above"])
def test_a_holder_named_by_a_path_gets_no_lock_file_deleted(cache: Path, victim: Path, how: str) -> None:
    edit(cache, f"INSERT INTO holders VALUES ('{names(victim / 'x', how, cache)}', 1, 'host', 'what', 0)")
    with pytest.raises(CatalogError, match="is no name of"), open_cache(cache):
        pass


@pytest.mark.parametrize("field", ["id", "data", "source", "progress", "column"])
def test_a_shard_json_that_names_a_path_is_not_adopted(cache: Path, victim: Path, field: str) -> None:
    folder = next((cache / "shards").iterdir())
    before, value = len(list((cache / "shards").iterdir())), unseal(folder / "shard.json")
    known = value["source"]
    progress = value["progress"]
    value |= {
        "id": {"id": str(victim)},
        "data": {"data": "../../../thesis/thesis.txt"},
        "source": {"source": str(victim / "x")},
        "progress": {"progress": {**progress, "id": str(victim / "x")}},
        "column": {"progress": {**progress, "id) SELECT 'x' --": 1}},
    }[field]
    (folder / "shard.json").write_bytes(seal(value))
    os.unlink(cache / "catalog.sqlite3")

    found = run("verify", "--repair", "--no-repull", "--cache", str(cache))
    assert "a bug in cachetool" not in found.stderr, found
    with open_cache(cache) as opened:
        count = len(opened.shards())
        with opened.catalog.read() as connection:
            (source,) = [row["id"] for row in connection.execute("SELECT id FROM sources")]
    assert count == before - (field != "column")
    assert source == known


def test_a_journal_that_names_another_file_does_not_cause_its_deletion(cache: Path, victim: Path) -> None:
    """SQLite deletes the super-journal that a hot journal names."""
    code = (
        "import os, sqlite3, sys\n"
        "c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('pragma journal_mode=persist')\nc.execute('pragma cache_size=1')\nc.execute('begin immediate')\n"
        "c.execute('create table big (b)')\n"
        "for i in range(200): c.execute('insert into big values (zeroblob(4000))')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, cache / "catalog.sqlite3"], check=False)
    assert done.returncode == -signal.SIGKILL
    name = os.fsencode(victim / "thesis.txt")
    end = (0x40000000 // 4096 + 1).to_bytes(4, "big") + name + len(name).to_bytes(4, "big")
    end += sum(name).to_bytes(4, "big") + bytes.fromhex("d9d505f920a163d7")
    with open(cache / "catalog.sqlite3-journal", "ab") as journal:
        journal.write(end)

    for verb in ("stats", "ls", "verify", "doctor"):
        found = run(verb, "--cache", str(cache))
        assert "a bug in cachetool" not in found.stderr
        assert found.returncode != 0 or verb == "doctor"
    with pytest.raises(CatalogError, match="names another file"), open_cache(cache):
        pass
    os.unlink(cache / "catalog.sqlite3-journal")  # the advice of the message
    assert run("verify", "--repair", "--no-repull", "--cache", str(cache)).returncode in (0, 1)


def _as_trash(cache: Path) -> Path:
    """Make the first shard's row trash of a dead process. Return the path of its folder."""
    with contextlib.closing(sqlite3.connect(cache / "catalog.sqlite3")) as connection:
        (id,) = connection.execute("SELECT id FROM shards ORDER BY seq LIMIT 1").fetchone()
        connection.execute("UPDATE shards SET state = 'trash', holder = ? WHERE id = ?", (DEAD, id))
        connection.commit()
    return cache / "shards" / id


def test_recovery_unlinks_a_link_in_place_of_a_shard_and_keeps_its_target(cache: Path, victim: Path) -> None:
    shard = _as_trash(cache)
    shutil.rmtree(shard)
    shard.symlink_to(victim)
    with open_cache(cache):
        pass
    assert not os.path.lexists(shard)


def test_recovery_follows_no_link_inside_a_shard(cache: Path, victim: Path) -> None:
    shard = _as_trash(cache)
    (shard / "c").symlink_to(victim)
    with open_cache(cache):
        pass
    assert not os.path.lexists(shard)


@pytest.mark.parametrize("folder", ["shards", "listings", "holders"])
def test_a_folder_of_the_cache_that_is_a_link_is_not_cleared_through_it(cache: Path, victim: Path, folder: str) -> None:
    shard = _as_trash(cache)
    twin = victim.parent / "twin"
    shutil.copytree(cache / folder, twin)
    before = sorted(twin.rglob("*"))
    shutil.rmtree(cache / folder)
    (cache / folder).symlink_to(twin)
    with contextlib.suppress(CacheToolError, OSError), open_cache(cache) as opened:
        opened.evict(1_000_000)
    after = [path for path in sorted(twin.rglob("*")) if path.suffix != ".lock"]
    assert after == [path for path in before if path.suffix != ".lock"]
    assert shard.name in {path.name for path in after} or folder != "shards"


@pytest.mark.parametrize("folder", ["shards", "listings", "holders"])
def test_a_cache_whose_folder_is_a_link_is_refused(cache: Path, victim: Path, folder: str) -> None:
    """Lock files without an owner are deleted. Behind a link they would belong to somebody else."""
    (victim / "poetry.lock").write_text("precious")
    twin = victim.parent / "twin"
    (cache / folder).rename(twin)
    (cache / folder).symlink_to(victim if folder == "holders" else twin)
    for verb in ("stats", "ls", "evict"):
        found = run(verb, "--cache", str(cache), *(["--max-size", "1MB"] if verb == "evict" else []))
        assert found.returncode == 6
        assert f"its folder {folder} is a link to" in found.stderr
    (victim / "poetry.lock").unlink()


def test_lock_files_of_other_programs_in_the_cache_stay(cache: Path) -> None:
    (cache / "holders" / "poetry.lock").touch()
    with open_cache(cache):
        pass
    assert (cache / "holders" / "poetry.lock").exists()


def test_no_record_is_moved_out_of_the_target_of_a_link(cache: Path, victim: Path) -> None:
    """The newest record of a source is moved out of a shard before its deletion."""
    shard = _as_trash(cache)
    edit(cache, f"UPDATE shards SET since = 999999 WHERE id = '{shard.name}'")
    shutil.rmtree(shard)
    shard.symlink_to(victim)
    with open_cache(cache):
        pass
    assert not os.path.lexists(shard)
    assert not [path for path in (cache / "listings").glob("*.json") if path.read_text() == "precious"]


def test_a_view_in_place_of_a_table_is_refused_and_repaired(cache: Path) -> None:
    """A view may have endless rows, which SQLite computes without reacting to signals."""
    edit(
        cache,
        "ALTER TABLE events RENAME TO before",
        "CREATE VIEW events AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n AS id, 1.0 AS"
        " at, 'error' AS kind, 'x' AS subject, 't' AS text, 'default' AS dataset FROM r",
    )
    for verb in ("stats", "ls"):
        found = run(verb, "--cache", str(cache))
        assert found.returncode == 6
        assert "has a view 'events', which cachetool never makes" in found.stderr
    assert run("verify", "--repair", "--no-repull", "--cache", str(cache)).returncode in (0, 1)
    assert run("stats", "--cache", str(cache)).returncode == 0


def test_a_lock_file_with_a_second_name_is_not_written(cache: Path, victim: Path) -> None:
    lock = cache / "catalog.sqlite3-lock"
    lock.unlink(missing_ok=True)
    os.link(victim / "thesis.txt", lock)
    found = run("evict", "--cache", str(cache), "--max-size", "1300000")
    assert found.returncode == 6
    assert "hard links" in found.stderr


@root_only
@pytest.mark.parametrize("what", ["bind", "tmpfs"])
def test_recovery_enters_no_mount(cache: Path, victim: Path, what: str) -> None:
    """A bind mount has the same device number as its target: only the kernel's mount id differs."""
    shard = _as_trash(cache)
    (shard / "c").mkdir()
    mount = ["--bind", str(victim), str(shard / "c")] if what == "bind" else ["-t", "tmpfs", "tmpfs", str(shard / "c")]
    if subprocess.run(["mount", *mount], check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (shard / "c" / "more").touch() if what == "tmpfs" else None
        found = run("stats", "--cache", str(cache))
        assert "another file system is mounted here" in found.stderr
        assert "Traceback" not in found.stderr
        assert sorted(path.name for path in (shard / "c").iterdir()) == (
            ["more"] if what == "tmpfs" else sorted(path.name for path in victim.iterdir())
        )
    finally:
        subprocess.run(["umount", str(shard / "c")], check=True)
    assert run("stats", "--cache", str(cache)).returncode == 0
    assert not shard.exists()


@root_only
def test_recovery_leaves_a_folder_of_another_user(cache: Path) -> None:
    shard = _as_trash(cache)
    (shard / "mine").mkdir()
    (shard / "mine" / "notes").touch()
    os.chown(shard / "mine", 65534, 65534)
    found = run("stats", "--cache", str(cache))
    assert "belongs to another user (65534)" in found.stderr
    assert (shard / "mine" / "notes").exists()


def test_removal_accepts_only_checked_names(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", b"file", Path("file"), 3):
        with pytest.raises(TypeError):
            remove(tmp_path, name)  # type: ignore[arg-type]
    layout = Layout(tmp_path)
    for make in (layout.shard, layout.listing, layout.record, layout.lock):
        with pytest.raises(TypeError):
            make("0" * 16)  # type: ignore[arg-type]
    for path in (tmp_path / "a" / "b", tmp_path / "shards" / "x" / ".." / "y"):
        with pytest.raises((ValueError, CatalogError)):
            layout.remove(path)
    assert (tmp_path / "file").exists()


@pytest.mark.parametrize(
    "text", ["", ".", "..", "a/b", "/a", "a\0b", "a\\b", "x" * 256, "ä" * 128, None, 3, b"x", ["x"]]
)
def test_an_invalid_name_is_refused(text: Any) -> None:
    with pytest.raises(CatalogError, match="is no name of a file"):
        Name(text)


@pytest.mark.parametrize("text", ["0" * 15, "0" * 17, "0" * 15 + "G", "0" * 15 + "A", "0" * 16 + "\n", "٠" * 16, None])
def test_an_invalid_id_is_refused(text: Any) -> None:
    with pytest.raises(CatalogError, match="is no name of a shard"):
        Id(text)
    assert not Id.fits(text)


FORMATS = {
    "lmdb": "data.lmdb",
    "hdf5": "data.h5",
    "tfrecord": "data.tfrecord",
    "zarr": "data.zarr/npy/c.0.0",
    "hdf5:gzip": "data.h5",
    "tfrecord:gzip": "data.tfrecord",
    "zarr:zstd": "data.zarr/npy/c.0.0",
}
"""Format and compression: the file of a shard that holds the values."""


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Create a cache of one shard in each format."""
    folder = tmp_path_factory.mktemp("caches")
    (folder / "source").mkdir()
    for number in range(8):
        np.save(folder / "source" / f"{number}.npy", np.full(1000, number, "f8"))
    for name in FORMATS:
        kind, _, compression = name.partition(":")
        with cachetool.open_cache(folder / name, max_size="8MB") as made:
            made.pull(folder / "source", all=True, to=kind, workers=1)
            if compression:
                made.convert(to=kind, compression=compression, workers=1)
    return {name: folder / name for name in FORMATS}


def _readers(cache: Path) -> Iterator[Callable[[], object]]:
    """Return each way to read the samples of a cache."""

    def load(*, verify: bool = False) -> None:
        with Loader(cache, batch_size=4, workers=0, verify=verify) as loader:
            list(loader)

    def sample() -> None:
        with open_cache(cache) as opened:
            read_sample(opened, opened.shards()[0].id, 0)

    def by_library() -> None:
        with open_cache(cache) as opened:
            (shard,) = opened.shards()
            open_shard(shard.path, get_format(shard.format), shard.schema, library=True).close()

    yield load
    yield lambda: load(verify=True)
    yield sample
    yield by_library


def _replaced(path: Path, how: str, aside: Path) -> None:
    """Replace a file or folder by something else. The original then lies at ``aside``."""
    aside.parent.mkdir(exist_ok=True)
    path.rename(aside)
    if how == "link":
        path.symlink_to(aside)
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "socket":
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    else:
        path.mkdir()


_SAID = {
    "link": "is a link",
    "pipe": "is no plain file",
    "socket": "is no plain file",
    "folder": "is no plain file|is not a whole|is not a plain file|changed after they were written",
}
"""The messages. For a folder, a library raises the same error as for foreign bytes."""


@pytest.mark.parametrize("how", _SAID)
@pytest.mark.parametrize("name", FORMATS)
def test_a_link_or_pipe_or_folder_in_place_of_a_shards_file_is_not_read(
    caches: dict[str, Path], tmp_path: Path, name: str, how: str
) -> None:
    """A link in a shard may lead to any file of the user. A read from a pipe waits forever."""
    above = ["data.zarr", "data.zarr/npy", "."] if "zarr" in name else ["."]
    for number, file in enumerate((FORMATS[name], "extents.bin", *(above if how == "link" else []))):
        cache = tmp_path / f"{number}" / "cache"
        shutil.copytree(caches[name], cache)
        (shard,) = (cache / "shards").iterdir()
        _replaced(shard / file, how, cache.parent / "aside" / Path(file).name)
        unread = how == "folder" and file == "extents.bin"  # the library does not need this file
        for read in list(_readers(cache))[: -1 if unread else None]:
            with pytest.raises(CorruptError, match=_SAID[how]) as told:
                read()
            assert str(shard) in str(told.value)
            assert len(str(told.value).splitlines()) == 1
        found = verify(cache)
        assert [problem for problem in found.problems if problem.shard == shard.name]


_HOSTILE = ("9e999", "-1", "9223372036854775807", "'x'", "x'ff00'", "NULL", "1e300", f"'{'[' * 100_000}'")
"""SQL values that cachetool never writes, or writes only into few columns."""
_ROWS = (
    f"INSERT INTO holders VALUES ('{'1' * 16}', 1, 'host', 'what', 1)",
    f"INSERT INTO jobs SELECT 'job', id, '{'1' * 16}', 5, NULL, 0, 0, 0, 1, 0.1, 'oldest', 0, 0, 0 FROM sources",
    "INSERT INTO claims (source, pass_number, start, stop, reopened) SELECT id, 0, 0, 1, 1 FROM sources",
    f"INSERT INTO leases VALUES (1, '{'1' * 16}', 'run', 0, 'default', 1, 1)",
    f"INSERT INTO background SELECT id, '{'1' * 16}', 1, 'url', 'default', 'pulling', 0, NULL, 1, 1 FROM sources",
    "INSERT OR REPLACE INTO events VALUES (1, 1, 'error', 'default', 'subject', 'text')",
    "INSERT INTO evictions VALUES ('default', 'room', 'oldest', 1, 1, 1)",
)


class _Odd:
    """A cache whose catalog gets one invalid value after another. Every command that shows the value reads it."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        edit(root, *_ROWS)
        self.root, self.capsys = root, capsys
        self.catalog = root / "catalog.sqlite3"
        self.pristine = self.catalog.read_bytes()
        self.files = sorted((root / "shards").rglob("*"))
        with contextlib.closing(sqlite3.connect(self.catalog)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            self.columns = [
                (table, row[1])
                for (table,) in tables
                if not table.startswith("sqlite_")
                for row in connection.execute(f"PRAGMA table_info({table})")
            ]
        verbs = [lambda verb=verb: self.verb(verb) for verb in ("stats", "ls", "doctor", "verify")]
        self.readers: list[Callable[[], None]] = [*verbs, self.library, self.load]

    def put(self, table: str, column: str, value: str) -> bool:
        """Write the value into one row. Return False if the catalog cannot store it."""
        self.catalog.write_bytes(self.pristine)
        self.catalog.with_name("catalog.sqlite3-journal").unlink(missing_ok=True)
        try:
            edit(self.root, f"UPDATE OR REPLACE {table} SET {column} = {value}")
        except sqlite3.IntegrityError:
            return False
        return True

    def verb(self, verb: str) -> None:
        code = app.run([verb, "--cache", str(self.root)])
        said = self.capsys.readouterr().err
        assert "a bug" not in said
        assert "Traceback" not in said
        assert code in (0, 2, 4, 5, 6) or verb == "doctor"

    def library(self) -> None:
        with contextlib.suppress(CacheToolError), open_cache(self.root) as opened:
            opened.stats()
            opened.shards()

    def load(self) -> None:
        with (
            contextlib.suppress(CacheToolError),
            Loader(self.root, batch_size=16, workers=0, wait=0, hold=0) as loader,
        ):
            list(loader)

    def look(self) -> None:
        with open_cache(self.root) as opened:
            opened.stats()
            View.of_snapshot(opened.snapshot(peek=True))

    def check(self, table: str, column: str, value: str, readers: list[Callable[[], None]]) -> None:
        if self.put(table, column, value):
            for read in readers:
                try:
                    read()
                except Exception as error:  # noqa: BLE001 (any exception belongs to this value)
                    pytest.fail(f"{table}.{column} = {value[:20]}: {error!r}")
            assert sorted((self.root / "shards").rglob("*")) == self.files, (table, column, value[:20])


@pytest.fixture
def odd(cache: Path, victim: Path, capsys: pytest.CaptureFixture[str]) -> _Odd:
    return _Odd(cache, capsys)


def test_values_that_cachetool_never_writes_end_in_one_line(odd: _Odd) -> None:
    """One value and one reader per column; the next test has all of them."""
    for number, (table, column) in enumerate(odd.columns):
        value = _HOSTILE[number % len(_HOSTILE)]
        odd.check(table, column, value, [odd.readers[number % len(odd.readers)]])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_value_in_every_column_ends_in_one_line(odd: _Odd) -> None:
    for table, column in odd.columns:
        for value in _HOSTILE:
            odd.check(table, column, value, odd.readers)


_SHOWN = (("shards", "draws"), ("shards", "samples"), ("events", "at"), ("evictions", "bytes"))
"""The columns whose values harm no command that only shows them: only ``verify`` names them."""


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("shards", "bytes", "9223372036854775807"),
        ("shards", "draws", _HOSTILE[-1]),
        ("shards", "samples", "-1"),
        ("sources", "options", _HOSTILE[-1]),
        ("datasets", "schema", _HOSTILE[-1]),
        ("cache", "pages", "-1"),
        ("events", "at", "9e999"),
        ("evictions", "bytes", "9223372036854775807"),
    ],
)
def test_an_invalid_value_is_named_and_a_repair_removes_it(odd: _Odd, table: str, column: str, value: str) -> None:
    assert odd.put(table, column, value)
    wrong = verify(odd.root)
    assert any("cannot be trusted: its table" in problem.what for problem in wrong.problems)
    if (table, column) not in _SHOWN:
        said = rf"({table}'|integer overflow).*verify --repair"
        with pytest.raises(CatalogError, match=said) as told:
            odd.look()
        assert len(str(told.value).splitlines()) == 1
    assert verify(odd.root, repair=True).sound
    assert verify(odd.root).problems == []
    with open_cache(odd.root) as opened:
        assert json.dumps(opened.stats().as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("shards", "draws", "[[0, 400000000]]"),  # the shard has 48 samples: listing these numbers took 6 GB
        ("sources", "segments", '[["a"]]'),
        ("sources", "segments", "{}"),
        ("sources", "past", "[5]"),
        ("sources", "units", -1),
        ("datasets", "schema", '[{"name": "x", "dtype": "|O", "shape": [2]}]'),
    ],
)
def test_a_pull_names_an_invalid_value_and_the_repair_command(
    cache: Path, table: str, column: str, value: object
) -> None:
    with contextlib.closing(sqlite3.connect(cache / "catalog.sqlite3")) as connection, connection:
        connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
        (source,) = connection.execute("SELECT url FROM sources").fetchone()
    said = run("pull", source, "--samples", "1", "--cache", str(cache), "--quiet")
    assert said.returncode == 6, said
    assert f"its table '{table}' has '{column}'" in said.stderr
    assert said.stderr.endswith(f"run: cachetool verify --repair --cache {cache}\n"), said.stderr
    assert run("verify", "--repair", "--cache", str(cache)).returncode == 0
    assert run("verify", "--cache", str(cache)).returncode == 0


_PAGE, _FAN, _LEVELS = 4096, 400, 6
"""Bytes of a page, pointers in each page to the same page, and the number of such pages above the rows."""


def _pointers_to(page: int) -> bytes:
    """Return an interior page of a table (sqlite.org/fileformat.html, section 1.6) whose cells all point to
    ``page``.
    """
    body, end, cells = bytearray(_PAGE), _PAGE, []
    for number in range(_FAN):
        cell = struct.pack(">I", page) + bytes([number % 5 + 1])
        end -= len(cell)
        body[end : end + len(cell)] = cell
        cells.append(end)
    body[:12] = struct.pack(">BHHHB", 5, 0, _FAN, end, 0) + struct.pack(">I", page)
    body[12 : 12 + 2 * _FAN] = struct.pack(f">{_FAN}H", *cells)
    return bytes(body)


def _without_end(catalog: Path, table: str) -> None:
    """Make ``table`` of a catalog reference its only page of rows 400 ** 6 times."""
    with contextlib.closing(sqlite3.connect(catalog)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
    with catalog.open("r+b") as file:
        file.seek((root - 1) * _PAGE)
        made = [file.read(_PAGE), *(_pointers_to(pages + level) for level in range(1, _LEVELS))]
        file.seek((root - 1) * _PAGE)
        file.write(_pointers_to(pages + _LEVELS))
        file.seek(pages * _PAGE)
        file.write(b"".join(made))
        file.seek(28)
        file.write(struct.pack(">I", pages + _LEVELS))


def test_a_table_with_endless_rows_is_named_and_repaired(cache: Path) -> None:
    with contextlib.closing(sqlite3.connect(cache / "catalog.sqlite3")) as connection, connection:
        connection.execute(
            "INSERT INTO leases (holder, run, epoch, version, dataset, taken) VALUES (?, 'r', 1, 1, 'default', 1.0)",
            ("1" * 16,),
        )
    _without_end(cache / "catalog.sqlite3", "leases")

    ran = run("stats", "--cache", str(cache))
    assert ran.returncode == 6
    assert "more rows than fit into a file of its size; run: cachetool verify --repair" in ran.stderr
    assert verify(cache, repair=True).sound
    assert verify(cache).sound


@pytest.mark.parametrize("name", ["catalog.sqlite3", "catalog.sqlite3-journal"])
def test_a_pipe_in_place_of_a_catalog_is_named_without_waiting(cache: Path, name: str) -> None:
    (cache / name).unlink(missing_ok=True)
    os.mkfifo(cache / name)
    with pytest.raises(
        CatalogError, match=f"{name} is not a plain file; remove it, then run: cachetool verify --repair"
    ):
        cachetool.open_cache(cache)
    (cache / name).unlink()
    verify(cache, repair=True)
    assert verify(cache).sound


def test_many_statements_in_one_transaction_do_not_count_as_an_endless_table(cache: Path) -> None:
    with cachetool.open_cache(cache) as used, used.catalog.write() as connection:
        connection.executemany(
            "INSERT INTO events (at, kind, dataset, subject, text) VALUES (?, 'x', '', 's', 't')",
            ((1.0,) for _ in range(2_000)),
        )
        for _ in range(3_000):  # 50 million instructions
            assert connection.execute("SELECT sum(at) FROM events").fetchone()[0] >= 2_000
