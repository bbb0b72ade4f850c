"""Run a benchmark suite, save its figures as JSON, and draw tables and a chart of them.

    python -m benchmarks run --suite feed --folder DIR [--peers "FFCV;Grain"] [--out DIR] [options of the script]
    python -m benchmarks show OUT/feed.json

A suite is a script of this folder. Each script also runs alone and has its own options (``--rounds``, ``--cases``).
``--folder`` is the folder to write data into and to delete it from again, on the disk to be measured. ``--peers``
also measures other tools: ``all``, or names separated by ``;``. Each tool has its own environment below
``--peers-dir``, which is installed if it does not exist. A tool that fails becomes a row with its error. ``--out``
receives ``SUITE.json`` (with date, machine, versions and settings), ``SUITE.md`` and ``SUITE.svg``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plot import picture
from benchmarks.tables import markdown

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """A script, and how it takes the folder and the other tools to measure."""

    script: str
    peers: str | None = None
    """The script's option for the other tools: ``--peers`` (environments below ``--peers-dir``) or ``--tools``."""

    def command(self, options: argparse.Namespace, rest: list[str]) -> list[str]:
        """Return the command that runs the script."""
        command = [sys.executable, str(HERE / self.script), str(options.folder), "--json", *rest]
        if options.peers and self.peers == "--tools":
            names = options.peers.replace(";", ",")
            command += [] if names == "all" else ["--tools", f"cachetool,{names}"]
        elif options.peers:
            command += ["--peers-dir", str(options.peers_dir or options.folder / "peers")]
            command += [] if options.peers == "all" else ["--peers", options.peers]
        elif self.peers == "--tools":
            command += ["--tools", "cachetool"]
        return command


SUITES = {
    "feed": Suite("feed.py", "--peers"),
    "convert": Suite("convert.py", "--peers"),
    "pull": Suite("pull.py", "--tools"),
    "gather": Suite("gather.py"),
    "scale": Suite("scale_catalog.py"),
    "nodes": Suite("scale.py"),
    "other": Suite("other.py"),
}


def run(options: argparse.Namespace, rest: list[str]) -> int:
    """Run a suite and save its figures. Return 1 if the suite failed."""
    suite = SUITES[options.suite]
    if options.peers and suite.peers is None:
        raise SystemExit(f"error: the suite {options.suite} has no peers; leave --peers out")
    options.folder.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile("w+") as answer:
        script = subprocess.Popen(suite.command(options, rest), stdout=answer, stderr=subprocess.PIPE, text=True)
        assert script.stderr is not None
        last = "it said nothing"
        for line in script.stderr:  # shows the progress of runs that take hours
            sys.stderr.write(line)
            last = line.strip() or last
        code = script.wait()
        answer.seek(0)
        printed = answer.read()
    try:
        found = json.loads(printed)
    except ValueError:
        found = {"settings": {}, "tables": {options.suite: [{"what": options.suite, "error": last}]}}
    kept = {
        "suite": options.suite,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "options": [*(["--peers", options.peers] if options.peers else []), *rest],
        "machine": machine(options.folder),
        "versions": versions(),
        **found,
    }
    path = options.out / f"{options.suite}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(kept))
    path.with_suffix(".svg").write_text(picture(kept["tables"]))
    print(page(kept))
    return 1 if code else 0


def show(options: argparse.Namespace) -> int:
    """Draw the tables and the chart of a saved run again."""
    kept = json.loads(options.file.read_text())
    options.file.with_suffix(".svg").write_text(picture(kept["tables"]))
    options.file.with_suffix(".md").write_text(page(kept))
    print(page(kept))
    return 0


def page(kept: dict[str, Any]) -> str:
    """Return a run as Markdown: the machine and versions, then the tables."""
    host, named = kept["machine"], ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    about = ", ".join(f"{name} {value}" for name, value in kept["settings"].items())
    lines = [
        f"## {kept['suite']} ({kept['date'][:10]})",
        f"    python -m benchmarks run --suite {kept['suite']} --folder FOLDER {shlex.join(kept['options'])}".rstrip(),
        f"{host['processor']}, {host['cores']} cores, {host['memory GiB']} GiB, {host['disk']}, {host['system']}."
        f" {named}." + (f" Settings: {about}." if about else ""),
    ]
    for title, rows in kept["tables"].items():
        lines += [f"### {title}", markdown(rows)] if len(kept["tables"]) > 1 else [markdown(rows)]
    return "\n\n".join(lines) + "\n"


def machine(folder: Path) -> dict[str, Any]:
    """Describe the machine: everything except the code that a figure depends on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*: (.*)", info)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": name[1] if name else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory GiB": round(pages / 2**30),
        "disk": _file_system(folder.resolve()),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "load": round(os.getloadavg()[0], 1),
    }


def _file_system(folder: Path) -> str:
    """Return the type of the folder's file system, that of the nearest mount point above it."""
    mounts = Path("/proc/mounts").read_text().splitlines() if Path("/proc/mounts").exists() else []
    above = {str(each) for each in (folder, *folder.parents)}
    found = [line.split() for line in mounts if line.split()[1] in above]
    return max(found, key=lambda fields: len(fields[1]))[2] if found else "unknown"


def versions() -> dict[str, str]:
    """Return the versions of Python, cachetool and the installed libraries."""
    found = {"Python": platform.python_version()}
    for name in ("cachetool", "numpy", "lmdb", "h5py", "zarr", "obstore", "torch", "tensorflow-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    git = subprocess.run(["git", "-C", HERE, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found | ({"commit": git.stdout.strip()} if git.returncode == 0 else {})


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="run a suite", allow_abbrev=False)
    running.add_argument("--suite", required=True, choices=SUITES)
    running.add_argument("--folder", required=True, type=Path, help="where data is written and deleted again")
    running.add_argument("--peers", help="measure beside: all, or names with ; between")
    running.add_argument("--peers-dir", type=Path, help="their environments; default: FOLDER/peers")
    running.add_argument("--out", type=Path, default=Path("benchmark-results"), help="default: %(default)s")
    running.set_defaults(does=run)
    showing = commands.add_parser("show", help="make tables and picture of a run that was kept")
    showing.add_argument("file", type=Path)
    showing.set_defaults(does=show)
    options, rest = parser.parse_known_args(arguments)
    if options.does is show:
        if rest:
            parser.error(f"unknown: {' '.join(rest)}")
        return show(options)
    return run(options, rest)


if __name__ == "__main__":
    sys.exit(main())
