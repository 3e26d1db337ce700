"""The independent check of a plan: recomputes cost, start-up, nodes, GPUs, served demand and every rule from inputs.

Must not import the solver, the program or the columns: it shares no code with what built the plan, so a fault there
cannot hide here. Sums are exact (fsum) and run over the plan's few rows in plain Python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coral_tasks.allocation.counts import Counts
from coral_tasks.allocation.options import GpuCap
from coral_tasks.allocation.problem import RUNTIMES, SERVED_TOLERANCE, AllocationProblem
from coral_tasks.domain.names import Market
from coral_tasks.domain.plan import AllocationPlan

FIGURE_TOLERANCE = 1e-6
"""Relative difference allowed between stated and recomputed figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Everything recomputed. Money in USD/h, rates in requests/s, by model index (and region index).

    ``violations``: empty for a valid plan. ``shortage_cost``: 0 where shortage has no weights. ``served``:
    (disaggregated, aggregated) capacity of each model in each place. ``missing_minimum``: instances missing to
    minimum counts (a soft rule: stated, not a violation). ``used``: nodes by zone and configuration.
    """

    violations: tuple[str, ...]
    cost: float
    startup: float
    shortage_cost: float
    shortfall: tuple[float, ...]
    served: tuple[tuple[tuple[float, float], ...], ...]
    used: tuple[tuple[int, ...], ...]
    num_started: int
    missing_minimum: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """No violation found."""
        return not self.violations

    @property
    def objective(self) -> float:
        """Cost, start-up and weighted shortage."""
        return self.cost + self.startup + self.shortage_cost


class _Tally:
    """Sums over the plan's rows, in plain Python numbers."""

    def __init__(self, problem: AllocationProblem, counts: Counts) -> None:
        self.problem = problem
        self.violations: list[str] = []
        self.rows = self._valid_rows(counts)
        self.running = {
            (int(t), int(z)): int(n)
            for t, z, n in zip(problem.running.template, problem.running.zone, problem.running.count, strict=True)
        }
        self.started = {key: max(0, n - self.running.get(key, 0)) for key, n in self.rows.items()}
        self.nodes = {key: [int(u) for u in problem.templates.nodes[key[0]]] for key in self.rows}
        self.price = {key: self._price(key) for key in self.rows}

    def _valid_rows(self, counts: Counts) -> dict[tuple[int, int], int]:
        rows: dict[tuple[int, int], int] = {}
        for t, z, n in zip(counts.template.tolist(), counts.zone.tolist(), counts.count.tolist(), strict=True):
            known = 0 <= t < len(self.problem.templates) and 0 <= z < len(self.problem.zones)
            if not known:
                self.violations.append(f"unknown template row {t} or zone {z}")
            elif n < 0 or n != int(n):
                self.violations.append(f"template row {t}, zone {z}: count {n} is not a whole number")
            elif (t, z) in rows:
                self.violations.append(f"template row {t}, zone {z} is listed twice")
            else:
                rows[t, z] = int(n)
        return rows

    def _price(self, key: tuple[int, int]) -> float:
        prices = self.problem.price_usd_per_hour[key[1]]
        return math.fsum(float(p) * u for p, u in zip(prices, self.nodes[key], strict=True) if u)

    def model_of(self, t: int) -> int:
        return int(self.problem.templates.model[t])

    def name_zone(self, z: int) -> str:
        zone = self.problem.zones[z]
        return f"{self.problem.regions[zone.region]} {zone.market.value}"


def check_counts(problem: AllocationProblem, counts: Counts) -> CheckReport:
    """Recompute every figure of ``counts`` and judge it by every hard rule of the problem."""
    tally = _Tally(problem, counts)
    used = _used_nodes(tally)
    _judge_supply(tally, used)
    served, shortfall, shortage_cost = _judge_demand(tally)
    missing = _judge_model_rules(tally)
    _judge_limits(tally)
    startup_factor = problem.options.startup_factor
    return CheckReport(
        violations=tuple(tally.violations),
        cost=math.fsum(tally.price[key] * n for key, n in tally.rows.items()),
        startup=math.fsum(startup_factor * tally.price[key] * n for key, n in tally.started.items()),
        shortage_cost=shortage_cost,
        shortfall=tuple(shortfall),
        served=served,
        used=tuple(tuple(row) for row in used),
        num_started=sum(tally.started.values()),
        missing_minimum=missing,
    )


def _used_nodes(tally: _Tally) -> list[list[int]]:
    used = [[0] * len(tally.problem.configurations) for _ in tally.problem.zones]
    for (t, z), n in tally.rows.items():
        for c, u in enumerate(tally.nodes[t, z]):
            used[z][c] += u * n
    return used


