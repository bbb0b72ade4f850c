"""Exported folders, written and read without ``convert``."""

from __future__ import annotations

import json
from pathlib import Path

from cachetool.core.block import Block
from cachetool.core.schema import Schema
from cachetool.formats import get_format
from cachetool.formats.shard import PlainFile

FORMATS = ("lmdb", "hdf5", "zarr", "tfrecord")


def make(folder: Path, name: str, content: Block) -> Path:
    """Create a folder as ``convert --out`` does, with one part of the format ``name``."""
    (folder / ".extents").mkdir(parents=True)
    kind = get_format(name)
    path = folder / f"part-00000{kind.suffix}"
    file = PlainFile(path, kind, content.schema, samples=len(content), nbytes=content.nbytes)
    file.write(content)
    written = file.finish()
    part = {"file": path.name, "samples": len(content), "payload": written.payload}
    about = {"format": name, "schema": content.schema.to_json(), "samples": len(content), "parts": [part]}
    (folder / "dataset.json").write_text(json.dumps(about))
    return folder


def parts(folder: Path) -> list[tuple[Path, int]]:
    """Return the files of a folder and the number of samples in each."""
    return [(folder / p["file"], p["samples"]) for p in json.loads((folder / "dataset.json").read_text())["parts"]]


def whole(folder: Path) -> Block:
    """Return all samples of a folder, read through the format's own library."""
    about = json.loads((folder / "dataset.json").read_text())
    kind, schema = get_format(about["format"]), Schema.from_json(about["schema"])
    blocks = [Block.from_samples(schema, [])]
    for path, samples in parts(folder):
        with kind.open(path, schema=schema) as reader:
            blocks.append(reader.read(0, samples))
    return Block.concat(blocks)


def files(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder except ``dataset.json``."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.name != "dataset.json"}
