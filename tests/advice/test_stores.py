"""The advice of messages of stores."""

from __future__ import annotations

import numpy as np
import pytest

from tests.advice.conftest import World, follows
from tests.advice.test_pull import numbered


@follows("stores/base.py", "\nlist the source again")
@pytest.mark.parametrize("option", ["--refresh", "--dataset other", "--on-error skip"])
def test_a_changed_object_is_listed_again_or_skipped(world: World, option: str) -> None:
    numbered(world.folder / "many", 200)
    world.works("pull many --samples 1 --order sequential --cache x")
    np.save(world.folder / "many/150.npy", np.zeros(4, "i8"))
    world.fails("pull many --all --cache x")
    world.works(f"pull many --all --cache x {option}")
