"""Working files and folders beside those of a user: planted files and the user's own files are never touched.

Root plays the other user, by giving that user the ownership of planted files.
"""

from __future__ import annotations

import ast
import base64
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cachetool
from cachetool.cache import open_cache
from cachetool.cli.stats import _plain_file
from cachetool.cluster.agent import Agent
from cachetool.cluster.pull import _Pull
from cachetool.conversion import to_files as export
from cachetool.core.errors import CatalogError, CorruptError, Interrupted, UsageError
from cachetool.core.names import Name
from cachetool.core.schema import Field, Schema
from cachetool.loaders.snapshots.plain_files import shards_at
from cachetool.proc import scratch as scratches
from cachetool.proc.folders import remove_held, replacing, write_piece
from cachetool.proc.scratch import WorkFolder, scratch
from tests.sources.files import open_files
from tests.test_layers import MODULES

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

# ---------------------------------------------------------------------------------------------------- the walk

WORKING = {"cachetool.proc.folders", "cachetool.proc.scratch"}
CACHE = "below the root of a cache, which is this user's alone; what lies there is counted, so names are fixed"
ALLOWED: dict[str, dict[str, str]] = {
    # module: its calls, and the reason why no helper makes them
    "cache.commit": {"mkdir": CACHE},
    "proc.disk": {"tempfile.TemporaryFile": "has no name"},
    "cache.holders": {"os.O_CREAT": CACHE, "mkdir": CACHE, "unlink": CACHE},
    "cache.layout": {"mkdir": CACHE},
    "cache.listings": {"os.O_CREAT": CACHE, "shutil.copytree": CACHE, "shutil.copyfileobj": CACHE, "os.rename": CACHE},
    "cache.history": {"os.replace": CACHE},
    "cache.marker": {"os.replace": CACHE},
    "cache.rebuild": {"os.replace": CACHE},
    "cache.records": {"os.replace": CACHE, "os.rename": CACHE},
    "cache.removal": {"mkdir": CACHE},
    "cache.repair": {"os.rename": CACHE},
    "cache.transaction_lock": {"os.O_CREAT": CACHE},
    "cache.unmaking": {"os.rename": "the root of a cache, to a random name", "rmdir": "folders above it, while empty"},
    "stores.whole": {"tempfile.TemporaryFile": "has no name"},
    "cli.output": {"open w": "/dev/null"},
    "formats.hdf5": {"h5py.File w": "into memory"},
    "pull.shared_listing": {"chmod": "of a new folder that nobody else may enter yet"},
    "cluster.pull": {"os.rename": "a segment into a listing, in its own scratch folder"},
    "sources.file_opening": {"tempfile.NamedTemporaryFile": "new, random, 0600; where memory has no files"},
}
OS = {
    "O_CREAT", "link", "makedirs", "mkdir", "mkfifo", "mknod", "remove", "removedirs", "rename", "renames", "replace",
    "rmdir", "symlink", "truncate", "unlink",
}  # fmt: skip
METHODS = {
    "chmod", "hardlink_to", "lchmod", "link_to", "makedirs", "mkdir", "rmdir", "rmtree", "symlink_to", "touch",
    "unlink", "write_bytes", "write_text",
}  # fmt: skip
HARMLESS = {
    "shutil": {"disk_usage", "get_terminal_size", "which"},
    "tempfile": {"gettempdir", "gettempprefix"},
}
SAVING = {"memmap", "open_memmap", "save", "savetxt", "savez", "savez_compressed", "tofile"}
WRITERS = {"h5py.File", "lmdb.open", "zarr.open", "zarr.open_group", "zarr.create", "zarr.create_array", "zarr.group",
           "zarr.save", "io.open", "gzip.open", "bz2.open", "lzma.open", "tarfile.open", "zipfile.ZipFile",
           "codecs.open"}  # fmt: skip


def dotted(node: ast.AST) -> str:
    """Return ``os.path.join`` for such an expression; otherwise its last name."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def writes(call: ast.Call, position: int | None) -> bool:
    """Return True if a call has a mode that creates or changes a file, or a mode that the code does not show."""
    given = [word.value for word in call.keywords if word.arg == "mode"]
    if position is not None and len(call.args) > position:
        given.append(call.args[position])
    return any(not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+") for mode in given)


def doings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the file operations of code, by line. A function that is only referenced may be called later."""
    for node in ast.walk(tree):
        name = dotted(node)
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil", "tempfile"):
            for alias in node.names:
                if alias.name in OS or (node.module in HARMLESS and alias.name not in HARMLESS[node.module]):
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            first, _, last = name.rpartition(".")
            if first == "os" and last in OS:
                yield node.lineno, name
            elif first in HARMLESS:
                if last not in HARMLESS[first]:
                    yield node.lineno, name
            elif last in METHODS:
                yield node.lineno, last
        elif isinstance(node, ast.Call) and (doing := done_by(node)):
            yield node.lineno, doing


