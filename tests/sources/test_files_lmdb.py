"""LMDB files that py-lmdb wrote, with both engines, read by a separate process."""

from __future__ import annotations

import io
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from cachetool.core.errors import BadObject, UsageError
from cachetool.sources.lmdb import check_value_format
from cachetool.sources.options import SourceOptions
from tests.sources.files import damaged, open_files, outcome, read, same, samples

RANDOM = np.random.default_rng(2)


def write(path: Path, entries: dict[bytes, bytes], *, engine: int = 0, subdir: bool = False, **how: Any) -> Path:
    env = lmdb.open(str(path), subdir=subdir, map_size=2**27, lib_version=engine, **how)
    with env.begin(write=True) as txn:
        for key, value in entries.items():
            assert txn.put(key, value)
    env.close()
    return path


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("engine", [0, 1], ids=["0.9", "1.0"])
@pytest.mark.parametrize("subdir", [False, True])
def test_values_are_bytes_under_their_keys(tmp_path: Path, engine: int, subdir: bool) -> None:
    """Both engines, a file or a folder, in the order of keys, short values and long ones."""
    entries = {b"k%03d" % i: RANDOM.bytes(int(size)) for i, size in enumerate(RANDOM.integers(0, 9000, 150))}
    write(tmp_path / "x.lmdb", entries, engine=engine, subdir=subdir)

    found = samples(tmp_path / "x.lmdb")

    assert {s["__key__"].encode(): s["value"] for s in found} == entries
    assert [s["__key__"] for s in found] == sorted(k.decode() for k in entries)


def test_a_read_only_lmdb_file_is_recognised_by_its_first_bytes(tmp_path: Path) -> None:
    write(tmp_path / "data", {b"0": b"x"})
    (tmp_path / "data-lock").unlink()
    (tmp_path / "data").chmod(0o444)

    assert samples(tmp_path / "data") == [{"value": b"x", "__key__": "0"}]
    assert sorted(os.listdir(tmp_path)) == ["data"]


def test_the_key_can_be_left_out_and_the_value_renamed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.lmdb", {b"0": b"x", b"1": b"yy"})

    assert samples(path, key=False, rename={"value": "image"}) == [{"image": b"x"}, {"image": b"yy"}]
    assert samples(path, fields=("image",), rename={"value": "image"})[1] == {"image": b"yy", "__key__": "1"}
    with pytest.raises(UsageError, match="unknown field 'image'; the file has 'value'"):
        open_files(path, SourceOptions(fields=("image",)))


def test_keys_of_any_bytes_are_kept(tmp_path: Path) -> None:
    keys = [b"\x00\x00\x00\x01", b"\xff\xfe", "日本".encode()]
    path = write(tmp_path / "x.lmdb", dict.fromkeys(keys, b"v"))

    assert [s["__key__"].encode("utf-8", "surrogateescape") for s in samples(path)] == sorted(keys)


def test_metadata_entries_of_the_file_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "x.lmdb", {b"0": b"x", b"__len__": pickle.dumps(1), b"length": b"1", b"__keys__": b"?"})

    assert len(samples(path)) == 1
    with open_files(path) as source:
        assert source.skipped == tuple(
            (k, "a note on the file, not a sample") for k in ("__keys__", "__len__", "length")
        )


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_values_are_decoded(tmp_path: Path, order: Any) -> None:
    arrays = {b"%d" % i: np.asarray(RANDOM.normal(size=(4, 3)), dtype=">f4", order=order) for i in range(10)}
    path = write(tmp_path / "x.lmdb", {k: npy(a) for k, a in arrays.items()})

    with open_files(path, SourceOptions(value_format="npy")) as source:
        assert source.schema["value"].shape == (4, 3)
    assert all(same(s["value"], arrays[s["__key__"].encode()]) for s in samples(path, value_format="npy"))


def test_npy_values_of_differing_shape_are_ragged(tmp_path: Path) -> None:
    arrays = {b"%d" % i: RANDOM.integers(0, 9, (i, 2)) for i in range(5)}
    path = write(tmp_path / "x.lmdb", {k: npy(a) for k, a in arrays.items()})

    with open_files(path, SourceOptions(value_format="npy")) as source:
        assert source.schema["value"].shape == (None, None)
    assert all(same(s["value"], arrays[s["__key__"].encode()]) for s in samples(path, value_format="npy"))


