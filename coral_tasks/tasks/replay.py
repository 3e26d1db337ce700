"""Recomputes a run's plan from what the run kept, and compares it byte by byte. Changes nothing.

What is needed: the run's folder as it was sealed, and the template library version that it names (versions never
change). A plan that the time limit cut short may differ on another machine; the verdict says which status it had.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

import msgspec

from coral_tasks.domain.errors import StorageFault, Unavailable
from coral_tasks.settings import Settings

if TYPE_CHECKING:
    from coral_tasks.storage.runs import Run
    from coral_tasks.tasks.planning import PlanRequest

PLAN: Final = "plan/plan.json"
REQUEST: Final = "plan/request.json"
_PATHS: Final = ("demand", "prices", "availability", "running", "options", "previous")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayVerdict:
    """``same``: the bytes are equal. ``first_difference``: first line that differs, kept → recomputed."""

    run: str
    plan: str
    status: str
    same: bool
    sealed: bool
    first_difference: str


def replay(settings: Settings, run_id: str) -> ReplayVerdict:
    """Recompute and compare.

    Raises UnknownName (no such run), Unavailable (it made no plan), StorageFault (changed since it was sealed, or
    something is missing) and what planning raises.
    """
    from coral_tasks.storage.runs import MANIFEST, RunStore
    from coral_tasks.tasks import planning

    run = RunStore(root=settings.home / "runs").find(run_id)
    sealed = run.path(MANIFEST).exists()
    if sealed:
        run.verify()
    if not run.path(PLAN).exists():
        message = f"run {run_id} made no plan"
        raise Unavailable(message)
    kept = run.get(PLAN)
    request = planning.decode_file(run.path(REQUEST), planning.PlanRequest)
    plan = planning.plan_files(relocated(run, request))
    again = msgspec.json.format(msgspec.json.encode(plan), indent=1)
    return ReplayVerdict(
        run=run_id,
        plan=plan.id,
        status=plan.certificate.status.value,
        same=again == kept,
        sealed=sealed,
        first_difference=_difference(kept, again),
    )


def relocated(run: Run, request: PlanRequest) -> PlanRequest:
    """The request with every file taken from the run's folder, wherever that lies now.

    Raises StorageFault for a file that the run never kept: such a plan cannot be recomputed from the run alone.
    """
    moved = {name: str(_kept(run, value)) for name in _PATHS if (value := getattr(request, name)) is not None}
    return replace(request, **moved)  # type: ignore[arg-type]


def _kept(run: Run, path: str) -> Path:
    parts = PurePosixPath(path).parts
    if run.id not in parts:
        message = f"run {run.id} planned on {path}, which lies outside its folder"
        raise StorageFault(message)
    last = len(parts) - 1 - parts[::-1].index(run.id)
    found = run.path("/".join(parts[last + 1 :]))
    if not found.is_file():
        message = f"run {run.id} planned on {found.name}, which is missing"
        raise StorageFault(message)
    return found


def _difference(kept: bytes, again: bytes) -> str:
    if kept == again:
        return ""
    old, new = kept.decode(errors="replace").splitlines(), again.decode(errors="replace").splitlines()
    for number, (left, right) in enumerate(zip(old, new, strict=False), start=1):
        if left != right:
            return f"line {number}: {left.strip()} → {right.strip()}"
    return f"{len(old)} lines → {len(new)} lines"
