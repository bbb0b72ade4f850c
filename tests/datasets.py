"""Real test data: the digits of scikit-learn as arrays and labels, the photographs of scikit-image as files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

__all__ = ["write_digits", "write_photos"]


def write_digits(folder: Path) -> Path:
    """Write ``0000.npy`` (float64, 8 x 8) and ``0000.json`` ``{"label": ...}`` for each of the 1,797 digits."""
    from sklearn.datasets import load_digits

    folder.mkdir(parents=True)
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        np.save(folder / f"{number:04d}.npy", image)
        (folder / f"{number:04d}.json").write_text(json.dumps({"label": int(label)}))
    return folder


def write_photos(folder: Path) -> Path:
    """Copy the ``.png`` and ``.jpg`` files of scikit-image's wheel, except one of 16 bits per channel."""
    import skimage

    folder.mkdir(parents=True)
    for path in sorted((Path(skimage.__file__).parent / "data").iterdir()):
        if path.suffix in (".png", ".jpg") and path.name != "chessboard_RGB.png":
            shutil.copy(path, folder)
    return folder
