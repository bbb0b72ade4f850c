"""A program that stops itself in the middle of a catalog transaction, as ``Ctrl-Z`` does."""

from __future__ import annotations

import os
import signal
import sys

from cachetool.cache import open_cache

root, where = sys.argv[1:]
with open_cache(root) as cache:
    _ = cache.holder
    with cache.catalog.read() if where == "reading" else cache.catalog.write() as connection:
        connection.execute("SELECT * FROM cache").fetchall()
        if where == "writing":
            connection.execute("UPDATE evictions SET shards = shards + 1")
        if where == "spilling":  # other processes see it as a commit
            connection.execute("PRAGMA cache_size = 1")
            connection.execute("CREATE TABLE large (x)")
            connection.executemany("INSERT INTO large VALUES (?)", [(bytes(900),)] * 100)
            connection.execute("DROP TABLE large")
        os.kill(os.getpid(), signal.SIGSTOP)
print("went on")
