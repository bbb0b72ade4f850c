"""Program that writes a TFRecord file by the package ``tfrecord`` into a folder, and the written values as ``.npz``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tfrecord


def main(folder: Path) -> None:
    chance = np.random.default_rng(0)
    count = 30
    ids, vectors = np.arange(count) - 5, chance.normal(size=(count, 7)).astype(np.float32)
    raws = chance.integers(0, 255, (count, 50), dtype=np.uint8)
    lists = [chance.integers(-9, 9, n % 4 + 1) for n in range(count)]
    writer = tfrecord.TFRecordWriter(str(folder / "package.tfrecord"))
    for i in range(count):
        writer.write(
            {
                "id": (int(ids[i]), "int"),
                "v": (vectors[i], "float"),
                "raw": (raws[i].tobytes(), "byte"),
                "l": (lists[i], "int"),
            }
        )
    writer.close()
    np.savez(
        folder / "package.npz",
        id=ids,
        v=vectors,
        raw=raws,
        l=np.concatenate(lists),
        l_sizes=[len(each) for each in lists],
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
