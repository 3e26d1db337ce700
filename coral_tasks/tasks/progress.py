"""How far a running dispatch is: one small file, ``<home>/dispatch/progress.json``, replaced whole.

Owns that file. It says nothing on how a dispatch ended: the dispatch's own result does.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from coral_tasks.domain.transition import Step, Transition

FILE: Final = "progress.json"
_EVERY_S: Final = 0.5


@dataclass(slots=True, kw_only=True)
class ProgressFile:
    """Called by the dispatcher as a round begins (no step) and after each step. Never raises."""

    folder: Path
    run: str
    epoch: int
    _values: dict[str, Any] = field(default_factory=dict)
    _written_s: float = 0.0

    def __call__(self, transition: Transition, step: Step | None) -> None:
        """Count; write at most twice a second, and always as a round begins."""
        if step is None:
            count, rounds = len(transition.steps), self._values.get("rounds", 0) + 1
            self._values = {"run": self.run, "epoch": self.epoch, "rounds": rounds, "num_steps": count}
            self._values |= {"num_done": 0, "last": ""}
        else:
            self._values["num_done"] += 1
            self._values["last"] = f"{step.kind.value.replace('_', ' ')} {step.instance or ''}".strip()
        if step is None or time.monotonic() - self._written_s >= _EVERY_S:
            self._write()

    def _write(self) -> None:
        from coral_tasks.storage.runs import write_whole

        self._written_s = time.monotonic()
        values = {**self._values, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        with contextlib.suppress(OSError):  # a picture of the work must not stop the work
            write_whole(self.folder / FILE, json.dumps(values, sort_keys=True).encode())
