"""Solving an allocation problem: reduction, fast search, shortage by priority, check, plan with certificate.

Owns the order of these steps and what is returned: always a plan that passed the independent check, with what is proved
about it. Never unchecked, never nothing; "infeasible" only where the problem itself forbids unserved load (paper mode).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.check import CheckReport, check_counts, check_plan
from coral_tasks.allocation.columns import Columns, build_columns
from coral_tasks.allocation.counts import (
    Counts,
    Solved,
    counts_from_columns,
    counts_from_dict,
    kept_of,
    values_on_columns,
)
from coral_tasks.allocation.options import AllocationOptions, ModelRules
from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.allocation.program import build_program
from coral_tasks.allocation.reduce import reduced_templates
from coral_tasks.allocation.search import Search, State
from coral_tasks.allocation.shortage import MAX_COLUMNS, PRICED_AFTER, TIME_SHARE, most_money, settle_shortage
from coral_tasks.domain.content import content_digest
from coral_tasks.domain.errors import Infeasible, PlanRejected
from coral_tasks.domain.names import PlanId
from coral_tasks.domain.plan import (
    AllocationPlan,
    Certificate,
    PlannedInstances,
    ServedRate,
    Shortfall,
    SolveStatus,
)
from coral_tasks.optimization.mip import MipOutcome, SolverName, solve_program, whole_values

DEFAULT_GAP: Final = 1e-4
OPTIMAL_GAP: Final = 1e-9
"""A gap this small is called optimal."""


def solve_allocation(
    problem: AllocationProblem,
    *,
    time_limit_s: float = 60.0,
    gap: float = DEFAULT_GAP,
    previous: AllocationPlan | None = None,
) -> AllocationPlan:
    """The best checked plan found within ``time_limit_s`` seconds, stopping early at relative ``gap``.

    ``previous``: the last plan, taken as a first incumbent where it still fits. Raises PlanRejected if the check
    refuses the result (a fault), and Infeasible only where the problem forbids unserved load.
    """
    start = None if previous is None else counts_of_plan(problem, previous)
    solved = solve_counts(problem, time_limit_s=time_limit_s, gap=gap, previous=start)
    return plan_of(problem, solved)


def solve_counts(
    problem: AllocationProblem,
    *,
    time_limit_s: float = 60.0,
    gap: float = DEFAULT_GAP,
    previous: Counts | None = None,
    columns: Columns | None = None,
    on_plan: Callable[[tuple[Counts, float]], None] | None = None,
) -> Solved:
    """As ``solve_allocation``, as bare counts. ``columns``: already reduced ones, to solve again without reduction.

    ``on_plan``: is handed every better plan that passes the check, with the bound proved so far.
    """
    begun = time.monotonic()
    if columns is None:
        columns = build_columns(problem, reduced_templates(problem))
    run = _Run(problem, columns, gap=gap, deadline=begun + time_limit_s, begun=begun, previous=previous)
    run.on_plan = on_plan
    solved = run.weighted() if problem.shortfall_weight is not None else run.lexicographic()
    report = check_counts(problem, solved.counts)
    if not report.ok:
        raise PlanRejected("the plan fails its check: " + "; ".join(report.violations))
    return solved


class _Run:
    """One solve: the problem, its columns and the limits."""

    def __init__(
        self,
        problem: AllocationProblem,
        columns: Columns,
        *,
        gap: float,
        deadline: float,
        begun: float,
        previous: Counts | None,
    ) -> None:
        self.problem, self.columns, self.previous = problem, columns, previous
        self.gap, self.deadline, self.begun = gap, deadline, begun
        self.log: list[str] = []
        self.on_plan: Callable[[tuple[Counts, float]], None] | None = None

    def hand_over(self, search: Search) -> None:
        """Hand a better plan to whoever listens, if it passes the check."""
        counts = counts_from_columns(self.columns, search.state.values)
        if self.on_plan is not None and check_counts(self.problem, counts).ok:
            self.on_plan((counts, max(0.0, search.state.bound)))

    def search(
        self,
        problem: AllocationProblem,
        start: NDArray[np.int64] | None = None,
        *,
        served_by: float = math.inf,
        stop_when: Callable[[Search], bool] | None = None,
    ) -> Search:
        """A finished search for weighted ``problem``; what runs, the last plan and ``start`` are first incumbents.

        ``served_by``: when it gives up as long as its plan does not serve everything, monotonic time.
        """
        weights = problem.shortfall_weight
        search = Search(
            problem,
            self.columns,
            weights if weights is not None else np.full(len(problem.models), np.inf),
            gap=self.gap,
            deadline=self.deadline,
            begun=self.begun,
        )
        search.on_better, search.stop_when, search.served_by = self.hand_over, stop_when, served_by
        search.offer(np.where(self.columns.kept, self.columns.upper, 0))
        for values in (self._previous_values(), start):
            if values is not None:
                search.offer(values)
        search.run()
        self.log += search.state.log
        return search

    def _previous_values(self) -> NDArray[np.int64] | None:
        return None if self.previous is None else values_on_columns(self.columns, self.previous)

    def weighted(self) -> Solved:
        """Shortage has weights: one search."""
        search = self.search(self.problem)
        if not math.isfinite(search.state.objective):
            raise Infeasible(self._why_infeasible(search.state))
        return self._solved(search, shortage_proved=search.current_gap() <= self.gap)

    def _why_infeasible(self, state: State) -> str:
        proved = "proved" if math.isinf(state.bound) or state.bound > 0 else "none found in time"
        return f"unserved load is forbidden and no plan serves all of it ({proved})"

    def lexicographic(self) -> Solved:
        """Serve everything if that is possible; else settle shortage by priority first. Then money."""
        problem = replace(self.problem, shortfall_weight=self._steep_weights())
        most = most_money(self.problem)

        def is_short(search: Search) -> bool:
            return search.state.bound > most

        share = TIME_SHARE if len(self.columns) <= MAX_COLUMNS else PRICED_AFTER
        served_by = time.monotonic() + share * (self.deadline - time.monotonic())
        search = self.search(problem, stop_when=is_short, served_by=served_by)
        _, beyond = search.objective_of(search.state.values)
        if beyond <= 0:
            return self._solved(search, shortage_proved=True)
        settled = settle_shortage(self.problem, search, deadline=self.deadline)
        self.log += settled.log
        final = self.search(_with_settled(self.problem, settled.shortfall, settled.missing), start=settled.values)
        return self._solved(final, shortage_proved=settled.proved)

    def _steep_weights(self) -> NDArray[np.float64]:
        """Weights far above what serving costs, steeper by priority: a search that serves whatever can be served."""
        required = np.maximum(self.problem.required_requests_per_s, 1e-12)
        dearest = max(1.0, float(self.columns.objective.max(initial=1.0)))
        rank = [self.problem.options.rules_of(model).priority for model in self.problem.models]
        lowest = max(rank, default=0)
        return np.array([1e4 * dearest * 4.0 ** min(lowest - k, 4) for k in rank]) / required

    def _solved(self, search: Search, *, shortage_proved: bool) -> Solved:
        gap = search.current_gap()
        status = SolveStatus.TIME_LIMIT
        if gap <= OPTIMAL_GAP:
            status = SolveStatus.OPTIMAL
        elif gap <= self.gap:
            status = SolveStatus.GAP_REACHED
        return Solved(
            counts=counts_from_columns(self.columns, search.state.values),
            objective=search.state.objective,
            bound=min(search.state.bound, search.state.objective),
            gap=gap,
            status=status,
            shortage_proved=shortage_proved,
            log=tuple(self.log),
        )


def _with_settled(
    problem: AllocationProblem, shortfall: NDArray[np.float64], missing: NDArray[np.int64]
) -> AllocationProblem:
    """The problem in which exactly the settled shortage is granted and no more is allowed."""
    rules = tuple(_granted(problem.options.rules_of(model), int(missing[m])) for m, model in enumerate(problem.models))
    options: AllocationOptions = replace(problem.options, model_rules=rules)
    required = np.maximum(problem.required_requests_per_s - shortfall, 0.0)
    required[required < 1e-9] = 0.0
    return replace(
        problem,
        required_requests_per_s=required,
        options=options,
        shortfall_weight=np.full(len(problem.models), np.inf),
    )


def _granted(rules: ModelRules, missing: int) -> ModelRules:
    return replace(rules, min_instances=max(0, rules.min_instances - missing))


def solve_plain(
    problem: AllocationProblem,
    *,
    solver: SolverName = SolverName.HIGHS,
    time_limit_s: float = 600.0,
    gap: float = 0.0,
    reduce: bool = False,
) -> Solved:
    """The whole program by one solver, without the fast search: the cross-check. Needs shortage weights."""
    startable = reduced_templates(problem) if reduce else _all_startable(problem)
    columns = build_columns(problem, startable)
    program = build_program(problem, columns)
    result = solve_program(program.arrays, solver=solver, time_limit_s=time_limit_s, gap=gap)
    if result.outcome is MipOutcome.INFEASIBLE:
        raise Infeasible("unserved load is forbidden and no plan serves all of it (proved)")
    counts = counts_from_columns(columns, whole_values(result.solution()[: len(columns)]))
    report = check_counts(problem, counts)
    if not report.ok:
        raise PlanRejected("the plan fails its check: " + "; ".join(report.violations))
    bound = result.bound if result.bound is not None else 0.0
    money = max(report.cost + report.startup, 1e-9)
    optimal = result.outcome is MipOutcome.OPTIMAL
    return Solved(
        counts=counts,
        objective=report.objective,
        bound=bound,
        gap=max(0.0, report.objective - bound) / money,
        status=SolveStatus.OPTIMAL if optimal else SolveStatus.TIME_LIMIT,
        shortage_proved=optimal,
    )


def _all_startable(problem: AllocationProblem) -> NDArray[np.bool_]:
    keep = problem.usable_templates() & np.isfinite(problem.request_rate)
    return keep if problem.startable is None else keep & problem.startable


# -- plans -----------------------------------------------------------------------------------------------------------


def plan_of(problem: AllocationProblem, solved: Solved) -> AllocationPlan:
    """The solved counts as a self-contained plan; raises PlanRejected if the check of the finished plan refuses it."""
    report = check_counts(problem, solved.counts)
    plan = AllocationPlan(
        id=PlanId("unnamed"),
        library_version=problem.library_version,
        instances=_planned_instances(problem, solved.counts),
        templates=tuple(
            problem.templates.serving_template(int(t)) for t in sorted(set(solved.counts.template.tolist()))
        ),
        served=_served(problem, report),
        shortfalls=_shortfalls(problem, report),
        certificate=_certificate(solved, report),
    )
    plan = replace(plan, id=PlanId(f"plan-{content_digest(plan, inputs_digest(problem))}"))
    verdict = check_plan(problem, plan)
    if not verdict.ok:
        raise PlanRejected("the plan fails its check: " + "; ".join(verdict.violations))
    return plan


def _planned_instances(problem: AllocationProblem, counts: Counts) -> tuple[PlannedInstances, ...]:
    kept = kept_of(problem, counts)
    rows = [
        PlannedInstances(
            template=problem.templates.template_id(t),
            region=problem.regions[problem.zones[z].region],
            market=problem.zones[z].market,
            count=n,
            num_kept=int(k),
        )
        for ((t, z), n), k in zip(counts.as_dict().items(), kept, strict=True)
    ]
    return tuple(sorted(rows, key=lambda row: (row.template, row.region, row.market)))


def _served(problem: AllocationProblem, report: CheckReport) -> tuple[ServedRate, ...]:
    """Capacity by region; with global coupling only aggregated capacity belongs to one region, so rows are left out."""
    if not problem.is_regional:
        return ()
    return tuple(
        ServedRate(model=model, region=region, disaggregated_requests_per_s=pd, aggregated_requests_per_s=agg)
        for m, model in enumerate(problem.models)
        for region, (pd, agg) in zip(problem.regions, report.served[m], strict=True)
        if pd + agg > 0
    )


def _shortfalls(problem: AllocationProblem, report: CheckReport) -> tuple[Shortfall, ...]:
    return tuple(
        Shortfall(
            model=model,
            required_requests_per_s=float(problem.required_requests_per_s[m]),
            shortfall_requests_per_s=float(report.shortfall[m]),
        )
        for m, model in enumerate(problem.models)
        if report.shortfall[m] > 0
    )


def _certificate(solved: Solved, report: CheckReport) -> Certificate:
    money = report.cost + report.startup
    bound = min(max(0.0, solved.bound - report.shortage_cost), money)
    return Certificate(
        status=solved.status,
        cost_usd_per_hour=report.cost,
        startup_usd_per_hour=report.startup,
        bound_usd_per_hour=bound,
        gap=(money - bound) / max(money, 1e-9),
        shortage_proved=solved.shortage_proved,
    )


def inputs_digest(problem: AllocationProblem) -> str:
    """Hash of everything the problem was made of."""
    running = problem.running
    return content_digest(
        problem.library_version,
        problem.models,
        problem.regions,
        problem.configurations,
        problem.zones,
        problem.required_requests_per_s,
        problem.prompt_tokens,
        problem.output_tokens,
        problem.price_usd_per_hour,
        problem.available_nodes,
        running.template,
        running.zone,
        running.count,
        problem.options,
    )


def counts_of_plan(problem: AllocationProblem, plan: AllocationPlan) -> Counts:
    """A plan's rows as counts of this problem; rows it does not know are left out."""
    zone_of = {(problem.regions[zone.region], zone.market): z for z, zone in enumerate(problem.zones)}
    total: dict[tuple[int, int], int] = {}
    for template in plan.templates:
        row = _row_of(problem, plan, template.id)
        for planned in plan.instances:
            z = zone_of.get((planned.region, planned.market))
            if row is not None and planned.template == template.id and z is not None:
                total[row, z] = total.get((row, z), 0) + planned.count
    return counts_from_dict(total)


def _row_of(problem: AllocationProblem, plan: AllocationPlan, wanted: str) -> int | None:
    template = next(one for one in plan.templates if one.id == wanted)
    if template.model not in problem.models or any(name not in problem.configurations for name in template.nodes):
        return None
    nodes = np.zeros(len(problem.configurations), dtype=np.int64)
    for name, count in template.nodes.counts:
        nodes[problem.configurations.index(name)] = count
    fits = (problem.templates.nodes == nodes).all(axis=1)
    fits &= problem.templates.model == problem.models.index(template.model)
    rows = [int(t) for t in np.flatnonzero(fits) if problem.templates.template_id(int(t)) == wanted]
    return rows[0] if rows else None
