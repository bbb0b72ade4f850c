"""The pages of the documentation as programs: their blocks, run in order, each page in a folder of its own.

::

    python -m tests.docs.pages docs/tutorial.md          one page alone

A block is what stands between fences, or lines that are indented by four spaces. What it is for its language says:

- ``python``: run in the names of the page, which is one program. When its first line is ``# train.py`` alone, it is
  written to a file of that name instead, for commands that follow.
- ``pycon``: lines typed at ``>>>``, and what Python answers.
- ``sh``: commands of one shell, the same from the page's first to its last; each must end with exit code 0.
- ``console``: commands behind ``$``, and what they print, errors included. After ``^C`` the command is interrupted.
- ``text``, or none: not run.

Indented lines that begin with ``cachetool`` are ``sh``. ``...`` in what is printed stands for anything, a line of it
for any lines.

A comment in front of a block changes what is done with it: ``<!-- not run: the reason -->``;
``<!-- lines of examples/x.py -->``, whose lines must all be in that file, in this order; ``<!-- without asyncssh -->``,
run as if that module were not installed.

Errors in ``errors.md`` must be of the class that is the heading above them.

Servers on loopback play ``s3://bucket/`` and ``https://data.example.org/``: both serve the folder ``bucket``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.docs.world import fill_bucket, page_folder
from tests.servers import counted_s3, folder_server

__all__ = ["DOCS", "ROOT", "Block", "blocks", "pages", "run_pages", "served", "wrong_lines"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOST = "https://data.example.org"
LANGUAGES = ("python", "pycon", "sh", "console", "text", "")
_NOT_RUN = ("api.md", "commands.md", "damaged-files.md", "decisions.md", "formats.md", "reliability.md", "scale.md")
"""Pages without programs, the reference, whose examples ``test_reference.py`` runs, and (``formats.md``) one with
programs that ``tests/interop`` runs one by one."""


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    page: str
    line: int
    """Line of the page at which the text begins."""
    language: str
    text: str
    said: str = ""
    """The comment before the block."""
    section: str = ""
    """The heading that it stands under."""

    @property
    def runs(self) -> bool:
        """True if the tests run the block."""
        return self.language not in ("text", "") and not self.said.startswith(("not run: ", "lines of "))


def pages() -> list[Path]:
    """README and the pages of ``docs/`` that have programs."""
    return [ROOT / "README.md", *(path for path in sorted(DOCS.rglob("*.md")) if path.name not in _NOT_RUN)]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    found: list[Block] = []
    name = str(page.relative_to(ROOT))
    lines = [*page.read_text(encoding="utf-8").splitlines(), ""]
    said, section, at = "", "", 0
    while at < len(lines):
        line = lines[at]
        if heading := re.match(r"#+ (.+)", line):
            said, section = "", heading[1]
        elif comment := re.fullmatch(r"<!-- (.+) -->", line):
            said = comment[1]
        elif fence := re.fullmatch(r"```(\w*)", line):
            end = lines.index("```", at + 1)
            text = "".join(f"{each}\n" for each in lines[at + 1 : end])
            found.append(Block(name, at + 2, fence[1], text, said, section))
            said, at = "", end
        elif line.startswith("    "):
            end = next(n for n in range(at, len(lines)) if not lines[n].startswith("    "))
            kind = "sh" if line.strip().startswith("cachetool ") else ""
            text = "".join(f"{each[4:]}\n" for each in lines[at:end])
            found.append(Block(name, at + 1, kind, text, said, section))
            said, at = "", end - 1
        elif line:
            said = ""
        at += 1
    return found


def wrong_lines(block: Block) -> list[str]:
    """Return the lines of a ``lines of FILE`` block that do not stand in the file in this order."""
    there = [line.strip() for line in (ROOT / block.said.removeprefix("lines of ")).read_text().splitlines()]
    wrong = []
    for line in filter(None, map(str.strip, block.text.splitlines())):
        if line in there:
            there = there[there.index(line) + 1 :]
        else:
            wrong.append(line)
    return wrong


@contextlib.contextmanager
def served(remote: Path) -> Iterator[dict[str, str]]:
    """The environment in which ``s3://bucket/`` and ``https://data.example.org/`` are the folder ``remote/bucket``."""
    with counted_s3(remote) as (env, _), folder_server(remote / "bucket") as http:
        yield {**env, "DOCS_HOST": http.url}


def run_pages(chosen: Sequence[Path], place: Path, env: dict[str, str]) -> None:
    """Run the blocks of some pages in one process, since a framework takes seconds to import; each in a folder below
    ``place``, which holds the bucket. An AssertionError says which block did not do as its page says."""
    work = []
    for page in chosen:
        folder = page_folder(place / page.stem, place / "bucket")
        work += [{**asdict(block), "folder": str(folder)} for block in blocks(page) if block.runs]
    bin = Path(sys.executable).parent
    environment = {
        **os.environ,
        **env,
        "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "HOME": str(place),
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONUNBUFFERED": "1",
        "RAY_ADDRESS": "local",  # not the cluster of another test
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "scripts" / "run_blocks.py")],
        input=json.dumps(work),
        env=environment,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def main() -> None:
    """Run the pages that the command line names."""
    with tempfile.TemporaryDirectory() as name:
        fill_bucket(Path(name, "bucket"))
        with served(Path(name)) as env:
            run_pages([Path(each).resolve() for each in sys.argv[1:]], Path(name), env)


if __name__ == "__main__":
    main()
