"""Decomposition by model: supply priced, each model's demand covered exactly by dynamic programming on a grid.

Owns the least adjusted cost of each model at given prices of supply, plans that reach nearly that, and for every column
the least value of any solution that uses it. Rates rounded up to whole grid units make the values lower bounds; rates
rounded down make the plans feasible. Knows no solver.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
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
    """Columns with what the kernels need: compact nodes, base costs, groups (model, place, phase).

    ``kinds``: what ``_kinds_of`` found, since it does not change from one set of prices to the next.
    """

    problem: AllocationProblem
    columns: Columns
    weights: FloatArray
    sides: tuple[SideRow, ...]
    node_rows: tuple[IntArray, IntArray, IntArray]
    local_template: IntArray
    group_start: IntArray
    kinds: dict[tuple[tuple[int, int], Tracked], _Kinds] = field(default_factory=dict)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """Supply that a model's own plan may not exceed, followed in the dynamic program of one place.

    ``pools``: (zone, configuration, levels): usage u of supply A counts as floor(u levels / A) of ``levels``, which
    relaxes the limit and keeps the number of states small. States are mixed-radix numbers of these.
    """

    pools: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_states(self) -> int:
        """States in all."""
        return math.prod(levels + 1 for _, _, levels in self.pools)

    def digits(self) -> IntArray:
        """Levels of each pool in each state, [S, pools]."""
        found = np.zeros((self.num_states, len(self.pools)), dtype=np.int64)
        number = np.arange(self.num_states)
        for k, (_, _, levels) in enumerate(self.pools):
            found[:, k] = number % (levels + 1)
            number = number // (levels + 1)
        return found

    def number(self, digits: IntArray) -> IntArray:
        """State of each row of digits; -1 where a digit is negative."""
        total = np.zeros(len(digits), dtype=np.int64)
        scale = 1
        for k, (_, _, levels) in enumerate(self.pools):
            total += digits[:, k] * scale
            scale *= levels + 1
        return np.where((digits < 0).any(axis=1), -1, total)

    def minus(self, used: IntArray) -> IntArray:
        """State left of every state once ``used`` levels are taken, [S]; -1 where they do not fit."""
        return self.number(self.digits() - used)

    def levels_used(self, core: _Core, first: int, last: int) -> IntArray:
        """Levels that one instance of the columns ``first`` to ``last`` uses of each pool, [last - first, pools]."""
        columns, problem = core.columns, core.problem
        used = np.zeros((last - first, len(self.pools)), dtype=np.int64)
        for k, (z, c, levels) in enumerate(self.pools):
            nodes = problem.templates.nodes[columns.template[first:last], c].astype(np.int64)
            here = columns.zone[first:last] == z
            used[:, k] = np.where(here, nodes * levels // max(1, int(problem.available_nodes[z, c])), 0)
        return used


UNTRACKED: Final = Tracked()


@functools.lru_cache(maxsize=1024)
def _states_within(tracked: Tracked) -> IntArray:
    """State s - r at [s, r]; -1 where r is not within s."""
    states = tracked.num_states
    return np.array([tracked.minus(digits) for digits in tracked.digits()]).reshape(states, states).T.copy()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kinds:
    """Columns of a group by what they use of the tracked supply.

    ``kind``: [group]; ``own``: state that just holds one of a kind [K]; ``rest``: state left of each state [K, S].
    """

    kind: IntArray
    own: IntArray
    rest: IntArray


def _kinds_of(core: _Core, group: tuple[int, int], tracked: Tracked) -> _Kinds:
    found = core.kinds.get((group, tracked))
    if found is None:
        found = core.kinds[group, tracked] = _find_kinds(core, group, tracked)
    return found


def _find_kinds(core: _Core, group: tuple[int, int], tracked: Tracked) -> _Kinds:
    first, last = group
    if not tracked.pools:
        none = np.zeros(last - first, dtype=np.int64)
        return _Kinds(kind=none, own=np.zeros(1, dtype=np.int64), rest=np.zeros((1, 1), dtype=np.int64))
    states = tracked.number(tracked.levels_used(core, first, last))
    own, kind = np.unique(states, return_inverse=True)
    rest = _states_within(tracked)[:, own].T.copy()
    return _Kinds(kind=kind.astype(np.int64), own=own, rest=rest)


class _Cover:
    """Least cost of one phase of a model in one place, by state of the tracked supply and number of units."""

    def __init__(self, core: _Core, grid: Grid, cost: FloatArray, group: tuple[int, int], tracked: Tracked) -> None:
        self.first, last = group
        states, G = tracked.num_states, grid.size
        kinds = _kinds_of(core, group, tracked)
        self.kind, self.rest = kinds.kind, kinds.rest
        best = np.empty((len(kinds.own), G + 1))
        self._column = np.empty((len(kinds.own), G + 1), dtype=np.int64)
        new_units = np.where(core.columns.kept[self.first : last], 0, grid.units[self.first : last])
        kernels.bucket_best(self.first, new_units, self.kind, cost, best, self._column)
        self.value = np.empty((states, G + 1))
        self._choice = (np.empty((states, G + 1), dtype=np.int64), np.empty((states, G + 1), dtype=np.int64))
        kernels.cover(best, kinds.own, self.rest, self.value, *self._choice)
        self._units = grid.units
        self._singles: list[tuple[int, NDArray[np.uint8]]] = []
        for j in np.flatnonzero(core.columns.kept[self.first : last]) + self.first:
            rest = self.rest[self.kind[j - self.first]]
            for _ in range(int(core.columns.upper[j])):
                taken = np.zeros((states, G + 1), dtype=np.uint8)
                kernels.add_single(self.value, int(grid.units[j]), float(cost[j]), rest, taken)
                self._singles.append((int(j), taken))

    def trace(self, state: int, q: int, into: dict[int, int]) -> None:
        """Add the columns of a cheapest cover of q units within a state to ``into``."""
        for j, taken in reversed(self._singles):
            if taken[state, q]:
                into[j] = into.get(j, 0) + 1
                q = max(0, q - int(self._units[j]))
                state = int(self.rest[self.kind[j - self.first], state])
        while q > 0 and self._choice[0][state, q] >= 0:
            g, u = int(self._choice[0][state, q]), int(self._choice[1][state, q])
            j = int(self._column[g, u])
            into[j] = into.get(j, 0) + 1
            q = max(0, q - u)
            state = int(self.rest[g, state])


class _Place:
    """Everything one model may do in one place: prefill with decode, and aggregated, under the tracked supply."""

    def __init__(self, core: _Core, grid: Grid, cost: FloatArray, m: int, place: int, tracked: Tracked) -> None:
        problem = core.problem
        self.place, self.tracked = place, tracked
        needed = (problem.prompt_tokens[m] > 0, problem.output_tokens[m] > 0, True)
        self.covers = [
            _Cover(core, grid, cost, core.group(m, place, phase), tracked) if needed[phase] else None
            for phase in range(3)
        ]
        states = tracked.num_states
        self.last = states - 1
        self.within = _states_within(tracked)
        self.pairs = self._pairs()
        self.value = np.full(grid.size + 1, np.inf)
        for s in range(states):
            kernels.min_plus(self.pairs[s], self.joint.value[self._left(s)], self.value)

    @property
    def joint(self) -> _Cover:
        """The aggregated phase, which every model may use."""
        cover = self.covers[2]
        if cover is None:  # never: aggregated instances need no tokens of one phase
            raise ValueError("the aggregated phase is always covered")
        return cover

    def _left(self, s: int) -> int:
        """State left of all supply once ``s`` is taken."""
        return int(self.within[self.last, s])

    def _pairs(self) -> FloatArray:
        prefill, decode = self.covers[0], self.covers[1]
        if prefill is None or decode is None:
            only = prefill or decode
            return only.value if only is not None else np.zeros_like(self.joint.value)
        out = np.empty_like(prefill.value)
        kernels.pair_up(prefill.value, decode.value, self.within, out)
        return out

    def trace(self, units: int, into: dict[int, int]) -> None:
        """Add the columns of a cheapest cover of ``units`` to ``into``."""
        best, state, part = np.inf, 0, 0
        for s in range(self.last + 1):
            joint = self.joint.value[self._left(s)]
            i = int(kernels.split_point(self.pairs[s], joint, units))
            value = self.pairs[s, i] + joint[max(0, units - i)]
            if value < best:
                best, state, part = value, s, i
        self.joint.trace(self._left(state), max(0, units - part), into)
        self._trace_pair(state, part, into)

    def _trace_pair(self, state: int, units: int, into: dict[int, int]) -> None:
        prefill, decode = self.covers[0], self.covers[1]
        if prefill is None or decode is None:
            only = prefill or decode
            if only is not None:
                only.trace(state, units, into)
            return
        options = [r for r in range(state + 1) if self.within[state, r] >= 0]
        first = min(options, key=lambda r: prefill.value[r, units] + decode.value[self.within[state, r], units])
        prefill.trace(first, units, into)
        decode.trace(int(self.within[state, first]), units, into)

    def completions(self, others: FloatArray, units: IntArray, groups: list[tuple[int, int]]) -> list[FloatArray]:
        """Least cost of all the rest once one column of each phase's group is used; ``units``: of all columns."""
        G, states = len(others), self.last + 1
        beside_joint, beside_pair = np.full((states, G), np.inf), np.full((states, G), np.inf)
        for s in range(states):
            kernels.beside(self.pairs[s], others, beside_joint[s])
            kernels.beside(self.joint.value[s], others, beside_pair[s])
        found = []
        for phase, (first, last) in enumerate(groups):
            cover = self.covers[phase]
            rest = beside_joint if phase == 2 else self._beside(1 - phase, beside_pair)
            found.append(np.zeros(last - first) if cover is None else self._around(cover, rest, units[first:last]))
        return found

    def _beside(self, partner: int, beside_pair: FloatArray) -> FloatArray:
        cover = self.covers[partner]
        if cover is None:
            return beside_pair
        out = np.empty_like(beside_pair)
        kernels.pair_up(cover.value, beside_pair, self.within, out)
        return out

    def _around(self, cover: _Cover, rest: FloatArray, units: IntArray) -> FloatArray:
        out = np.full(len(units), np.inf)
        for g in range(len(cover.rest)):
            mine = np.flatnonzero(cover.kind == g)
            distinct, back = np.unique(units[mine], return_inverse=True)
            low = np.full(len(distinct), np.inf)
            for s in range(self.last + 1):
                left = int(cover.rest[g, s])
                if left >= 0:
                    kernels.completion(cover.value[left], rest[self._left(s)], distinct, low)
            out[mine] = low[back]
        return out