def done_by(call: ast.Call) -> str:
    """Return a call's operation on a file that it names; empty if it only reads, or writes to an open file."""
    called, method = dotted(call.func), isinstance(call.func, ast.Attribute)
    last = called.rpartition(".")[2]
    first = dotted(call.args[0]) if call.args else ""
    if called == "open":  # the file behind a descriptor was opened before
        return "open w" if writes(call, 1) and first != "fd" else ""
    if called == "lmdb.open":
        readonly = {word.arg: word.value for word in call.keywords}.get("readonly")
        return "" if isinstance(readonly, ast.Constant) and readonly.value is True else "lmdb.open w"
    if called in WRITERS:
        return f"{called} w" if writes(call, 1) or last in ("create", "create_array", "group", "save") else ""
    if last == "open" and method and called != "os.open":
        named = [word for word in call.keywords if word.arg == "mode"]
        plain = [mode for mode in call.args[:1] if isinstance(mode, ast.Constant)]
        return "open w" if (named and writes(call, None)) or (plain and writes(call, 0)) else ""
    if last in SAVING:
        return "" if first in ("file", "array") else last
    if last in ("rename", "replace") and method and len(call.args) == 1 and not call.keywords:
        return last
    return ""


def test_only_the_helpers_create_and_remove_files() -> None:
    wrong, used = [], set()
    for name, path in MODULES.items():
        if f"cachetool.{name}" in WORKING:
            continue
        for line, doing in doings(ast.parse(path.read_text(encoding="utf-8"))):
            used.add((name, doing))
            if doing not in ALLOWED.get(name, {}):
                wrong.append(f"{name}:{line} {doing}")
    assert wrong == []
    assert {(name, doing) for name, each in ALLOWED.items() for doing in each} == used


@pytest.mark.parametrize(
    ("code", "doing"),
    [
        ("shutil.rmtree(x)", "shutil.rmtree"),
        ("stack.callback(shutil.rmtree, x)", "shutil.rmtree"),
        ("from shutil import rmtree as gone", "shutil.rmtree"),
        ("from os import unlink", "os.unlink"),
        ("path.unlink(missing_ok=True)", "unlink"),
        ("list(map(Path.unlink, paths))", "unlink"),
        ("os.remove(x)", "os.remove"),
        ("path.parent.mkdir(parents=True, exist_ok=True)", "mkdir"),
        ("os.makedirs(x, exist_ok=True)", "os.makedirs"),
        ("open(x, 'w')", "open w"),
        ("open(x, mode=how)", "open w"),
        ("path.open('ab')", "open w"),
        ("path.open(mode='x')", "open w"),
        ("(a / b).write_text(t)", "write_text"),
        ("os.open(x, os.O_RDWR | os.O_CREAT)", "os.O_CREAT"),
        ("tempfile.mkdtemp()", "tempfile.mkdtemp"),
        ("tempfile.NamedTemporaryFile()", "tempfile.NamedTemporaryFile"),
        ("os.replace(a, b)", "os.replace"),
        ("a.replace(b)", "replace"),
        ("path.rename(target)", "rename"),
        ("np.save(folder / 'x.npy', values)", "save"),
        ("h5py.File(path, 'a')", "h5py.File w"),
        ("lmdb.open(path, map_size=1)", "lmdb.open w"),
    ],
)  # fmt: skip
def test_the_check_finds_file_operations(code: str, doing: str) -> None:
    assert doing in [found for _, found in doings(ast.parse(code))]


@pytest.mark.parametrize(
    "code",
    ["open(x)", "open(x, 'rb')", "path.open('rb')", "text.replace('a', 'b')", "replace(row, x=1)", "names.remove(x)",
     "lmdb.open(x, readonly=True)", "h5py.File(x, 'r')", "os.open(x, os.O_RDONLY)", "tempfile.gettempdir()"],
)  # fmt: skip
def test_the_check_accepts_harmless_code(code: str) -> None:
    assert list(doings(ast.parse(code))) == []


