"""Changed problems: the same inputs with one thing different, and the comparison of two plans.

Owns the changes a person may ask for; solves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.options import AllocationOptions, ModelRules
from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.domain.errors import UnknownName
from coral_tasks.domain.names import Market, ModelId, NodeConfigurationId, RegionId, Runtime, TemplateId
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.domain.templates import ServingTemplate


def with_demand_factor(problem: AllocationProblem, factor: float, model: ModelId | None = None) -> AllocationProblem:
    """Demand of one model, or of all, times ``factor``."""
    scale = np.ones(len(problem.models))
    scale[:] = factor if model is None else scale
    if model is not None:
        scale[_index(problem.models, model, "model")] = factor
    return replace(
        problem,
        demand_requests_per_s=problem.demand_requests_per_s * scale,
        required_requests_per_s=problem.required_requests_per_s * scale,
    )


def with_price_factor(
    problem: AllocationProblem,
    factor: float,
    *,
    region: RegionId | None = None,
    configuration: NodeConfigurationId | None = None,
) -> AllocationProblem:
    """Prices of a region, a configuration, or both, times ``factor``."""
    chosen = _pools(problem, region, configuration, None)
    return replace(problem, price_usd_per_hour=np.where(chosen, factor, 1.0) * problem.price_usd_per_hour)


def with_more_nodes(
    problem: AllocationProblem,
    nodes: int,
    *,
    region: RegionId | None = None,
    configuration: NodeConfigurationId | None = None,
    market: Market | None = None,
) -> AllocationProblem:
    """``nodes`` more (or fewer, if negative) in every chosen pool; never below zero."""
    chosen = _pools(problem, region, configuration, market)
    return replace(problem, available_nodes=np.maximum(problem.available_nodes + nodes * chosen, 0))


def _pools(
    problem: AllocationProblem,
    region: RegionId | None,
    configuration: NodeConfigurationId | None,
    market: Market | None,
) -> NDArray[np.bool_]:
    chosen = np.ones(problem.available_nodes.shape, dtype=np.bool_)
    if region is not None:
        r = _index(problem.regions, region, "region")
        chosen &= np.array([zone.region == r for zone in problem.zones])[:, None]
    if configuration is not None:
        c = _index(problem.configurations, configuration, "configuration")
        chosen &= (np.arange(len(problem.configurations)) == c)[None, :]
    if market is not None:
        chosen &= np.array([zone.market is market for zone in problem.zones])[:, None]
    return chosen


def without_region(problem: AllocationProblem, region: RegionId, model: ModelId | None = None) -> AllocationProblem:
    """One model, or every model, kept out of a region."""
    _index(problem.regions, region, "region")
    models = problem.models if model is None else (model,)
    rules = {name: problem.options.rules_of(name) for name in models}
    banned = {
        name: replace(one, allowed_regions=tuple(r for r in one.allowed_regions or problem.regions if r != region))
        for name, one in rules.items()
    }
    return with_rules(problem, tuple(banned.values()))


def without_configuration(problem: AllocationProblem, configuration: NodeConfigurationId) -> AllocationProblem:
    """A configuration excluded."""
    _index(problem.configurations, configuration, "configuration")
    excluded = tuple(sorted({*problem.options.excluded_configurations, configuration}))
    return replace(problem, options=replace(problem.options, excluded_configurations=excluded))


def with_runtimes(problem: AllocationProblem, runtimes: Sequence[Runtime] | None) -> AllocationProblem:
    """Only these runtimes, or all."""
    allowed = None if runtimes is None else tuple(runtimes)
    return replace(problem, options=replace(problem.options, allowed_runtimes=allowed))


def with_rules(problem: AllocationProblem, rules: Sequence[ModelRules]) -> AllocationProblem:
    """Rules of some models replaced."""
    named = {one.model for one in rules}
    kept = tuple(one for one in problem.options.model_rules if one.model not in named)
    options = replace(problem.options, model_rules=(*kept, *rules))
    return replace(problem, options=options)


def with_options(problem: AllocationProblem, options: AllocationOptions) -> AllocationProblem:
    """Other options; the headroom is applied to the demand anew."""
    return replace(problem, options=options, required_requests_per_s=problem.demand_requests_per_s / options.headroom)


def _index[Name: str](names: Sequence[Name], wanted: Name, kind: str) -> int:
    if wanted not in names:
        raise UnknownName(kind=kind, name=wanted, known=[str(name) for name in names])
    return list(names).index(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan against another. Money in USD/h, shortfalls in requests/s, instances by (template, region, market).

    ``retuned``: the same nodes and runtime under a template of another SLO, which neither start nor stop.
    """

    cost_before: float
    cost_after: float
    shortfall_before: float
    shortfall_after: float
    started: tuple[str, ...]
    stopped: tuple[str, ...]
    retuned: tuple[str, ...] = ()

    @property
    def saving(self) -> float:
        """Cost before minus cost after."""
        return self.cost_before - self.cost_after


_Place = tuple[TemplateId, RegionId, Market]


def compare_plans(before: AllocationPlan, after: AllocationPlan) -> Comparison:
    """What changes from one plan to the other."""
    old, new = (_counts(plan) for plan in (before, after))
    change = {key: new.get(key, 0) - old.get(key, 0) for key in sorted({*old, *new})}
    retuned = tuple(_retuned(change, {one.id: one for plan in (before, after) for one in plan.templates}))
    return Comparison(
        cost_before=before.certificate.cost_usd_per_hour,
        cost_after=after.certificate.cost_usd_per_hour,
        shortfall_before=sum(row.shortfall_requests_per_s for row in before.shortfalls),
        shortfall_after=sum(row.shortfall_requests_per_s for row in after.shortfalls),
        started=tuple(f"{n} x {_named(key)}" for key, n in change.items() if n > 0),
        stopped=tuple(f"{-n} x {_named(key)}" for key, n in change.items() if n < 0),
        retuned=retuned,
    )


def _counts(plan: AllocationPlan) -> dict[_Place, int]:
    return {(row.template, row.region, row.market): row.count for row in plan.instances}


def _named(key: _Place) -> str:
    return f"{key[0]} in {key[1]} {key[2].value}"


def _retuned(change: dict[_Place, int], templates: Mapping[TemplateId, ServingTemplate]) -> Iterator[str]:
    """Pairs of a stop and a start that are the same machines; both are taken out of ``change``."""

    def machines(key: _Place) -> tuple[object, ...]:
        one = templates[key[0]]
        return one.model, one.phase, one.nodes, one.runtime, *key[1:]

    for new in [key for key, n in change.items() if n > 0]:
        for old in [key for key, n in change.items() if n < 0 and machines(key) == machines(new)]:
            count = min(change[new], -change[old])
            if count:
                change[new], change[old] = change[new] - count, change[old] + count
                yield f"{count} x {_named(old)} as {new[0]}"
