"""How an allocation run begins: its parameters checked, its moment, mode, reason and library pinned in ``run.json``.

Owns that file. A run that is opened again keeps what it was opened with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from coral_tasks.domain.errors import Unavailable
from coral_tasks.tasks import run_parameters
from coral_tasks.tasks.nightly import library_address

if TYPE_CHECKING:
    from coral_tasks.settings import Settings
    from coral_tasks.storage.runs import Run
    from coral_tasks.tasks.run_parameters import AllocationParameters

RUN: Final = "run.json"
MAX_REASON: Final = 500
_STARTED_BY: Final = {"scheduled__": "schedule", "backfill__": "backfill", "asset_triggered__": "asset event"}

Trigger = Mapping[str, Any]
"""What started a run: ``asset``: its name; ``extra``: what the event carried."""


def read_params(settings: Settings, params: Mapping[str, Any]) -> AllocationParameters:
    """The parameters, checked against the setup's models. Raises ValidationFailed, UnknownName."""
    from coral_tasks.catalog import load_catalog

    models = [str(one.model.id) for one in load_catalog().setup(settings.setup).models]
    return run_parameters.read_allocation(params, models)


def pin(settings: Settings, run: Run, given: AllocationParameters, triggers: Sequence[Trigger]) -> None:
    """Write ``run.json`` unless it is there. Raises Unavailable if no library is published."""
    from coral_tasks.storage.library import current_manifest
    from coral_tasks.storage.objects import open_store

    if run.path(RUN).exists():
        return
    store = open_store(library_address(settings))
    manifest = current_manifest(store)
    if manifest is None:
        raise Unavailable(f"{store.address} holds no published template library; run coral_template_library first")
    now = datetime.now(UTC).replace(microsecond=0)
    pinned = {
        "run": str(run.id),
        "as_of": ((run_parameters.moment(given.as_of) if given.as_of else None) or now).isoformat(),
        "reason": reason(str(run.id), given, triggers),
        "mode": mode(settings, str(run.id), given),
        "setup": settings.setup,
        "library": library_address(settings),
        "library_version": manifest.version,
        "given": msgspec.to_builtins(given),
        "triggers": list(triggers),
    }
    run.put_json(RUN, pinned)


def given_params(run: Run) -> AllocationParameters:
    """What the run was given by hand; nothing for a run of the schedule."""
    return msgspec.convert(run.get_json(RUN).get("given", {}), run_parameters.AllocationParameters)


def mode(settings: Settings, run_id: str, given: AllocationParameters) -> str:
    """Mode of a run. A backfill looks at the past, a dry or partial run asks "what if": none may touch the fleet."""
    if run_id.startswith("backfill__") or given.dry_run or given.is_partial:
        return "advisory"
    return given.mode or settings.mode


def reason(run_id: str, given: AllocationParameters, triggers: Sequence[Trigger]) -> str:
    """Why the run is: what a person said, else the events that started it, else the clock or a hand."""
    if given.reason:
        return given.reason
    told = "; ".join(dict.fromkeys(_event(one) for one in triggers))
    if told:
        return told if len(told) <= MAX_REASON else f"{told[: MAX_REASON - 2]} …"
    return next((text for prefix, text in _STARTED_BY.items() if run_id.startswith(prefix)), "by hand")


def _event(trigger: Trigger) -> str:
    extra = trigger.get("extra") or {}
    if "moved" in extra:
        return f"price change: {', '.join(map(str, extra['moved']))}"
    if "missing" in extra:
        return f"nodes that could not be had: {', '.join(map(str, extra['missing']))}"
    if "version" in extra:
        return f"template library {extra['version']}"
    return f"event of {trigger.get('asset', 'an asset')}"
