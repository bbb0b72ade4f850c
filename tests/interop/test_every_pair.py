"""Any format to any other, every type of field, bit for bit: checked by ``--verify`` and by other libraries.

The random half runs the code of ``convert`` in this process: 16 pairs, with 300 examples each under ``pytest
--hypothesis-profile thorough``.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cachetool
from cachetool.core.block import Block
from cachetool.core.errors import NotFound
from cachetool.core.schema import KEY, Field, Schema
from cachetool.formats.digest import ContentDigest, checksums
from tests.formats.samples import DTYPES, EVERY_FIELD, big_endian, block, blocks
from tests.interop.documented import arguments, expected, read
from tests.interop.folders import FORMATS, files, make, parts, whole

CONTENT = block(EVERY_FIELD, 6, seed=3)
CUT = CONTENT.nbytes // 3


def content_digest(content: Block) -> str:
    digest = ContentDigest(content.schema)
    digest.update(checksums(content))
    return digest.hexdigest()


def test_the_schema_has_every_type_of_field() -> None:
    fixed = [field for field in EVERY_FIELD if field.kind == "fixed"]
    for kind in ([f for f in fixed if f.is_scalar], [f for f in fixed if f.rank], list(EVERY_FIELD)):
        assert {field.numpy for field in kind} >= {np.dtype(dtype) for dtype in DTYPES}
    assert {np.dtype(dtype).char for dtype in DTYPES} >= set(np.typecodes["AllInteger"] + "?efdFDM") - set("pPqQnN")
    assert {f.numpy for f in EVERY_FIELD if f.kind == "ragged"} == {np.dtype(dtype) for dtype in DTYPES}
    assert {field.rank for field in fixed} == {0, 1, 2, 3, 4, 5}
    assert {f.rank for f in EVERY_FIELD if f.kind == "ragged"} == {1, 2, 3, 4}
    assert {field.nbytes for field in fixed} >= {0}
    assert {"bytes", "str"} <= {field.kind for field in EVERY_FIELD}
    assert big_endian(CONTENT).columns["scalar/3"].dtype.byteorder == ">"  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write every type of field in every format, from big-endian values."""
    root = tmp_path_factory.mktemp("made")
    for name in FORMATS:
        make(root / name, name, big_endian(CONTENT))
    return root


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("to", FORMATS)
def test_every_format_is_converted_to_every_other_bit_for_bit(made: Path, tmp_path: Path, to: str) -> None:
    """Checked by ``--verify`` and by the library of the target alone. The files are the same for every format of
    origin.
    """
    for name in FORMATS:
        result = cachetool.convert(made / name, to=to, out=tmp_path / name, shard_size=CUT, verify=True, workers=1)
        assert result.verified
        assert (result.samples, result.digest) == (6, content_digest(CONTENT))
        assert result.shards > 1
        assert files(tmp_path / name) == files(tmp_path / FORMATS[0])

    found = parts(tmp_path / FORMATS[0])
    by_others = read(to, [(count, arguments(to, path, EVERY_FIELD)) for path, count in found])
    assert list(itertools.chain(*by_others)) == expected(CONTENT)


def test_a_chain_of_conversions_with_other_shard_sizes_keeps_the_digest(made: Path, tmp_path: Path) -> None:
    digests, source, cuts = {content_digest(CONTENT)}, made / "lmdb", []
    for to, size in (("hdf5", CUT), ("zarr", 10 * CUT), ("tfrecord", 2 * CUT), ("lmdb", CUT // 2)):
        out = tmp_path / to
        result = cachetool.convert(source, to=to, out=out, shard_size=size)
        digests.add(result.digest)
        cuts.append(result.shards)
        source = out
    assert len(digests) == 1
    assert len(set(cuts)) > 2
    np.testing.assert_array_equal(checksums(whole(source)), checksums(CONTENT))


THOROUGH = settings.default.max_examples >= 300  # type: ignore[union-attr]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("a", "b"), list(itertools.product(FORMATS, FORMATS)), ids=lambda name: name)
@settings(max_examples=settings.default.max_examples if THOROUGH else 8)  # type: ignore[union-attr]
@given(content=blocks(), data=st.data())
def test_random_samples_keep_every_bit(a: str, b: str, content: Block, data: st.DataObject) -> None:
    """Any schema, names, bits and blocks are verified, and read again through the library, without an error."""
    assume(all(field.name != KEY or field.kind == "str" for field in content.schema))  # real samples have no such keys
    size = data.draw(st.integers(1, content.nbytes + 1))
    with tempfile.TemporaryDirectory() as folder:
        made = make(Path(folder) / "made", a, content)
        if not len(content):
            with pytest.raises(NotFound, match=r"no samples|no rows"):
                cachetool.convert(made, to=b, out=Path(folder) / "out")
            return
        result = cachetool.convert(made, to=b, out=Path(folder) / "out", shard_size=size, verify=True)
        assert (result.samples, result.digest) == (len(content), content_digest(content))
        found = whole(Path(folder) / "out")
    assert found.schema == content.schema
    np.testing.assert_array_equal(checksums(found), checksums(content))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("a", FORMATS)
@pytest.mark.parametrize("names", list(itertools.permutations(["__key__", "x", "n"])))
def test_the_key_may_be_at_any_position_among_the_fields(tmp_path: Path, a: str, names: tuple[str, ...]) -> None:
    fields = {"__key__": Field(KEY, "str"), "x": Field("x", "<f4", (2,)), "n": Field("n", "<i8")}
    content = block(Schema(tuple(fields[name] for name in names)), 5)
    made = make(tmp_path / "made", a, content)
    result = cachetool.convert(made, to="lmdb", out=tmp_path / "out", verify=True)
    assert result.digest == content_digest(content)
    assert whole(tmp_path / "out").schema == content.schema
