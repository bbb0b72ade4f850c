"""The local engine: processes that are started before their task is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import cachetool
from cachetool.cluster import agent as agent_module
from cachetool.cluster.agent import Agent, version_here
from cachetool.proc.parent import LocalEngine, begun_early


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.usefixtures("real_processes")
def test_a_process_started_early_serves_the_first_task_and_ends_if_none_comes() -> None:
    before = children()
    with begun_early("cachetool.pull.worker"):
        early = children() - before
        assert len(early) == 1
        with LocalEngine() as engine:
            engine.expect(2, "cachetool.pull.worker")
            assert early < children() - before
            assert len(children() - before) == 2
        assert children() == before
    with begun_early("cachetool.pull.worker"):
        assert len(children() - before) == 1
    assert children() == before


def heard(agent: Agent) -> dict[str, object]:
    (said,) = (value for _, value in agent.hear())
    return said


def test_a_node_with_another_version_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(sys.argv, "0.0.9")
    agent.begin(1, "cachetool.pull.worker:draw", {}, "n7")
    said = heard(agent)
    assert said["error"] == "UsageError"
    assert said["message"] == (
        f"node n7 has cachetool {cachetool.__version__}, but this command is cachetool 0.0.9;"
        " install the same version on both"
    )


def test_a_task_that_is_ended_before_its_start_does_not_start() -> None:
    agent = Agent(sys.argv, cachetool.__version__)
    agent.end(1)
    agent.begin(1, "cachetool.pull.worker:draw", {}, "n7")
    assert heard(agent)["error"] == "Interrupted"


def test_a_node_that_uses_the_package_without_installing_it_can_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(agent_module, "version", nowhere)
    agent = Agent(sys.argv, version_here())
    agent.begin(1, "cachetool.nowhere:at_all", {}, "n7")
    assert "ModuleNotFoundError" in str(heard(agent)["message"])


def test_a_refused_pull_leaves_no_process(tmp_path: Path) -> None:
    """The output of the pull ends with it: a program that reads the output does not wait for a process started
    early.
    """
    ran = subprocess.run(
        [sys.executable, "-m", "cachetool", "pull", "--no-such-option"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 2
    assert "no-such-option" in ran.stderr
    assert len(ran.stderr.splitlines()) == 2


def test_work_that_missed_its_stop_signal_is_stopped_again() -> None:
    """An exception raised by a signal may occur at a place where exceptions are ignored."""
    code = """if True:
        import time
        from cachetool.core import units
        from cachetool.proc import child
        from cachetool.core.errors import Interrupted

        def work(channel):
            try:
                channel.send({})
                time.sleep(60)
            except Interrupted:
                time.sleep(60)

        child.AGAIN, units.work = 0.1, work
        child.main()
    """
    task = {"target": "cachetool.core.units:work", "arguments": {}, "starter": os.getpid()}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(task).encode() + b"\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline()) == {"message": {}}
    out, _ = process.communicate(timeout=30)
    assert json.loads(out)["error"] == "Interrupted"
    assert process.returncode == 0