# ---------------------------------------------------------------------------------------------------- helpers


def seen(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Return type, owner and contents of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        how = path.lstat()
        data = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (how.st_mode, how.st_uid, how.st_ino, data)
    return found


def given_away(path: Path) -> Path:
    """Give a path and everything below it to another user."""
    for each in [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]:
        os.lchown(each, OTHER, OTHER)
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Create files and folders that must not change, with names that working folders contain."""
    home = tmp_path / "home"
    for name in ("thesis/t.txt", "notes", "made/part-00000.h5", "done/part-00000.h5.json", "plan.json", "keys.npy"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("precious")
    return home


@pytest.fixture(params=[0o777, 0o1777], ids=["group-folder", "sticky"])
def shared(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Create a folder that others may write to, like that of a group or like /tmp."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(request.param)
    return shared


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(120.0).reshape(20, 6))
    return path


class Here:
    """An engine that runs the tasks in this process, up to a number of parts."""

    most: int | None = None

    def run(self, tasks: Any, on_message: Any = None) -> Any:
        self.send = functools.partial(on_message, 0)
        done = []
        for task in tasks:
            few = {"todo": task.arguments["todo"][: self.most]}
            done.append(export.write_parts(self, **{**task.arguments, **few}))  # type: ignore[arg-type]
        if self.most is not None:
            raise Interrupted("stopped")
        return done


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "LocalEngine", Here)


def convert(rows: Path, out: Path, **more: Any) -> Path:
    made = cachetool.convert(rows, to="hdf5", out=out, workers=1, shard_size=240, **more)
    assert made.samples == 20
    assert sorted(os.listdir(out)) == [".extents", "dataset.json", *(f"part-{n:05d}.h5" for n in range(4))]
    values = []
    with open_files(out) as source:
        for block in source.blocks():
            values += np.asarray(block.columns["x"]).tolist()
    assert values == np.arange(120.0).reshape(20, 6).tolist()
    return out


def interrupted(rows: Path, out: Path) -> Path:
    """Return the working folder that a conversion left, with two complete parts."""
    Here.most = 2
    try:
        with pytest.raises(Interrupted, match=r"keeps 2 of 4 files"):
            cachetool.convert(rows, to="hdf5", out=out, workers=1, shard_size=240)
    finally:
        Here.most = None
    (left,) = out.parent.glob(f".{out.name}.partial-*")
    return left


# ---------------------------------------------------------------------------------------------------- convert --out


def test_folders_of_the_user_are_never_used_as_working_folders_for_any_name(rows: Path, tmp_path: Path) -> None:
    for name in (".out.partial", ".out.partial-0123456789ab", ".out.partial-"):
        (tmp_path / name / "made").mkdir(parents=True)
        (tmp_path / name / "plan.json").write_text("{}")
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / ".out.partial-f").write_text("a file")
    (tmp_path / ".out.partial-e").mkdir()
    before = seen(tmp_path)

    convert(rows, tmp_path / "out")

    shutil.rmtree(tmp_path / "out")
    assert seen(tmp_path) == before


@as_root
def test_links_planted_beside_the_output_are_not_followed(rows: Path, shared: Path, home: Path) -> None:
    for name in (".out.partial", ".out.partial-0123456789ab"):
        (shared / name).symlink_to(home)
        given_away(shared / name)
    before = seen(home), seen(shared)

    convert(rows, shared / "out")

    shutil.rmtree(shared / "out")
    assert (seen(home), seen(shared)) == before


@as_root
@pytest.mark.parametrize("whose", ["all", "the folder", "the mark"])
def test_a_working_folder_prepared_by_another_user_is_not_continued(
    rows: Path, shared: Path, home: Path, whose: str
) -> None:
    """The folder has the right plan and the mark of a real run, but its parts would be those of the other user."""
    left = interrupted(rows, shared / "out")
    for each in (left / "done").iterdir():
        each.write_text(json.dumps({**json.loads(each.read_text()), "file": "../../../home/notes"}))
    if whose == "all":
        given_away(left)
    else:
        os.chown(left if whose == "the folder" else left / ".cachetool-working", OTHER, OTHER)
    before = seen(home), seen(shared)

    convert(rows, shared / "out")

    shutil.rmtree(shared / "out")
    assert (seen(home), seen(shared)) == before


def test_an_interrupted_conversion_in_a_shared_folder_continues(rows: Path, shared: Path) -> None:
    made = interrupted(rows, shared / "out") / "made"
    stamps = {path.name: path.stat().st_mtime_ns for path in made.glob("part-*.h5")}
    convert(rows, shared / "out")
    assert {name: (shared / "out" / name).stat().st_mtime_ns for name in stamps} == stamps
    assert (len(stamps), os.listdir(shared)) == (2, ["out"])


def test_a_record_that_names_another_file_is_ignored(rows: Path, tmp_path: Path, home: Path) -> None:
    left = interrupted(rows, tmp_path / "out")
    first, second = sorted((left / "done").iterdir())
    first.write_text(json.dumps({**json.loads(first.read_text()), "file": "../../home/notes"}))
    second.write_text('["part-00001.h5"]')
    (left / "done" / "part-00003.h5.json").symlink_to(home / "notes")
    (left / "made" / "part-00002.h5").unlink(missing_ok=True)
    (left / "made" / "part-00002.h5").symlink_to(home / "notes")
    (left / "made" / ".extents" / "part-00003.h5").symlink_to(home / "thesis")
    before = seen(home)

    convert(rows, tmp_path / "out")

    assert seen(home) == before
    assert list(tmp_path.glob(".out.*")) == []


def _open_to_all(left: Path, tmp_path: Path) -> None:
    left.chmod(0o777)


def _of_two_names(left: Path, tmp_path: Path) -> None:
    """Give the mark a second name, like a link that somebody creates in a shared folder of the user."""
    os.link(left / ".cachetool-working", tmp_path / "elsewhere")


def _of_another_output(left: Path, tmp_path: Path) -> None:
    left.rename(left.with_name(left.name.replace("out", "two")))
    (tmp_path / "out").symlink_to("two")  # out must not be written through this link; the other checks are about two


def _copied_text(left: Path, tmp_path: Path) -> None:
    mark = left / ".cachetool-working"
    mark.write_text(mark.read_text() + "\n")


def _linked_mark(left: Path, tmp_path: Path) -> None:
    (left / ".cachetool-working").rename(tmp_path / "mark")
    (left / ".cachetool-working").symlink_to(tmp_path / "mark")


def _pipe(left: Path, tmp_path: Path) -> None:
    (left / ".cachetool-working").unlink()
    os.mkfifo(left / ".cachetool-working")


@pytest.mark.parametrize("change", [_open_to_all, _of_two_names, _of_another_output, _copied_text, _linked_mark, _pipe])
def test_a_folder_with_an_invalid_mark_is_not_touched(
    rows: Path, tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    interrupted(rows, tmp_path / "out")
    change(next(tmp_path.glob(".out.partial-*")), tmp_path)
    before = {name: what for name, what in seen(tmp_path).items() if name != "two"}

    out = convert(rows, tmp_path / ("two" if change is _of_another_output else "out"))

    shutil.rmtree(out)
    assert seen(tmp_path) == before


@pytest.mark.parametrize("by", ["link", "folder"])
def test_swapping_a_working_folder_while_it_is_filled_writes_nothing_elsewhere(
    rows: Path, tmp_path: Path, home: Path, by: str
) -> None:
    """Others may rename foreign files in a folder without the sticky bit, and put other files in their place."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    before, came = seen(home), []

    def swap(progress: Any) -> None:
        if progress.phase == "convert" and not came:
            (work,) = shared.glob(".out.partial-*")
            came.append(work)
            work.rename(shared / "away")
            if by == "link":
                work.symlink_to(home)
            else:
                home.rename(work)

    convert(rows, shared / "out", progress=swap)

    assert seen(home if by == "link" else came[0]) == before
    assert sorted(os.listdir(shared)) == sorted([came[0].name, "away", "out"])
    assert os.listdir(shared / "away") == []


@pytest.mark.parametrize("what", ["file", "folder", "link", "full"])
def test_a_file_that_appears_at_the_output_meanwhile_stays_and_the_parts_are_kept(
    rows: Path, tmp_path: Path, home: Path, what: str
) -> None:
    out = tmp_path / "out"

    def plant(progress: Any) -> None:
        if progress.phase == "convert" and not os.path.lexists(out):
            if what == "file":
                out.write_text("planted")
            elif what == "link":
                out.symlink_to(home)
            else:
                out.mkdir()
                (out / "full").write_text("x") if what == "full" else None

    before = seen(home)
    with pytest.raises(UsageError, match=r"move it away, .*--out;?\n.*keeps 4 of 4 files"):
        cachetool.convert(rows, to="hdf5", out=out, workers=1, shard_size=240, progress=plant)
    assert seen(home) == before
    assert (what, out.is_symlink(), out.is_file()) == (what, what == "link", what == "file")

    out.rename(tmp_path / "moved")
    stamps = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob(".out.partial-*/made/part-*")}
    convert(rows, out)
    assert stamps == {name: (out / name).stat().st_mtime_ns for name in stamps}
    assert len(stamps) == 4


