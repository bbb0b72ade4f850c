"""MosaicML Streaming's MDSWriter: raw arrays, no compression, no hashes, 64 MiB per file (its defaults)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import torch
from common import serve

# streaming imports torchvision, which needs its own operators. Beside a PyTorch of another build they do not exist, so
# this block declares them.
with contextlib.suppress(RuntimeError):
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter


def write(folder: Path, x: np.ndarray) -> None:
    columns = {"x": f"ndarray:float32:{x.shape[1]}", "y": "int"}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for number, row in enumerate(x):
            writer.write({"x": row, "y": number})


if __name__ == "__main__":
    serve(write)
