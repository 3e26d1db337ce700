"""Ends sessions of processes when the process that started them ends, however it ends. Run as a script.

Reads lines from standard input: ``+123`` takes charge of session 123, ``-123`` lets go of it. When the other end of the
pipe closes (Linux closes it even after SIGKILL), every process of a session still in charge is asked to end, and killed
after the seconds given as argument. Sessions and not groups: Airflow gives each task a group of its own. Standard
library only; knows nothing of what the processes are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Final

_KILL_S: Final = 5.0


def main() -> None:
    """Follow the pipe to its end, then end what is left."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # whoever ends all of them must not end this one first
    sessions: set[int] = set()
    for line in sys.stdin:
        session = int(line[1:])
        sessions = sessions | {session} if line.startswith("+") else sessions - {session}
    end_sessions(sessions, grace_s=float(sys.argv[1]))


def end_sessions(sessions: Iterable[int], *, grace_s: float) -> None:
    """Terminate every process of these sessions; kill what is left of them after ``grace_s`` (0: at once)."""
    wanted = frozenset(sessions)
    if grace_s > 0:
        _send(members(wanted), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while members(wanted) and time.monotonic() < deadline:
        time.sleep(0.1)
    deadline = time.monotonic() + _KILL_S
    while (left := members(wanted)) and time.monotonic() < deadline:
        _send(left, signal.SIGKILL)  # again, since a process may start another one while it is being killed
        time.sleep(0.05)


def members(sessions: Container[int]) -> list[int]:
    """Processes of these sessions that have not ended, whatever group they moved to and whoever is their parent."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - quick, many times
        if name.isdigit():
            with contextlib.suppress(OSError):
                # the name in brackets may hold anything; after it: state, parent, group, session (man 5 proc)
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[3]) in sessions and fields[0] != b"Z":
                    found.append(int(name))
    return found


def _send(pids: Iterable[int], what: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


if __name__ == "__main__":
    main()
