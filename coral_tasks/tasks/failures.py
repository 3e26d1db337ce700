"""What went wrong in a run, in a form that outlives the task: for the demo's screen, the page and the on-call engineer.

Owns ``runs/<run id>/failures/<task>.json``. Recording must never raise: it runs while something else is failing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coral_tasks.domain.errors import CoralError, ExpectedOutcome
from coral_tasks.settings import Settings
from coral_tasks.tasks.inputs import run_store
from coral_tasks.tasks.sharing import shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failed task. ``expected``: a well-formed "no" (bad input, nothing available), not a fault."""

    task: str
    error: str
    message: str
    expected: bool


def record_failure(run_id: str, task: str, error: BaseException | None) -> None:
    """Keep what ended ``task``. Silent if even that cannot be written."""
    failure = {
        "task": task,
        "error": type(error).__name__,
        "message": str(error),
        "expected": isinstance(error, ExpectedOutcome),
    }
    with contextlib.suppress(CoralError, OSError):
        _keep(run_id, task, failure)


@shared()
def _keep(run_id: str, task: str, failure: Mapping[str, Any]) -> None:
    run_store(Settings()).open(run_id).put_json(f"failures/{task}.json", failure, replace=True)


def read_failures(run_id: str) -> tuple[Failure, ...]:
    """Failures of a run, by task name; none if the run left no folder."""
    run = run_store(Settings()).open(run_id)
    names = [name for name in run.names() if name.startswith("failures/")]
    return tuple(Failure(**run.get_json(name)) for name in sorted(names))
