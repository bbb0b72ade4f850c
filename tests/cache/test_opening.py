"""Opening: which folders are caches, and which are refused without a change."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from pathlib import Path

import pytest

import cachetool
from cachetool.cache import CacheDir, open_cache
from cachetool.cache.layout import Layout
from cachetool.cache.records import read_shard_json
from cachetool.check.verify import verify
from cachetool.core.errors import CatalogError, UsageError
from cachetool.proc.disk import known_error, too_long

from .conftest import SCHEMA, put_shard


def test_a_new_cache_is_on_disk_only_after_its_first_write(root: Path) -> None:
    said: list[str] = []
    with open_cache(root, max_size="4MB", notify=said.append) as cache:
        assert cache.datasets() == []
        assert cache.shards() == []
        assert not root.exists()
        cache.declare("default", SCHEMA)

    assert said == [f"new cache {root}, cap 4.0 MB"]
    assert (root / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
    assert root.stat().st_mode & 0o777 == 0o700


def test_the_default_cap_is_half_of_the_free_disk(root: Path) -> None:
    said: list[str] = []
    cache = open_cache(root, notify=said.append)

    assert abs(cache.max_size - cache.layout.free_disk() // 2) < 10**9
    assert said == []  # no file exists yet, and none may be created
    _ = cache.catalog
    assert len(said) == 1
    assert "half of the free disk" in said[0]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        open_cache(tmp_path / "file")


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="is not a cache"):
        open_cache(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_command_that_only_reads_creates_no_cache(root: Path) -> None:
    with pytest.raises(UsageError, match="there is no cache"):
        open_cache(root, create=False)


def test_a_newer_layout_and_a_newer_catalog_are_refused(cache: CacheDir, root: Path) -> None:
    _ = cache.version
    cache.close()
    (root / "cachetool.json").write_text(json.dumps({"layout": 2}))
    with pytest.raises(CatalogError, match="newer cachetool"):
        open_cache(root)
    (root / "cachetool.json").write_text(json.dumps({"layout": 1}))
    with sqlite3.connect(root / "catalog.sqlite3") as raw:
        raw.execute("PRAGMA user_version = 99")
    with pytest.raises(CatalogError, match="schema 99"):
        open_cache(root).datasets()


@pytest.mark.parametrize("how", ["no application id", "migrated"])
def test_a_cache_of_a_pre_release_is_refused_in_one_line_and_not_changed(cache: CacheDir, root: Path, how: str) -> None:
    put_shard(cache)
    cache.close()
    with contextlib.closing(sqlite3.connect(root / "catalog.sqlite3")) as raw:
        raw.execute("PRAGMA application_id = 0")
        if how == "migrated":
            raw.execute("PRAGMA user_version = 11")
    before = (root / "catalog.sqlite3").read_bytes()
    says = f"^cache {root} was made by a pre-release of cachetool; pull again into an empty folder$"
    with pytest.raises(CatalogError, match=says) as told:
        open_cache(root).datasets()
    assert told.value.exit_code == 6
    with pytest.raises(CatalogError, match=says):
        verify(root, repair=True)
    assert (root / "catalog.sqlite3").read_bytes() == before


def test_a_foreign_application_id_is_refused_and_repaired(cache: CacheDir, root: Path) -> None:
    put_shard(cache)
    cache.close()
    with contextlib.closing(sqlite3.connect(root / "catalog.sqlite3")) as raw:
        raw.execute("PRAGMA application_id = 7")
    with pytest.raises(CatalogError, match="has the application id 7, which cachetool never writes; run: cachetool"):
        open_cache(root)
    assert verify(root, repair=True).sound


def test_an_old_sqlite_is_named(cache: CacheDir, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ = cache.version
    cache.close()
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 36, 0))
    with pytest.raises(CatalogError, match=r"needs SQLite 3\.37 or newer"):
        open_cache(root)


def test_a_table_without_its_checks_is_refused(cache: CacheDir, root: Path) -> None:
    _ = cache.version
    cache.close()
    with contextlib.closing(sqlite3.connect(root / "catalog.sqlite3", isolation_level=None)) as raw:
        raw.execute("DROP TABLE leases")
        raw.execute("CREATE TABLE leases (id, holder, run, epoch, dataset, version, taken)")
    with pytest.raises(CatalogError, match="has a table 'leases', which cachetool never makes"):
        open_cache(root)
    assert verify(root, repair=True).sound
    with open_cache(root) as again:
        assert again.datasets() == []


def test_a_missing_or_garbled_catalog_is_a_catalog_error(cache: CacheDir, root: Path) -> None:
    cache.close()
    (root / "catalog.sqlite3").write_bytes(b"x" * 4096)
    with pytest.raises(CatalogError, match="not a database"):
        open_cache(root).datasets()
    (root / "catalog.sqlite3").unlink()
    with pytest.raises(CatalogError, match="is missing; run: cachetool verify --repair"):
        open_cache(root).datasets()


@pytest.mark.parametrize("name", ["catalog.sqlite3", "cachetool.json"])
def test_a_folder_in_place_of_a_file_is_named_and_replaced_by_a_repair(cache: CacheDir, root: Path, name: str) -> None:
    put_shard(cache)
    before = cache.max_size
    cache.close()
    (root / name).unlink()
    (root / name).mkdir()
    for repair in (False, True):
        with pytest.raises(CatalogError, match=rf"{name} is a folder; remove it, then run: cachetool verify --repair"):
            verify(root, repair=repair)
    (root / name).rmdir()
    verify(root, repair=True)
    with open_cache(root, create=False) as again:
        assert again.max_size == before


def test_a_cache_with_a_relative_path_stays_the_same_after_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_cache("here", max_size="4MB") as cache:
        cache.declare("default", SCHEMA)
        monkeypatch.chdir(tmp_path / "elsewhere")
        put_shard(cache)
        assert cache.root == tmp_path / "here"
    assert len(open_cache(tmp_path / "here").shards()) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_new_cache_with_a_relative_path_is_created_in_the_folder_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_cache("here", max_size="4MB") as cache:
        monkeypatch.chdir(tmp_path / "elsewhere")
        cache.declare("default", SCHEMA)
    assert (tmp_path / "here" / "catalog.sqlite3").is_file()


def test_the_environment_variable_sets_the_default_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHETOOL_CACHE", str(root))

    assert open_cache().root == root


def test_shard_json_carries_its_checksum_and_its_id(cache: CacheDir) -> None:
    shard = put_shard(cache)
    folder = cache.root / "shards" / shard
    assert read_shard_json(folder)["samples"] == 10
    text = (folder / "shard.json").read_text()
    (folder / "shard.json").write_text(text.replace('"samples": 10', '"samples": 11'))
    with pytest.raises(ValueError, match="checksum"):
        read_shard_json(folder)
    (folder / "shard.json").write_text(text)
    folder.rename(folder.with_name("0" * 16))
    with pytest.raises(ValueError, match="belongs to shard"):
        read_shard_json(folder.with_name("0" * 16))


def test_a_command_in_a_message_names_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is left out if the command uses that cache by default. A path with spaces is quoted for a shell."""
    root = tmp_path / "my cache"
    with open_cache(root, max_size="4MB") as cache:
        cache.declare("default", SCHEMA)
    (root / "catalog.sqlite3").unlink()
    command = f"run: cachetool verify --repair --cache '{root}'"

    with pytest.raises(CatalogError) as caught:
        open_cache(root).datasets()
    assert str(caught.value).endswith(command)
    monkeypatch.setenv("CACHETOOL_CACHE", str(root))
    with pytest.raises(CatalogError) as caught:
        open_cache(root).datasets()
    assert str(caught.value).endswith("run: cachetool verify --repair")


