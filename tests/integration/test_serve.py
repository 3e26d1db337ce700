"""`coral serve` itself: killed with -9, it leaves none of Airflow's components behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

COMPONENTS = {"api-server", "scheduler", "dag-processor", "triggerer"}


def _processes() -> dict[int, tuple[int, int, str, str]]:
    """Parent, group, state and command of every process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found[int(path.name)] = (int(fields[1]), int(fields[2]), fields[0], command)
    return found


def _alive(groups: set[int]) -> list[str]:
    """Commands of processes of these groups that have not ended."""
    return [command for _, group, state, command in _processes().values() if group in groups and state != "Z"]


def test_killing_serve_ends_every_component(tmp_path) -> None:
    """The four components and all that they started end, although serve could run no handler."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "CORAL_HOME": str(tmp_path / "home"), "CORAL_UI_PORT": str(port)}
    program = str(Path(sys.executable).parent / "coral")
    groups: set[int] = set()
    with subprocess.Popen([program, "serve"], env=environment, stdout=subprocess.DEVNULL) as serve:
        deadline = time.monotonic() + 90
        started: dict[str, int] = {}
        while set(started) != COMPONENTS and time.monotonic() < deadline:
            assert serve.poll() is None, "serve ended"
            time.sleep(0.2)
            children = {pid: one for pid, one in _processes().items() if one[0] == serve.pid}
            started = {
                name: pid
                for pid, (_, _, _, command) in children.items()
                for name in COMPONENTS
                if f"airflow {name}" in command
            }
        assert set(started) == COMPONENTS
        groups = set(started.values())
        time.sleep(2)  # into their start, where they have children of their own
        serve.send_signal(signal.SIGKILL)
        serve.wait(timeout=10)
    deadline = time.monotonic() + 20
    while _alive(groups) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _alive(groups) == []
