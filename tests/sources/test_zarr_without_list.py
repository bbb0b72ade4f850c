"""A Zarr whose place cannot be listed: a web server without an index, a bucket without the permission to list."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import cachetool
from cachetool.core.errors import AccessDenied, BadObject, CacheToolError, NotFound, SourceError, UsageError
from cachetool.loaders.numpy import Loader
from cachetool.sources.options import SourceOptions
from cachetool.sources.registry import list_source
from tests.servers import Http, Scripted, folder_server, scripted_server
from tests.sources.files import open_files

ROWS = np.arange(40, dtype=np.float32).reshape(10, 4)
TIMES = np.arange(10)


def group(folder: Path, version: int, *, consolidated: bool = True, **more: Any) -> str:
    root = zarr.open_group(folder / "g.zarr", mode="w", zarr_format=version)  # type: ignore[arg-type]
    root.create_array("rows", shape=ROWS.shape, chunks=(2, 4), dtype="f4", **more)[...] = ROWS
    root.create_array("deep/times", shape=(10,), chunks=(5,), dtype="i8")[...] = TIMES
    if consolidated:
        zarr.consolidate_metadata(folder / "g.zarr")
    return "g.zarr"


def array(folder: Path, version: int, **more: Any) -> str:
    made = zarr.create_array(
        folder / "a.zarr", shape=ROWS.shape, chunks=(2, 4), dtype="f4", zarr_format=version, **more
    )  # type: ignore[call-overload]
    made[...] = ROWS
    return "a.zarr"


@contextlib.contextmanager
def bucket(folder: Path, absent: int = 403) -> Iterator[str]:
    """Serve an S3 bucket that forbids listing and answers for a missing key as S3 then does."""

    def script(handler: Scripted) -> None:
        path, _, query = handler.path.partition("?")
        file = folder / path.removeprefix("/bkt/")
        if "list-type" in query:
            handler.answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif not file.is_file():
            handler.answer(absent, b"" if handler.command == "HEAD" else b"<Error><Code>AccessDenied</Code></Error>")
        else:
            body = file.read_bytes()
            about = {"ETag": f'"{len(body)}"', "Last_Modified": "Fri, 21 Nov 2025 00:34:00 GMT"}
            if handler.command == "HEAD":
                handler.answer(200, Content_Length=str(len(body)), **about)
            elif asked := handler.headers.get("Range"):
                start, stop = (int(number) for number in asked.removeprefix("bytes=").split("-"))
                part = body[start : stop + 1]
                handler.answer(206, part, Content_Range=f"bytes {start}-{stop}/{len(body)}", **about)
            else:
                handler.answer(200, body, **about)

    with scripted_server(script) as server:
        yield server.url


@pytest.fixture(params=["web", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of ``tmp_path/place``."""
    (tmp_path / "place").mkdir()
    if request.param == "web":
        with folder_server(tmp_path / "place", index="none") as server:
            yield server.url
        return
    with bucket(tmp_path / "place") as url:
        for name, value in {"ENDPOINT_URL": url, "ACCESS_KEY_ID": "CANARY", "SECRET_ACCESS_KEY": "CANARY"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield "s3://bkt"


def samples(url: str, options: SourceOptions | None = None) -> dict[str, Any]:
    with open_files(url, options or SourceOptions(key=False)) as source:
        return dict(source.read(0, source.samples).columns)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("more", [{}, {"shards": (4, 4)}], ids=["chunks", "shards"])
def test_a_group_is_read_by_its_consolidated_metadata(place: str, tmp_path: Path, version: int, more: Any) -> None:
    if version == 2 and more:
        pytest.skip("version 2 has no shards")
    name = group(tmp_path / "place", version, **more)

    columns = samples(f"{place}/{name}")

    assert np.array_equal(columns["rows"], ROWS)
    assert np.array_equal(columns["deep/times"], TIMES)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("encoding", [".", "/"])
def test_one_array_is_read_by_its_own_metadata(place: str, tmp_path: Path, version: int, encoding: str) -> None:
    name = array(
        tmp_path / "place", version,
        chunk_key_encoding={"name": "v2" if version == 2 else "default", "configuration": {"separator": encoding}}
        if version == 3 else {"name": "v2", "separator": encoding},
    )  # fmt: skip

    assert np.array_equal(samples(f"{place}/{name}")["a"], ROWS)


@pytest.mark.parametrize(
    ("version", "mark"), [(3, "zarr.json"), (2, ".zmetadata"), (2, ".zgroup")], ids=["v3", "zmetadata", "zgroup"]
)
def test_the_url_may_name_the_file_of_metadata(place: str, tmp_path: Path, version: int, mark: str) -> None:
    name = group(tmp_path / "place", version)

    assert np.array_equal(samples(f"{place}/{name}/{mark}")["rows"], ROWS)
    assert np.array_equal(samples(str(tmp_path / "place" / name / mark))["rows"], ROWS)


@pytest.mark.parametrize("version", [2, 3])
def test_a_zarr_without_a_listing_is_pulled_and_converted(place: str, tmp_path: Path, version: int) -> None:
    name = group(tmp_path / "place", version)

    with cachetool.open_cache(tmp_path / "cache", max_size="20MB") as cache:
        assert cache.pull(f"{place}/{name}", all=True).samples == 10
        with Loader(cache, batch_size=10, shuffle=False, workers=0) as loader:
            [batch] = list(loader)
    assert sorted(batch["deep/times"].tolist()) == TIMES.tolist()
    assert np.array_equal(batch["rows"][:, 0], 4 * batch["deep/times"])
    result = cachetool.convert(f"{place}/{name}", to="hdf5", out=tmp_path / "out")
    assert result.samples == 10


def test_unwritten_chunks_are_fill_values_if_the_server_reports_missing_keys(tmp_path: Path) -> None:
    name = group(tmp_path, 3)
    (tmp_path / name / "rows" / "c" / "1" / "0").unlink()

    with folder_server(tmp_path, index="none") as server:
        rows = samples(f"{server.url}/{name}")["rows"]

    assert np.array_equal(rows[2:4], np.zeros((2, 4)))
    assert np.array_equal(np.delete(rows, [2, 3], axis=0), np.delete(ROWS, [2, 3], axis=0))


def test_a_refused_chunk_is_never_read_as_fill_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the permission to list, S3 refuses a missing key."""
    name = group(tmp_path, 3)
    (tmp_path / name / "rows" / "c" / "1" / "0").unlink()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "CANARY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "CANARY")
    with bucket(tmp_path) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(AccessDenied, match=r"rows/c/1/0.*\na store that does not let you list") as caught:
            samples(f"s3://bkt/{name}")
        assert "CANARY" not in str(caught.value)
        # Chunks that are not requested cannot be missing.
        columns = samples(f"s3://bkt/{name}", SourceOptions(key=False, fields=("deep/times",)))
    assert np.array_equal(columns["deep/times"], TIMES)
    with bucket(tmp_path, absent=404) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert np.array_equal(samples(f"s3://bkt/{name}")["rows"][2:4], np.zeros((2, 4)))


def test_a_group_without_consolidated_metadata_is_refused_with_alternatives_that_work(
    place: str, tmp_path: Path
) -> None:
    name = group(tmp_path / "place", 3, consolidated=False)

    with pytest.raises(UsageError, match=r"not consolidated;\ngive the URL of one array") as caught:
        samples(f"{place}/{name}")
    assert "consolidate_metadata()" in str(caught.value)
    # Both alternatives from the message:
    assert np.array_equal(samples(f"{place}/{name}/rows")["rows"], ROWS)
    zarr.consolidate_metadata(tmp_path / "place" / name)
    assert np.array_equal(samples(f"{place}/{name}")["rows"], ROWS)


def no_json(text: str) -> str:
    return text[:-2]


def no_arrays(text: str) -> str:
    return "[1]"


def no_shape(text: str) -> str:
    return text.replace('"shape"', '"shapes"')


def a_strange_grid(text: str) -> str:
    return text.replace('"chunk_shape"', '"chunks"')


def too_deep(text: str) -> str:
    return "[" * 100_000


@pytest.mark.parametrize("damage", [no_json, no_arrays, no_shape, a_strange_grid, too_deep])
def test_damaged_metadata_is_named(place: str, tmp_path: Path, damage: Callable[[str], str]) -> None:
    name = group(tmp_path / "place", 3)
    about = tmp_path / "place" / name / "zarr.json"
    about.write_text(damage(about.read_text()))

    with pytest.raises(BadObject, match="is not the metadata of a"):
        samples(f"{place}/{name}")


def test_an_array_with_too_many_chunks_is_refused_and_other_arrays_are_read(place: str, tmp_path: Path) -> None:
    name = group(tmp_path / "place", 3)
    about = tmp_path / "place" / name / "zarr.json"
    value = json.loads(about.read_text())
    value["consolidated_metadata"]["metadata"]["rows"]["shape"] = [10**12, 4]
    about.write_text(json.dumps(value))

    with pytest.raises(UsageError, match=r"more than 1048576 chunks.* choose fewer arrays with --fields"):
        samples(f"{place}/{name}")
    assert list(samples(f"{place}/{name}", SourceOptions(fields=("deep/times",), key=False))) == ["deep/times"]


def test_a_named_array_that_is_missing_is_an_error(tmp_path: Path) -> None:
    name = group(tmp_path, 3)
    (tmp_path / name / "rows" / "zarr.json").unlink()

    with (
        folder_server(tmp_path, index="none") as server,
        pytest.raises(NotFound, match=r"'rows/zarr\.json' is missing, but its group names it"),
    ):
        samples(f"{server.url}/{name}")


def test_a_place_without_a_zarr_keeps_its_error_and_costs_few_requests(tmp_path: Path) -> None:
    with folder_server(tmp_path, index="none") as server:
        with pytest.raises(CacheToolError, match="404") as caught:
            list_source(f"{server.url}/nothing/", tmp_path / "listing")
        assert isinstance(caught.value, NotFound)
        assert len(server.requests) <= 5


def test_a_server_that_answers_everything_with_a_page_has_no_zarr(tmp_path: Path) -> None:
    def page(handler: Scripted) -> None:
        handler.answer(200, b"<html>welcome</html>", Content_Type="text/html")

    with scripted_server(page) as server, pytest.raises(SourceError, match="no samples"):
        list_source(f"{server.url}/app/", tmp_path / "listing")


def test_no_single_chunk_of_a_listable_place_is_probed(tmp_path: Path) -> None:
    name = group(tmp_path / "place", 3) if (tmp_path / "place").mkdir() is None else ""
    server: Http
    with folder_server(tmp_path / "place", index="json") as server:
        list_source(f"{server.url}/{name}/", tmp_path / "listing")
        asked = [path for path, _ in server.requests]

    assert not [path for path in asked if "/c/" in path and not path.endswith("/")]