def test_no_message_advises_a_command_for_another_cache() -> None:
    """Every command on a cache in a message of the source has the option that names the cache."""
    package = Path(cachetool.__file__).parent
    bare = re.compile(r'(?:run|with|see|is): cachetool (?:verify|evict|ls|stats|pull SOURCE|convert --to)[^"{\n]*"')
    found = [
        f"{path.relative_to(package)}: {match.group()}"
        for path in sorted(package.rglob("*.py"))
        for match in bare.finditer(path.read_text())
    ]
    assert found == []


def test_a_folder_without_read_permission_is_not_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    assert not Layout(tmp_path / ("a" * 300)).is_cache
    monkeypatch.setattr("os.stat", refused)
    assert not Layout(tmp_path).is_cache


def test_any_name_is_accepted_if_the_file_system_reports_no_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert too_long(tmp_path / ("a" * 300))
    monkeypatch.setattr("os.pathconf", lambda *_: -1)
    assert not too_long(tmp_path / ("a" * 300))


def test_the_advice_depends_on_the_owner_of_the_cache(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_cache(root, max_size="20MB") as cache:
        cache.declare("default", SCHEMA)
        folder = cache.layout.shards
    refused = PermissionError(13, "Permission denied", str(folder / "a"))
    assert "chmod -R u+rwX" in str(known_error(refused))
    monkeypatch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
    assert f"the cache belongs to another user ({folder.stat().st_uid})" in str(known_error(refused))


def test_an_error_that_is_its_own_cause_is_examined_once() -> None:
    error = UsageError("raised again")
    error.__cause__ = error
    assert known_error(error) is None
