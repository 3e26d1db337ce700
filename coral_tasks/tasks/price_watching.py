"""One check of the price watch: fetch prices, gate them, compare those that the plan in force uses with their anchors.

Owns the state file ``<home>/current/price_watch.json``. A DAG calls ``check_prices`` every minute or on a new file and
updates the price-change asset if it fired. Bad or missing prices never fire: they are an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from coral_tasks.domain.errors import StorageFault, ValidationFailed
from coral_tasks.domain.market import NodePrice
from coral_tasks.settings import Settings
from coral_tasks.tasks.sharing import shared

if TYPE_CHECKING:
    from coral_tasks.ingestion.price_watch import WatchResult, WatchSettings


@shared("current")
def moved_prices() -> list[str]:
    """One check with the settings of the environment; a sentence for each used pool that fired, largest move first."""
    from coral_tasks.tasks.inputs import utc_now

    result = check_prices(Settings(), utc_now())
    return [f"{one.pool}: {one.before_usd_per_hour:g} to {one.now_usd_per_hour:g} USD/h" for one in result.moves]


def check_prices(settings: Settings, now: datetime, limits: WatchSettings | None = None) -> WatchResult:
    """Fetch, gate and compare. Raises SourceFault, ValidationFailed (prices the gate refuses) or StorageFault."""
    from coral_tasks.ingestion.rows import price_rows
    from coral_tasks.tasks.inputs import default_source, gate_context, require_source, violations_of
    from coral_tasks.tasks.sources import configured_source
    from data_contracts.gate import check_table
    from data_contracts.registry import contract_of

    source, minimum = configured_source(settings, "prices") or (default_source(settings, "prices"), 0.0)
    batch = source(now)
    require_source(batch, minimum)
    outcome = check_table(contract_of("prices"), batch.raw(), gate_context(settings, "prices", now))
    if outcome.table is None:
        raise ValidationFailed(violations_of(outcome.report))
    return watch_prices(settings, price_rows(outcome.table), used_pools(settings), limits)


def used_pools(settings: Settings) -> tuple[str, ...]:
    """Pools that the plan in force uses, by name; none if there is no plan."""
    from coral_tasks.tasks.planning import read_plan

    path = settings.home / "current" / "plan.json"
    if not path.exists():
        return ()
    plan = read_plan(path)
    pools = {
        f"{row.region} {configuration} {row.market.value}"
        for row in plan.instances
        for configuration, _ in plan.template(row.template).nodes.counts
    }
    return tuple(sorted(pools))


def watch_prices(
    settings: Settings, prices: Sequence[NodePrice], used: Sequence[str], limits: WatchSettings | None = None
) -> WatchResult:
    """One check against ``<home>/current/price_watch.json``, which is replaced whole. Raises StorageFault."""
    from coral_tasks.ingestion.price_watch import WatchSettings, state_from_json, state_to_json, watch
    from coral_tasks.storage.runs import write_whole

    path = settings.home / "current" / "price_watch.json"
    try:
        before = state_from_json(json.loads(path.read_bytes()), str(path)) if path.exists() else {}
        result = watch(before, prices, used, limits or WatchSettings())
        write_whole(path, (json.dumps(state_to_json(result.anchors), indent=1) + "\n").encode())
    except (OSError, ValueError) as error:
        message = f"{path}: {error}"
        raise StorageFault(message) from error
    return result
