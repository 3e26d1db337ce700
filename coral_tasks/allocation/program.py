"""The allocation program, one function for each constraint family (paper 4.3; design 3.3).

Owns the formulation, for any set of columns: all of them in the plain program, the survivors in the fast solver. Knows
no solver. Rates and rows are in requests/s, money in USD/h.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.columns import Columns
from coral_tasks.allocation.options import GpuCap, ModelRules
from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.domain.names import Market
from coral_tasks.optimization.mip import ArrayProgram, ProgramBuilder

LEVEL_SLACK: Final = 1e-7
"""How far a settled level may move while later ones are solved, relative to its scale."""


class GoalKind(StrEnum):
    """What a program minimises.

    MONEY: cost + start-up (+ weighted shortage where weights are given). FLOORS, WORST, TOTAL: floor shortfalls, worst
    weighted share unserved, and unserved rate, of one priority class. MODEL: unserved rate of one model. MINIMUM:
    instances missing to minimum counts. STARTED: nodes started, among equals nodes held (to prefer what runs, and
    nothing idle, among plans of the same cost).
    """

    MONEY = "money"
    FLOORS = "floors"
    WORST = "worst"
    TOTAL = "total"
    MODEL = "model"
    MINIMUM = "minimum"
    STARTED = "started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One level of the lexicographic order. ``index``: priority class of FLOORS, WORST, TOTAL; model of MODEL."""

    kind: GoalKind
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """An earlier level and the value it reached; later programs must not exceed it."""

    goal: Goal
    value: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """A proved bound: ``values @ x[columns] + shortfall_value * s[model] >= lower``."""

    model: int
    columns: NDArray[np.int64]
    values: NDArray[np.float64]
    shortfall_value: float
    lower: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """An ``ArrayProgram`` and where its columns are: x[k] belongs to row k of ``columns``; s[m] is ``shortfall[m]``.

    ``minimum_slack``, ``floor_slack``: column of g[m] and f[m] where the model has such a rule; ``worst``: members and
    column of each priority class. ``shortfall_scale``: s[m] in requests/s = column value * scale (steep weights lose
    digits otherwise).
    """

    arrays: ArrayProgram
    columns: Columns
    shortfall: NDArray[np.int64]
    shortfall_scale: NDArray[np.float64]
    minimum_slack: dict[int, int]
    floor_slack: dict[int, int]
    worst: dict[int, tuple[list[int], int]]