class ModelValue:
    """Least adjusted cost of serving one model, shortfall included, at given prices.

    Sources are the places; the shortfall is the last source.
    """

    def __init__(
        self, core: _Core, grid: Grid, cost: FloatArray, m: int, tracked: Mapping[tuple[int, int], Tracked]
    ) -> None:
        problem, G = core.problem, grid.size
        self.core, self.grid, self.m = core, grid, m
        self.places = [
            _Place(core, grid, cost, m, place, tracked.get((m, place), UNTRACKED))
            for place in range(problem.num_places)
        ]
        step = float(problem.required_requests_per_s[m]) / G
        lost: FloatArray = np.arange(G + 1, dtype=np.float64) * step
        beyond = problem.excess_unserved(m, lost) > 0
        lost[1:] *= core.weights[m]
        lost[beyond] = np.inf
        self.suffix = [lost]
        for place in reversed(self.places):
            self.suffix.insert(0, _min_plus(place.value, self.suffix[0]))

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
        for k, place in enumerate(self.places):
            part = int(kernels.split_point(place.value, self.suffix[k + 1], left))
            place.trace(part, counts)
            left = max(0, left - part)
        return model_plan(self.core, self.m, counts)

    def others(self) -> list[FloatArray]:
        """For each place: least cost of covering the demand elsewhere once q units are covered there, by q, [G+1]."""
        prefix: FloatArray = np.full(self.grid.size + 1, np.inf)
        prefix[0] = 0.0
        found = []
        for k, place in enumerate(self.places):
            found.append(_min_plus(prefix, self.suffix[k + 1])[::-1].copy())
            prefix = _min_plus(prefix, place.value)
        return found

    def completions(self) -> list[tuple[tuple[int, int], FloatArray]]:
        """For each group of columns (first, last): the least cost of all the rest once one of them is used."""
        found = []
        for place, others in zip(self.places, self.others(), strict=True):
            groups = [self.core.group(self.m, place.place, phase) for phase in range(3)]
            found += list(zip(groups, place.completions(others, self.grid.units, groups), strict=True))
        return found


