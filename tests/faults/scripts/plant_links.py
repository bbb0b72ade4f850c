"""Plants links to an outside file at every path that a cache is about to write, and removes them: ROOTS TARGET COUNT
[USER].

Prints how many links were planted and how many were refused, at the end of stdin or after COUNT attempts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import sys
from pathlib import Path

OWN = (
    "CACHEDIR.TAG",
    "cachetool.json",
    "cachetool.json.new",
    "catalog.sqlite3",
    "catalog.sqlite3-journal",
    "catalog.sqlite3-lock",
)
SHARD = ("data.lmdb", "data.h5", "data.tfrecord", "extents.bin", "shard.json")
LISTING = ("objects.npy", "blocks.npy", "sizes.npy", "units.npy", "listing.json")


def names(root: Path) -> list[Path]:
    """Yield the paths at which a command may be about to create a file."""
    places = [root / name for name in (*OWN, "shards", "holders", "listings")]
    places.append(root / "holders" / f"{secrets.token_hex(8)}.lock")
    for folder, files in ((root / "shards", SHARD), (root / "listings", LISTING)):
        with contextlib.suppress(OSError):
            places += [folder / entry / name for entry in os.listdir(folder) for name in files]
    return places


def main(roots: str, target: str, count: int) -> None:
    """Plant links again and again until COUNT attempts."""
    planted = refused = 0
    while planted + refused < count and not select.select([0], [], [], 0)[0]:
        for root in sorted(Path(roots).iterdir()) if Path(roots).is_dir() else []:
            for place in names(root):
                try:
                    os.symlink(target, place)
                except FileExistsError:
                    continue
                except OSError:
                    refused += 1
                    continue
                planted += 1
                with contextlib.suppress(OSError):
                    if place.is_symlink():
                        place.unlink()
    print(planted, refused, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 4:
        os.setgroups([])
        os.setgid(int(sys.argv[4]))
        os.setuid(int(sys.argv[4]))
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
