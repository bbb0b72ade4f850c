"""``convert --out``: any input as plain files that other tools open. The folder appears complete or not at all.

::

    .OUT.partial-3f2a9c81d04e/   a working folder (`proc.scratch`): the same command continues where it stopped
      plan.json                  input, format and runs of samples
      made/                      part-00000.h5  .extents/     parts, each a fixed run of samples
      done/part-00000.h5.json    written last: this part is complete
    OUT/                         made/ with dataset.json, renamed: it appears by this one rename

The working folder has a mark, so a user's own folder with such a name is never touched. Tasks of an engine write the
parts: processes here, or on other machines that see the working folder under the same name.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from cachetool.cache.layout import refuse_in_cache
from cachetool.conversion.inputs import Input, Survey, identity, open_input, survey
from cachetool.core.block import Block
from cachetool.core.errors import BadObject, CacheToolError, UsageError, from_json, to_json
from cachetool.core.names import Name
from cachetool.core.progress import Progress, Report
from cachetool.formats.base import Format, Written
from cachetool.formats.compression import PROBED, chosen, compressed, compression_of
from cachetool.formats.digest import digest_of
from cachetool.formats.exported import DATASET_FILE, LAYOUT, SIDE_FOLDER
from cachetool.formats.shard import PlainFile, side_folder, stored_checksums, verify_file
from cachetool.proc.disk import too_long
from cachetool.proc.folders import (
    fsync_folder,
    make_folder,
    make_missing,
    put_in_place,
    remove,
    resolved,
    shortened,
    write_durable,
)
from cachetool.proc.parent import LocalEngine
from cachetool.proc.scratch import WorkFolder
from cachetool.proc.task import Channel, Engine, Message, Task
from cachetool.pull.job import too_many
from cachetool.sources.readers import MAX_SKIPPED

__all__ = ["export", "require_new", "sized", "write_parts"]

_MADE, _DONE, _EXTENTS, _PLAN = Name("made"), Name("done"), Name(SIDE_FOLDER), Name("plan.json")


def require_new(out: Path) -> None:
    """Raise :class:`UsageError` unless ``out`` can be a new folder.

    Existing paths and impossible names are refused. So are paths in a cache, because the new files would not count
    against its cap.
    """
    if out.name == "..":
        raise UsageError(f"--out {str(out)!r} ends in '..', which names no new folder; write its own name")
    if too_long(out):
        raise UsageError(f"--out {str(out)!r} is too long for this file system; choose a shorter name")
    # lexists, because a link that leads nowhere is in the way too.
    if os.path.lexists(out):
        raise UsageError(f"{out} exists already; name a new folder with --out")
    resolved(out.parent, "--out")
    refuse_in_cache(out, "--out")


def export(
    description: Message,
    out: Path,
    *,
    kind: Format,
    part_bytes: int,
    probe: bool,
    workers: int,
    verify: bool,
    report: Report,
    engine: Engine | None = None,
) -> tuple[list[Message], str, Survey]:
    """Write the input that ``description`` opens into the new folder ``out``.

    Return its parts, the content digest and the facts about the input. ``probe``: the first samples decide whether the
    parts are compressed. ``engine``: where the parts are written; None: in processes here. An interrupted run is
    continued: parts that are complete stay. Raises :class:`UsageError` when ``out`` exists or somebody is writing
    it.
    """
    require_new(out)
    contents = survey(description, part_bytes)
    schema, samples, cuts = contents.schema, contents.samples, contents.runs
    if probe:
        with closing(open_input(description)) as source:
            kind = chosen(kind, source.blocks(0, min(samples, PROBED)))
    plan = {"input": identity(description), "to": kind.name, "compression": compression_of(kind), "runs": cuts}
    if description.get("skip_bad"):
        plan["on_error"] = "skip"
    names = [_name(number, kind) for number in range(len(cuts))]
    pieces = workers if engine is None else engine.pieces(workers)
    # The parent is opened once: if somebody renames it during the conversion, the result still appears where it was
    # asked for.
    with _place(out) as parent, _working(out, plan) as work, _resumable(work, names):
        finished = _finished(work.inside, names)
        todo = [(n, *cut) for n, cut in enumerate(cuts) if names[n] not in finished]
        done = sum(part["samples"] for part in finished.values())
        moved = sum(part["payload"] for part in finished.values())

        def on_message(_: int, message: Message) -> None:
            nonlocal done, moved
            done += message["samples"]
            moved += message["bytes"]
            report(Progress("convert", min(done, samples), samples, moved))

        # An input that is read in order has one reader: each further one would read everything before its part.
        count = max(1, min(pieces, len(todo))) if contents.random else 1
        task = {
            "description": description,
            "folder": str(work.path.absolute()),
            "token": work.token,
            "to": kind.name,
            "compression": compression_of(kind),
            "verify": verify,
        }
        call = "cachetool.conversion.to_files:write_parts"
        # Parts are dealt in turn, so all workers end at about the same time.
        tasks = [Task(call, {**task, "todo": todo[first::count]}) for first in range(count)]
        for outcome in (engine or LocalEngine()).run(tasks, on_message):
            finished |= {part["file"]: part for part in outcome["parts"]}
        left_out, unused = _left_out(finished.values())
        _refuse_too_many(unused, samples, left_out)
        contents = replace(contents, skipped=(*contents.skipped, *left_out))
        folder = work.inside / _MADE
        for name in names:
            # All samples of the part were unusable. A file without samples is left out.
            if not finished[name]["samples"]:
                _remove_part(work.inside, name)
        parts = [{key: part[key] for key in _SAID} for name in names if (part := finished[name])["samples"]]
        sides = (side_folder(folder / part["file"]) for part in parts)
        digest = digest_of(schema, (stored_checksums(side, schema, links=True) for side in sides))
        about = {
            "layout": LAYOUT,
            "format": kind.name,
            "compression": compression_of(kind),
            "schema": schema.to_json(),
            "samples": sum(part["samples"] for part in parts),
            "content": digest,
            "parts": parts,
        }
        _appear(folder, parent, out, about)
        work.remove()
    return parts, digest, contents


def _appear(folder: Path, parent: int, out: Path, about: Message) -> None:
    """Write ``dataset.json`` and rename the folder to ``out``, in the open folder ``parent``."""
    # An interrupted run may have left one, for other parts.
    remove(folder, Name(DATASET_FILE))
    write_durable(folder / DATASET_FILE, json.dumps(about, indent=1).encode())
    fsync_folder(folder)
    try:
        # A rename that fails if the name exists: another process may have made it since it was checked. The rename is
        # the moment of commit.
        put_in_place(folder, parent, out.name)
    except FileExistsError as error:
        raise UsageError(
            f"{out} was created by another program meanwhile; move it away, or choose another --out"
        ) from error
    except PermissionError as error:
        raise UsageError(f"{out} cannot be created: {_why(error)}; choose another --out") from error


def write_parts(
    channel: Channel,
    *,
    description: Message,
    folder: str,
    token: str,
    to: str,
    compression: str | None,
    verify: bool,
    todo: list[tuple[int, int, int]],
) -> Message:
    """Write these parts one after another. This is the task of one worker.

    Return ``{"parts": [...]}``, the records of the parts on disk.
    """
    work, kind, parts, unused = _joined(Path(folder), token, description), compressed(to, compression), [], 0
    with closing(work), _as_named(work), closing(open_input(description)) as source:
        where = work.inside
        for number, start, stop in todo:
            name = _name(number, kind)
            # A node may have written this part before it was lost, and this task replaces its task.
            if (part := _part(where, name)) is not None:
                parts.append(part)
                continue
            _remove_part(where, name)
            path = where / _MADE / name
            written = _write(source, path, kind, start, stop, channel)
            left_out = source.left_out()
            unused += len(left_out)
            _refuse_too_many(unused, source.samples, left_out)
            # With left out samples it is not known which samples the others are, so their numbers cannot be compared.
            if not left_out:
                source.check(start, written.checksums)
            if verify:
                verify_file(path, kind, source.schema, written.checksums)
            part = {
                "file": name,
                "samples": written.samples,
                "payload": written.payload,
                "content": digest_of(source.schema, [written.checksums]),
                "left_out": left_out[:MAX_SKIPPED],
                "left_out_count": len(left_out),
            }
            # The record comes last and durably: it is the sign that the part is complete, also after a power cut.
            write_durable(_record(where, name), json.dumps(part).encode())
            fsync_folder(where / _DONE)
            parts.append(part)
    return {"parts": parts}


_SAID = ("file", "samples", "payload", "content")
"""Entries of a part's record that ``dataset.json`` repeats."""


