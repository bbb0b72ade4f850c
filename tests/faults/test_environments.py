"""Unusual environments: low limits, closed streams, namespaces, clocks that jump, libraries that patch Python, files of
another user. Each command succeeds or prints one clear line, and nothing is lost.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachetool.api import open_cache
from cachetool.check.one_shard import faults_of
from cachetool.check.verify import verify
from cachetool.core.errors import CacheToolError, CapBlocked
from cachetool.formats.tfrecord_package import PackageReader
from cachetool.proc.disk import permission_denied
from tests.faults.world import FORMATS

LOADS = """
import sys
from cachetool.loaders.numpy import Loader
with Loader(sys.argv[1], batch_size=8, workers=int(sys.argv[2])) as loader:
    print("loaded", sum(len(next(iter(batch.values()))) for _ in range(2) for batch in loader))
"""
HOLDS = """
import sys, os
from cachetool.cache import open_cache
with open_cache(sys.argv[1], create=False) as cache, cache.snapshot():
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("objects")
    for number in range(96):
        np.save(folder / f"{number:03d}.npy", np.full(500, number, "f8"))
    return folder


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, objects: Path) -> Path:
    root = tmp_path_factory.mktemp("ready") / "cache"
    with open_cache(root, max_size="20MB") as cache:
        for format in FORMATS:
            cache.pull(str(objects), to=format, samples=12, shard_size=16_000, workers=1)
    return root


@pytest.fixture
def root(tmp_path: Path, ready: Path) -> Path:
    """Create a cache of 48 samples in all formats."""
    return Path(shutil.copytree(ready, tmp_path / "cache"))


def samples_of(root: Path) -> int:
    with open_cache(root) as cache:
        return sum(shard.samples for shard in cache.shards())


def under(limits: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run Python with ``words`` under a shell's limits or redirections."""
    line = ["sh", "-c", f'{limits} "$@"', "sh", sys.executable, *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=200)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the message of a failed command. Assert that it is not a traceback."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    assert "a bug" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_too_many_open_files_are_named_and_nothing_is_lost(root: Path, objects: Path) -> None:
    pulling = ["pull", objects, "--samples", "8"]
    for files, verb in (8, pulling), (12, pulling), (12, ["convert", "--to", "hdf5"]):
        done = under(f"ulimit -n {files}; exec", "-m", "cachetool", *verb, "--cache", root, "-q")
        assert "too many open files for one process (ulimit -n)" in one_line(done)
    assert samples_of(root) == 48
    assert verify(root).problems == []


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Limit this process to ``count`` more open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256), hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_shard_that_cannot_be_opened_without_free_descriptors_does_not_count_as_damaged(root: Path) -> None:
    """A repair would delete such a shard."""
    with open_cache(root) as cache, PackageReader() as package:
        rows = cache.catalog.rows("SELECT * FROM shards")
        refused = 0
        for row in rows:
            folder = cache.layout.shards / row["id"]
            for count in range(6):
                with descriptors_left(count):
                    try:
                        faults = faults_of(folder, row, package, every_byte=True)
                    except (OSError, CacheToolError) as error:
                        refused += "too many open files" in str(error).lower()
                        continue
                assert faults == []
        assert refused >= len(rows)


def test_a_missing_folder_for_temporary_files_is_reported_as_such(root: Path, objects: Path) -> None:
    done = under("ulimit -f 0; exec", "-m", "cachetool", "pull", objects, "--cache", root, "-q")

    assert one_line(done) == "error: no folder for temporary files is writable; set TMPDIR to a writable folder"


@pytest.mark.soak
@pytest.mark.parametrize("limit", ["-n 8", "-n 10", "-n 14", "-f 0", "-f 8", "-f 100", "-v 200000", "-v 250000"])
def test_under_low_limits_each_command_succeeds_or_reports_the_limit(root: Path, objects: Path, limit: str) -> None:
    for verb in (["pull", objects, "--samples", "8"], ["convert", "--to", "zarr"], ["evict", "--max-size", "1.5MB"]):
        done = under(f"ulimit {limit}; exec", "-m", "cachetool", *verb, "--cache", root, "-q")
        if done.returncode:
            one_line(done)
    for workers in (0, 2):
        done = under(f"ulimit {limit}; exec", "-c", LOADS, root, workers)
        assert done.returncode in (0, 1)
    assert verify(root).problems == []


