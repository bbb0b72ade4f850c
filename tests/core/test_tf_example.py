"""The reader of ``tf.train.Example``, compared with a plain decoder of the wire format, and tried with noise."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.tf_example import BYTES, EMPTY, FLOAT, INT64, Feature, Gathered, parse_example


def varint(value: int) -> bytes:
    out = bytearray()
    value &= 2**64 - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def tagged(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(value: list[int] | list[float] | list[bytes], kind: int, packed: bool) -> bytes:
    if kind == BYTES:
        return tagged(1, b"".join(tagged(1, v) for v in value))  # type: ignore[arg-type]
    if kind == FLOAT:
        raw = [struct.pack("<f", v) for v in value]
        return tagged(2, tagged(1, b"".join(raw)) if packed else b"".join(b"\x0d" + r for r in raw))
    raw = [varint(v) for v in value]  # type: ignore[arg-type]
    return tagged(3, tagged(1, b"".join(raw)) if packed else b"".join(b"\x08" + r for r in raw))


LISTS = st.one_of(
    st.tuples(st.just(BYTES), st.lists(st.binary(max_size=300), max_size=3)),
    st.tuples(st.just(FLOAT), st.lists(st.floats(width=32, allow_nan=False), max_size=70)),
    st.tuples(st.just(INT64), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=70)),
)
EXAMPLES = st.dictionaries(st.text(max_size=200), st.tuples(LISTS, st.booleans()), max_size=5)


@given(st.lists(EXAMPLES, min_size=1, max_size=4))
def test_every_list_is_read_back(examples: list[dict[str, tuple[tuple[int, list[object]], bool]]]) -> None:
    """Packed or not, with any name and number, among unknown fields, for columns of many records."""
    unknown = varint(15 << 3) + varint(77) + varint(9 << 3 | 5) + b"abcd" + varint(8 << 3 | 1) + b"12345678"
    records = []
    for wanted in examples:
        entries = [
            tagged(1, tagged(1, name.encode()) + unknown + tagged(2, feature(value, kind, packed)))  # type: ignore[arg-type]
            for name, ((kind, value), packed) in wanted.items()
        ]
        records.append(unknown + tagged(1, b"".join(entries) + unknown))

    for record, wanted in zip(records, examples, strict=True):
        found = parse_example(memoryview(record))
        assert found.keys() == wanted.keys()
        for name, ((kind, value), _) in wanted.items():
            assert found[name].kind == kind
            gathered = Gathered(kind)
            for part in (None, found[name], found[name]):
                gathered.add(part)
            assert gathered.counts().tolist() == [0, len(value), len(value)]
            if kind == BYTES:
                assert gathered.sizes().tolist() == [len(v) for v in value * 2]  # type: ignore[arg-type]
                assert gathered.values().tobytes() == b"".join(value * 2)  # type: ignore[arg-type]
            else:
                assert gathered.values().tolist() == value * 2


@given(st.binary(max_size=200))
def test_noise_is_an_example_or_a_value_error(noise: bytes) -> None:
    try:
        found = parse_example(memoryview(noise))
    except ValueError:
        return
    for each in found.values():
        gathered = Gathered(each.kind)
        try:
            gathered.add(each)
            counts, values = gathered.counts(), gathered.values()
        except ValueError:
            continue
        if each.kind in (FLOAT, INT64):
            assert int(counts.sum()) == len(values)


@given(EXAMPLES, st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_raises_nothing_but_value_error(
    wanted: dict[str, tuple[tuple[int, list[object]], bool]], at: int, change: int
) -> None:
    entries = [
        tagged(1, tagged(1, name.encode()) + tagged(2, feature(value, kind, packed)))  # type: ignore[arg-type]
        for name, ((kind, value), packed) in wanted.items()
    ]
    record = bytearray(tagged(1, b"".join(entries)))
    record[at % len(record)] ^= change

    try:
        found = parse_example(memoryview(bytes(record)))
    except ValueError:
        return
    assert all(sum(map(len, each.parts)) <= len(record) for each in found.values())


def test_only_requested_features_are_parsed() -> None:
    record = tagged(1, tagged(1, tagged(1, b"a") + tagged(2, b"\x0b")) + tagged(1, tagged(1, b"b") + tagged(2, b"")))

    assert parse_example(memoryview(record), {"b"}) == {"b": Feature(EMPTY, [])}
    with pytest.raises(ValueError, match="wire type 3"):
        parse_example(memoryview(record))


def test_repeated_lists_of_one_kind_are_joined_and_the_last_kind_wins() -> None:
    ints = [tagged(3, tagged(1, varint(n))) for n in (1, 2)]
    record = tagged(1, tagged(1, tagged(1, b"a") + tagged(2, tagged(2, b"") + ints[0] + ints[1])))
    gathered = Gathered(INT64)
    gathered.add(parse_example(memoryview(record))["a"])

    assert gathered.values().tolist() == [1, 2]


def test_no_records_have_no_values() -> None:
    assert Gathered(INT64).values().tolist() == []
    assert Gathered(INT64).counts().tolist() == []
    assert Gathered(FLOAT).values().dtype == np.float32
