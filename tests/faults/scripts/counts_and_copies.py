"""A program that increments a counter in the catalog while its threads read all files of the cache."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from cachetool.cache import open_cache

root, times = Path(sys.argv[1]), int(sys.argv[2])
over = threading.Event()


def read() -> None:
    while not over.is_set():
        for path in root.iterdir():
            if path.is_file():
                path.read_bytes()


with open_cache(root) as cache:
    cache.catalog.number("version")
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(times):
            with cache.catalog.write() as connection:
                connection.execute("UPDATE evictions SET shards = shards + 1")
            cache.catalog.rows("SELECT * FROM cache")
    finally:
        over.set()
