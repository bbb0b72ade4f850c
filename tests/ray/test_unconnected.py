"""``cachetool.loaders.ray`` without a connection."""

from __future__ import annotations

import pytest

from cachetool.errors import UsageError
from cachetool.loaders.ray import batches


def test_a_program_that_is_not_connected_is_told_how() -> None:
    with pytest.raises(UsageError, match=r"Ray is not connected; call ray\.init"):
        batches("cache", batch_size=5)