def test_a_command_without_standard_streams_opens_no_file_in_their_place(root: Path, objects: Path) -> None:
    done = under("exec 0<&- 1>&- 2>&-; exec", "-m", "cachetool", "pull", objects, "--samples", "8", "--cache", root)

    assert done.returncode == 0
    assert samples_of(root) == 56
    assert verify(root).problems == []
    assert [path for path in root.rglob("*") if b"pulled" in (path.read_bytes() if path.is_file() else b"")] == []


def test_a_reader_in_another_pid_namespace_keeps_its_shards(root: Path) -> None:
    """The reader's pid is 1, which is another process in each namespace."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", HOLDS, str(root)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline().strip() != "1":
            pytest.skip(f"no pid namespace can be made here: {holder.stderr.read().strip()[-200:]}")
        with open_cache(root) as cache:
            before = {shard.id for shard in cache.shards()}
            with pytest.raises(CapBlocked, match="pid 1 on"):
                cache.evict(cache.usage().overhead + cache.usage().listings)
            assert {path.name for path in cache.layout.shards.iterdir()} == before
        holder.stdin.close()
        assert holder.wait(60) == 0
    with open_cache(root) as cache:
        assert list(cache.layout.shards.iterdir()) == [], "they went with their reader"


def test_for_files_of_another_user_in_the_own_cache_chown_is_advised(tmp_path: Path) -> None:
    """Root leaves such files when it pulls into a user's cache."""
    if os.geteuid():
        pytest.skip("needs root")
    file = tmp_path / "shards" / "s" / "shard.json"
    file.parent.mkdir(parents=True)
    file.touch()
    for path in (tmp_path, tmp_path / "shards"):
        os.chown(path, 65534, 65534)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)  # lets the other user enter these folders
    os.seteuid(65534)
    try:
        said = str(permission_denied(file, tmp_path))
    finally:
        os.seteuid(0)

    assert said == (
        f"permission denied: {file}; {file} belongs to another user (0); let that user run: chown -R 65534 {tmp_path}"
    )


@pytest.mark.soak
@pytest.mark.parametrize("when", ["1971-01-01", "1999-12-31 23:59:59", "2039-01-01", "2090-01-01"])
def test_a_wrong_clock_changes_nothing(root: Path, objects: Path, when: str) -> None:
    if shutil.which("faketime") is None:
        pytest.skip("faketime is not installed")
    for verb in (["pull", objects, "--samples", "8"], ["stats"], ["doctor"], ["evict", "--max-size", "1.5MB"]):
        done = under(f"exec faketime '{when}'", "-m", "cachetool", *verb, "--cache", root)
        assert done.returncode == 0, done.stderr
    assert under(f"exec faketime '{when}'", "-c", LOADS, root, 2).stdout == f"loaded {2 * samples_of(root)}\n"
    assert verify(root).problems == []


@pytest.mark.soak
@pytest.mark.parametrize("first", ["gevent", "cachetool"])
def test_gevent_may_patch_python_before_or_after_the_import(root: Path, objects: Path, first: str) -> None:
    pytest.importorskip("gevent")
    lines = ["from gevent import monkey; monkey.patch_all()", "import cachetool, cachetool.loaders.numpy"]
    program = "\n".join(
        [
            *(lines if first == "gevent" else reversed(lines)),
            "import sys",
            f"with cachetool.open_cache(sys.argv[1]) as cache: cache.pull({str(objects)!r}, samples=8)",
            LOADS,
        ]
    )
    for workers in (0, 2):
        done = under("exec", "-c", program, root, workers)
        assert done.stdout == f"loaded {2 * samples_of(root)}\n", done.stderr