def _judge_supply(tally: _Tally, used: list[list[int]]) -> None:
    for z, row in enumerate(used):
        for c, name in enumerate(tally.problem.configurations):
            available = int(tally.problem.available_nodes[z, c])
            if row[c] > available:
                tally.violations.append(f"{tally.name_zone(z)}: {row[c]} x {name} used, {available} available")


def _judge_demand(tally: _Tally) -> tuple[tuple[tuple[tuple[float, float], ...], ...], list[float], float]:
    problem = tally.problem
    carried: dict[tuple[int, int, int], list[float]] = {}
    for (t, z), n in tally.rows.items():
        place = problem.zones[z].region if problem.is_regional else 0
        key = (tally.model_of(t), int(problem.templates.phase[t]), place)
        carried.setdefault(key, []).append(float(problem.templates.throughput[t]) * n)
    served, shortfall, costs = [], [], []
    for m, model in enumerate(problem.models):
        rates = tuple(_served_rates(problem, carried, m, place) for place in range(problem.num_places))
        required = float(problem.required_requests_per_s[m])
        missing = required - math.fsum(pd + agg for pd, agg in rates)
        missing = 0.0 if missing <= SERVED_TOLERANCE * max(1.0, required) else missing
        weight = math.nan if problem.shortfall_weight is None else float(problem.shortfall_weight[m])
        if missing and math.isinf(weight):
            tally.violations.append(f"{model}: {missing:.6g} requests/s not served")
        elif missing and math.isfinite(weight):
            costs.append(weight * missing)
        served.append(rates)
        shortfall.append(missing)
    return tuple(served), shortfall, math.fsum(costs)


def _served_rates(
    problem: AllocationProblem, carried: dict[tuple[int, int, int], list[float]], m: int, place: int
) -> tuple[float, float]:
    limits = []
    for phase, tokens in enumerate((float(problem.prompt_tokens[m]), float(problem.output_tokens[m]))):
        if tokens > 0:
            limits.append(math.fsum(carried.get((m, phase, place), [])) / tokens)
    return min(limits), math.fsum(carried.get((m, 2, place), []))


def _judge_model_rules(tally: _Tally) -> tuple[int, ...]:
    missing = []
    for m, model in enumerate(tally.problem.models):
        rules = tally.problem.options.rules_of(model)
        mine = {key: n for key, n in tally.rows.items() if tally.model_of(key[0]) == m and n}
        total = sum(mine.values())
        if rules.max_instances is not None and total > rules.max_instances:
            tally.violations.append(f"{model}: {total} instances, at most {rules.max_instances} allowed")
        for t, z in mine:
            _judge_row(tally, model, t, z)
        _judge_spot(tally, m, mine)
        missing.append(max(0, rules.min_instances - total))
    return tuple(missing)


def _judge_row(tally: _Tally, model: str, t: int, z: int) -> None:
    problem = tally.problem
    rules = next((one for one in problem.options.model_rules if one.model == model), None)
    region = problem.regions[problem.zones[z].region]
    if rules and rules.allowed_regions is not None and region not in rules.allowed_regions:
        tally.violations.append(f"{model}: runs in {region}, which its rules forbid")
    runtime = RUNTIMES[int(problem.templates.runtime[t])]
    for allowed in (problem.options.allowed_runtimes, rules.allowed_runtimes if rules else None):
        if allowed is not None and runtime not in allowed:
            tally.violations.append(f"{model}: uses runtime {runtime.value}, which is not allowed")
    for c, name in enumerate(problem.configurations):
        if name in problem.options.excluded_configurations and tally.nodes[t, z][c]:
            tally.violations.append(f"{model}: uses {name}, which is excluded")
    if problem.zones[z].market is Market.SPOT and not problem.options.use_spot:
        tally.violations.append(f"{model}: uses spot nodes, which are switched off")


def _judge_spot(tally: _Tally, m: int, mine: dict[tuple[int, int], int]) -> None:
    problem = tally.problem
    rules = problem.options.rules_of(problem.models[m])
    required = float(problem.required_requests_per_s[m])
    tokens = (float(problem.prompt_tokens[m]), float(problem.output_tokens[m]), 1.0)
    for phase in range(3):
        on_spot = [
            float(problem.templates.throughput[t]) * n / tokens[phase]
            for (t, z), n in mine.items()
            if int(problem.templates.phase[t]) == phase and problem.zones[z].market is Market.SPOT and tokens[phase] > 0
        ]
        carried = math.fsum(on_spot)
        if rules.max_spot_share < 1 and carried > rules.max_spot_share * required + SERVED_TOLERANCE * max(1, required):
            tally.violations.append(
                f"{rules.model}: spot nodes carry {carried:.6g} requests/s,"
                f" at most {rules.max_spot_share * required:.6g}"
            )


