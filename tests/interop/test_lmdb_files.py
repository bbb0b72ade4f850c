"""LMDB files of ours, read with py-lmdb and without cachetool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np

from cachetool.core.schema import Field, Schema
from cachetool.formats import get_format
from tests.formats.samples import EVERY_KIND, block, write

KIND = get_format("lmdb")


def test_variable_fields_follow_the_documented_layout(tmp_path: Path) -> None:
    """A table follows the fixed fields, then the bytes of each field, all at multiples of 8."""
    schema = Schema((Field("a", "<i2"), Field("r", "<f4", (None, None)), Field("t", "str")))
    content = block(schema, 30, largest=40)
    write(KIND, tmp_path / "data.lmdb", content)
    with (
        lmdb.open(str(tmp_path / "data.lmdb"), subdir=False, readonly=True, lock=False) as env,
        env.begin() as txn,
    ):
        assert env.lib_version()[0] == 0
        assert int(txn.get(b"__len__")) == 30
        assert json.loads(txn.get(b"__schema__")) == schema.to_json()
        assert [key for key, _ in txn.cursor()] == [*(b"%012d" % n for n in range(30)), b"__len__", b"__schema__"]
        for n in range(30):
            value, one = txn.get(b"%012d" % n), content.sample(n)
            assert np.frombuffer(value, "<i2", 1)[0] == one["a"]
            rows, columns, length = np.frombuffer(value, "<i8", 3, 8).tolist()
            np.testing.assert_array_equal(
                np.frombuffer(value, "<u4", rows * columns, 32).reshape(rows, columns), one["r"].view("<u4")
            )
            at = -(-(32 + 4 * rows * columns) // 8) * 8
            assert value[at:] == one["t"].encode("utf-8", "surrogateescape")
            assert length == len(value) - at


def test_lmdb_verifies_the_file(tmp_path: Path) -> None:
    """py-lmdb's own structure checker finds no error."""
    write(KIND, tmp_path / "data.lmdb", block(EVERY_KIND, 300, largest=60))
    done = subprocess.run(
        [sys.executable, "-m", "lmdb", "verify", str(tmp_path / "data.lmdb")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_py_lmdb_can_write_to_a_shard_file(tmp_path: Path) -> None:
    """The file is an ordinary LMDB file, truncated to its size or not."""
    path = tmp_path / "data.lmdb"
    write(KIND, path, block(EVERY_KIND, 50))
    with lmdb.open(str(path), subdir=False, lock=False, map_size=2**26) as env:
        with env.begin(write=True) as txn:
            txn.put(b"zz", bytes(100_000))
            txn.delete(b"%012d" % 7)
        with env.begin() as txn:
            assert len(txn.get(b"zz")) == 100_000
            assert txn.stat()["entries"] == 52
