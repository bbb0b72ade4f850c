"""``convert --out``: any input as plain files that other tools open, whole or not at all.

::

    .OUT.partial/  plan.json                    what is being made of what: the same command goes on where it stopped
                   part-00000.h5  .extents/     parts, each a fixed run of samples
                   done/part-00000.h5.json      written last: this part is whole
                   run                          of the process that makes it: tells it from a folder of another disk
    OUT/           the same without plan, done and run, with dataset.json: appears by one rename

Parts are written by tasks of an engine: processes here, or on other machines that see the folder under the same name.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cachetool.block import Block
from cachetool.cache.layout import refuse_in_cache
from cachetool.disk import too_long
from cachetool.engines import LocalEngine, Task
from cachetool.engines.task import Channel, Engine, Message
from cachetool.errors import CacheToolError, UsageError, from_json, to_json
from cachetool.folders import fsync_folder, remove_path, write_durable
from cachetool.formats import get_format
from cachetool.formats.base import Format, Written
from cachetool.formats.digest import ContentDigest
from cachetool.formats.shard import PlainFile, side_folder, stored_checksums, verify_file
from cachetool.inputs import Input, Survey, identity, open_input, survey
from cachetool.parts import DATASET_FILE, LAYOUT
from cachetool.progress import Progress, Report
from cachetool.schema import Schema

__all__ = ["export", "require_new", "sized", "write_parts"]

DEFAULT_PART = 64 * 10**6
"""Bytes of values in one file."""
RUN = "run"


def require_new(out: Path) -> None:
    """Raise :class:`UsageError` when there is anything at ``out``, when no folder can have that name, and when it is in
    a cache, whose cap would not hold."""
    if out.name == "..":
        raise UsageError(f"--out {str(out)!r} ends in '..', which names no new folder; write its own name")
    if too_long(_aside(out)):
        raise UsageError(f"--out {str(out)!r} is longer than a name may be here; name a shorter one")
    if os.path.lexists(out):  # also a link to nowhere
        raise UsageError(f"{out} exists already; name a new folder with --out")
    refuse_in_cache(out, "--out")


def export(
    description: Message,
    out: Path,
    *,
    kind: Format,
    part_bytes: int,
    compression: str | None,
    workers: int,
    verify: bool,
    report: Report,
    engine: Engine | None = None,
) -> tuple[list[Message], str, Survey]:
    """Write the input that ``description`` opens into the new folder ``out``; gives its parts, the content digest and
    what was found in the input. ``engine``: where; None: in processes here.

    A run that was interrupted is gone on with: parts that are whole stay. Raises :class:`UsageError` when ``out``
    exists or another process is writing it.
    """
    require_new(out)
    found = survey(description, part_bytes)
    schema, samples, cuts = found.schema, found.samples, found.runs
    plan = {"input": identity(description), "to": kind.name, "compression": compression, "runs": cuts}
    aside = _aside(out)
    pieces = workers if engine is None else engine.pieces(workers)
    with _owned(aside, plan), _resumable(aside, len(cuts)):
        finished = _finished(aside)
        todo = [(n, *cut) for n, cut in enumerate(cuts) if _name(n, kind) not in finished]
        done = sum(part["samples"] for part in finished.values())
        moved = sum(part["payload"] for part in finished.values())

        def on_message(_: int, message: Message) -> None:
            nonlocal done, moved
            done += message["samples"]
            moved += message["bytes"]
            report(Progress("convert", min(done, samples), samples, moved))

        run = secrets.token_hex(8)
        (aside / RUN).unlink(missing_ok=True)  # of a run that was interrupted
        write_durable(aside / RUN, run.encode())
        count = max(1, min(pieces, len(todo))) if found.random else 1
        tasks = [_task(description, aside, run, kind, compression, verify, todo[n::count]) for n in range(count)]
        for outcome in (engine or LocalEngine()).run(tasks, on_message):
            finished |= {part["file"]: part for part in outcome["parts"]}
        parts = [finished[_name(n, kind)] for n in range(len(cuts))]
        digest = _digest(aside, parts, schema)
        about = {
            "layout": LAYOUT,
            "format": kind.name,
            "compression": compression,
            "schema": schema.to_json(),
            "samples": samples,
            "content": digest,
            "parts": parts,
        }
        (aside / DATASET_FILE).unlink(missing_ok=True)
        write_durable(aside / DATASET_FILE, json.dumps(about, indent=1).encode())
        remove_path(aside / "done")
        (aside / "plan.json").unlink()
        (aside / RUN).unlink()
        fsync_folder(aside)
        os.rename(aside, out)
        fsync_folder(out.parent)
    return parts, digest, found


def _aside(out: Path) -> Path:
    """Where it is made."""
    return out.parent / f".{out.name}.partial"


def _task(
    description: Message,
    folder: Path,
    run: str,
    kind: Format,
    compression: str | None,
    verify: bool,
    todo: list[tuple[int, int, int]],
) -> Task:
    arguments = {
        "description": description,
        "folder": str(folder.absolute()),
        "run": run,
        "to": kind.name,
        "compression": compression,
        "verify": verify,
        "todo": todo,
    }
    return Task("cachetool.export:write_parts", arguments)


def write_parts(
    channel: Channel,
    *,
    description: Message,
    folder: str,
    run: str,
    to: str,
    compression: str | None,
    verify: bool,
    todo: list[tuple[int, int, int]],
) -> Message:
    """The task of one worker: these parts, one after another. Gives ``{"parts": [...]}``, what the disk has of them."""
    kind, where = get_format(to), Path(folder)
    _refuse_other(where, run, description)
    source, parts = open_input(description), []
    try:
        for number, start, stop in todo:
            path = where / _name(number, kind)
            if (part := _part(where, path.name)) is not None:  # of a node that was lost, whose task this was
                parts.append(part)
                continue
            _remove_part(path)
            written = _write(source, path, kind, start, stop, compression, channel)
            source.check(start, written.checksums)
            if verify:
                verify_file(path, kind, source.schema, written.checksums)
            content = ContentDigest(source.schema)
            content.update(written.checksums)
            part = {
                "file": path.name,
                "samples": written.samples,
                "payload": written.payload,
                "content": content.hexdigest(),
            }
            write_durable(where / "done" / f"{path.name}.json", json.dumps(part).encode())
            fsync_folder(where / "done")
            parts.append(part)
    finally:
        source.close()
    return {"parts": parts}


def _refuse_other(folder: Path, run: str, description: Message) -> None:
    """Raise :class:`UsageError` on a machine that does not see what the one sees that asked for this."""
    try:
        same = (folder / RUN).read_text() == run
    except (OSError, ValueError):
        same = False
    if not same:
        raise UsageError(
            f"{socket.gethostname()} does not see the folder {folder.parent} in which --out is made;"
            " name an --out that lies under the same name on every node"
        )
    if (path := description.get("path")) is not None and not Path(path).exists():
        raise UsageError(f"{socket.gethostname()} has no {path}; name an INPUT that every node sees, or a URL")


def _write(
    source: Input, path: Path, kind: Format, start: int, stop: int, compression: str | None, channel: Channel
) -> Written:
    blocks, nbytes = sized(source, start, stop)
    file = PlainFile(path, kind, source.schema, samples=stop - start, nbytes=nbytes, compression=compression)
    try:
        for block in blocks:
            file.write(block)
            channel.send({"samples": len(block), "bytes": block.nbytes})
        return file.finish()
    except BaseException:
        file.abort()
        raise


def sized(source: Input, start: int, stop: int) -> tuple[Iterator[Block] | list[Block], int]:
    """Blocks of a run and the bytes of their values, which a writer must know beforehand. Where samples differ in size
    the run is read into memory first; its length was chosen for that."""
    blocks = source.blocks(start, stop)
    if source.schema.is_fixed:
        return blocks, (stop - start) * source.schema.fixed_nbytes
    held = list(blocks)
    return held, sum(block.nbytes for block in held)


@contextmanager
def _owned(aside: Path, plan: Message) -> Iterator[None]:
    """The folder that is filled, made or taken over; one process at a time."""
    wanted = json.loads(json.dumps(plan))
    try:
        aside.mkdir(parents=True, exist_ok=True)
        fd = os.open(aside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (PermissionError, NotADirectoryError, FileExistsError, FileNotFoundError) as error:
        why = os.strerror(error.errno or 0).lower()
        raise UsageError(f"cannot write into {aside.parent}: {why}; name another --out") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"another process is writing {aside}; wait for it, or name another --out") from error
        if not _same_plan(aside, wanted):
            for entry in os.listdir(aside):
                path = aside / entry
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            (aside / "done").mkdir()
            (aside / ".extents").mkdir()
            write_durable(aside / "plan.json", json.dumps(wanted).encode())
        _drop_unfinished(aside)
        yield
    finally:
        os.close(fd)


@contextmanager
def _resumable(aside: Path, parts: int) -> Iterator[None]:
    """Around the writing: an error says what was kept of it. Without one part that is whole nothing is kept."""
    try:
        yield
    except CacheToolError as error:
        if not (kept := len(_finished(aside))):
            remove_path(aside)
            raise
        _drop_unfinished(aside)
        told = to_json(error)
        told["message"] += (
            f";\n{aside} keeps {kept} of {parts} parts: the same command goes on from there while the input is as"
            " it was; the folder may be deleted instead"
        )
        raise from_json(told) from error


def _same_plan(aside: Path, wanted: Message) -> bool:
    try:
        return bool(json.loads((aside / "plan.json").read_bytes()) == wanted)
    except (OSError, ValueError):
        return False


def _finished(aside: Path) -> dict[str, Message]:
    names = [path.name.removesuffix(".json") for path in (aside / "done").iterdir()]
    return {name: part for name in names if (part := _part(aside, name)) is not None}


def _part(aside: Path, name: str) -> Message | None:
    """What is known of a part that is whole; None for one that is not."""
    path = aside / "done" / f"{name}.json"
    try:
        part: Message = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        path.unlink()  # killed while it was written: the part is made again
        return None
    return part


def _drop_unfinished(aside: Path) -> None:
    whole = _finished(aside)
    for folder in (aside, aside / ".extents"):
        for path in folder.iterdir():
            if path.name.startswith("part-") and path.name not in whole:
                _remove_part(path)


def _remove_part(path: Path) -> None:
    """Remove what is there of a part that is not whole, file or folder, and what lies beside it."""
    for each in (path, side_folder(path)):
        if each.is_dir():
            shutil.rmtree(each)
        else:
            each.unlink(missing_ok=True)


def _name(number: int, kind: Format) -> str:
    return f"part-{number:05d}{kind.suffix}"


def _digest(folder: Path, parts: list[Message], schema: Schema) -> str:
    digest = ContentDigest(schema)
    for part in parts:
        digest.update(stored_checksums(side_folder(folder / part["file"]), schema))
    return digest.hexdigest()
