"""The start time of the command line: ``cachetool --help`` beside a Typer app that does nothing.

    python benchmarks/startup.py [--runs 30] [--json]

Runs are interleaved, so other load on the machine slows all programs equally. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

BARE = """
import typer

app = typer.Typer({})

@app.command()
def one() -> None:
    "Do nothing."

@app.command()
def other() -> None:
    "Do nothing."

app(["--help"], prog_name="bare")
"""

PROGRAMS = {
    "python -c pass": ["-c", "pass"],
    "bare Typer app --help": ["-c", BARE.format("")],
    "bare Typer app --help, plain": ["-c", BARE.format("rich_markup_mode=None")],
    "cachetool --help": ["-m", "cachetool", "--help"],
    "cachetool pull --help": ["-m", "cachetool", "pull", "--help"],
    "import cachetool": ["-c", "import cachetool"],
}


def measure(runs: int) -> dict[str, float]:
    """Return the median seconds of each program over ``runs`` interleaved runs."""
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(runs):
        for name, args in PROGRAMS.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *args], stdout=subprocess.DEVNULL, check=True)
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    medians = measure(options.runs)
    if options.json:
        print(json.dumps({"runs": options.runs, "seconds": medians}, indent=2))
        return
    bare = medians["bare Typer app --help"]
    for name, seconds in medians.items():
        print(f"{name:30} {1000 * seconds:7.1f} ms   {seconds / bare:5.2f} x bare")


if __name__ == "__main__":
    main()
