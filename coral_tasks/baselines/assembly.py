"""From whole counts of templates to an allocation plan, the same way for every baseline.

Owns the recomputed figures of a baseline's plan (served rates, shortfalls, cost) and the supply that is left while
one is being made. A baseline proves nothing: the bound of its certificate is 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.problem import SERVED_TOLERANCE, AllocationProblem
from coral_tasks.domain.content import content_digest
from coral_tasks.domain.names import PlanId
from coral_tasks.domain.plan import (
    AllocationPlan,
    Certificate,
    PlannedInstances,
    ServedRate,
    Shortfall,
    SolveStatus,
)

PREFILL, DECODE, AGGREGATED = 0, 1, 2
"""Phase numbers of an AllocationProblem."""

type Counts = dict[tuple[int, int], int]
"""Instances by (template, zone) of the problem."""


def instance_price(problem: AllocationProblem, t: int, z: int) -> float:
    """USD per hour of one instance of template t in zone z."""
    return float(problem.price_usd_per_hour[z] @ problem.templates.nodes[t])


def used_nodes(problem: AllocationProblem, counts: Mapping[tuple[int, int], int]) -> NDArray[np.int64]:
    """Nodes by zone and configuration, shape (Z, C)."""
    used = np.zeros(problem.available_nodes.shape, dtype=np.int64)
    for (t, z), count in counts.items():
        used[z] += problem.templates.nodes[t].astype(np.int64) * count
    return used


def served_rates(problem: AllocationProblem, counts: Mapping[tuple[int, int], int]) -> NDArray[np.float64]:
    """Requests/s that each model's instances can serve, shape (M, places, 2): disaggregated and aggregated."""
    carried = np.zeros((len(problem.models), problem.num_places, 3))
    place = problem.place_of_zone()
    for (t, z), count in counts.items():
        m, phase = problem.templates.model[t], problem.templates.phase[t]
        carried[m, place[z], phase] += problem.request_rate[t] * count
    together = np.minimum(
        np.where((problem.prompt_tokens > 0)[:, None], carried[:, :, PREFILL], np.inf),
        np.where((problem.output_tokens > 0)[:, None], carried[:, :, DECODE], np.inf),
    )
    return np.stack([together, carried[:, :, AGGREGATED]], axis=2)


def assemble_plan(problem: AllocationProblem, counts: Counts, *, planner: str) -> AllocationPlan:
    """The plan with every figure recomputed from ``counts``; equal inputs give equal ids."""
    rows = sorted((key, count) for key, count in counts.items() if count > 0)
    running = _running(problem)
    instances = []
    for (t, z), count in rows:
        zone = problem.zones[z]
        instances.append(
            PlannedInstances(
                template=problem.templates.template_id(t),
                region=problem.regions[zone.region],
                market=zone.market,
                count=count,
                num_kept=min(count, running.get((t, z), 0)),
            )
        )
    templates = tuple(problem.templates.serving_template(t) for t in sorted({t for (t, _), _ in rows}))
    rates = served_rates(problem, dict(rows))
    return AllocationPlan(
        id=PlanId(f"{planner}-{content_digest(problem.library_version, planner, rows, problem.models)}"),
        library_version=problem.library_version,
        instances=tuple(instances),
        templates=templates,
        served=_served_rows(problem, rates),
        shortfalls=_shortfall_rows(problem, rates),
        certificate=_certificate(problem, rows, running),
    )


def _running(problem: AllocationProblem) -> dict[tuple[int, int], int]:
    running = problem.running
    triples = zip(running.template.tolist(), running.zone.tolist(), running.count.tolist(), strict=True)
    return {(t, z): n for t, z, n in triples}


def _served_rows(problem: AllocationProblem, rates: NDArray[np.float64]) -> tuple[ServedRate, ...]:
    """One row for each model and region that serves; with global coupling there is no regional rate to state."""
    if not problem.is_regional:
        return ()
    return tuple(
        ServedRate(
            model=problem.models[m],
            region=problem.regions[r],
            disaggregated_requests_per_s=float(rates[m, r, 0]),
            aggregated_requests_per_s=float(rates[m, r, 1]),
        )
        for m, r in np.argwhere(rates.sum(axis=2) > 0).tolist()
    )


def _shortfall_rows(problem: AllocationProblem, rates: NDArray[np.float64]) -> tuple[Shortfall, ...]:
    rows = []
    for m, required in enumerate(problem.required_requests_per_s.tolist()):
        missing = required - math.fsum(rates[m].ravel())
        if missing > SERVED_TOLERANCE * max(1.0, required):
            model = problem.models[m]
            rows.append(Shortfall(model=model, required_requests_per_s=required, shortfall_requests_per_s=missing))
    return tuple(rows)


def _certificate(
    problem: AllocationProblem, rows: list[tuple[tuple[int, int], int]], running: Mapping[tuple[int, int], int]
) -> Certificate:
    prices = {key: instance_price(problem, *key) for key, _ in rows}
    started = {key: max(0, count - running.get(key, 0)) for key, count in rows}
    cost = math.fsum(prices[key] * count for key, count in rows)
    startup = problem.options.startup_factor * math.fsum(prices[key] * count for key, count in started.items())
    return Certificate(
        status=SolveStatus.GAP_REACHED,
        cost_usd_per_hour=cost,
        startup_usd_per_hour=startup,
        bound_usd_per_hour=0.0,
        gap=1.0 if cost > 0 else 0.0,
        shortage_proved=False,
    )
