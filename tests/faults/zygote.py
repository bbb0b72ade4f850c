"""A process with all imports that forks a child for each action, so a thousand children need no thousand imports.

Run as ``python -m tests.faults.zygote``.

::

    stdin    {"action": "pull", "arguments": {...}}    ->  stdout  {"pid": 123}     the child waits
    stdin    {"go": 123}                                                            the child does it
    stdin    {"wait": 123}                             ->  stdout  {"status": 0, "error": null}
"""

from __future__ import annotations

import ctypes
import json
import os
import pkgutil
import socket
import sys

PR_SET_PTRACER = 0x59616D61
DONE, FAILED = 0, 3


def main() -> None:
    import cachetool.cache
    from cachetool.proc.disk import disk_error
    from tests.faults import world

    for module in (
        *(f"cachetool.cache.{found.name}" for found in pkgutil.iter_modules(cachetool.cache.__path__)),
        "h5py",
        "lmdb",
        "zarr",
        "cachetool.formats.hdf5",
        "cachetool.formats.lmdb",
        "cachetool.formats.zarr",
    ):
        __import__(module)
    __import__("cachetool.formats.tfrecord")
    libc = ctypes.CDLL(None)
    waiting: dict[int, tuple[int, socket.socket]] = {}
    for line in sys.stdin:
        told = json.loads(line)
        if "go" in told:
            os.write(waiting[told["go"]][0], b"g")
        elif "wait" in told:
            start, trouble = waiting.pop(told["wait"])
            _, status = os.waitpid(told["wait"], 0)
            text = trouble.recv(65536).decode()
            os.close(start)
            trouble.close()
            say(status=os.waitstatus_to_exitcode(status), error=json.loads(text) if text else None)
        else:
            go, start = os.pipe()
            # not a pipe, because write calls are among the calls that are made to fail
            trouble, report = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                os.close(start)
                # If the kernel allows only ancestors to trace (Yama), this call allows every process to trace this one.
                libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(-1 & 0xFFFFFFFFFFFFFFFF), 0, 0, 0)
                os.read(go, 1)
                code = DONE
                try:
                    world.ACTIONS[told["action"]](**told["arguments"])
                except BaseException as error:  # noqa: BLE001 - every error is reported
                    names = [kind.__name__ for kind in type(error).__mro__]
                    known = disk_error(error)
                    names = [type(known).__name__, *names] if known else names
                    report.send(json.dumps({"kinds": names, "text": str(known or error)}).encode())
                    code = FAILED
                os._exit(code)
            os.close(go)
            report.close()
            waiting[pid] = start, trouble
            say(pid=pid)


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