def test_npy_values_that_share_no_field_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.lmdb", {b"a": npy(np.zeros(3)), b"b": npy(np.zeros((3, 1)))})

    with pytest.raises(
        BadObject, match=r"the value of 'a' is <f8 \(3,\), but the value of 'b' is <f8 \(3, 1\); no field can"
    ):
        open_files(path, SourceOptions(value_format="npy"))
    path = write(tmp_path / "y.lmdb", {b"a": npy(np.zeros(3)), b"b": b"junk"})
    with pytest.raises(BadObject, match=r"y\.lmdb: the value of 'b': not a \.npy file"):
        open_files(path, SourceOptions(value_format="npy"))


@pytest.mark.parametrize("text", ["raw:float32,2x3", "raw:<f4,2,3"])
def test_raw_values_are_read(tmp_path: Path, text: str) -> None:
    arrays = {b"%d" % i: RANDOM.normal(size=(2, 3)).astype("<f4") for i in range(9)}
    path = write(tmp_path / "x.lmdb", {k: a.tobytes() for k, a in arrays.items()})

    assert all(same(s["value"], arrays[s["__key__"].encode()]) for s in samples(path, value_format=text))
    assert samples(path, value_format="raw:uint8,24")[0]["value"].tobytes() == arrays[b"0"].tobytes()
    with pytest.raises(BadObject, match=r"x\.lmdb: the value of '0' has 24 bytes, but float32 \(2,\) needs 8"):
        samples(path, value_format="raw:float32,2")


def test_raw_scalars_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.lmdb", {b"%d" % i: np.int16(i).tobytes() for i in range(5)})

    assert [s["value"] for s in samples(path, value_format="raw:int16")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [">i2", ">u8", ">f2", ">f4", ">f8", ">c8", ">M8[s]", "<i2", "int16", "u1", "?"])
def test_raw_numbers_of_either_byte_order_keep_their_values(tmp_path: Path, dtype: str) -> None:
    array = np.arange(1, 4).astype(dtype)
    path = write(tmp_path / "x.lmdb", {b"0": array.tobytes(), b"1": array[::-1].tobytes()})

    found = [s["value"] for s in samples(path, value_format=f"raw:{dtype},3")]

    assert [value.tolist() for value in found] == [array.tolist(), array[::-1].tolist()]
    assert {value.dtype for value in found} == {np.dtype(dtype).newbyteorder("<")}


def test_images_are_decoded(tmp_path: Path) -> None:
    from PIL import Image

    pixels = RANDOM.integers(0, 255, (3, 6, 5, 3), dtype=np.uint8)
    entries = {}
    for i, array in enumerate(pixels):
        file = io.BytesIO()
        Image.fromarray(array[: 4 + i]).save(file, "PNG")
        entries[b"%d" % i] = file.getvalue()
    path = write(tmp_path / "x.lmdb", entries)

    with open_files(path, SourceOptions(value_format="image")) as source:
        assert source.schema["value"].shape == (None, None, None)
    for i, sample in enumerate(samples(path, value_format="image")):
        assert same(sample["value"], pixels[i][: 4 + i])


@pytest.mark.parametrize(
    "text", ["raw", "raw:", "raw:float32,", "raw:float32,ax2", "json", "", "raw:object,2", "raw:U3"]
)
def test_invalid_value_formats_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--value-format|cannot be stored|not a NumPy dtype"):
        check_value_format(text)


class Canary:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickled_values_are_refused_with_an_alternative(tmp_path: Path, protocol: int) -> None:
    """No mode unpickles anything. The raw bytes can be requested."""
    raw = pickle.dumps([Canary(tmp_path / "unpickled"), "x" * 50], protocol)
    path = write(tmp_path / "x.lmdb", {b"0": b"fine", b"1": raw})

    for value_format in (None, "npy", "image", "raw:uint8,4"):
        with pytest.raises(BadObject, match=r"x\.lmdb: the value of '1' is a Python pickle.*\n.*--value-format bytes"):
            open_files(path, SourceOptions(value_format=value_format))
    assert samples(path, value_format="bytes")[1]["value"] == raw
    assert not (tmp_path / "unpickled").exists()


def test_declared_raw_numbers_that_begin_like_a_pickle_are_numbers(tmp_path: Path) -> None:
    entries = {b"%d" % i: bytes([0x80, 4, 0x95, i]) for i in range(3)}
    path = write(tmp_path / "x.lmdb", entries)

    assert [s["value"].tobytes() for s in samples(path, value_format="raw:uint8,4")] == list(entries.values())
    with pytest.raises(BadObject, match="is a Python pickle"):
        open_files(path)


