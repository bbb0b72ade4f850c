"""Runs the blocks of some pages, given as JSON on stdin, each page in its folder; see ``tests/docs/pages.py``."""

from __future__ import annotations

import ast
import doctest
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
HOST, SERVER = "https://data.example.org", os.environ.get("DOCS_HOST", "")
END = "--- end of command "


class Shell:
    """One bash for all commands of a page: its folder, variables and jobs stay."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> tuple[int, str]:
        """Exit code and all that was printed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        # The code is handed on, so that a page can ask for $?.
        stdin.write(f"(exit ${{code:-0}})\n{command}\ncode=$?; echo; echo '{END}'$code\n")
        stdin.flush()
        lines: list[str] = []
        while not (line := stdout.readline()).startswith(END):
            if not line:
                raise RuntimeError(f"the shell ended: {''.join(lines)}")
            lines.append(line)
        return int(line.removeprefix(END)), "".join(lines)[:-1]

    def close(self) -> None:
        """End it, and what it left in the background."""
        self.run("kill $(jobs -p) 2>/dev/null; wait 2>/dev/null")
        self._process.communicate()


def matches(wanted: str, got: str) -> bool:
    """Return True if ``got`` matches the text of a page, in which ``...`` stands for anything."""
    pattern = ""
    for line in (line.rstrip() for line in wanted.splitlines()):
        pattern += r"(?:.*\n)*?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + "\n"
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in got.splitlines())) is not None


def interrupted(command: str) -> str:
    """Return a shell line that runs a command until it has written a shard, then interrupts it."""
    words = shlex.split(command)
    shards = shlex.quote(f"{words[words.index('--cache') + 1]}/shards")
    return (
        f'{command} & wait_for=$!; until [ -n "$(ls -A {shards} 2>/dev/null)" ]; do kill -0 $wait_for || break;'
        " sleep 0.05; done; kill -TERM $wait_for; wait $wait_for"
    )


def console(shell: Shell, text: str, error: str | None = None) -> None:
    """Commands behind ``$``, each with what it prints; ``error`` is the class that it is to end with."""
    first, *commands = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not first, f"a console block begins with a command, not with {first!r}"
    for each in commands:
        command, _, wanted = each.partition("\n")
        if wanted.startswith("^C\n"):
            command, wanted = interrupted(command), wanted.removeprefix("^C\n")
        fails = error is not None and "error: " in wanted
        if fails:
            command = re.sub(r"\bcachetool (\w+)", r"cachetool \1 --json", command)
        code, got = shell.run(command)
        if fails:
            got, _, document = got.partition("\n{")
            found = json.loads("{" + document)
            assert (found["error"], found["exit_code"]) == (error, code), f"$ {command}\nended with {found}"
        # On a busy machine a command that takes seconds prints its progress.
        progress = r"^(?:pulling|looking at samples|listing): .*\n"
        got = re.sub(progress, "", got, flags=re.MULTILINE) if "pulling: " not in wanted else got
        assert matches(wanted, got), f"$ {command}\nprinted ({code}):\n{got}"


def commands(shell: Shell, text: str) -> None:
    """Lines that must all succeed; a line may go on behind a backslash."""
    for command in filter(None, text.replace("\\\n", " ").splitlines()):
        code, got = shell.run(command)
        assert code == 0, f"$ {command}\nended with {code}:\n{got}"


def typed(text: str, names: dict[str, Any]) -> None:
    """Lines at ``>>>`` and what Python answers."""
    test = doctest.DocTestParser().get_doctest(text, names, "page", None, None)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    runner.run(test, out=said.append, clear_globs=False)
    names.update(test.globs)
    assert not runner.summarize(verbose=False).failed, "".join(said)


def without(module: str, shell: Shell) -> None:
    """Hide a module from what the shell starts from now on."""
    stub = Path(f".without-{module}")
    stub.mkdir()
    (stub / f"{module}.py").write_text(f"raise ImportError('no module named {module}')\n")
    shell.run(f"export PYTHONPATH={shlex.quote(str(stub.resolve()))}:$PYTHONPATH")


def main() -> int:
    """Run all blocks; the first that does not do as it says ends the page."""
    for _, page in itertools.groupby(json.load(sys.stdin), key=lambda block: block["folder"]):
        if not run(list(page)):
            return 1
    return 0


def run(page: list[dict[str, Any]]) -> bool:
    """Run the blocks of one page; whether all did as it says."""
    names: dict[str, Any] = {"__name__": "__main__"}
    os.chdir(page[0]["folder"])
    shell = Shell()
    for block in page:
        text = block["text"].replace(HOST, SERVER or HOST)
        where = f"{block['page']}:{block['line']}"
        before = os.environ["PYTHONPATH"]
        if block["said"].startswith("without "):
            without(block["said"].removeprefix("without "), shell)
        try:
            file = re.match(r"# (\w+\.py)\n", text)
            if block["language"] == "python" and file is not None:
                Path(file[1]).write_text(text)
            elif block["language"] == "python":
                tree = ast.parse(text, where)
                ast.increment_lineno(tree, block["line"] - 1)  # so that tracebacks, and TensorFlow, find its source
                exec(compile(tree, str(ROOT / block["page"]), "exec"), names)
            elif block["language"] == "console":
                console(shell, text, block["section"] if block["page"] == "docs/reference/errors.md" else None)
            elif block["language"] == "sh":
                commands(shell, text)
            else:
                typed(text, names)
        except BaseException:  # noqa: BLE001 - whatever it is, the page is wrong
            print(f"{where} does not do what the page says:", file=sys.stderr)
            traceback.print_exc()
            return False
        shell.run(f"export PYTHONPATH={shlex.quote(before)}")
    shell.close()
    return True


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
