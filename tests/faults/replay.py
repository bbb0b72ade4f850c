"""The bytes of a folder after each system call of a traced run, to check the cap at every instant.

Sizes grow when a call writes, allocates or creates, and shrink when it truncates or deletes. Allocated and apparent
bytes are counted separately, because the cap counts the larger of them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CALLS", "Replay"]

CALLS = (
    "openat,close,write,pwrite64,pwritev,pwritev2,writev,lseek,ftruncate,fallocate,rename,renameat,renameat2,unlink,"
    "unlinkat,mkdir,mkdirat,rmdir"
)
_BLOCK = 4096
_CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (-?\d+)")
_FD = re.compile(r"^(\d+)<([^>]*)>")
_PATH = re.compile(r'"([^"]*)"')


@dataclass
class _File:
    apparent: int = 0
    allocated: int = 0

    def reach(self, end: int) -> None:
        self.apparent = max(self.apparent, end)
        self.allocated = max(self.allocated, -(-end // _BLOCK) * _BLOCK)

    def cut(self, size: int) -> None:
        self.apparent = size
        self.allocated = min(self.allocated, -(-size // _BLOCK) * _BLOCK)

    @property
    def bytes(self) -> int:
        return max(self.apparent, self.allocated)


class Replay:
    """A replay that starts with a folder's current state and follows a log of ``strace -y``, of one process with one
    thread.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._folder = os.lstat(root / "shards").st_blocks * 512  # a block, or 0 on tmpfs
        self.files: dict[str, _File] = {}
        self.folders: set[str] = set()
        self._at: dict[int, int] = {}
        self.peak = self.catalog_peak = 0
        self.calls = 0
        for folder, _, names in os.walk(root):
            self.folders.add(folder)
            for name in names:
                found = os.lstat(os.path.join(folder, name))
                self.files[os.path.join(folder, name)] = _File(found.st_size, found.st_blocks * 512)

    @property
    def catalog(self) -> int:
        """Return the current bytes of the catalog and its journal."""
        return sum(file.bytes for path, file in self.files.items() if "/catalog.sqlite3" in path)

    @property
    def rest(self) -> int:
        """Return the current bytes of everything else."""
        return sum(file.bytes for file in self.files.values()) - self.catalog + self._folder * len(self.folders)

    def follow(self, log: Path) -> None:
        """Replay the log. The peaks are the largest sizes after any of its calls."""
        for line in log.read_text(errors="replace").splitlines():
            match = _CALL.match(line)
            if match is not None and int(match[3]) >= 0:
                self._step(match[1], match[2], int(match[3]))
                self.peak = max(self.peak, self.rest)
                self.catalog_peak = max(self.catalog_peak, self.catalog)

    def _step(self, call: str, text: str, result: int) -> None:
        fd = _FD.match(text)
        paths = [path for path in _PATH.findall(text) if path.startswith(self.root)]
        if call == "openat" and paths:
            # The path of the returned descriptor follows the result, and the pattern drops it: names here are absolute.
            self._at[result] = 0
            if "O_CREAT" in text:
                self.files.setdefault(paths[0], _File())
            if "O_TRUNC" in text:
                self.files[paths[0]].cut(0)
        elif fd is not None and fd[2].startswith(self.root) and fd[2] in self.files:
            self._of_file(call, self.files[fd[2]], int(fd[1]), text, result)
        elif call.startswith("mkdir") and paths:
            self.folders.add(paths[0])
        elif call.startswith(("unlink", "rmdir")):
            path = paths[0] if paths else self._beside(text)
            self.files.pop(path, None)
            self.folders.discard(path)
        elif call.startswith("rename") and len(paths) == 2:
            self.files[paths[1]] = self.files.pop(paths[0])
        self.calls += 1

    @staticmethod
    def _beside(text: str) -> str:
        """Return the path that a call names relative to a folder's descriptor."""
        fd, name = _FD.match(text), _PATH.search(text)
        return os.path.join(fd[2], name[1]) if fd and name else ""

    def _of_file(self, call: str, file: _File, fd: int, text: str, result: int) -> None:
        if call in ("write", "writev"):
            self._at[fd] = self._at.get(fd, 0) + result
            file.reach(self._at[fd])
        elif call in ("pwrite64", "pwritev"):
            file.reach(int(text.rsplit(", ", 1)[1]) + result)
        elif call == "pwritev2":
            file.reach(int(text.rsplit(", ", 2)[1]) + result)
        elif call == "lseek":
            self._at[fd] = result
        elif call == "ftruncate":
            size = int(text.rsplit(", ", 1)[1])
            if size < file.apparent:
                file.cut(size)
            file.apparent = size
        elif call == "fallocate":
            _, _, offset, length = text.rsplit(", ", 3)
            file.reach(int(offset) + int(length))
