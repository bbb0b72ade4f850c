"""``cache.stats()`` in a notebook: a small table with bars."""

from __future__ import annotations

from pathlib import Path

import html5lib
import numpy as np

import cachetool
from cachetool.core.schema import Field, Schema
from tests.loaders.numbered import put_samples


def test_the_table_shows_the_fill_and_escapes_names(tmp_path: Path) -> None:
    schema = Schema((Field("x", "<f4", (4,)),))
    name = "a<script>b</script>"
    with cachetool.open_cache(tmp_path / "cache", max_size="10MB") as cache:
        put_samples(cache, [{"x": np.ones(4, np.float32)} for _ in range(24)], schema=schema, dataset=name)
        stats = cache.stats()
    page = stats._repr_html_()
    assert "<script" not in page
    tree = html5lib.HTMLParser(strict=True).parseFragment(page)
    rows = [
        ["".join(cell.itertext()) for cell in row.iter("{http://www.w3.org/1999/xhtml}td")]
        for row in tree.iter("{http://www.w3.org/1999/xhtml}tr")
    ]
    assert [row[0] for row in rows] == ["cache", name, "free"]
    assert rows[1][3] == "24 samples"
    assert rows[0][2].endswith("of 10.0 MB")
