"""FFCV over JPEG images: its .beton file with ``write_mode="jpg"``, its own threads, the page cache is warm.

Arguments and lines are those of ``imaging.py``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import CenterCropRGBImageDecoder, IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip
from ffcv.writer import DatasetWriter
from imaging import SIDE, Job, serve
from PIL import Image


class Images:
    """The decoded images, which FFCV encodes again."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __len__(self) -> int:
        return len(self.job.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.asarray(Image.open(io.BytesIO(self.job.images[index]))), index


def prepare(job: Job) -> Callable[[], Iterator[Any]]:
    path = str(job.folder / "data.beton")
    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
    DatasetWriter(path, fields, num_workers=1).from_indexed_dataset(Images(job))
    if job.case == "random":
        image = [RandomResizedCropRGBImageDecoder((SIDE, SIDE)), RandomHorizontalFlip()]
    else:
        image = [CenterCropRGBImageDecoder((SIDE, SIDE), ratio=1)]
    loader = Loader(
        path,
        batch_size=job.batch,
        num_workers=job.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={"image": image, "label": [IntDecoder()]},
    )
    return lambda: (images for images, _ in loader)


if __name__ == "__main__":
    serve(prepare)
