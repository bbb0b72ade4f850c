"""README and ``docs/`` show programs and commands that work: the tests run all of them and compare their output."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, LANGUAGES, ROOT, blocks, pages, run_pages, served, wrong_lines
from tests.docs.world import fill_bucket

PAGES = pages()
_TRAINING = (
    "pad-ragged-samples resume select-samples share-a-cache split-for-validation transform-samples use-several-gpus"
)
_DATA = (
    "crop-large-arrays decode-images-and-masks decode-images-while-training move-from-imagefolder move-from-lmdb"
    " mix-datasets move-from-mds move-from-webdataset read-hdf5-and-zarr read-parquet store-bfloat16"
    " train-on-large-arrays unpack-netcdf-values"
)


def how_tos(names: str) -> tuple[str, ...]:
    return tuple(f"docs/how-to/{name}.md" for name in names.split())


TOGETHER = (
    ("README.md", *how_tos("move-from-tensorflow")),
    how_tos(f"{_TRAINING} train-with-torchdata train-with-ignite"),
    how_tos(_DATA),
    ("docs/tutorial.md", "docs/reference/errors.md", *how_tos("choose-a-cap")),
    how_tos("pull-on-ray"),
    (
        "docs/explanation/trainers.md",
        "docs/explanation/waits.md",
        *how_tos("train-with-accelerate train-with-fabric train-with-hugging-face train-with-lightning"),
    ),
    how_tos("train-with-keras"),
)
"""Pages that share a process."""
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    fill_bucket(folder / "bucket")
    return folder


@pytest.fixture(scope="module")
def servers(remote: Path) -> Iterator[dict[str, str]]:
    with served(remote) as env:
        yield env


@pytest.mark.timeout(600)  # half a minute each, where nothing else wants the processor
@pytest.mark.parametrize(
    "together",
    # A cluster takes a minute to start; one test of tests/ray runs by default.
    [
        pytest.param(names, id=names[0], marks=[pytest.mark.soak] * (names == how_tos("pull-on-ray")))
        for names in TOGETHER
    ],
)
def test_all_programs_and_commands_do_what_their_page_says(
    together: tuple[str, ...], remote: Path, servers: dict[str, str]
) -> None:
    run_pages([ROOT / name for name in together], remote, servers)


def test_every_page_with_programs_is_run() -> None:
    assert sorted(itertools.chain(*TOGETHER)) == [named(page) for page in PAGES if any(b.runs for b in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_what_is_not_run_says_why(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.page}:{block.line}"
        if block.language in ("python", "pycon", "sh", "console") and not block.runs:
            assert re.fullmatch(r"not run: .{10,}|lines of [\w/.]+", block.said), f"{block.page}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_lines_of_an_example_are_in_it(page: Path) -> None:
    for block in blocks(page):
        if block.said.startswith("lines of "):
            assert wrong_lines(block) == [], f"{block.page}:{block.line}"


@pytest.mark.parametrize("page", TEXTS, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    """Files, and headings of files, as GitHub numbers them."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("https://", "http://")):
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], target


def test_the_list_of_pages_names_every_page() -> None:
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(([\w/-]+\.md)\)", text))

    assert named == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"README.md"}