def _left_out(parts: Iterable[Message]) -> tuple[tuple[tuple[str, str], ...], int]:
    """Return key and reason of the unusable samples of parts (the first ones), and their number."""
    names = [(str(key), str(why)) for part in parts for key, why in part.get("left_out", ())]
    count = sum(int(part.get("left_out_count", 0)) for part in parts)
    more = count - len(names[:MAX_SKIPPED])
    return (*names[:MAX_SKIPPED], *([("...", f"and {more} more")] if more else [])), count


def _refuse_too_many(count: int, samples: int, left_out: Sequence[tuple[str, str]]) -> None:
    """Raise :class:`BadObject` when more samples are unusable than ``--on-error skip`` may leave out (1 %)."""
    if too_many(count, samples):
        key, why = left_out[-1]
        raise BadObject(
            f"{count} of {samples} samples could not be used, which is more than 1 %; one of them is {key}: {why}"
        )


def _joined(folder: Path, token: str, description: Message) -> WorkFolder:
    """Return the working folder that the starter of a task made.

    Raises :class:`UsageError` on a machine that does not see the folder or the input.
    """
    if (work := WorkFolder.joined(folder, token)) is None:
        raise UsageError(
            f"{socket.gethostname()} does not see {folder.parent}, the folder of --out;"
            " choose an --out that has the same path on every node"
        )
    # A local path may be another disk on another node. The message must name the machine.
    if (path := description.get("path")) is not None and not Path(path).exists():
        work.close()
        raise UsageError(f"{socket.gethostname()} has no {path}; choose an INPUT that every node can read, or a URL")
    return work


