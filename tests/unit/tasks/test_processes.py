"""Children in groups: none outlives the process that started it, and only those in charge are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coral_tasks.tasks import guardian
from coral_tasks.tasks.processes import ChildGroups

FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "deaf" else signal.SIG_DFL)
if not os.fork():
    os.setpgid(0, 0)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(100)
"""
"""A leader and a child in a group of its own, as Airflow's tasks have; "deaf" ones ignore SIGTERM."""

STARTER = f"""
import os, sys, time
from pathlib import Path
from coral_tasks.tasks.processes import ChildGroups
children = ChildGroups(grace_s=1.0)
for kind in ("deaf", "polite"):
    children.start(
        kind, [sys.executable, "-c", {FAMILY!r}, sys.argv[1], kind], log=Path(sys.argv[2]), environment=os.environ
    )
print("started", flush=True)
time.sleep(100)
"""


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def _wait_for_pids(path: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if path.exists() and len(path.read_text(encoding="ascii").split()) == count:
            return [int(word) for word in path.read_text(encoding="ascii").split()]
        time.sleep(0.05)
    pytest.fail(f"{path} does not name {count} processes")


def _wait_until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not any(map(_alive, pids)):
            return
        time.sleep(0.05)
    pytest.fail(f"still alive: {[pid for pid in pids if _alive(pid)]}")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_starter_leaves_nobody_behind(tmp_path, sent) -> None:
    """Leaders and their own children end, even those that ignore SIGTERM, when the starter is killed."""
    words = [sys.executable, "-c", STARTER, str(tmp_path / "pids"), str(tmp_path / "log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"started\n"
        pids = _wait_for_pids(tmp_path / "pids", 4)
        assert all(map(_alive, pids))
        starter.send_signal(sent)
        starter.wait(timeout=30)
        _wait_until_dead(pids)


def test_leaving_the_block_ends_all_and_one_can_be_ended_alone(tmp_path) -> None:
    """Ending one child leaves the others; leaving the block ends them with their children."""
    environment, log = dict(os.environ), tmp_path / "log"
    with ChildGroups() as children:
        for kind in ("one", "two"):
            words = [sys.executable, "-c", FAMILY, str(tmp_path / kind), kind]
            children.start(kind, words, log=log, environment=environment)
        one, two = (_wait_for_pids(tmp_path / kind, 2) for kind in ("one", "two"))
        children.end("one", at_once=True)
        _wait_until_dead(one)
        assert all(map(_alive, two))
        assert children.ended() is None
    _wait_until_dead(two)


def test_a_child_that_ends_by_itself_is_named_with_its_status(tmp_path) -> None:
    """The watcher learns who ended and how."""
    with ChildGroups() as children:
        child = children.start(
            "short", [sys.executable, "-c", "raise SystemExit(5)"], log=tmp_path / "log", environment=dict(os.environ)
        )
        child.wait(timeout=30)
        assert children.ended() == ("short", 5)


def test_a_session_that_was_let_go_is_not_touched() -> None:
    """The guardian ends only what it is still in charge of: a number may belong to somebody else by then."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True) as other:
        told = f"+{other.pid}\n-{other.pid}\n"
        done = subprocess.run(
            [sys.executable, "-I", guardian.__file__, "1"], input=told, text=True, timeout=60, check=False
        )
        assert done.returncode == 0
        assert other.poll() is None
        other.kill()
