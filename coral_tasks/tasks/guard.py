"""When a run's plan may still be sent or become current: not too old, and nobody dispatched since the run began.

Owns ``basis.json`` of a run: when it began and which epoch was the newest then. Airflow may run any task again, hours
later, after a pause, a kill or a "clear"; this is what keeps an old plan from being sent over a newer one.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from coral_tasks.domain.errors import StaleInput

if TYPE_CHECKING:
    from coral_tasks.dispatch.epochs import Epochs
    from coral_tasks.settings import Settings
    from coral_tasks.storage.runs import Run

BASIS: Final = "basis.json"


def pin_basis(settings: Settings, run: Run, now: datetime | None = None) -> None:
    """Note once when the run began and the newest epoch then."""
    if not run.path(BASIS).exists():
        opened = now or datetime.now(UTC)
        run.put_json(BASIS, {"opened_at": opened.isoformat(), "epoch": _store(settings).newest()[0]})


def age_s(run: Run, now: datetime | None = None) -> float:
    """Seconds since the run began."""
    opened = datetime.fromisoformat(run.get_json(BASIS)["opened_at"])
    return ((now or datetime.now(UTC)) - opened).total_seconds()


def take_epoch(settings: Settings, run: Run, plan: str) -> int:
    """A new epoch for this run's dispatch. Raises StaleInput if the run is too old or another dispatch came between."""
    age = age_s(run)
    if age > settings.plan_max_age_s:
        message = (
            f"this run began {age:,.0f} s ago, more than CORAL_PLAN_MAX_AGE_S ({settings.plan_max_age_s:g} s): "
            f"its plan {plan} is not sent any more; start a new run"
        )
        raise StaleInput(message)
    newest, owner = _store(settings).newest()
    if newest != run.get_json(BASIS)["epoch"] and owner != _label(run, plan):
        message = (
            f"the fleet was dispatched by someone else since this run began (epoch {newest}: {owner}); "
            f"its plan {plan} is not sent any more; start a new run"
        )
        raise StaleInput(message)
    return _store(settings).next_epoch(_label(run, plan), expected=newest)


def has_begun(settings: Settings, run: Run, plan: str) -> bool:
    """Whether this run's own dispatch is the newest: then what moved since may be its own doing."""
    return _store(settings).newest()[1] == _label(run, plan)


def _label(run: Run, plan: str) -> str:
    return f"{plan} of run {run.id}"


def _store(settings: Settings) -> Epochs:
    from coral_tasks.tasks import sharing

    return sharing.epochs(settings.home / "dispatch" / "epochs.sqlite")