@contextmanager
def _as_named(work: WorkFolder) -> Iterator[None]:
    """Replace, in errors, the path by which the working folder is reached by the path that the user sees."""
    inside, path = str(work.inside), str(work.path)
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = error.filename.replace(inside, path)
        raise
    except CacheToolError as error:
        if inside == path or inside not in str(error):
            raise
        error_json = to_json(error)
        raise from_json(error_json | {"message": error_json["message"].replace(inside, path)}) from error


def _write(source: Input, path: Path, kind: Format, start: int, stop: int, channel: Channel) -> Written:
    """Write one part and return the result of its writer."""
    blocks, nbytes = sized(source, start, stop)
    file = PlainFile(path, kind, source.schema, samples=stop - start, nbytes=nbytes)
    try:
        for block in blocks:
            file.write(block)
            channel.send({"samples": len(block), "bytes": block.nbytes})
        return file.finish()
    except BaseException:
        file.abort()
        raise


def sized(source: Input, start: int, stop: int) -> tuple[Iterator[Block] | list[Block], int]:
    """Return the blocks of a run and the bytes of their values, which a writer must know beforehand.

    If samples differ in size the run is read into memory first. Runs are short enough for that.
    """
    blocks = source.blocks(start, stop)
    if source.schema.is_fixed:
        return blocks, (stop - start) * source.schema.fixed_nbytes
    # Nobody knows the bytes of a run of ragged samples before they are read, and the writer allocates its file by them.
    buffered = list(blocks)
    return buffered, sum(block.nbytes for block in buffered)


@contextmanager
def _place(out: Path) -> Iterator[int]:
    """Yield a descriptor of the folder in which ``out`` will appear. The folder is made if it is missing."""
    try:
        make_missing(out.parent)
        fd = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _cannot_write(out, error) from error
    try:
        yield fd
    finally:
        os.close(fd)


def _cannot_write(out: Path, error: OSError) -> Exception:
    """Return the error to raise for an OSError: one about ``--out`` if the path is to blame, else
    the OSError itself."""
    if not isinstance(error, PermissionError | NotADirectoryError | FileExistsError | FileNotFoundError):
        return error
    return UsageError(f"cannot write into {out.parent}: {_why(error)}; name another --out")