@pytest.mark.parametrize("value", [b"v" * 48, bytes(48), b"\xff" * 48])
def test_a_value_as_long_as_a_database_record_is_a_value(tmp_path: Path, value: bytes) -> None:
    write(tmp_path / "y.lmdb", {b"0": value})
    assert [sample["value"] for sample in samples(tmp_path / "y.lmdb")] == [value]


def test_values_are_read_from_any_position_and_again_after_close(tmp_path: Path) -> None:
    entries = {b"%03d" % i: b"%d" % i for i in range(500)}
    source = open_files(write(tmp_path / "x.lmdb", entries))

    for start, stop in [(400, 500), (100, 103), (103, 110), (0, 500), (7, 7)]:
        assert [read(source, start, stop).sample(i)["value"] for i in range(stop - start)] == [
            b"%d" % i for i in range(start, stop)
        ]
    source.close()
    assert read(source, 499, 500).sample(0) == {"value": b"499", "__key__": "499"}
    source.close()


def test_an_iterator_that_is_left_does_not_disturb_the_next(tmp_path: Path) -> None:
    entries = {b"%03d" % i: b"x" * 100 for i in range(100)}
    with open_files(write(tmp_path / "x.lmdb", entries)) as source:
        first = source.blocks(block_bytes=500)
        next(first)
        first.close()  # type: ignore[attr-defined]
        assert sum(len(block) for block in source.blocks(block_bytes=500)) == 100
        assert len(read(source, 0, 3)) == 3


def test_an_empty_database_has_no_samples(tmp_path: Path) -> None:
    with pytest.raises(BadObject, match=r"x\.lmdb: no samples in it"):
        open_files(write(tmp_path / "x.lmdb", {}))


@pytest.mark.parametrize(("content", "why"), [(b"", "it is empty"), (b"hello " * 1000, "it does not begin like one")])
@pytest.mark.parametrize("name", ["x.lmdb", "folder/data.mdb"])
def test_a_file_that_is_not_lmdb_is_reported_as_such(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    """The message does not quote the library's own calls, has the path once, and names a folder by its own name."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)

    with pytest.raises(BadObject) as caught:
        open_files(path if name == "x.lmdb" else path.parent)
    assert str(caught.value) == f"{name} is not an LMDB file: {why}"


def test_files_of_a_folder_are_one_input(tmp_path: Path) -> None:
    for k in range(3):
        write(tmp_path / f"{k}.lmdb", {b"%d%d" % (k, i): b"%d" % i for i in range(5)})

    found = samples(tmp_path)

    assert [s["__key__"] for s in found] == [f"{k}{i}" for k in range(3) for i in range(5)]


@pytest.mark.parametrize("engine", [0, 1], ids=["0.9", "1.0"])
def test_damaged_files_are_errors_and_the_calling_process_survives(
    tmp_path: Path, engine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachetool.sources.guard.CPU_SECONDS", 2)
    write(tmp_path / "x.lmdb", {b"%03d" % i: RANDOM.bytes(50 * i) for i in range(60)}, engine=engine)

    for how, path in damaged(tmp_path / "x.lmdb", cuts=6, flips=10, seed=engine):
        assert isinstance(outcome(path), str) or not how.startswith("cut"), how


def test_a_file_truncated_inside_its_last_page_is_an_error(tmp_path: Path) -> None:
    """The kernel fills the rest of a mapped page with zeros, which must not be read as values."""
    path = write(tmp_path / "x.lmdb", {b"0": b"x" * 5000})
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"xxxx") - 10])

    with pytest.raises(BadObject, match=r"x\.lmdb is cut short: it ends inside of a page"):
        open_files(path)


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGBUS])
def test_a_file_that_kills_its_reader_is_an_error_in_the_calling_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """However the reading process ends, the calling process names the file and continues."""
    path = write(tmp_path / "x.lmdb", {b"%03d" % i: b"x" * 50_000 for i in range(1000)})
    with open_files(path) as source:
        blocks = source.blocks(block_bytes=1)
        next(blocks)
        os.kill(source.reader, how)

        with pytest.raises(BadObject, match=rf"x\.lmdb: the file is damaged: .* was killed by signal {int(how)}"):
            list(blocks)
        assert sum(len(block) for block in source.blocks()) == 1000


@pytest.mark.usefixtures("real_processes")
def test_credentials_are_not_passed_to_the_process_that_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-1")
    monkeypatch.setenv("HF_TOKEN", "canary-2")
    with open_files(write(tmp_path / "x.lmdb", {b"0": b"x"})) as source:
        source.read(0, 1)
        pid = source.reader
        told = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"canary" not in told
        assert b"PATH=" in told
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # it ended with close
