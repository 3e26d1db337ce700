"""Ends process groups when the process that started them ends, however it ends. Standard library only, run as a script.

Reads lines from standard input: ``+123`` takes charge of process group 123, ``-123`` lets go of it. When the other end
of the pipe closes (Linux closes it even after SIGKILL), every group still in charge is asked to end, and killed after
the seconds given as argument. Knows nothing of what the processes are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable


def main() -> None:
    """Follow the pipe to its end, then end what is left."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # whoever ends all of them must not end this one first
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        groups = groups | {group} if line.startswith("+") else groups - {group}
    end_groups(groups, grace_s=float(sys.argv[1]))


def end_groups(groups: Iterable[int], *, grace_s: float) -> None:
    """Terminate process groups; kill what is left of them after ``grace_s``."""
    left = {group for group in groups if _send(group, signal.SIGTERM)}
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = {group for group in left if _send(group, 0)}
    for group in left:
        _send(group, signal.SIGKILL)


def _send(group: int, what: int) -> bool:
    """Whether the group is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, what)
        return True
    return False


if __name__ == "__main__":
    main()
