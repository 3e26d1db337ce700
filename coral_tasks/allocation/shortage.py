"""Shortage by priority: what can be served when not everything can (design 3.3, lexicographic).

Order: floors class by class; then for each class the worst share unserved, the unserved rate, and each model by name,
so that the result is unique; then missing minimum instances. Owns that order; money is minimised afterwards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.allocation.program import Goal, GoalKind, Program, Settled, build_program
from coral_tasks.allocation.search import Search, start_point, unserved_rate
from coral_tasks.domain.errors import SolverFault
from coral_tasks.optimization.mip import MipOutcome, MipResult, solve_arrays, whole_values

MAX_COLUMNS: Final = 3000
"""Columns of the level programs; levels over all columns are proved, over the best of them only improved."""
MAX_NODES: Final = 2000


@dataclass(slots=True, kw_only=True)
class ShortageResult:
    """``shortfall``: requests/s unserved by model [M]; ``missing``: instances missing to minimum counts [M].

    ``values``: instances on the search's columns. ``proved``: every level was solved to its optimum over all columns.
    """

    values: NDArray[np.int64]
    shortfall: NDArray[np.float64]
    missing: NDArray[np.int64]
    proved: bool
    log: list[str] = field(default_factory=list)


def levels(problem: AllocationProblem) -> list[Goal]:
    """The goals in order."""
    rules = [problem.options.rules_of(model) for model in problem.models]
    wanted = [m for m in range(len(rules)) if problem.required_requests_per_s[m] > 0]
    classes = sorted({rules[m].priority for m in wanted})
    goals = [
        Goal(kind=GoalKind.FLOORS, index=k)
        for k in classes
        if any(rules[m].floor_share > 0 and rules[m].priority == k for m in wanted)
    ]
    for k in classes:
        members = [m for m in wanted if rules[m].priority == k]
        if len(members) > 1:
            goals.append(Goal(kind=GoalKind.WORST, index=k))
            goals.append(Goal(kind=GoalKind.TOTAL, index=k))
        goals += [Goal(kind=GoalKind.MODEL, index=m) for m in members]
    if any(one.min_instances > 0 for one in rules):
        goals.append(Goal(kind=GoalKind.MINIMUM))
    return goals


def settle_shortage(problem: AllocationProblem, search: Search, *, deadline: float) -> ShortageResult:
    """Settle every level in turn, starting from the search's plan. ``problem``: without weights."""
    rows = _chosen_columns(search)
    run = _Levels(problem, search, rows, complete=len(rows) == len(search.columns), deadline=deadline)
    for goal in levels(problem):
        run.settle(goal)
    values = np.zeros(len(search.columns), dtype=np.int64)
    values[rows] = run.values
    models = range(len(problem.models))
    return ShortageResult(
        values=values,
        shortfall=np.array([unserved_rate(problem, search.columns, values, m) for m in models]),
        missing=_missing(problem, search, values),
        proved=run.proved,
        log=run.log,
    )


def _missing(problem: AllocationProblem, search: Search, values: NDArray[np.int64]) -> NDArray[np.int64]:
    least = np.array([problem.options.rules_of(model).min_instances for model in problem.models])
    held = np.bincount(search.columns.model, weights=values, minlength=len(least)).astype(np.int64)
    return np.maximum(least - held, 0)


def _chosen_columns(search: Search) -> NDArray[np.int64]:
    """All columns if they are few, else those of the generated plans and the best by rate for what they use."""
    count = len(search.columns)
    if count <= MAX_COLUMNS:
        return np.arange(count)
    chosen = np.flatnonzero(search.columns.kept | (search.state.values > 0))
    planned = [plan.columns for plan in search.master.plans]
    chosen = np.union1d(chosen, np.concatenate(planned))
    ranked = search.ranked_columns()
    return np.union1d(chosen, ranked[: MAX_COLUMNS - min(len(chosen), MAX_COLUMNS // 2)])


class _Levels:
    """The levels settled so far and the plan that reaches them."""

    def __init__(
        self,
        problem: AllocationProblem,
        search: Search,
        rows: NDArray[np.int64],
        *,
        complete: bool,
        deadline: float,
    ) -> None:
        self.problem, self.columns = problem, search.columns.take(rows)
        self.values = search.state.values[rows]
        self.proved, self.deadline = complete, deadline
        self.settled: list[Settled] = []
        self.log: list[str] = []

    def settle(self, goal: Goal) -> None:
        """Minimise one goal under all earlier ones and hold what was reached; without time nothing is settled."""
        if time.monotonic() >= self.deadline:
            self.proved = False
            self.log.append(f"level {goal.kind} {goal.index}: no time left")
            return
        program = build_program(self.problem, self.columns, goal=goal, settled=self.settled)
        start = start_point(self.problem, program, self.values)
        reached = self._value(program, start)
        if reached > 1e-9:
            result = solve_arrays(
                program.arrays,
                time_limit_s=max(0.1, self.deadline - time.monotonic()),
                start_values=start,
                options={"mip_max_nodes": MAX_NODES},
            )
            reached = self._take(program, result, reached)
        self.settled.append(Settled(goal=goal, value=max(0.0, reached)))
        self.log.append(f"level {goal.kind} {goal.index}: {reached:.6g}")

    def _value(self, program: Program, point: NDArray[np.float64]) -> float:
        return float(program.arrays.cost @ point)

    def _take(self, program: Program, result: MipResult, reached: float) -> float:
        self.proved &= result.outcome is MipOutcome.OPTIMAL
        if not result.has_solution:
            return reached
        try:
            values = whole_values(result.solution()[: len(self.values)])
        except SolverFault:
            self.proved = False
            return reached
        value = self._value(program, start_point(self.problem, program, values))
        if value < reached - 1e-9:
            self.values = values
        return min(value, reached)
