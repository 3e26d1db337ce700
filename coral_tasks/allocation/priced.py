"""One goal of the order of shortage over very many columns, where neither a program nor a search over all of them ends.

The goal's relaxation prices the supply; a program over the best columns of every model, phase and place finds a plan;
a program over all columns that could still better it proves what it can. Owns that choice; knows nothing of the order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.columns import Columns
from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.allocation.program import Goal, GoalKind, Program, Settled, build_program
from coral_tasks.allocation.search import start_point, whole_on
from coral_tasks.optimization.mip import ArrayProgram, MipOutcome, solve_arrays

LOOKS: Final = ((0.4, 800), (1.0, 2200))
"""Programs that look for a plan: share of the time left to them, and columns chosen, in all …"""
LEAST_OF_GROUP: Final = 2
"""… and at least of one model, phase and place."""
PROVEN: Final = 50_000
"""Most columns of the program that proves: with more, HiGHS 1.16 was seen to run four times its limit."""
PROVING: Final = {"presolve": "off", "mip_heuristic_effort": 0.0}
"""Presolve takes a minute there and gains little; the plan is there already, what is wanted is the bound."""
PROVING_SHARE: Final = 0.4
"""Of a level's time that is left to the proof."""
SERVED_TIE: Final = 0.02
MONEY_TIE: Final = 0.005
"""What serving everything, and all supply's money, count beside the goal where columns are chosen: most goals leave
open what the models that are not short are served with, and any choice of columns among equals would leave out what
those need."""
NAME_ORDER: Final = 1e-6
"""How much more an unserved request of the first model of a class weighs than one of its last."""
CLOSE: Final = 1e-7
"""Values of a goal this close, relative to the largest of 1 and the value, are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLevel:
    """``values``: instances on all columns; ``reached``: the goal there; ``bound``: proved."""

    values: NDArray[np.int64]
    reached: float
    bound: float

    @property
    def proved(self) -> bool:
        """Whether no plan reaches less."""
        return self.reached - self.bound <= CLOSE * max(1.0, self.reached)


def settle_priced(
    problem: AllocationProblem,
    columns: Columns,
    values: NDArray[np.int64],
    *,
    goal: Goal,
    settled: Sequence[Settled],
    until: float,
) -> PricedLevel:
    """Minimise ``goal`` under what is ``settled``, from the plan ``values`` [N], up to the monotonic time ``until``."""
    run = _Run(problem, columns, goal, settled, until)
    level = PricedLevel(values=values, reached=run.value_of(values), bound=0.0)
    for step in (run.look_for_better, run.prove):
        if not level.proved:
            level = step(level)
    return level


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prices:
    """Value of a relaxation and what an instance of each column adds to it at least, [N]."""

    value: float
    reduced_cost: NDArray[np.float64]


class _Run:
    def __init__(
        self, problem: AllocationProblem, columns: Columns, goal: Goal, settled: Sequence[Settled], until: float
    ) -> None:
        self.problem, self.columns, self.goal, self.settled, self.until = problem, columns, goal, settled, until
        self.program = self._program(columns)
        self.cost = self.program.arrays.cost

    def _program(self, columns: Columns) -> Program:
        program = build_program(self.problem, columns, goal=self.goal, settled=self.settled)
        if self.goal.kind is GoalKind.TOTAL:  # among equals the earlier models first, so that the result is unique
            counted = np.flatnonzero(program.arrays.cost)
            program.arrays.cost[counted] *= 1 + NAME_ORDER * 0.5 ** np.arange(len(counted))
        return program

    def _time_left(self) -> float:
        return self.until - time.monotonic()

    def value_of(self, values: NDArray[np.int64]) -> float:
        """The goal at a plan over all columns."""
        return float(self.cost @ start_point(self.problem, self.program, values))

    def prices(self, cost: NDArray[np.float64]) -> _Prices | None:
        """The relaxation with a ``cost`` for each column of the program; None where the time did not suffice."""
        if self._time_left() <= 0:
            return None
        arrays = self.program.arrays
        relaxed = replace(arrays, cost=cost, integer=np.zeros_like(arrays.integer))
        result = solve_arrays(relaxed, time_limit_s=self._time_left())
        if result.outcome is not MipOutcome.OPTIMAL or result.row_duals is None or result.objective is None:
            return None
        reduced = cost - _column_sums(arrays, result.row_duals)
        return _Prices(value=result.objective, reduced_cost=reduced[: len(self.columns)])

    def look_for_better(self, level: PricedLevel) -> PricedLevel:
        """Programs over ever more of the best columns."""
        price = self.prices(self._blended_cost(level.reached))
        if price is None:
            return level
        until = self.until - PROVING_SHARE * self._time_left()
        for share, chosen in LOOKS:
            used = np.flatnonzero((level.values > 0) | self.columns.kept)
            rows = np.union1d(self._best_of_groups(price.reduced_cost, chosen), used)
            level, _ = self._solve(level, rows, limit_s=share * (until - time.monotonic()), options={})
        return level

    def _blended_cost(self, reached: float) -> NDArray[np.float64]:
        """The goal with a little of what the later ones want, so that its ties are not left to chance."""
        cost, program = self.cost.copy(), self.program
        everything = max(float(self.problem.required_requests_per_s.sum()), 1e-9)
        cost[program.shortfall] += SERVED_TIE * reached * program.shortfall_scale / everything
        supply = float((self.problem.price_usd_per_hour * self.problem.available_nodes).sum())
        cost[: len(self.columns)] += MONEY_TIE * reached * self.columns.objective / max(supply, 1e-9)
        return cost

    def _best_of_groups(self, reduced_cost: NDArray[np.float64], chosen: int) -> NDArray[np.int64]:
        """The best columns of each model, phase and place, about ``chosen`` in all."""
        columns = self.columns
        group = (columns.model * 3 + columns.phase) * self.problem.num_places + columns.place
        order = np.lexsort((np.arange(len(columns)), reduced_cost, group))
        begins = np.searchsorted(group[order], np.unique(group))
        rank = np.arange(len(order)) - np.repeat(begins, np.diff([*begins, len(order)]))
        return np.sort(order[rank < max(LEAST_OF_GROUP, chosen // max(1, len(begins)))])

    def prove(self, level: PricedLevel) -> PricedLevel:
        """A program over every column of a plan better than the one at hand: the others add too much."""
        price = self.prices(self.cost)
        if price is None:
            return level
        level = replace(level, bound=max(0.0, price.value - CLOSE * max(1.0, price.value)))
        most = level.reached - price.value + CLOSE * max(1.0, level.reached)
        used = (level.values > 0) | self.columns.kept
        rows = np.flatnonzero((price.reduced_cost <= most) | used)
        if level.proved or len(rows) > PROVEN or self._time_left() <= 0:
            return level
        level, bound = self._solve(level, rows, limit_s=self._time_left(), options=PROVING)
        return replace(level, bound=max(level.bound, min(bound, level.reached)))

    def _solve(
        self, level: PricedLevel, rows: NDArray[np.int64], *, limit_s: float, options: dict[str, object]
    ) -> tuple[PricedLevel, float]:
        """The level with what a program over ``rows`` finds, and the bound that the program proves for those."""
        program = self._program(self.columns.take(rows))
        result = solve_arrays(
            program.arrays,
            time_limit_s=max(0.1, limit_s),
            absolute_gap=CLOSE / 2,
            start_values=start_point(self.problem, program, level.values[rows]),
            options=options,
        )
        values = whole_on(len(self.columns), result.solution(), rows) if result.has_solution else None
        if values is not None:
            reached = self.value_of(values)
            if reached < level.reached:
                level = replace(level, values=values, reached=reached)
        proved = level.reached if result.outcome is MipOutcome.INFEASIBLE else result.bound
        return level, 0.0 if proved is None else proved


def _column_sums(arrays: ArrayProgram, row_duals: NDArray[np.float64]) -> NDArray[np.float64]:
    """Σ over rows of coefficient times dual, for each column."""
    column = np.repeat(np.arange(arrays.num_columns), np.diff(arrays.start))
    return np.bincount(column, weights=arrays.value * row_duals[arrays.index], minlength=arrays.num_columns)
