"""``crop=`` and ``offsets=`` that cannot be used are refused with one line that names argument, value and way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachetool.core.errors import UsageError
from cachetool.loaders.numpy import Loader
from cachetool.loaders.other_names import OF_TENSORFLOW, answering
from cachetool.loaders.torch import CacheDataset
from tests.loaders.cropped import volumes

BOX = {"volume": (4, 5, 3)}
CROPPING = ("crop", "crops", "stride", "corner", "crop_pad")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": (4, 4)}, r"crop=\(4, 4\) cannot be used; use a dict of fields and the sizes"),
        ({"crop": {}}, r"crop=\{\} cannot be used"),
        ({"crop": {3: (4, 4)}}, r"crop=\{3: \(4, 4\)\} cannot be used"),
        ({"crop": {"volume": ()}}, "crop= of field 'volume' has no size; give one for each axis"),
        ({"crop": {"volume": None}}, "crop= of field 'volume' has no size"),
        ({"crop": {"volume": (None, None)}}, "crop= of field 'volume' has no size"),
        ({"crop": {"volume": (4, 0, 4)}}, "crop= of field 'volume'.*0"),
        ({"crop": {"volume": (4, -1, 4)}}, "crop= of field 'volume'.*-1"),
        ({"crop": {"volume": (4, 2.5, 4)}}, r"crop= of field 'volume'.*2\.5"),
        ({"crop": {"volume": "64"}}, "crop= of field 'volume'.*64"),
        ({"crop": {"volume": (True, 2, 3)}}, "crop= of field 'volume'.*True"),
        ({"crops": 4}, "crops=4 needs crop=, a dict such as"),
        ({"stride": 4}, "stride=4 needs crop="),
        ({"corner": len}, "corner=.* needs crop="),
        ({"crop_pad": 0}, "crop_pad=0 needs crop="),
        ({"crop": BOX, "crops": 0}, "crops=.*0"),
        ({"crop": BOX, "crops": "all"}, "crops=.*all"),
        ({"crop": BOX, "crops": 1.5}, r"crops=.*1\.5"),
        ({"crop": BOX, "stride": 2}, "stride=2 needs crops='grid'"),
        ({"crop": BOX, "crops": "grid", "stride": 0}, "stride=.*0"),
        ({"crop": BOX, "crops": "grid", "corner": len}, "corner= chooses the corners of crops, which crops='grid'"),
        ({"crop": BOX, "corner": (0, 0, 0)}, r"corner=\(0, 0, 0\) cannot be used; it must be a function"),
        ({"crop": BOX, "crop_pad": "mirror"}, "crop_pad='mirror' cannot be used; it must be a number, 'reflect' or"),
        ({"crop": BOX, "crop_pad": (0, 1)}, r"crop_pad=\(0, 1\) cannot be used"),
        ({"offsets": (0, 1)}, r"offsets=\(0, 1\) cannot be used; use a dict of fields and numbers of rows"),
        ({"offsets": {}}, r"offsets=\{\} cannot be used"),
        ({"offsets": {"volume": ()}}, r"offsets= of field 'volume': \(\) cannot be used; give numbers of rows"),
        ({"offsets": {"volume": "01"}}, "offsets= of field 'volume': '01' cannot be used"),
        ({"offsets": {"volume": (0, 0.5)}}, r"offsets= of field 'volume': .*0\.5"),
        ({"offsets": {"volume": None}}, "offsets= of field 'volume': None cannot be used"),
        ({"offsets": {"volume": 2**41}}, "offsets= of field 'volume': .* reaches further than a series can be long"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as error:
        Loader(tmp_path, batch_size=4, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": {"nothing": (4, 4)}}, "nothing"),
        ({"crop": BOX, "fields": ["number"]}, "volume"),
        ({"offsets": {"volume": (0, 1)}, "fields": ["number"]}, "offsets= names the field 'volume', but a batch has"),
        ({"crop": {"volume": (4, 4)}}, r"gives field 'volume' a box of 2 sizes \(4, 4\), but a sample of it is"),
        ({"crop": {"number": (4,)}}, r"gives field 'number' a box of 1 sizes \(4,\), but a sample of it is"),
        ({"crop": {"__key__": (4,)}}, "gives field '__key__' a box of 1 sizes"),
        ({"crop": {"plane": (4, None)}}, "keeps axis 1 of field 'plane' whole, but its size differs from sample to"),
        ({"crop": BOX, "crops": "grid", "stride": (1, 2)}, r"stride=\(1, 2\) cannot be used with a box of 3 sizes"),
    ],
)
def test_fields_that_have_no_such_boxes_are_named(
    options: dict[str, Any], message: str, workers: int, tmp_path: Path
) -> None:
    place = volumes(tmp_path / "cache", [range(20)])
    with (
        Loader(place, batch_size=4, workers=workers, **options) as loader,
        pytest.raises(UsageError, match=message) as error,
    ):
        list(loader)
    assert "\n" not in str(error.value)


def test_numbers_of_numpy_and_lists_are_sizes_too(tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache", [range(20)])
    options: dict[str, Any] = {
        "crop": {"volume": [np.int64(4), 5, None]},
        "crops": np.int64(2),
        "crop_pad": np.float32(1),
    }
    with Loader(place, batch_size=40, workers=1, **options) as loader:
        (batch,) = loader
    assert batch["volume"].shape == (40, 4, 5, 8)


@pytest.mark.parametrize("name", [*CROPPING, "offsets"])
def test_datasets_say_which_loader_has_crops_and_windows(name: str, tmp_path: Path) -> None:
    place = volumes(tmp_path / "cache", [range(4)])
    option = "offsets=" if name == "offsets" else "crop="
    with pytest.raises(UsageError, match=rf"^{name}=.* is not an argument here: .*torch\.Loader with {option}$"):
        CacheDataset(place, **{name: 1})  # type: ignore[arg-type]

    @answering(OF_TENSORFLOW)
    def make(*, batch_size: int) -> None:
        pytest.fail(str(batch_size))

    with pytest.raises(UsageError, match=rf"^{name}=.* is not an argument here: .*numpy\.Loader, and the loader to"):
        make(batch_size=1, **{name: 1})
