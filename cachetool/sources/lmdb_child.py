"""The process that opens an LMDB file which others made, on behalf of :mod:`cachetool.sources.lmdb`.

LMDB trusts its files: a damaged or hostile one can kill the process that maps it. So this one holds nothing that is
worth anything: no lock, no cache, no credentials; it reads, and hands keys and values through a pipe as plain bytes.

::

    stdin    {"path": ...}                                one line, then requests:
             {"start": 0, "count": 100, "bytes": 8388608, "head": null}
    stdout   u32 length | JSON | payload                  answers:
             {"busy": true}                               still counting
             {"samples": 1000, "notes": [...]}            the file is open
             {"count": k, "keys": bytes, "values": bytes} followed by k int64 sizes of keys, k of values, keys, values
             {"error": "..."}                             then it ends
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import struct
import sys
from collections.abc import Iterator
from typing import Any

import lmdb
import numpy as np

__all__ = ["main"]

NOTES = (b"length", b"num-samples", b"num_samples")
"""Keys that are notes on the file, besides those like ``__len__``."""
_BUSY = 2**20
_MAX_NOTES = 1000
_SPARE = 2**30


def main() -> None:
    """Answer until stdin ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):
        try:
            _serve(out)
        except (lmdb.Error, OSError, ValueError, MemoryError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            _answer(out, {"error": lines[0][:300]})
    os._exit(0)  # the file may have broken what a tidy end would touch


def _serve(out: Any) -> None:
    path = os.fsencode(json.loads(sys.stdin.buffer.readline())["path"])
    folder = os.path.isdir(path)
    _limit(os.path.join(path, b"data.mdb") if folder else path)
    env = lmdb.open(os.fsdecode(path), subdir=folder, readonly=True, lock=False, max_dbs=1)
    with env.begin(buffers=True) as txn:
        _refuse_tables(env, txn)
        notes: list[str] = []
        samples = _count(out, txn, notes)
        _answer(out, {"samples": samples, "notes": notes})
        entries, position = _entries(txn), 0
        while line := sys.stdin.buffer.readline():
            asked = json.loads(line)
            if asked["start"] < position:
                entries, position = _entries(txn), 0
            while position < asked["start"] and next(entries, None) is not None:
                position += 1
            position += _send(out, entries, asked)


def _limit(file: bytes) -> None:
    """No more memory than the file's map and some, and no core file of somebody's data."""
    most = os.stat(file).st_size + _SPARE
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _refuse_tables(env: Any, txn: Any) -> None:
    """Named databases are entries too: refuse them rather than read their page numbers as values."""
    names = []
    for number, (key, value) in enumerate(txn.cursor()):
        if number == 100:
            break
        if len(value) == 48:
            name = bytes(key).rstrip(b"\0")
            with contextlib.suppress(lmdb.Error):
                env.open_db(name, txn=txn, create=False)
                names.append(name.decode("utf-8", "replace"))
    if names:
        raise ValueError(
            f"it holds named databases ({', '.join(names)[:100]}); copy one into a file of its own, with"
            f" mdb_dump -s {names[0][:50]} and mdb_load"
        )


def _is_note(key: Any) -> bool:
    return key in NOTES or (len(key) > 4 and key[:2] == b"__" and key[-2:] == b"__")


def _count(out: Any, txn: Any, notes: list[str]) -> int:
    """Samples in the file. Keys must rise: a tree that leads back into itself would never end."""
    count, last = 0, None
    for key in txn.cursor().iternext(keys=True, values=False):
        key = bytes(key)
        if last is not None and key <= last:
            raise ValueError(f"its keys are not in order at {key[:50]!r}")
        last = key
        if _is_note(key):
            if len(notes) == _MAX_NOTES:
                raise ValueError(f"more than {_MAX_NOTES} of its keys are notes such as {key[:50]!r}")
            notes.append(key.decode("utf-8", "replace")[:100])
        else:
            count += 1
            if count % _BUSY == 0:
                _answer(out, {"busy": True})
    return count


def _entries(txn: Any) -> Iterator[tuple[Any, Any]]:
    return ((key, value) for key, value in txn.cursor() if not _is_note(key))


def _send(out: Any, entries: Iterator[tuple[Any, Any]], asked: dict[str, Any]) -> int:
    keys, values, held = [], [], 0
    for key, value in entries:
        keys.append(key)
        values.append(value if asked["head"] is None else value[: asked["head"]])
        held += len(key) + len(values[-1])
        if held >= asked["bytes"] or len(keys) >= asked["count"]:
            break
    sizes = np.array([[len(key) for key in keys], [len(value) for value in values]], dtype="<i8")
    about = {"count": len(keys), "keys": int(sizes[0].sum()), "values": int(sizes[1].sum())}
    _answer(out, about, sizes.tobytes(), *keys, *values)
    return len(keys)


def _answer(out: Any, about: dict[str, Any], *payload: Any) -> None:
    text = json.dumps(about).encode()
    out.write(struct.pack("<I", len(text)) + text)
    for part in payload:
        out.write(part)
    out.flush()