def test_the_output_has_the_modes_of_the_umask_and_the_working_folder_is_private(rows: Path, tmp_path: Path) -> None:
    modes = []

    def look(progress: Any) -> None:
        modes.extend(path.stat().st_mode & 0o777 for path in tmp_path.glob(".out.partial-*"))

    for mask in (0o000, 0o027):
        before = os.umask(mask)
        try:
            out = convert(rows, tmp_path / f"out{mask}" / "out", progress=look)
        finally:
            os.umask(before)
        assert out.stat().st_mode & 0o777 == 0o777 & ~mask
        assert (out / "part-00000.h5").stat().st_mode & 0o777 == 0o666 & ~mask
        assert [path.stat().st_mode & 0o777 for path in out.parent.glob(".out.*")] == []
    assert set(modes) <= {0o700}


@as_root
def test_a_link_of_another_user_on_the_way_to_the_output_is_refused(rows: Path, shared: Path, home: Path) -> None:
    (shared / "sub").symlink_to(home)
    given_away(shared / "sub")
    (shared / "mine").symlink_to(home)
    with pytest.raises(UsageError, match=r"leads through .*sub, a link that another user \(65534\) made;\nremove"):
        cachetool.convert(rows, to="hdf5", out=shared / "sub" / "out", workers=1)
    assert not (home / "out").exists()
    convert(rows, shared / "mine" / "out")


