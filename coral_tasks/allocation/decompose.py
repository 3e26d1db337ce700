"""Decomposition by model: supply priced, each model's demand covered exactly by dynamic programming on a grid.

Owns the least adjusted cost of each model at given prices of supply, plans that reach nearly that, and for every column
the least value of any solution that uses it. Rates rounded up to whole grid units make the values lower bounds; rates
rounded down make the plans feasible. Knows no solver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation import kernels
from coral_tasks.allocation.columns import Columns
from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.allocation.program import gpu_cap_weights, spot_weights
from coral_tasks.domain.names import Market

UNIT_TOLERANCE: Final = 1e-9
"""Rates this close to a whole number of units count as whole. Harmless in bounds: it takes a billion instances to sum
to one unit."""

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SideRow:
    """A further limit Σ weight x ≤ upper that couples columns, besides supply."""

    name: str
    weights: FloatArray
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Duals:
    """Prices of supply, USD/h per node [Z, C], and of the side rows [S]; none negative."""

    nodes: FloatArray
    sides: FloatArray

    def towards(self, other: Duals, share: float) -> Duals:
        """The point at ``share`` of the way to ``other``."""
        return Duals(
            nodes=self.nodes + share * (other.nodes - self.nodes), sides=self.sides + share * (other.sides - self.sides)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelPlan:
    """A way to serve one model: ``counts`` of ``columns``, requests/s left unserved."""

    model: int
    columns: IntArray
    counts: IntArray
    unserved: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Core:
    """Columns with what the kernels need: compact nodes, base costs, groups (model, place, phase)."""

    problem: AllocationProblem
    columns: Columns
    weights: FloatArray
    sides: tuple[SideRow, ...]
    node_rows: tuple[IntArray, IntArray, IntArray]
    local_template: IntArray
    group_start: IntArray

    def group(self, m: int, place: int, phase: int) -> tuple[int, int]:
        """First and last column (exclusive) of a group."""
        key = (m * self.problem.num_places + place) * 3 + phase
        return int(self.group_start[key]), int(self.group_start[key + 1])


def build_core(problem: AllocationProblem, columns: Columns, weights: FloatArray) -> _Core:
    """Prepare columns for the kernels. ``weights``: USD/h per unserved request/s [M], infinite where forbidden."""
    used, local = np.unique(columns.template, return_inverse=True)
    nodes = problem.templates.nodes[used]
    row, column = np.nonzero(nodes)
    start = np.zeros(len(used) + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=len(used)), out=start[1:])
    key = (columns.model * problem.num_places + columns.place) * 3 + columns.phase
    groups = len(problem.models) * problem.num_places * 3
    return _Core(
        problem=problem,
        columns=columns,
        weights=weights,
        sides=side_rows(problem, columns),
        node_rows=(start, column.astype(np.int64), nodes[row, column].astype(np.int64)),
        local_template=local.astype(np.int64),
        group_start=np.searchsorted(key, np.arange(groups + 1)).astype(np.int64),
    )


def side_rows(problem: AllocationProblem, columns: Columns) -> tuple[SideRow, ...]:
    """Every hard limit besides supply as a row over ``columns``. Minimum counts are left to the final program."""
    options, found = problem.options, []
    for m, model in enumerate(problem.models):
        rules = options.rules_of(model)
        if rules.max_instances is not None:
            mine = (columns.model == m).astype(np.float64)
            found.append(SideRow(name=f"max {model}", weights=mine, upper=float(rules.max_instances)))
        if rules.max_spot_share < 1 and any(zone.market is Market.SPOT for zone in problem.zones):
            most = rules.max_spot_share * float(problem.required_requests_per_s[m])
            for phase in range(3):
                weights = spot_weights(problem, columns, m, phase)
                found.append(SideRow(name=f"spot {model} {phase}", weights=weights, upper=most))
    for cap in options.gpu_caps:
        weights = gpu_cap_weights(problem, columns, cap)
        found.append(SideRow(name=f"cap {cap}", weights=weights, upper=float(cap.max_gpus)))
    if options.budget_usd_per_hour is not None:
        found.append(SideRow(name="budget", weights=columns.cost_usd_per_hour, upper=options.budget_usd_per_hour))
    if options.max_started_instances is not None:
        new = (~columns.kept).astype(np.float64)
        found.append(SideRow(name="change", weights=new, upper=float(options.max_started_instances)))
    return tuple(row for row in found if row.weights.any())


def no_duals(core: _Core) -> Duals:
    """Supply and side rows at price zero."""
    return Duals(nodes=np.zeros(core.problem.price_usd_per_hour.shape), sides=np.zeros(len(core.sides)))


def adjusted_costs(core: _Core, duals: Duals) -> FloatArray:
    """Cost + start-up of each column plus the price of the supply and limits it uses, [N]."""
    cost = core.columns.objective.copy()
    for price, row in zip(duals.sides, core.sides, strict=True):
        if price:
            cost += price * row.weights
    if duals.nodes.any():
        kernels.add_node_prices(core.node_rows, core.local_template, core.columns.zone, duals.nodes, cost)
    return cost


def supply_value(core: _Core, duals: Duals) -> float:
    """What all supply and all limits are worth at these prices; subtracted from the models' values for the bound."""
    nodes = float((duals.nodes * core.problem.available_nodes).sum())
    return nodes + float(sum(price * row.upper for price, row in zip(duals.sides, core.sides, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """Rates in whole units of required rate / size: rounded up for bounds, or down for plans, [N]."""

    size: int
    rounds_up: bool
    units: IntArray


def build_grid(core: _Core, size: int, *, rounds_up: bool) -> Grid:
    """A grid of ``size`` units for every model. Rates above the required rate count as it."""
    required = core.problem.required_requests_per_s[core.columns.model]
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.where(required > 0, core.columns.rate / required * size, size)
    exact = np.minimum(exact, size)
    rounded = np.ceil(exact - UNIT_TOLERANCE) if rounds_up else np.floor(exact + UNIT_TOLERANCE)
    return Grid(size=size, rounds_up=rounds_up, units=np.maximum(rounded, 0).astype(np.int64))


class _Cover:
    """Least cost of one phase of a model in one place for every number of units, and how to reach it."""

    def __init__(self, core: _Core, grid: Grid, cost: FloatArray, group: tuple[int, int]) -> None:
        G = grid.size
        first, last = group
        self.value, self._choice = np.empty(G + 1), np.empty(G + 1, dtype=np.int64)
        best, self._column = np.empty(G + 1), np.empty(G + 1, dtype=np.int64)
        new_units = np.where(core.columns.kept[first:last], 0, grid.units[first:last])
        kernels.bucket_best(first, new_units, cost, best, self._column)
        scratch = (np.empty(G + 1), np.empty(G + 1, dtype=np.int64), np.empty(G + 1, dtype=np.int64))
        kernels.cover(best, self.value, self._choice, *scratch)
        self._units = grid.units
        self._singles: list[tuple[int, NDArray[np.uint8]]] = []
        for j in np.flatnonzero(core.columns.kept[first:last]) + first:
            for _ in range(int(core.columns.upper[j])):
                taken = np.zeros(G + 1, dtype=np.uint8)
                kernels.add_single(self.value, int(grid.units[j]), float(cost[j]), taken)
                self._singles.append((int(j), taken))

    def trace(self, q: int, into: dict[int, int]) -> None:
        """Add the columns of a cheapest cover of q units to ``into``."""
        for j, taken in reversed(self._singles):
            if taken[q]:
                into[j] = into.get(j, 0) + 1
                q = max(0, q - int(self._units[j]))
        while q > 0 and self._choice[q] >= 0:
            u = int(self._choice[q])
            j = int(self._column[u])
            into[j] = into.get(j, 0) + 1
            q = max(0, q - u)


class ModelValue:
    """Least adjusted cost of serving one model, shortfall included, at given prices.

    Sources are, for each place, prefill with decode, and aggregated; the shortfall is the last source.
    """

    def __init__(self, core: _Core, grid: Grid, cost: FloatArray, m: int) -> None:
        problem, G = core.problem, grid.size
        self.core, self.grid, self.m = core, grid, m
        self.covers: list[tuple[_Cover | None, _Cover | None, _Cover]] = []
        self.sources: list[FloatArray] = []
        for place in range(problem.num_places):
            prefill, decode, joint = (self._cover(cost, place, phase) for phase in range(3))
            self.covers.append((prefill, decode, joint if joint is not None else _Cover(core, grid, cost, (0, 0))))
            self.sources.append(_sum_of([cover.value for cover in (prefill, decode) if cover is not None], G))
            self.sources.append(self.covers[-1][2].value)
        step = float(problem.required_requests_per_s[m]) / G
        lost: FloatArray = np.arange(G + 1, dtype=np.float64) * step
        lost[1:] *= core.weights[m]
        self.suffix = [lost]
        for source in reversed(self.sources):
            self.suffix.insert(0, _min_plus(source, self.suffix[0]))

    def _cover(self, cost: FloatArray, place: int, phase: int) -> _Cover | None:
        tokens = (self.core.problem.prompt_tokens, self.core.problem.output_tokens)
        if phase < 2 and tokens[phase][self.m] <= 0:
            return None
        return _Cover(self.core, self.grid, cost, self.core.group(self.m, place, phase))

    @property
    def value(self) -> float:
        """Least adjusted cost, USD/h."""
        return float(self.suffix[0][self.grid.size])

    def plan(self) -> ModelPlan | None:
        """Columns of a cheapest way; None where nothing covers the demand and shortfall is forbidden."""
        if not math.isfinite(self.value):
            return None
        counts: dict[int, int] = {}
        left = self.grid.size
        for k, source in enumerate(self.sources):
            part = int(kernels.split_point(source, self.suffix[k + 1], left))
            self._trace(k, part, counts)
            left = max(0, left - part)
        return model_plan(self.core, self.m, counts)

    def _trace(self, k: int, units: int, counts: dict[int, int]) -> None:
        prefill, decode, joint = self.covers[k // 2]
        chosen = (joint,) if k % 2 else (prefill, decode)
        for cover in chosen:
            if cover is not None:
                cover.trace(units, counts)

    def completions(self) -> list[tuple[int, int, FloatArray]]:
        """(place, phase, E): E[u] = least cost of all the rest once a column of that group with u units is used."""
        G = self.grid.size
        prefix: FloatArray = np.full(G + 1, np.inf)
        prefix[0] = 0.0
        found = []
        for k, source in enumerate(self.sources):
            others: FloatArray = _min_plus(prefix, self.suffix[k + 1])[
                ::-1
            ].copy()  # others[q]: the rest covers G - q units
            place, joint = divmod(k, 2)
            prefill, decode, aggregated = self.covers[place]
            members = ((2, aggregated, None),) if joint else ((0, prefill, decode), (1, decode, prefill))
            for phase, cover, partner in members:
                if cover is not None:
                    rest = others if partner is None else others + partner.value
                    found.append((place, phase, _completion(cover.value, rest)))
            prefix = _min_plus(prefix, source)
        return found


def _sum_of(parts: list[FloatArray], size: int) -> FloatArray:
    total = np.zeros(size + 1)
    for part in parts:
        total = total + part
    return total


def _min_plus(a: FloatArray, b: FloatArray) -> FloatArray:
    out = np.empty(len(a))
    kernels.min_plus(a, b, out)
    return out


def _completion(value: FloatArray, others: FloatArray) -> FloatArray:
    out = np.empty(len(value))
    kernels.completion(value, others, out)
    return out


def model_plan(core: _Core, m: int, counts: dict[int, int]) -> ModelPlan:
    """Counts of columns as a plan, with the rate it truly leaves unserved."""
    columns = np.array(sorted(counts), dtype=np.int64)
    numbers = np.array([counts[j] for j in columns.tolist()], dtype=np.int64)
    served = 0.0
    for place in range(core.problem.num_places):
        here = core.columns.place[columns] == place
        rates = [
            float((core.columns.rate[columns] * numbers)[here & (core.columns.phase[columns] == p)].sum())
            for p in range(3)
        ]
        pairs = [rates[p] for p, tokens in enumerate(_tokens(core.problem, m)) if tokens > 0]
        served += min(pairs) + rates[2]
    required = float(core.problem.required_requests_per_s[m])
    return ModelPlan(model=m, columns=columns, counts=numbers, unserved=max(0.0, required - served))


def _tokens(problem: AllocationProblem, m: int) -> tuple[float, float]:
    return float(problem.prompt_tokens[m]), float(problem.output_tokens[m])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """Models' least adjusted costs at ``duals`` and the bound they prove, USD/h."""

    duals: Duals
    cost: FloatArray
    models: tuple[ModelValue, ...]
    bound: float


def evaluate(core: _Core, grid: Grid, duals: Duals) -> Evaluation:
    """Solve every model at these prices. With a grid that rounds up, ``bound`` is a proved bound."""
    cost = adjusted_costs(core, duals)
    wanted = np.flatnonzero(core.problem.required_requests_per_s > 0)
    models = tuple(ModelValue(core, grid, cost, int(m)) for m in wanted)
    total = math.fsum(model.value for model in models)
    return Evaluation(duals=duals, cost=cost, models=models, bound=total - supply_value(core, duals))


def column_bounds(core: _Core, evaluation: Evaluation) -> FloatArray:
    """For every column the least objective of any solution that uses it at least once, [N]; the grid must round up."""
    bounds = np.full(len(core.columns), evaluation.bound)
    for model in evaluation.models if math.isfinite(evaluation.bound) else ():
        for place, phase, completion in model.completions():
            first, last = core.group(model.m, place, phase)
            units = model.grid.units[first:last]
            bounds[first:last] += evaluation.cost[first:last] + completion[units] - model.value
    return bounds
