"""Sizes, rates, durations and shares as people write them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachetool.core.errors import UsageError
from cachetool.core.units import (
    format_duration,
    format_size,
    parse_duration,
    parse_fraction,
    parse_rate,
    parse_size,
    parse_whole,
    size_option,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        (4096, 4096),
        ("7B", 7),
        ("50GB", 50 * 10**9),
        ("50GiB", 50 * 2**30),
        ("64MB", 64 * 10**6),
        ("64mb", 64 * 10**6),
        ("512 KiB", 512 * 1024),
        ("3k", 3000),
        ("2T", 2 * 10**12),
        ("1.5GB", 1_500_000_000),
        (" 10MB ", 10**7),
        ("4096PiB", 2**62),
    ],
)
def test_decimal_units_are_powers_of_ten_and_binary_units_powers_of_two(text: str | int, expected: int) -> None:
    assert expected == parse_size(text)


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", -1, "1e9", "5 GB 3", "12XB", "1.GB", "0x10", "٣MB", "nan", "5GB/s", "4097PiB"]
)
def test_an_invalid_size_is_refused_with_the_text_quoted(text: str | int) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(str(text)))):
        parse_size(text, what="--max-size")


def test_the_error_names_the_option() -> None:
    with pytest.raises(UsageError, match=r"^--shard-size 'big' is not a size"):
        parse_size("big", what="--shard-size")


@given(st.integers(0, 2**62))
def test_a_plain_number_of_bytes_is_exact(value: int) -> None:
    assert value == parse_size(value) == parse_size(str(value))


@given(st.integers(0, 2**60))
def test_a_printed_size_is_parsed_back_within_its_precision(value: int) -> None:
    # One decimal of a number of at least 1.0 has an error of at most 0.05.
    assert abs(parse_size(format_size(value).replace(" ", "")) - value) <= 0.05 * value + 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1_500_000_000, "1.5 GB"),
        (10**15, "1.0 PB"),
    ],
)
def test_sizes_are_printed_in_powers_of_ten(value: int, expected: str) -> None:
    assert expected == format_size(value)


@pytest.mark.parametrize(("text", "expected"), [("200MB/s", 200_000_000), ("1MiB/s", 2**20), ("5kBps", 5000), (77, 77)])
def test_a_rate_is_a_size_with_or_without_per_second(text: str | int, expected: int) -> None:
    assert expected == parse_rate(text)


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="above 0"):
        parse_rate("0")


def test_a_number_below_the_minimum_is_refused_with_the_minimum() -> None:
    assert parse_whole(1, what="steps=", least=1) == 1
    with pytest.raises(UsageError, match=r"^steps=0 cannot be used; it must be at least 1$"):
        parse_whole(0, what="steps=", least=1)
    with pytest.raises(UsageError, match=r"^epoch=-1 cannot be used; it must be 0 or more$"):
        parse_whole(-1, what="epoch=", least=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("60s", 60.0), ("10min", 600.0), ("2h", 7200.0), ("500ms", 0.5), ("1.5", 1.5), (3, 3.0), ("1d", 86400.0)],
)
def test_durations_are_parsed_to_seconds(text: str | float, expected: float) -> None:
    assert expected == pytest.approx(parse_duration(text))


@pytest.mark.parametrize("text", ["soon", "-1s", "", "1 week", "inf", "nan"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(text))):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.44, "0.4 s"), (12.4, "12 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_are_printed_for_people(seconds: float, expected: str) -> None:
    assert expected == format_duration(seconds)


@pytest.mark.parametrize(("text", "expected"), [("10%", 0.1), ("0.1", 0.1), (0.25, 0.25), ("0", 0.0), ("100%", 1.0)])
def test_shares_are_percent_or_a_number_up_to_one(text: str | float, expected: float) -> None:
    assert expected == pytest.approx(parse_fraction(text))


@pytest.mark.parametrize("text", ["101%", "-1%", "2", "half", "", "nan", "nan%", "%"])
def test_an_invalid_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(text))):
        parse_fraction(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0B"),
        (1, "1B"),
        (999, "999B"),
        (1000, "1.0kB"),
        (1001, "1.1kB"),
        (5_430_000, "5.5MB"),
        (543_000_001, "544MB"),
    ],
)
def test_a_size_for_an_option_is_never_too_small(value: int, text: str) -> None:
    assert size_option(value) == text
    assert value <= parse_size(text) <= 1.1 * value
