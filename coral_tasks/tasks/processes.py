"""Child processes that live as long as this one: each leads a group of its own, and none outlives its starter.

Owns starting, watching and ending. ``guardian.py`` ends the groups even if this process is killed with -9, which no
handler in it could do; and whole groups, since a component's own children know nothing of its end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from coral_tasks.tasks import guardian


class ChildGroups:
    """Children by name. Leaving the ``with`` block ends all that run."""

    def __init__(self, *, grace_s: float = 10.0) -> None:
        """``grace_s``: from being asked to end to being killed."""
        self._grace_s = grace_s
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._guardian = subprocess.Popen(  # noqa: S603 - our own interpreter and script
            [sys.executable, "-I", guardian.__file__, str(grace_s)], stdin=subprocess.PIPE, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_all()

    def start(
        self,
        name: str,
        words: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        user: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program as leader of a new group, its output appended to ``log``. Raises OSError."""
        with log.open("ab") as sink:
            child = subprocess.Popen(  # noqa: S603
                list(words),
                env=dict(environment),
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=user,
            )
        self._tell(f"+{child.pid}")
        self._children[name] = child
        return child

    def ended(self) -> tuple[str, int] | None:
        """Name and exit status of a child that ended by itself, None if all run."""
        for name, child in self._children.items():
            if child.poll() is not None:
                return name, child.returncode
        return None

    def running(self) -> dict[str, subprocess.Popen[bytes]]:
        """Children that run, by name."""
        return {name: child for name, child in self._children.items() if child.poll() is None}

    def end(self, name: str, *, at_once: bool = False) -> None:
        """End one child and its group; ``at_once`` kills."""
        child = self._children.pop(name)
        self._end([child], (signal.SIGKILL,) if at_once else (signal.SIGTERM, signal.SIGKILL))

    def end_all(self) -> None:
        """Terminate all groups, kill what is left after the grace. A second Ctrl-C does not leave half of them."""
        children = list(self._children.values())
        self._children.clear()
        with _uninterrupted():
            self._end(children, (signal.SIGTERM, signal.SIGKILL))
            with contextlib.suppress(BrokenPipeError):
                self._guardian.communicate()

    def _end(self, children: Sequence[subprocess.Popen[bytes]], signals: Sequence[int]) -> None:
        for sent in signals:
            deadline = time.monotonic() + self._grace_s
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, sent)
            for child in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(BrokenPipeError):  # a dead guardian is in charge of nothing
            for child in children:
                self._tell(f"-{child.pid}")

    def _tell(self, line: str) -> None:
        if self._guardian.stdin is not None:
            self._guardian.stdin.write(f"{line}\n".encode())
            self._guardian.stdin.flush()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    before = {name: signal.signal(name, signal.SIG_IGN) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