def _min_plus(a: FloatArray, b: FloatArray) -> FloatArray:
    out = np.full(len(a), np.inf)
    kernels.min_plus(a, b, out)
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


def evaluate(
    core: _Core, grid: Grid, duals: Duals, tracked: Mapping[tuple[int, int], Tracked] = MappingProxyType({})
) -> Evaluation:
    """Solve every model at these prices. With a grid that rounds up, ``bound`` is a proved bound.

    ``tracked``: supply of (model, place) that the model's own plan may not exceed.
    """
    cost = adjusted_costs(core, duals)
    wanted = np.flatnonzero(core.problem.required_requests_per_s > 0)
    models = tuple(ModelValue(core, grid, cost, int(m), tracked) for m in wanted)
    total = math.fsum(model.value for model in models)
    return Evaluation(duals=duals, cost=cost, models=models, bound=total - supply_value(core, duals))


def column_bounds(core: _Core, evaluation: Evaluation) -> FloatArray:
    """For every column the least objective of any solution that uses it at least once, [N]; the grid must round up."""
    bounds = np.full(len(core.columns), evaluation.bound)
    for model in evaluation.models if math.isfinite(evaluation.bound) else ():
        for (first, last), rest in model.completions():
            bounds[first:last] += evaluation.cost[first:last] + rest - model.value
    return bounds
