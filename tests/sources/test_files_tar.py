"""Tar files in WebDataset's form, read as samples. No member is ever extracted, whatever its name."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import pickle
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachetool.core.errors import BadObject, UsageError
from cachetool.sources import tar
from cachetool.sources.byte_source import MemoryRanges, SourceFile
from cachetool.sources.options import SourceOptions
from cachetool.sources.tar import TarFile
from tests.sources.files import damaged, file_kind, open_files, outcome, same, samples

RANDOM = np.random.default_rng(3)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def write(path: Path, members: Iterable[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def digits(count: int) -> list[tuple[str, bytes]]:
    members = []
    for i in range(count):
        members += [
            (f"train/{i:04d}.image.npy", npy(RANDOM.integers(0, 9, (4, 4), dtype=np.uint8))),
            (f"train/{i:04d}.json", json.dumps({"weight": i / 2, "name": f"n{i}"}).encode()),
            (f"train/{i:04d}.cls", b"%d" % (i % 10)),
            (f"train/{i:04d}.txt", f"dígit {i}".encode()),
            (f"train/{i:04d}.jpg", RANDOM.bytes(100 + i)),
        ]
    return members


@pytest.mark.parametrize("name", ["x.tar", "x.tgz"])
def test_names_with_dates_are_refused_with_the_stem_option_that_works(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [(f"2024.01.{day:02d}.txt", b"x") for day in range(1, 6)])
    with pytest.raises(UsageError, match="use --stem last"):
        samples(path)
    with open_files(path, SourceOptions(stem="last")) as source:
        assert source.samples == 5


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz"])
def test_members_with_the_same_key_are_a_sample(tmp_path: Path, suffix: str, form: int) -> None:
    """Fields and values are those of a folder of objects. Keys are kept. A folder in the archive is no sample."""
    members = digits(30)
    path = write(tmp_path / f"x{suffix}", members, form)
    data = dict(members)

    found = samples(path)

    assert len(found) == 30
    for i, sample in enumerate(found):
        key = f"train/{i:04d}"
        assert sample["__key__"] == key
        assert same(sample["image"], np.load(io.BytesIO(data[f"{key}.image.npy"])))
        assert (sample["weight"], sample["name"]) == (i / 2, f"n{i}")
        assert (sample["cls"], sample["txt"], sample["jpg"]) == (i % 10, f"dígit {i}", data[f"{key}.jpg"])


def test_long_and_non_ascii_names_are_read(tmp_path: Path) -> None:
    long = "/".join(["folder" * 10] * 6) + "/日本"
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        path = write(tmp_path / "x.tar", [(f"{long}.txt", b"a"), ("b.txt", b"b")], form)
        assert [s["__key__"] for s in samples(path)] == [long, "b"]


def test_names_that_begin_with_dot_slash_are_read(tmp_path: Path) -> None:
    """``tar c .`` writes such names. Folders and hidden files are ignored."""
    path = write(
        tmp_path / "x.tar", [("./a/0.txt", b"x"), ("./a/1.txt", b"y"), ("./.hidden.txt", b"z"), ("./noext", b"")]
    )

    assert [s["__key__"] for s in samples(path)] == ["a/0", "a/1"]
    with open_files(path) as source:
        assert source.skipped == ((".hidden.txt", "hidden"), ("noext", "names without an extension"))


def test_options_of_pull_apply_to_members(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", digits(3))

    assert list(samples(path, fields=("y", "x"), rename={"image": "x", "cls": "y"}, key=False)[0]) == ["y", "x"]
    assert samples(path, fields=("label",), label_from_folder=True)[2] == {"label": "train", "__key__": "train/0002"}
    assert list(samples(path, fields=("name",), key=False)[0]) == ["name"]
    with pytest.raises(
        UsageError, match=r"x\.tar: unknown field 'z'; the samples have image, weight, name, cls, txt, jpg"
    ):
        open_files(path, SourceOptions(fields=("z",)))
    underscored = write(tmp_path / "y.tar", [("a_img.txt", b"1"), ("a_seg.txt", b"2")])
    assert samples(underscored, stem=r"[^_]*") == [{"img": "1", "seg": "2", "__key__": "a"}]


def test_images_are_decoded_on_demand(tmp_path: Path, photos: Path) -> None:
    from PIL import Image

    names = sorted(p for p in photos.iterdir() if p.suffix in (".jpg", ".png"))[:4]
    path = write(tmp_path / "x.tar", [(f"{p.stem}.img{p.suffix}", p.read_bytes()) for p in names])

    found = samples(path, decode="image", rename={"img": "image"})

    for name, sample in zip(names, found, strict=True):
        with Image.open(name) as image:
            assert sample["image"].shape == (image.height, image.width, 3)
            if name.suffix == ".png":
                assert same(sample["image"], np.asarray(image.convert("RGB")))
    assert [s["img"] for s in samples(path)] == [p.read_bytes() for p in names] if len(names) > 1 else True


def test_the_schema_fits_all_members_including_the_last(tmp_path: Path) -> None:
    """A different size makes a field ragged, and one fraction makes numbers float64."""
    members = [m for i in range(200) for m in ((f"{i}.x.npy", npy(np.zeros(3))), (f"{i}.json", b'{"y": 1}'))]
    members += [("last.x.npy", npy(np.zeros(4))), ("last.json", b'{"y": 0.5}')]

    with open_files(write(tmp_path / "x.tar", members)) as source:
        assert source.schema.describe() == "x: float64 ragged rank 1, y: float64, __key__: str"
        assert source.samples == 201


def test_samples_whose_fields_differ_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", [("a.txt", b""), ("b.cls", b"1")])

    with pytest.raises(BadObject, match=r"'[^']*x\.tar: a' has txt; '[^']*x\.tar: b' has cls;\n.* --stem"):
        open_files(path)


def test_files_of_a_folder_are_one_input(tmp_path: Path) -> None:
    for k in range(3):
        write(tmp_path / f"shard-{k}.tar{'.gz' if k == 1 else ''}", [(f"{k}{i}.cls", b"%d" % i) for i in range(4)])

    assert [s["__key__"] for s in samples(tmp_path)] == [f"{k}{i}" for k in range(3) for i in range(4)]


def test_a_key_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    """Fault 74: neither the first nor the last silently wins."""
    path = write(tmp_path / "x.tar", [("a.txt", b"1"), ("b.txt", b"2"), ("a.cls", b"3")])
    with pytest.raises(BadObject, match=r"x\.tar: the key 'a' appears twice, with other samples in between"):
        open_files(path)

    path = write(tmp_path / "y.tar", [("a.txt", b"1"), ("a.txt", b"2")])
    with pytest.raises(BadObject, match=r"y\.tar: 'a\.txt': sample 'a' has field 'txt' twice"):
        open_files(path)


def hostile(path: Path, outside: Path) -> Path:
    """Write members that would write outside a folder, or read files there, if they were extracted."""
    with tarfile.open(path, "w") as archive:

        def add(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"evil") -> None:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, link, len(data) if kind == tarfile.REGTYPE else 0
            info.mode = 0o4777
            archive.addfile(info, io.BytesIO(data))

        add("good.txt", data=b"fine")
        add("../up.txt")
        add("a/../../up.txt")
        add(f"{outside}/absolute.txt")
        add("link.txt", tarfile.SYMTYPE, "/etc/passwd")
        add("hard.txt", tarfile.LNKTYPE, "/etc/passwd")
        add("device.txt", tarfile.CHRTYPE)
        add("block.txt", tarfile.BLKTYPE)
        add("pipe.txt", tarfile.FIFOTYPE)
        add("folder.txt", tarfile.DIRTYPE)
    return path


def test_members_that_are_no_files_or_lead_outside_are_left_out(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (tmp_path / "in").mkdir()
    before = sorted(tmp_path.rglob("*"))
    path = hostile(tmp_path / "in" / "x.tar", outside)

    assert samples(path) == [{"txt": "fine", "__key__": "good"}]
    with open_files(path) as source:
        assert dict(source.skipped) == {
            "../up.txt": "its name leads out of the archive",
            "a/../../up.txt": "its name leads out of the archive",
            f"{outside}/absolute.txt": "its name leads out of the archive",
            "link.txt": "a symbolic link",
            "hard.txt": "a hard link",
            "device.txt": "a device",
            "block.txt": "a device",
            "pipe.txt": "a pipe",
        }
    path.unlink()
    assert sorted(tmp_path.rglob("*")) == before


class Canary:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_pickles_are_read_as_bytes_or_refused(tmp_path: Path) -> None:
    canary = Canary(tmp_path / "unpickled")
    path = write(tmp_path / "x.tar", [("a.pyd", pickle.dumps(canary)), ("a.pkl", b"x")])
    assert samples(path)[0]["pyd"] == pickle.dumps(canary)

    path = write(tmp_path / "y.tar", [("a.npy", npy(np.array([canary], dtype=object)))])
    with pytest.raises(BadObject, match=r"y\.tar: 'a\.npy': dtype object cannot be stored"):
        open_files(path)
    assert not (tmp_path / "unpickled").exists()


def test_sparse_members_are_left_out(tmp_path: Path) -> None:
    raw = bytearray(write(tmp_path / "x.tar", [("a.txt", b"x" * 600), ("b.txt", b"y")]).read_bytes())
    raw[156:157] = tarfile.GNUTYPE_SPARSE
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    (tmp_path / "x.tar").write_bytes(raw)

    assert samples(tmp_path / "x.tar") == [{"txt": "y", "__key__": "b"}]


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, suffix: str) -> None:
    """Every truncation is detected, also between two members. A flipped bit in gzip never results in another sample."""
    path = write(tmp_path / f"x{suffix}", digits(4))
    whole = samples(path)

    for how, copy in damaged(path, cuts=150, flips=150):
        found = outcome(copy)
        if how.startswith("cut") and int(how.split()[-1]) < (
            len(path.read_bytes()) if "gz" in suffix else 4 * 5 * 1024
        ):
            assert isinstance(found, str), how
        if not isinstance(found, str) and "gz" in suffix:
            assert all(same(s[k], w[k]) for s, w in zip(found, whole, strict=True) for k in w), how


def test_the_checksum_of_gzip_is_read_to_its_end(tmp_path: Path) -> None:
    """The checksum follows the last member. Before that, a changed byte is not detected or ends the stream early."""
    path = write(tmp_path / "x.tar.gz", [(f"{i:03d}.jpg", RANDOM.bytes(5000)) for i in range(100)])
    whole = path.read_bytes()
    for at in (len(whole) // 3, len(whole) // 2, len(whole) - 6):
        raw = bytearray(whole)
        raw[at] ^= 16
        path.write_bytes(raw)
        with pytest.raises(BadObject, match=r"x\.tar\.gz"):
            open_files(path)
    for size in (len(whole) // 3, len(whole) // 2, len(whole) - 6):
        path.write_bytes(whole[:size])
        with pytest.raises(BadObject, match=r"x\.tar\.gz"):
            open_files(path)


def test_a_damaged_header_in_the_middle_does_not_end_the_file_silently(tmp_path: Path) -> None:
    raw = bytearray(write(tmp_path / "x.tar", [(f"{i}.txt", b"x") for i in range(5)]).read_bytes())
    raw[2 * 1024] ^= 1
    (tmp_path / "x.tar").write_bytes(raw)

    with pytest.raises(BadObject, match=r"x\.tar: there is no valid header of a member at byte 2048 \(bad checksum\)"):
        open_files(tmp_path / "x.tar")


def test_a_file_without_an_end_mark_counts_as_truncated(tmp_path: Path) -> None:
    raw = write(tmp_path / "x.tar", [(f"{i}.txt", b"x") for i in range(5)]).read_bytes()
    (tmp_path / "x.tar").write_bytes(raw[: 3 * 1024])

    with pytest.raises(BadObject, match=r"x\.tar is cut short: it ends at byte 3072 without an end mark"):
        open_files(tmp_path / "x.tar")


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_declared_sizes_beyond_the_file_allocate_no_memory(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("a.npy")
    info.size, info.type = 2**40, kind
    head = info.tobuf(tarfile.GNU_FORMAT)
    for name in ("x.tar", "x.tar.gz"):
        (tmp_path / name).write_bytes(gzip.compress(head + b"x" * 512) if name.endswith("gz") else head + b"x" * 512)
        with pytest.raises(
            BadObject, match=rf"{name}: ('a\.npy': it claims 1\.1 TB|'a.npy'.*cut short|the name or note at byte 512)"
        ):
            open_files(tmp_path / name, SourceOptions(decode="image"))


def test_a_decompression_bomb_in_a_member_is_refused(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x.tar.gz", "wb", compresslevel=9) as file:
        info = tarfile.TarInfo("a.bin")
        info.size = 100 * 2**20
        file.write(info.tobuf())
        for _ in range(100):
            file.write(bytes(2**20))
        file.write(bytes(1024))

    with pytest.raises(BadObject, match=r"x\.tar\.gz: 'a\.bin': it claims 104\.9 MB in one piece"):
        samples(tmp_path / "x.tar.gz")


@pytest.mark.parametrize("size", ["٣", "9" * 5000, "-1", "1e3", ""])
def test_an_invalid_size_in_pax_records_is_an_error_that_names_the_file(tmp_path: Path, size: str) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("0.cls")
        info.size, info.pax_headers = 1, {"size": size}
        archive.addfile(info, io.BytesIO(b"1"))
    with pytest.raises(BadObject, match=r"x\.tar.*the pax records at byte 512 are damaged"):
        samples(path)


@pytest.mark.parametrize(("mode", "packed"), [("bz2", "bzip2"), ("xz", "xz")])
def test_an_unsupported_compression_of_a_tar_file_is_named(tmp_path: Path, mode: str, packed: str) -> None:
    with tarfile.open(tmp_path / "x.tar", f"w:{mode}") as archive:  # type: ignore[call-overload]
        archive.addfile(tarfile.TarInfo("a.txt"))

    with pytest.raises(BadObject, match=rf"x\.tar is compressed with {packed}: decompress it"):
        open_files(tmp_path / "x.tar")


def test_an_archive_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadObject, match=r"x\.tar: no samples in it;\n'README': names without an extension"):
        open_files(write(tmp_path / "x.tar", [("README", b"")]))
    (tmp_path / "y.tar").touch()
    with pytest.raises(BadObject, match=r"y\.tar is cut short: it ends at byte 0"):
        open_files(tmp_path / "y.tar")
    (tmp_path / "z").write_bytes(write(tmp_path / "z.tar", [("a.txt", b"")]).read_bytes())
    assert file_kind(tmp_path / "z") == "tar"


def test_many_skipped_members_are_counted_without_names(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar", [("a.txt", b""), *((f"README{i}", b"") for i in range(150))])

    with open_files(path) as source:
        assert len(source.skipped) == 101
        assert source.skipped[-1] == ("...", "and 50 more")


KEYS = st.lists(st.sampled_from(["a", "b", "d/c", "d/e", "f", "./g"]), unique=True, min_size=1)
ENDS = st.lists(st.sampled_from(["txt", "cls", "x.npy", "y.npy", "jpg", "json", "bin"]), unique=True, max_size=4)
OTHERS = st.lists(st.sampled_from([(".h", "txt", 0), ("README", "", 0), ("a", "txt", 1), ("f", "cls", 2)]), max_size=1)
VALUES: dict[str, list[bytes]] = {
    "txt": [b"", "é".encode(), b"\xff"],
    "cls": [b"1", b"-5\n", b"x"],
    "x.npy": [npy(np.arange(3)), npy(np.arange(2)), b"junk"],
    "y.npy": [npy(np.float32(1)), npy(np.float32(2)), npy(np.int64(1))],
    "json": [b'{"k": 1}', b'{"k": 2}', b"{"],
}


@settings(max_examples=80)
@given(
    keys=KEYS,
    ends=ENDS,
    values=st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=5),
    others=OTHERS,
    form=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    options=st.sampled_from(
        [
            {},
            {"fields": ["txt"]},
            {"label_from_folder": True, "key": False},
            {"rename": {"txt": "jpg"}},
            {"stem": "last"},
        ]
    ),
)
def test_members_read_as_columns_are_the_members_read_one_by_one(
    keys: list[str],
    ends: list[str],
    values: list[int],
    others: list[tuple[str, str, int]],
    form: int,
    options: dict[str, Any],
) -> None:
    members = [(key, end, values[at % len(values)]) for at, (key, end) in enumerate(itertools.product(keys, ends))]
    members += others
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder, "x.tar")
        with tarfile.open(path, "w", format=form) as archive:
            for key, end, value in members:
                body = VALUES.get(end, [b"", b"1", b"22"])[value]
                info = tarfile.TarInfo(f"{key}.{end}" if end else key)
                info.size, info.mtime = len(body), value + 0.5 if form == tarfile.PAX_FORMAT else value
                archive.addfile(info, io.BytesIO(body))

        def read() -> Any:
            try:
                source = TarFile(
                    SourceFile(path, path.stat().st_size, MemoryRanges(path.read_bytes()), in_order=True),
                    SourceOptions(**options),
                )
                blocks = list(source.blocks())
            except (BadObject, UsageError) as error:
                return str(error)
            rows = [
                [np.asarray(column[at]).tobytes() for column in block.columns.values()]
                for block in blocks
                for at in range(len(block))
            ]
            return source.schema, source.samples, source.skipped, source.places, rows

        together = read()
        patch.setattr(TarFile, "_plan", lambda *_: None)
        patch.setattr(tar, "_plain_header", lambda _: None)
        assert read() == together
        patch.undo()
        patch.setattr(tar, "MAX_MEMBERS", 3)
        assert read() == together