def _why(error: OSError) -> str:
    """Return the system's words for an error."""
    return os.strerror(error.errno or 0).lower()


@contextmanager
def _working(out: Path, plan: Message) -> Iterator[WorkFolder]:
    """Yield the working folder of this process: the one of an interrupted run of the same plan, or a new one."""
    # Through JSON and back, so that tuples are lists, as in the plan that is read from disk.
    wanted = json.loads(json.dumps(plan))
    prefix = f".{shortened(out.name)}.partial-"
    there = list(WorkFolder.existing(out.parent, prefix, out.name))
    try:
        # A lock on the mark tells whether the process that made the folder still lives. Age or pid would be guesses.
        if any(work.busy for work in there):
            raise UsageError(f"another process is writing {out}; wait for it, or name another --out")
        left = [work for work in there if _same_plan(work.inside, wanted)][:1]
        # Folders of other plans are of no use any more: another input, format or size.
        for work in [work for work in there if work not in left]:
            there.remove(work)
            work.remove()
        try:
            (work,) = left or [WorkFolder.make(out.parent, prefix, out.name, durable=True)]
        except OSError as error:
            raise _cannot_write(out, error) from error
        there = [work]
        if not left:
            for folder in (work.inside / _DONE, work.inside / _MADE, work.inside / _MADE / _EXTENTS):
                make_folder(folder)
            # The plan comes last: a folder without it is not continued.
            write_durable(work.inside / _PLAN, json.dumps(wanted).encode())
        with _as_named(work):
            yield work
    finally:
        for work in there:
            work.close()


@contextmanager
def _resumable(work: WorkFolder, names: list[Name]) -> Iterator[None]:
    """Add to an error during the writing how many parts were kept. Without a complete part nothing is kept."""
    _drop_unfinished(work.inside, names)
    try:
        yield
    except CacheToolError as error:
        if not (kept := len(_finished(work.inside, names))):
            work.remove()
            raise
        _drop_unfinished(work.inside, names)
        error_json = to_json(error)
        error_json["message"] += (
            f";\n{work.path} keeps {kept} of {len(names)} files: the same command continues from there if the input has"
            " not changed; to start again, delete the folder"
        )
        raise from_json(error_json) from error


def _same_plan(where: Path, wanted: Message) -> bool:
    """Return True if the folder of an interrupted run has the same plan and is whole."""
    folders = (where / _DONE, where / _MADE / _EXTENTS)
    try:
        same = json.loads((where / _PLAN).read_bytes()) == wanted
    except (OSError, ValueError):
        return False
    return same and all(map(os.path.isdir, folders))


def _finished(where: Path, names: list[Name]) -> dict[Name, Message]:
    """Return the records of all complete parts."""
    return {name: part for name in names if (part := _part(where, name)) is not None}


def _record(where: Path, name: Name) -> Path:
    """Return the path of a part's record."""
    return where / _DONE / f"{name}.json"


def _part(where: Path, name: Name) -> Message | None:
    """Return the record of a complete part, or None for a part that is not complete."""
    path = _record(where, name)
    try:
        part: Message = json.loads(path.read_bytes())
        if part["file"] == name and all(isinstance(part[number], int) for number in ("samples", "payload")):
            return part
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass
    # The process was killed while it wrote the record. The part is made again.
    remove(where, _DONE, Name(path.name))
    return None


def _drop_unfinished(where: Path, names: list[Name]) -> None:
    """Remove all parts that have no record."""
    finished = _finished(where, names)
    for folder in (where / _MADE, where / _MADE / _EXTENTS):
        for name in os.listdir(folder):
            if name.startswith("part-") and name not in finished:
                _remove_part(where, Name(name))


def _remove_part(where: Path, name: Name) -> None:
    """Remove the files of a part that is not complete, and its extents."""
    remove(where, _MADE, name)
    remove(where, _MADE, _EXTENTS, name)


def _name(number: int, kind: Format) -> Name:
    """Return the name of the part with this number."""
    return Name(f"part-{number:05d}{kind.suffix}")