def test_a_locked_mark_means_that_another_process_writes(rows: Path, tmp_path: Path) -> None:
    work = WorkFolder.make(tmp_path, ".out.partial-", "out")
    with pytest.raises(UsageError, match="another process is writing"):
        cachetool.convert(rows, to="hdf5", out=tmp_path / "out", workers=1)
    assert work.path.is_dir()
    work.close()
    convert(rows, tmp_path / "out")
    assert list(tmp_path.glob(".out.*")) == []


# ---------------------------------------------------------------------------------------------------- temporary folders


def left_by_a_killed_process(parent: Path, prefix: str) -> Path:
    code = (
        "import os, sys, pathlib, cachetool.proc.scratch as s;"
        "held = s.scratch(pathlib.Path(sys.argv[1]), sys.argv[2]);"
        "made = held.__enter__(); (made / 'big').write_text('x'); os._exit(0)"
    )
    before = set(os.listdir(parent))
    subprocess.run([sys.executable, "-c", code, parent, prefix], check=True)
    (name,) = set(os.listdir(parent)) - before
    return parent / name


def test_only_leftovers_of_killed_processes_of_this_user_are_removed(shared: Path, home: Path) -> None:
    prefix = "cachetool-listing-"
    mine = left_by_a_killed_process(shared, prefix)
    (shared / f"{prefix}link").symlink_to(home)
    (shared / f"{prefix}own").mkdir()
    (shared / f"{prefix}own" / "keys.npy").write_text("mine")
    (shared / f"{prefix}file").write_text("mine")
    os.mkfifo(shared / f"{prefix}pipe")
    (shared / f"{prefix}marked").mkdir()
    (shared / f"{prefix}marked" / ".cachetool-working").write_text("")
    held = WorkFolder.make(shared, prefix, prefix)
    if os.geteuid() == 0:
        planted = given_away(left_by_a_killed_process(shared, prefix).rename(shared / "planted"))
        planted.rename(shared / f"{prefix}planted")
    before = {name: what for name, what in seen(shared).items() if not name.startswith(mine.name)}, seen(home)

    with scratch(shared, prefix) as made:
        (made / "listing").mkdir()
        assert not mine.exists()

    assert (seen(shared), seen(home)) == before
    held.remove()