class _Draft:
    """Builder state shared by the constraint families of one program."""

    def __init__(self, problem: AllocationProblem, columns: Columns, *, named: bool) -> None:
        self.problem, self.columns, self.named = problem, columns, named
        self.rows = ProgramBuilder()
        self.rules: list[ModelRules] = [problem.options.rules_of(model) for model in problem.models]
        M, P = len(problem.models), problem.num_places
        count = len(columns)
        self.x = self.rows.add_columns(
            np.zeros(count), upper=columns.upper.astype(np.float64), integer=True, names=self._x_names()
        )
        places = problem.regions if problem.is_regional else ("anywhere",)
        pairs = [f"{model}_{place}" for model in problem.models for place in places]
        self.pd = self._continuous([f"qpd_{pair}" for pair in pairs]).reshape(M, P)
        self.agg = self._continuous([f"qagg_{pair}" for pair in pairs]).reshape(M, P)
        self.scale = self._shortfall_scale()
        self.s = self.rows.add_columns(
            np.zeros(M), upper=self._most_unserved(), names=self.names([f"s_{model}" for model in problem.models])
        )
        self.cost: dict[int, float] = {}
        self.minimum_slack: dict[int, int] = {}
        self.minimum_price = 0.0
        self.floor_slack: dict[int, int] = {}
        self.worst: dict[int, int] = {}

    def names(self, names: Sequence[str]) -> Sequence[str]:
        return [_plain(name) for name in names] if self.named else ()

    def _continuous(self, names: Sequence[str]) -> NDArray[np.int64]:
        return self.rows.add_columns(np.zeros(len(names)), names=self.names(names))

    def _x_names(self) -> Sequence[str]:
        if not self.named:
            return ()
        problem, columns = self.problem, self.columns
        names = []
        for t, z, kept in zip(columns.template, columns.zone, columns.kept, strict=True):
            zone = problem.zones[z]
            market = "" if zone.market is Market.ON_DEMAND else f"_{zone.market}"
            stem = "kept" if kept else "x"
            names.append(
                _plain(f"{stem}_{problem.templates.template_id(int(t))}_{problem.regions[zone.region]}{market}")
            )
        return names

    def _shortfall_scale(self) -> NDArray[np.float64]:
        weights = self.problem.shortfall_weight
        if weights is None:
            return np.ones(len(self.problem.models))
        return np.where(np.isfinite(weights) & (weights > 1), 1 / np.maximum(weights, 1), 1.0)

    def _most_unserved(self) -> NDArray[np.float64]:
        weights = self.problem.shortfall_weight
        required = self.problem.required_requests_per_s
        if weights is not None:
            required = np.where(np.isfinite(weights), required, 0.0)
        if self.problem.most_unserved is not None:
            required = np.minimum(required, self.problem.most_unserved)
        return np.asarray(required / self.scale, dtype=np.float64)

    def where(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Columns x of a mask over ``columns``."""
        return self.x[np.flatnonzero(mask)]

    def of(self, m: int, place: int, phase: int) -> NDArray[np.int64]:
        """Rows of ``columns`` of one model, place and phase."""
        columns = self.columns
        return np.flatnonzero((columns.model == m) & (columns.place == place) & (columns.phase == phase))

    def place_name(self, place: int) -> str:
        """Region's name, or "anywhere" with global coupling."""
        return self.problem.regions[place] if self.problem.is_regional else "anywhere"

    def models_in(self, priority: int) -> list[int]:
        """Models of a priority class that need something."""
        required = self.problem.required_requests_per_s
        return [m for m, rules in enumerate(self.rules) if rules.priority == priority and required[m] > 0]


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_." else "_" for letter in name)


def build_program(
    problem: AllocationProblem,
    columns: Columns,
    *,
    goal: Goal | None = None,
    settled: Sequence[Settled] = (),
    cuts: Sequence[Cut] = (),
    minimum_price: float = 0.0,
    named: bool = False,
) -> Program:
    """The program over ``columns`` that minimises ``goal`` (money where none is named), earlier levels held.

    ``minimum_price``: USD/h for each instance missing to a minimum count, in the goal MONEY.
    """
    draft = _Draft(problem, columns, named=named)
    draft.minimum_price = minimum_price
    for add_constraint in CONSTRAINT_FAMILIES.values():
        add_constraint(draft)
    for level in settled:
        add_settled_level_constraint(draft, level)
    for cut in cuts:
        add_bound_constraint(draft, cut)
    set_goal(draft, goal or Goal(kind=GoalKind.MONEY))
    arrays = draft.rows.build()
    for column, value in draft.cost.items():
        arrays.cost[column] += value
    return Program(
        arrays=arrays,
        columns=columns,
        shortfall=draft.s,
        shortfall_scale=draft.scale,
        minimum_slack=dict(draft.minimum_slack),
        floor_slack=dict(draft.floor_slack),
        worst={priority: (draft.models_in(priority), column) for priority, column in draft.worst.items()},
    )


def add_prefill_capacity_constraint(draft: _Draft) -> None:
    """Σ_prefill rate x[t,r] ≥ q_pd[m,r] in every region (paper 4.3 eq. prefill; everywhere at once if global)."""
    _add_phase_capacity(draft, 0, "prefill", draft.problem.prompt_tokens)


def add_decode_capacity_constraint(draft: _Draft) -> None:
    """Σ_decode rate x[t,r] ≥ q_pd[m,r]: the KV cache of a request does not cross regions."""
    _add_phase_capacity(draft, 1, "decode", draft.problem.output_tokens)


def add_aggregated_capacity_constraint(draft: _Draft) -> None:
    """Σ_aggregated rate x[t,r] ≥ q_agg[m,r]."""
    _add_phase_capacity(draft, 2, "aggregated", np.ones(len(draft.problem.models)))


def _add_phase_capacity(draft: _Draft, phase: int, name: str, needed: NDArray[np.float64]) -> None:
    served = draft.agg if phase == 2 else draft.pd
    for m, model in enumerate(draft.problem.models):
        for place in range(draft.problem.num_places):
            if needed[m] <= 0 or draft.problem.required_requests_per_s[m] <= 0:
                continue
            rows = draft.of(m, place, phase)
            draft.rows.add_row(
                [*draft.x[rows], served[m, place]],
                [*draft.columns.rate[rows], -1.0],
                lower=0.0,
                name=_plain(f"{name}_{model}_{draft.place_name(place)}"),
            )


def add_demand_constraint(draft: _Draft) -> None:
    """Σ_r (q_pd + q_agg)[m,r] + s_m ≥ λ_m / headroom."""
    required = draft.problem.required_requests_per_s
    for m, model in enumerate(draft.problem.models):
        if required[m] > 0:
            served = [*draft.pd[m], *draft.agg[m]]
            draft.rows.add_row(
                [*served, draft.s[m]],
                [*np.ones(len(served)), draft.scale[m]],
                lower=float(required[m]),
                name=_plain(f"demand_{model}"),
            )


def add_availability_constraint(draft: _Draft) -> None:
    """Σ_t U[t,c] x[t,z] ≤ A[z,c]: nodes of a configuration in a region and market, reserved ones being a market."""
    problem, columns = draft.problem, draft.columns
    nodes = problem.templates.nodes[columns.template]
    for z, zone in enumerate(problem.zones):
        here = columns.zone == z
        for c, configuration in enumerate(problem.configurations):
            rows = np.flatnonzero(here & (nodes[:, c] > 0))
            if len(rows):
                draft.rows.add_row(
                    draft.x[rows],
                    nodes[rows, c].astype(np.float64),
                    upper=float(problem.available_nodes[z, c]),
                    name=_plain(f"available_{configuration}_{problem.regions[zone.region]}_{zone.market}"),
                )


def add_maximum_instances_constraint(draft: _Draft) -> None:
    """Σ_t,z x[t,z] ≤ most instances of the model, kept ones included."""
    for m, rules in enumerate(draft.rules):
        if rules.max_instances is not None:
            columns = draft.where(draft.columns.model == m)
            if len(columns):
                draft.rows.add_row(
                    columns,
                    np.ones(len(columns)),
                    upper=float(rules.max_instances),
                    name=_plain(f"at_most_{rules.model}"),
                )


def add_minimum_instances_constraint(draft: _Draft) -> None:
    """Σ_t,z x[t,z] + g_m ≥ least instances of the model; g_m > 0 only where hard limits leave no other way."""
    for m, rules in enumerate(draft.rules):
        if rules.min_instances > 0:
            slack = draft.rows.add_columns(np.zeros(1), names=draft.names([f"g_{rules.model}"]))
            draft.minimum_slack[m] = int(slack[0])
            columns = draft.where(draft.columns.model == m)
            draft.rows.add_row(
                [*columns, slack[0]],
                np.ones(len(columns) + 1),
                lower=float(rules.min_instances),
                name=_plain(f"at_least_{rules.model}"),
            )


def gpu_cap_weights(problem: AllocationProblem, columns: Columns, cap: GpuCap) -> NDArray[np.float64]:
    """GPUs of a cap that one instance of each column uses, [N]."""
    of_type = np.array([cap.gpu_type is None or _gpu_of(name) == cap.gpu_type for name in problem.configurations])
    gpus = problem.templates.nodes[columns.template] @ (problem.num_gpus * of_type)
    in_region = np.array([cap.region is None or problem.regions[zone.region] == cap.region for zone in problem.zones])
    of_model = np.array([cap.model is None or model == cap.model for model in problem.models])
    return np.asarray(gpus * in_region[columns.zone] * of_model[columns.model], dtype=np.float64)


def _gpu_of(configuration: str) -> str:
    return configuration.rsplit("x", 1)[0]


def add_gpu_cap_constraint(draft: _Draft) -> None:
    """Σ GPUs of the type, region and model x ≤ cap."""
    for number, cap in enumerate(draft.problem.options.gpu_caps):
        _add_weighted_row(
            draft, gpu_cap_weights(draft.problem, draft.columns, cap), upper=cap.max_gpus, name=f"gpu_cap_{number}"
        )


def add_budget_constraint(draft: _Draft) -> None:
    """Σ p[z,c] U[t,c] x[t,z] ≤ budget; start-up is a preference, not a bill, and does not count."""
    budget = draft.problem.options.budget_usd_per_hour
    if budget is not None:
        _add_weighted_row(draft, draft.columns.cost_usd_per_hour, upper=budget, name="budget")


def add_largest_change_constraint(draft: _Draft) -> None:
    """Σ new instances ≤ most started in one run; kept instances are columns of their own and do not count."""
    most = draft.problem.options.max_started_instances
    if most is not None:
        _add_weighted_row(draft, (~draft.columns.kept).astype(np.float64), upper=most, name="largest_change")


def spot_weights(problem: AllocationProblem, columns: Columns, m: int, phase: int) -> NDArray[np.float64]:
    """Requests/s that one instance of each column carries on spot nodes for a model and phase, [N]."""
    on_spot = np.array([zone.market is Market.SPOT for zone in problem.zones], dtype=np.bool_)
    mine = (columns.model == m) & (columns.phase == phase) & on_spot[columns.zone]
    return np.where(mine, columns.rate, 0.0)


def add_spot_share_constraint(draft: _Draft) -> None:
    """Σ_spot rate x[t,z] ≤ share × required rate, per model and phase; the rest falls to other markets."""
    problem = draft.problem
    for m, rules in enumerate(draft.rules):
        if rules.max_spot_share < 1 and any(zone.market is Market.SPOT for zone in problem.zones):
            most = rules.max_spot_share * float(problem.required_requests_per_s[m])
            for phase, name in enumerate(("prefill", "decode", "aggregated")):
                weights = spot_weights(problem, draft.columns, m, phase)
                _add_weighted_row(draft, weights, upper=most, name=f"spot_{rules.model}_{name}")


def _add_weighted_row(draft: _Draft, weights: NDArray[np.float64], *, upper: float, name: str) -> None:
    rows = np.flatnonzero(weights)
    if len(rows):
        draft.rows.add_row(draft.x[rows], weights[rows], upper=float(upper), name=_plain(name))


def add_floor_constraint(draft: _Draft) -> None:
    """f_m ≥ s_m − (1 − floor) λ_m: what is missing to the model's floor."""
    for m, rules in enumerate(draft.rules):
        required = float(draft.problem.required_requests_per_s[m])
        if rules.floor_share > 0 and required > 0:
            slack = draft.rows.add_columns(np.zeros(1), names=draft.names([f"f_{rules.model}"]))
            draft.floor_slack[m] = int(slack[0])
            draft.rows.add_row(
                [slack[0], draft.s[m]],
                [1.0, -draft.scale[m]],
                lower=-(1 - rules.floor_share) * required,
                name=_plain(f"floor_{rules.model}"),
            )


def add_fair_share_constraint(draft: _Draft) -> None:
    """worst_k ≥ share_m s_m / λ_m for every model of class k with more than one model: shortage is spread by share."""
    for priority in sorted({rules.priority for rules in draft.rules}):
        members = draft.models_in(priority)
        if len(members) < 2 or draft.problem.shortfall_weight is not None:
            continue
        worst = draft.rows.add_columns(np.zeros(1), names=draft.names([f"worst_{priority}"]))
        draft.worst[priority] = int(worst[0])
        for m in members:
            weight = draft.rules[m].share / float(draft.problem.required_requests_per_s[m])
            draft.rows.add_row(
                [worst[0], draft.s[m]],
                [1.0, -weight * draft.scale[m]],
                lower=0.0,
                name=_plain(f"fair_{draft.rules[m].model}"),
            )


CONSTRAINT_FAMILIES: Final[dict[str, Callable[[_Draft], None]]] = {
    "prefill_capacity": add_prefill_capacity_constraint,
    "decode_capacity": add_decode_capacity_constraint,
    "aggregated_capacity": add_aggregated_capacity_constraint,
    "demand": add_demand_constraint,
    "availability": add_availability_constraint,
    "maximum_instances": add_maximum_instances_constraint,
    "minimum_instances": add_minimum_instances_constraint,
    "gpu_cap": add_gpu_cap_constraint,
    "budget": add_budget_constraint,
    "largest_change": add_largest_change_constraint,
    "spot_share": add_spot_share_constraint,
    "floor": add_floor_constraint,
    "fair_share": add_fair_share_constraint,
}
"""Every family in the order in which it is added; each has a golden LP under tests/formulation."""


def add_settled_level_constraint(draft: _Draft, level: Settled) -> None:
    """The expression of an earlier level ≤ the value it reached."""
    columns, values = _goal_terms(draft, level.goal)
    if columns:
        slack = LEVEL_SLACK * max(1.0, abs(level.value)) if level.goal.kind is GoalKind.MONEY else LEVEL_SLACK
        draft.rows.add_row(
            columns, values, upper=level.value + slack, name=_plain(f"settled_{level.goal.kind}_{level.goal.index}")
        )


def add_bound_constraint(draft: _Draft, cut: Cut) -> None:
    """Adjusted cost of a model's columns + weight s_m ≥ its least adjusted cost (from the decomposition)."""
    draft.rows.add_row(
        [*draft.x[cut.columns], draft.s[cut.model]],
        [*cut.values, cut.shortfall_value * draft.scale[cut.model]],
        lower=cut.lower,
        name=f"bound_{cut.model}",
    )


def set_goal(draft: _Draft, goal: Goal) -> None:
    """The objective: terms of the goal; MONEY adds weighted shortage where weights are given."""
    columns, values = _goal_terms(draft, goal)
    for column, value in zip(columns, values, strict=True):
        draft.cost[int(column)] = draft.cost.get(int(column), 0.0) + float(value)


def _goal_terms(draft: _Draft, goal: Goal) -> tuple[list[int], list[float]]:
    if goal.kind is GoalKind.MONEY:
        return _money_terms(draft)
    if goal.kind is GoalKind.STARTED:
        nodes = draft.problem.templates.nodes[draft.columns.template].sum(axis=1)
        of_held_node = 0.5 / (1 + int(draft.problem.available_nodes.sum()))  # all of them less than one started
        return draft.x.tolist(), (nodes * (~draft.columns.kept + of_held_node)).tolist()
    if goal.kind is GoalKind.MINIMUM:
        slack = draft.minimum_slack
        return list(slack.values()), [1.0] * len(slack)
    return _shortage_terms(draft, goal)


def _shortage_terms(draft: _Draft, goal: Goal) -> tuple[list[int], list[float]]:
    if goal.kind is GoalKind.MODEL:
        return [int(draft.s[goal.index])], [float(draft.scale[goal.index])]
    members = draft.models_in(goal.index)
    if goal.kind is GoalKind.FLOORS:
        floors = draft.floor_slack
        required = draft.problem.required_requests_per_s
        chosen = [m for m in members if m in floors]
        return [floors[m] for m in chosen], [1.0 / float(required[m]) for m in chosen]
    if goal.kind is GoalKind.WORST:
        worst = draft.worst
        return ([worst[goal.index]], [1.0]) if goal.index in worst else ([], [])
    return [int(draft.s[m]) for m in members], [float(draft.scale[m]) for m in members]


def _money_terms(draft: _Draft) -> tuple[list[int], list[float]]:
    columns, values = draft.x.tolist(), draft.columns.objective.tolist()
    if draft.minimum_price:
        columns += list(draft.minimum_slack.values())
        values += [draft.minimum_price] * len(draft.minimum_slack)
    weights = draft.problem.shortfall_weight
    if weights is not None:
        finite = [m for m in range(len(weights)) if math.isfinite(weights[m])]
        columns += [int(draft.s[m]) for m in finite]
        values += [float(weights[m] * draft.scale[m]) for m in finite]
    return columns, values