def _judge_limits(tally: _Tally) -> None:
    options = tally.problem.options
    cost = math.fsum(tally.price[key] * n for key, n in tally.rows.items())
    budget = options.budget_usd_per_hour
    if budget is not None and cost > budget + FIGURE_TOLERANCE * max(1.0, budget):
        tally.violations.append(f"nodes cost {cost:.6g} USD/h, budget {budget:.6g}")
    started = sum(tally.started.values())
    if options.max_started_instances is not None and started > options.max_started_instances:
        tally.violations.append(f"{started} instances started, at most {options.max_started_instances} allowed")
    for cap in options.gpu_caps:
        gpus = _gpus_under(tally, cap)
        if gpus > cap.max_gpus:
            tally.violations.append(f"{gpus} GPUs used, cap {cap}")


def _gpus_under(tally: _Tally, cap: GpuCap) -> int:
    problem, total = tally.problem, 0
    for (t, z), n in tally.rows.items():
        if cap.region is not None and problem.regions[problem.zones[z].region] != cap.region:
            continue
        if cap.model is not None and problem.models[tally.model_of(t)] != cap.model:
            continue
        for c, name in enumerate(problem.configurations):
            if cap.gpu_type is None or name.rpartition("x")[0] == cap.gpu_type:
                total += tally.nodes[t, z][c] * int(problem.num_gpus[c]) * n
    return total


def check_plan(problem: AllocationProblem, plan: AllocationPlan) -> CheckReport:
    """Check a plan by its own rows and carried templates: they must be the problem's, and its figures must be right."""
    rows, unknown = _rows_of_plan(problem, plan)
    report = check_counts(problem, rows)
    violations = [*unknown, *report.violations, *_misstated(problem, plan, report)]
    return CheckReport(
        **{name: getattr(report, name) for name in CheckReport.__dataclass_fields__ if name != "violations"},
        violations=tuple(violations),
    )


def _rows_of_plan(problem: AllocationProblem, plan: AllocationPlan) -> tuple[Counts, list[str]]:
    import numpy as np

    zone_of = {(problem.regions[zone.region], zone.market): z for z, zone in enumerate(problem.zones)}
    found: list[tuple[int, int, int]] = []
    unknown: list[str] = []
    row_of = {template.id: _library_row(problem, plan, template.id) for template in plan.templates}
    for row in plan.instances:
        t, z = row_of[row.template], zone_of.get((row.region, row.market))
        if t is None:
            unknown.append(f"{row.template}: not in the library, or not with these nodes and this throughput")
        elif z is None:
            unknown.append(f"{row.template}: no supply is known in {row.region} {row.market.value}")
        else:
            found.append((t, z, row.count))
    table = np.array(sorted(found), dtype=np.int64).reshape(-1, 3)
    return Counts(template=table[:, 0], zone=table[:, 1], count=table[:, 2]), unknown


def _library_row(problem: AllocationProblem, plan: AllocationPlan, wanted: str) -> int | None:
    """Row of the problem with the carried template's model, phase, nodes and throughput, and its id; None if none."""
    template = next(one for one in plan.templates if one.id == wanted)
    if template.model not in problem.models:
        return None
    table, column = problem.templates, {name: c for c, name in enumerate(problem.configurations)}
    phases = ("prefill", "decode", "aggregated")
    fits = (table.model == problem.models.index(template.model)) & (table.phase == phases.index(template.phase.value))
    fits &= table.throughput == template.throughput
    if any(name not in column for name, _ in template.nodes.counts):
        return None
    for name, c in column.items():
        fits &= table.nodes[:, c] == dict(template.nodes.counts).get(name, 0)
    rows = [int(t) for t in fits.nonzero()[0] if table.template_id(int(t)) == wanted]
    return rows[0] if rows else None


def _misstated(problem: AllocationProblem, plan: AllocationPlan, report: CheckReport) -> list[str]:
    found = []
    certificate = plan.certificate
    for name, stated, right in (
        ("cost", certificate.cost_usd_per_hour, report.cost),
        ("start-up", certificate.startup_usd_per_hour, report.startup),
    ):
        if not _close(stated, right):
            found.append(f"stated {name} {stated} USD/h, recomputed {right}")
    stated_short = {row.model: row.shortfall_requests_per_s for row in plan.shortfalls}
    for m, model in enumerate(problem.models):
        stated = stated_short.get(model, 0.0)
        slack = 2 * SERVED_TOLERANCE * max(1.0, float(problem.required_requests_per_s[m]))
        if abs(stated - report.shortfall[m]) > slack:
            found.append(f"{model}: stated shortfall {stated} requests/s, recomputed {report.shortfall[m]}")
    return found


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= FIGURE_TOLERANCE * max(1.0, abs(a), abs(b))
