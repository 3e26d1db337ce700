"""Engine processes: locked, found again, ended with everything they started. Real processes, all short-lived."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from coral_tasks.agent.config import LimitsConfig
from coral_tasks.agent.engines import Launch
from coral_tasks.agent.supervisor import Supervisor
from coral_tasks.domain.errors import EngineFault

SLEEP = ("/bin/sleep", "60")
# as a process that overwrites its environment when it sets its title
FORGETFUL = ("/usr/bin/env", "-i", *SLEEP)


MADE: list[Supervisor] = []


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A state folder whose processes are gone, and reaped, after the test."""
    yield tmp_path
    for made in MADE:
        for child in made._children.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
            if child.popen is not None:
                child.popen.wait(10)
    MADE.clear()


def supervisor(folder: Path, **limits: int) -> Supervisor:
    MADE.append(Supervisor(folder=folder, limits=LimitsConfig(**limits), kill_grace_s=0.5))
    return MADE[-1]


def launch(*argv: str) -> Launch:
    return Launch(argv=argv, environment={"EXTRA": "1"}, endpoint="")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pid_of(made: Supervisor, name: str) -> int:
    return made._children[name].process.pid


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("argv", [SLEEP, FORGETFUL])
def test_a_new_supervisor_finds_what_the_old_one_started(folder: Path, argv: tuple[str, ...]) -> None:
    """Adoption works by mark and by file: the same process is watched and ended by the next agent run."""
    first = supervisor(folder)
    first.spawn("n", "l1", launch(*argv))
    pid = pid_of(first, "l1")
    time.sleep(0.2)
    second = supervisor(folder)
    assert second.adopt() == {"l1"}
    assert pid_of(second, "l1") == pid
    assert second.exit_of("l1") is None
    second.kill("l1")
    until(lambda: second.exit_of("l1") is not None)
    assert "code -15" in str(first.exit_of("l1"))


def test_a_node_cannot_run_two_engines(folder: Path) -> None:
    """While a process of the node lives, its lock refuses another one, even to a supervisor that knows of none."""
    first = supervisor(folder)
    first.spawn("n", "l1", launch(*SLEEP))
    with pytest.raises(EngineFault, match="another engine still holds n"):
        supervisor(folder).spawn("n", "l2", launch(*SLEEP))
    first.kill("l1")
    until(lambda: first.exit_of("l1"))
    first.spawn("n", "l3", launch(*SLEEP))
    assert first.living() == ("l3",)


def test_what_an_engine_started_ends_with_it(folder: Path) -> None:
    """A worker that lost its environment and outlives its killed parent is found by its session and ended."""
    made = supervisor(folder)
    script = (
        "import os, sys, time; os.spawnl(os.P_NOWAIT, '/usr/bin/env', 'env', '-i', '/bin/sleep', '60'); time.sleep(60)"
    )
    made.spawn("n", "l1", launch(sys.executable, "-c", script))
    leader = psutil.Process(pid_of(made, "l1"))
    until(leader.children)
    worker = leader.children()[0].pid
    leader.kill()
    until(lambda: made.exit_of("l1"))
    until(lambda: gone(worker))


def test_orphans_of_a_dead_engine_are_ended_at_adoption(folder: Path) -> None:
    """The agent was down when the engine died: its worker is ended when the next run looks."""
    made = supervisor(folder)
    script = "import os, time; os.spawnl(os.P_NOWAIT, '/usr/bin/env', 'env', '-i', '/bin/sleep', '60'); time.sleep(60)"
    made.spawn("n", "l1", launch(sys.executable, "-c", script))
    leader = psutil.Process(pid_of(made, "l1"))
    until(leader.children)
    worker = leader.children()[0].pid
    leader.kill()
    leader.wait(5)
    assert supervisor(folder).adopt() == frozenset()
    until(lambda: gone(worker))


def test_an_engine_that_ignores_term_is_killed_after_the_grace(folder: Path) -> None:
    """TERM first, KILL half a second later."""
    made = supervisor(folder)
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    made.spawn("n", "l1", launch(sys.executable, "-c", script))
    until(lambda: "up" in (folder / "engines" / "n.log").read_text())
    made.kill("l1")
    time.sleep(0.1)
    made.enforce()
    assert made.exit_of("l1") is None
    until(lambda: made.enforce() or made.exit_of("l1"))


def test_a_command_that_cannot_start_is_a_fault(folder: Path) -> None:
    """A missing program is reported, and the node's lock is free again."""
    made = supervisor(folder)
    with pytest.raises(EngineFault, match="cannot start /no/such/program"):
        made.spawn("n", "l1", launch("/no/such/program"))
    made.spawn("n", "l2", launch(*SLEEP))
    assert made.living() == ("l2",)


def test_limits_environment_and_log_reach_the_engine(folder: Path) -> None:
    """Open files, no core dumps, the environment and the log file are as configured; node names may hold slashes."""
    made = supervisor(folder, open_files=77)
    script = (
        "import os, resource as r, time; time.sleep(0.5); "
        "print(os.environ['EXTRA'], r.getrlimit(r.RLIMIT_NOFILE)[0], r.getrlimit(r.RLIMIT_CORE)[0])"
    )
    made.spawn("aws/n", "l1", launch(sys.executable, "-c", script))
    until(lambda: made.exit_of("l1"))
    assert (folder / "engines" / "aws%2Fn.log").read_text() == "1 77 0\n"


def test_logs_are_rotated_by_size(folder: Path) -> None:
    """A log above its size is copied and emptied while the engine goes on writing; only so many copies stay."""
    made = supervisor(folder, log_bytes=10, log_files=2)
    log = folder / "engines" / "n.log"
    log.parent.mkdir()
    for text in ("first " * 5, "second " * 5, "third " * 5):
        log.write_text(text)
        made.rotate_logs()
    assert log.read_text() == ""
    names = sorted(path.name for path in log.parent.iterdir())
    assert names == ["n.log", "n.log.1", "n.log.2"]
    assert log.with_name("n.log.1").read_text() == "third " * 5
