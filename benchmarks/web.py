"""CPU time per request for a web server's objects, compared with another checkout.

    python benchmarks/web.py FOLDER [--beside CHECKOUT] [--rounds 5] [--threads 8]

``rclone serve http`` on loopback serves objects of 64 KiB over TLS and of 16 MiB without TLS. Each round measures
each checkout once, in its own process, in random order. The table gives medians and the ratio to the other checkout.
CPU time is more reliable than wall time, because the server and other processes share the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.servers import certificates, rclone_http

HERE = Path(__file__).parents[1]
KIB, MIB = 2**10, 2**20
CASES = {"https, 64 KiB": (True, 64 * KIB, 4000), "http, 16 MiB": (False, 16 * MIB, 64)}
FILES = 32

CLIENT = """
import resource, sys
from concurrent.futures import ThreadPoolExecutor
from cachetool.stores import Object, open_store

url, nbytes, count, threads, files = sys.argv[1], *map(int, sys.argv[2:])
store = open_store(url)

def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

with ThreadPoolExecutor(threads) as pool:
    get = lambda number: len(store.get(Object(f"{number % files}.bin", nbytes)))
    list(pool.map(get, range(2 * threads)))
    began = cpu()
    assert sum(pool.map(get, range(count))) == count * nbytes
    print((cpu() - began) / count)
"""


@contextlib.contextmanager
def served(folder: Path, *, tls: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the URL of a server of ``folder``, and the environment that trusts its certificate."""
    with tempfile.TemporaryDirectory() as keys:
        authority, server = certificates(Path(keys))
        with rclone_http(folder, certificate=server if tls else None) as url:
            yield url, {"SSL_CERT_FILE": str(authority)} if tls else {}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--beside", type=Path, help="another checkout of cachetool")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    checkouts = [HERE, *([options.beside.resolve()] if options.beside else [])]
    for name, (tls, nbytes, count) in CASES.items():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            for number in range(FILES):
                (Path(folder) / f"{number}.bin").write_bytes(random.randbytes(nbytes))
            taken: dict[Path, list[float]] = {checkout: [] for checkout in checkouts}
            with served(Path(folder), tls=tls) as (url, env):
                for _ in range(options.rounds):
                    for checkout in random.sample(checkouts, len(checkouts)):
                        more = {**env, "PYTHONPATH": str(checkout)}
                        command = [
                            sys.executable,
                            "-c",
                            CLIENT,
                            url,
                            *map(str, (nbytes, count, options.threads, FILES)),
                        ]
                        done = subprocess.run(
                            command, env={**os.environ, **more}, cwd=folder, capture_output=True, text=True
                        )
                        if done.returncode:
                            sys.exit(done.stderr)
                        taken[checkout].append(float(done.stdout))
        medians = [statistics.median(seconds) for seconds in taken.values()]
        ratio = f"   x {medians[0] / medians[1]:.2f}" if len(medians) > 1 else ""
        print(name.ljust(16), *(f"{seconds * 1e6:10.0f} us" for seconds in medians), ratio)


if __name__ == "__main__":
    main()
