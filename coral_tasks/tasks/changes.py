"""What a run's plan would change: money, nodes and instances against what runs, inputs against those used before.

Owns the comparison and its words. Decides nothing: see ``approval``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from coral_tasks.domain.fleet import Fleet, InstanceState
from coral_tasks.tasks import inputs

if TYPE_CHECKING:
    from coral_tasks.domain.market import Demand, NodeAvailability, NodePrice
    from coral_tasks.domain.plan import AllocationPlan
    from coral_tasks.settings import Settings
    from coral_tasks.storage.runs import Run

MAX_LISTED: Final = 20
_GONE: Final = frozenset({InstanceState.DRAINING, InstanceState.FAILED})
_SAME: Final = 1e-9

Group = tuple[str, str, str]
"""Template, region, market."""

Pool = tuple[str, str, str]
"""Region, node configuration, market."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A plan against what runs. Money in USD/h at the run's own prices.

    ``cost_before``: None if a node in use has no price. ``cost_change`` and ``fleet_change`` are relative to what runs
    (nodes started or stopped over nodes in use); None if nothing runs, or nothing is known, to compare with.
    """

    plan: str
    plan_before: str
    cost_before: float | None
    cost_after: float
    nodes_before: int
    nodes_started: int
    nodes_stopped: int
    started: tuple[str, ...]
    stopped: tuple[str, ...]
    moved: Mapping[str, tuple[str, ...]]

    @property
    def cost_change(self) -> float | None:
        """Signed share of the cost of what runs."""
        if self.cost_before is None or (self.cost_before == 0 and self.cost_after > 0):
            return None
        return 0.0 if self.cost_before == 0 else self.cost_after / self.cost_before - 1

    @property
    def fleet_change(self) -> float | None:
        """Share of the nodes in use that would be started or stopped."""
        touched = self.nodes_started + self.nodes_stopped
        if self.nodes_before == 0:
            return None if touched else 0.0
        return touched / self.nodes_before

    @property
    def is_empty(self) -> bool:
        """Whether the same instances would run."""
        return not self.started and not self.stopped

    def as_json(self) -> dict[str, Any]:
        """For ``change.json``."""
        import msgspec

        values: dict[str, Any] = msgspec.to_builtins(self)
        return {**values, "cost_change": self.cost_change, "fleet_change": self.fleet_change}


def describe(settings: Settings, run: Run, plan: AllocationPlan, before: str) -> Change:
    """Compare ``plan`` with the fleet that the run observed. ``before``: id of the plan in force, "" if there is none.

    Raises StorageFault if the run's inputs cannot be read.
    """
    loaded = inputs.load_inputs(settings, run.id)
    prices = {_pool(row): row.price_usd_per_hour for row in loaded.prices}
    old, sizes = _running(loaded.fleet)
    new = Counter({(str(row.template), str(row.region), row.market.value): row.count for row in plan.instances})
    sizes |= {str(one.id): one.nodes.num_nodes for one in plan.templates}
    more, fewer = new - old, old - new
    return Change(
        plan=str(plan.id),
        plan_before=before,
        cost_before=_cost(loaded.fleet, prices),
        cost_after=plan.certificate.cost_usd_per_hour,
        nodes_before=sum(count * sizes[group[0]] for group, count in old.items()),
        nodes_started=sum(count * sizes[group[0]] for group, count in more.items()),
        nodes_stopped=sum(count * sizes[group[0]] for group, count in fewer.items()),
        started=_words(more),
        stopped=_words(fewer),
        moved=_moved_inputs(run, loaded),
    )


def _pool(row: NodePrice | NodeAvailability) -> Pool:
    return str(row.region), str(row.configuration), row.market.value


def _running(fleet: Fleet) -> tuple[Counter[Group], dict[str, int]]:
    """Instances that serve or will, by group, and nodes of one instance by template."""
    alive = [one for one in fleet.instances if one.state not in _GONE]
    counts = Counter((str(one.template), str(one.region), one.market.value) for one in alive)
    return counts, {str(one.template): len(one.nodes) for one in alive}


def _cost(fleet: Fleet, prices: Mapping[Pool, float]) -> float | None:
    """USD/h of all nodes that hold a stage."""
    busy = {node for one in fleet.instances if one.state not in _GONE for node in one.nodes}
    pools = [(str(one.region), str(one.configuration), one.market.value) for one in fleet.nodes if one.id in busy]
    if any(pool not in prices for pool in pools):
        return None
    return sum(prices[pool] for pool in pools)


def _words(counts: Counter[Group]) -> tuple[str, ...]:
    return tuple(
        f"{count} × {template} in {region} {market}" for (template, region, market), count in sorted(counts.items())
    )


def _moved_inputs(run: Run, loaded: inputs.PlanningInputs) -> dict[str, tuple[str, ...]]:
    """What differs from the inputs accepted before, in words, the largest change first."""
    from coral_tasks.ingestion import rows

    before = {name: _table_before(run, name) for name in ("prices", "availability", "demand")}
    moved: dict[str, tuple[str, ...]] = {}
    if before["prices"] is not None:
        moved["prices"] = moves(
            prices_by_pool(rows.price_rows(before["prices"])), prices_by_pool(loaded.prices), "USD/h"
        )
    if before["availability"] is not None:
        old_nodes = nodes_by_pool(rows.availability_rows(before["availability"]))
        moved["availability"] = moves(old_nodes, nodes_by_pool(loaded.availability), "nodes")
    if before["demand"] is not None:
        old_rates = newest_rates(rows.demand_rows(before["demand"]))
        moved["demand"] = moves(old_rates, newest_rates(loaded.demand), "requests/s")
    return {name: found for name, found in moved.items() if found}


def prices_by_pool(found: Iterable[NodePrice]) -> dict[str, float]:
    """USD per node-hour by "region configuration market"."""
    return {" ".join(_pool(row)): row.price_usd_per_hour for row in found}


def nodes_by_pool(found: Iterable[NodeAvailability]) -> dict[str, float]:
    """Nodes that can be had, likewise."""
    return {" ".join(_pool(row)): float(row.available_nodes) for row in found}


def _table_before(run: Run, name: str) -> Any:
    from data_contracts.files import read_file

    path = run.path(f"inputs/{name}/previous.parquet")
    return read_file(path).table if path.is_file() else None


def newest_rates(demand: Iterable[Demand]) -> dict[str, float]:
    """Requests/s by model in the newest interval, origins added up."""
    listed = list(demand)
    last = max((row.interval_start for row in listed), default=None)
    rates: defaultdict[str, float] = defaultdict(float)
    for row in listed:
        if row.interval_start == last:
            rates[str(row.model)] += row.requests_per_s
    return dict(rates)


def moves(before: Mapping[str, float], after: Mapping[str, float], unit: str) -> tuple[str, ...]:
    """Sentences for every value that appeared, went or changed; the largest relative change first."""
    found = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if relative(old, new) > _SAME:
            found.append((-relative(old, new), f"{key}: {in_words(old, new, unit)}"))
    return tuple(text for _, text in sorted(found))


def in_words(before: float | None, after: float | None, unit: str) -> str:
    """Like "0.8 to 0.9 USD/h"."""
    return f"{' to '.join('none' if value is None else f'{value:g}' for value in (before, after))} {unit}"


def relative(before: float | None, after: float | None) -> float:
    """Size of a change as a share of the value before; infinite from nothing or from 0."""
    if before == after:
        return 0.0
    if before is None or after is None or before == 0:
        return float("inf")
    return abs(after / before - 1)
