"""Axes: a few round numbers within the range, with a unit, for any range."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator

import pytest

from cachetool.report import axes, charts

RANGES = [1, 7, 59, 61, 600, 3599, 7200, 40_000, 86_400, 200_000, 10**6, 10**7, 10**8, 10**9]


@pytest.fixture(params=["UTC", "Asia/Kolkata", "America/St_Johns", "Pacific/Auckland"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("length", RANGES)
def test_a_time_axis_has_some_ticks_at_round_local_times(zone: str, length: int) -> None:
    for begin in (1.7e9, 1.7e9 + 12_345.678):
        axis = axes.time_axis(begin, begin + length)
        assert 1 <= len(axis.ticks) <= 7
        assert all(begin <= at <= begin + length for at, _ in axis.ticks)
        assert length > 86_400 or len({text for _, text in axis.ticks}) == len(axis.ticks)
        assert axis.title.startswith("local time (UTC")
        if length >= 2 * 86_400:
            assert {time.localtime(at)[3:6] for at, _ in axis.ticks} <= {(0, 0, 0), (12, 0, 0)}


@pytest.mark.parametrize("most", [0, 1, 3, 999, 1000, 1234, 5 * 10**6, 999_999_999, 10**12, 7 * 10**15])
def test_an_axis_of_bytes_extends_above_its_values_in_one_unit(most: int) -> None:
    axis = axes.bytes_axis(most, per="/s")

    assert axis.low == 0
    assert axis.high >= max(1, most) * 0.999
    assert 2 <= len(axis.ticks) <= 6
    assert all(len(text) <= 6 for _, text in axis.ticks)
    assert axis.title in {f"{unit}/s" for unit in ("B", "kB", "MB", "GB", "TB", "PB")}


def test_counts_are_whole_and_durations_in_a_fitting_unit() -> None:
    assert [text for _, text in axes.count_axis(2, "shards").ticks] == ["0", "1", "2"]
    assert axes.seconds_axis(7200, "time").title == "time, hours"
    assert axes.age_axis(90).title == "age in seconds"
    assert axes.age_axis(90).high == 90
    assert [text for _, text in axes.log_bytes_axis(3e5, 3e6).ticks] == ["500 kB", "1 MB", "2 MB"]
    assert axes.log_bytes_axis(101, 102).ticks[0][1].endswith(" B")


def test_labels_that_would_overlap_are_left_out() -> None:
    ticks = tuple((float(number), f"{number:,} samples") for number in range(101))
    crowded = axes.Axis(0.0, 100.0, ticks, "samples")
    drawn = charts.stacked(crowded, axes.count_axis(1, "shards"), [0.0, 100.0], {"all": ("blue", [1.0])}, ["all"])
    spans = [
        (float(at) - 7.2 * len(text) / 2, float(at) + 7.2 * len(text) / 2)
        for at, text in re.findall(r'<text x="([0-9.]+)"[^>]*>([0-9,]+ samples)</text>', drawn)
    ]

    assert 2 < len(spans) < 8
    assert spans[0][0] >= 0
    assert spans[-1][1] <= charts.WIDTH
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
