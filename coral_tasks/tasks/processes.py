"""Child processes that live as long as this one: each leads a session of its own, and none outlives its starter.

Owns starting, watching and ending. ``guardian.py`` ends the sessions even if this process is killed with -9, which no
handler in it could do; and whole sessions, since a component's own children know nothing of its end.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
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
        """Start a program as leader of a new session, its output appended to ``log``. Raises OSError."""
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
        """End one child and all that it started; ``at_once`` kills."""
        self._end([self._children.pop(name)], grace_s=0.0 if at_once else self._grace_s)

    def end_all(self) -> None:
        """Ask all to end, kill what is left after the grace. A second Ctrl-C does not leave half of them."""
        children = list(self._children.values())
        self._children.clear()
        with _uninterrupted():
            self._end(children, grace_s=self._grace_s)
            with contextlib.suppress(BrokenPipeError):
                self._guardian.communicate()

    def _end(self, children: Sequence[subprocess.Popen[bytes]], *, grace_s: float) -> None:
        guardian.end_sessions([child.pid for child in children], grace_s=grace_s)
        for child in children:
            child.wait()
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