def test_a_temporary_folder_that_was_replaced_is_not_emptied(tmp_path: Path, home: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    before = seen(home)
    with scratch(shared, "cachetool-input-") as made:
        (work,) = shared.iterdir()
        work.rename(shared / "away")
        home.rename(work)
        (made / "fetched").write_text("x")
        assert os.listdir(shared / "away") == [".cachetool-working", "fetched"] or len(os.listdir(shared / "away")) == 2
    assert seen(work) == before
    assert os.listdir(shared / "away") == []


def test_a_new_folder_that_was_replaced_before_it_is_opened_is_not_used(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, before, swapped = scratches.new_folder, seen(home), []

    def swapping(parent: Path, prefix: str) -> Path:
        path = new(parent, prefix)
        if len(swapped) < 2:
            path.rmdir()
            path.symlink_to(home) if swapped else shutil.copytree(home, path)
            swapped.append(path)
        return path

    monkeypatch.setattr(scratches, "new_folder", swapping)
    with scratch(tmp_path, "work-") as made:
        assert made not in swapped
        assert seen(home) == before
    assert sorted(seen(swapped[0])) == sorted(before)
    assert swapped[1].is_symlink()


def test_a_link_as_the_temporary_folder_is_followed_but_no_link_inside(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "cachetool-listing-mine").mkdir()
    (tmp_path / "link").symlink_to("there")
    with scratch(tmp_path / "link", "cachetool-listing-") as made:
        (made / "x").write_text("x")
        assert made.parent == tmp_path / "link"
    assert os.listdir(tmp_path / "there") == ["cachetool-listing-mine"]


def test_deleting_a_folder_keeps_the_targets_of_planted_mounts_and_links(tmp_path: Path, home: Path) -> None:
    work = WorkFolder.make(tmp_path, "w-", "w-")
    (work.path / "link").symlink_to(home)
    (work.path / "deep").mkdir()
    (work.path / "deep" / "link").symlink_to(home / "notes")
    os.link(home / "notes", work.path / "hard")
    os.mkfifo(work.path / "pipe")
    before = {name: (what[0], what[3]) for name, what in seen(home).items()}
    work.remove()
    assert {name: (what[0], what[3]) for name, what in seen(home).items()} == before
    assert os.listdir(tmp_path) == ["home"]


def test_the_open_folder_is_deleted_and_not_another_one_with_its_name(tmp_path: Path, home: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "x").write_text("x")
    fd = os.open(tmp_path / "work", os.O_RDONLY)
    (tmp_path / "work").rename(tmp_path / "away")
    (tmp_path / "work").symlink_to(home)
    before = seen(home)
    remove_held(fd, tmp_path / "work")
    os.close(fd)
    assert (seen(home), os.listdir(tmp_path / "away")) == (before, [])


# ---------------------------------------------------------------------------------------------------- stats --html


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    with open_cache(tmp_path / "cache", max_size="5MB") as opened:
        opened.declare("default", Schema((Field("x", "<f8", (2,)),)))
    return tmp_path / "cache"


def page(cache: Path, target: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "cachetool", "stats", "--cache", str(cache), "--html", str(target)]
    return subprocess.run(line, stderr=subprocess.PIPE, text=True, check=False, **{"stdout": subprocess.PIPE, **how})


@as_root
def test_planted_names_of_earlier_temporary_pages_are_not_used(tmp_path: Path, cache: Path, shared: Path) -> None:
    """Earlier versions used these names, with the process ids to come."""
    target = tmp_path / "target"
    target.write_text("root:x:0:0")
    for pid in range(os.getpid(), os.getpid() + 400):
        path = shared / f".report.html.{pid}.new"
        path.symlink_to(target)
        os.lchown(path, OTHER, OTHER)
    assert page(cache, shared / "report.html").returncode == 0
    assert target.read_text() == "root:x:0:0"
    assert "<html" in (shared / "report.html").read_text()[:200]
    assert not (shared / "report.html").is_symlink()


def test_a_page_replaces_a_file_and_the_target_of_the_users_link(tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("old")
    os.link(tmp_path / "real.html", tmp_path / "hard.html")
    (tmp_path / "link.html").symlink_to("real.html")
    assert _plain_file(tmp_path / "link.html") == tmp_path / "real.html"
    with replacing(_plain_file(tmp_path / "link.html"), durable=False) as file:
        file.write(b"new")
    assert (tmp_path / "real.html").read_text() == "new"
    assert (tmp_path / "hard.html").read_text() == "old", "another name of the old file is another file"
    assert (tmp_path / "link.html").is_symlink()
    assert len(os.listdir(tmp_path)) == 3


@as_root
@pytest.mark.parametrize("chain", [False, True])
def test_a_link_that_another_user_planted_as_the_page_is_refused(tmp_path: Path, shared: Path, chain: bool) -> None:
    (tmp_path / "target").write_text("precious")
    (shared / "report.html").symlink_to(tmp_path / "target")
    given_away(shared / "report.html")
    (tmp_path / "mine.html").symlink_to(shared / "report.html")
    named = tmp_path / "mine.html" if chain else shared / "report.html"
    with pytest.raises(UsageError, match=r"report\.html, a link that another user \(65534\) made;\nremove that link"):
        _plain_file(named)
    (shared / "report.html").unlink()
    assert _plain_file(named) == shared / "report.html"


def test_a_path_that_is_no_file_is_not_replaced_by_a_page(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(UsageError, match="it is a device, a pipe or a socket; name a file"):
            _plain_file(path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError), replacing(_plain_file(tmp_path / "folder")) as file:
        file.write(b"x")
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_a_page_for_a_stdout_that_is_a_file_is_written_into_that_file(tmp_path: Path, cache: Path) -> None:
    with open(tmp_path / "out.html", "w") as out:
        assert page(cache, "/dev/stdout", stdout=out).returncode == 0
    assert "<html" in (tmp_path / "out.html").read_text()[:200]
    assert page(cache, "/dev/stdout").returncode == 2


# ---------------------------------------------------------------------------------------------------- names in messages


@pytest.mark.parametrize("name", ["../x", "sent/../../x", "/etc/x", "a//b", "", ".", "a\0b", 7, None])
def test_a_name_in_a_message_of_a_process_is_not_used_as_a_path(
    tmp_path: Path, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, before = tmp_path / "place", None
    place.mkdir()
    agent = SimpleNamespace(place=lambda: str(place))
    before = seen(tmp_path)
    with pytest.raises((CatalogError, AttributeError)):
        Agent.write(agent, name, 0, b"x")  # type: ignore[arg-type]

    class Engine:
        def start(self, node: Any, task: Any, heard: Any) -> Any:
            heard({"name": name, "at": 0, "piece": base64.b64encode(b"x").decode()})
            raise AssertionError("it was taken")

    with pytest.raises((CatalogError, AttributeError)):
        _Pull._fetch(
            SimpleNamespace(_engine=Engine(), _listing=place, _task=lambda *_: None),  # type: ignore[arg-type]
            SimpleNamespace(host=None),  # type: ignore[arg-type]
        )
    assert seen(tmp_path) == before


def test_received_file_pieces_follow_no_link_below_the_folder(tmp_path: Path, home: Path) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "sub").symlink_to(home)
    (tmp_path / "place" / "file").symlink_to(home / "notes")
    os.mkfifo(tmp_path / "place" / "pipe")
    before = seen(home)
    for names in (["sub", "notes"], ["file"], ["pipe"]):
        with pytest.raises(OSError, match=r"Not a directory|symbolic links|not a plain file|No such device"):
            write_piece(tmp_path / "place", [Name(name) for name in names], 0, memoryview(b"x"))
    write_piece(tmp_path / "place", [Name("new"), Name("a")], 0, memoryview(b"12345"))
    write_piece(tmp_path / "place", [Name("new"), Name("a")], 3, memoryview(b"xy"))
    assert (tmp_path / "place" / "new" / "a").read_bytes() == b"123xy"
    write_piece(tmp_path / "place", [Name("new"), Name("a")], 0, memoryview(b"z"))
    assert (tmp_path / "place" / "new" / "a").read_bytes() == b"z"
    assert seen(home) == before


@pytest.mark.parametrize(
    "name", ["../out2/part-00000.h5", "sub/part-00000.h5", "/part-00000.h5", "..", "x\\part.h5", 5]
)
def test_a_part_that_dataset_json_names_lies_in_its_folder(rows: Path, tmp_path: Path, name: Any) -> None:
    out = convert(rows, tmp_path / "out")
    about = json.loads((out / "dataset.json").read_text())
    about["parts"][0]["file"] = name
    (out / "dataset.json").write_text(json.dumps(about))
    with pytest.raises(CorruptError, match=r"dataset\.json does not fit the files"):
        open_files(out)
    with pytest.raises(CorruptError, match=r"dataset\.json is damaged"):
        shards_at([out])
