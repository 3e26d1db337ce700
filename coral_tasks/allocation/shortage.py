"""Shortage by priority: what can be served when not everything can (design 3.3, lexicographic).

Order: floors class by class; then for each class the worst share unserved, the unserved rate, and each model by name,
so that the result is unique; then missing minimum instances. Owns that order; money is minimised afterwards.

Two ways to the same result: each level as a program, for few columns, for very many (``priced``) and for the rules that
only a program knows; else by searches that know the shortage of each model (``SearchLevels``): the worst share by
questions of the form "can everybody be served but this share?", then the rate in all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.columns import Columns
from coral_tasks.allocation.priced import NAME_ORDER, settle_priced
from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.allocation.program import Goal, GoalKind, Program, Settled, build_program
from coral_tasks.allocation.search import Search, start_point, unserved_rate, whole_on
from coral_tasks.domain.errors import SolverFault
from coral_tasks.optimization.mip import MipOutcome, MipResult, solve_arrays, whole_values

MAX_COLUMNS: Final = 3000
"""Columns of one program over all; with more, columns are chosen by prices: searches over all of them do not end in
time, and what they find on the way is worse."""
MAX_NODES: Final = 2000
FEW_COLUMNS: Final = 150
"""So few columns are settled by programs, which are quicker there."""
MAX_PRICED: Final = 150_000
"""Columns of a relaxation; of more only the best are looked at."""
PRICED_AFTER: Final = 0.2
"""Of the whole time after which a search over so many columns that is still short leaves off for the levels."""
PRICED_SHARE: Final = 0.6
"""As TIME_SHARE, where columns are chosen by prices: a class has two levels there."""
SHARE_STEP: Final = 1e-6
"""Shares unserved this close to each other count as the same."""
MAX_QUESTIONS: Final = 60
PROVED: Final = 1e-7
"""Share of all demand within which the rate unserved counts as proved."""
TIME_SHARE: Final = 0.4
"""Of the time left that one level may take."""
LEVELS_SHARE: Final = 0.7
"""Of the time left that all levels may take, so that money has its turn."""
MOST_MONEY: Final = 1e-6
"""What all supply together counts in a question: less than the least shortage. A plan above it has shortage."""
TIE_MONEY: Final = 1e-9
"""What all supply counts where shortage itself is minimised."""


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


def most_money(problem: AllocationProblem) -> float:
    """More than any plan can cost with its start-ups, USD/h."""
    everything = float((problem.price_usd_per_hour * problem.available_nodes).sum())
    return (1 + problem.options.startup_factor) * everything * (1 + 1e-9) + 1e-9


def settle_shortage(problem: AllocationProblem, search: Search, *, deadline: float) -> ShortageResult:
    """Settle every level in turn, starting from the search's plan. ``problem``: without weights."""
    now = time.monotonic()
    deadline = now + LEVELS_SHARE * (deadline - now)
    if FEW_COLUMNS < len(search.columns) <= MAX_COLUMNS and not needs_programs(problem):
        found = SearchLevels(problem, search.columns, search.state.values, deadline=deadline).settle()
        if found is not None:
            return found
    return settle_by_programs(problem, search, deadline=deadline)


def needs_programs(problem: AllocationProblem) -> bool:
    """Whether rules hold that a search with lesser demand would misread."""
    rules = [problem.options.rules_of(model) for model in problem.models]
    return any(one.min_instances > 0 or one.max_spot_share < 1 for one in rules)


class SearchLevels:
    """The levels by searches over all columns. ``values``: any plan that respects supply and limits, [N]."""

    def __init__(
        self, problem: AllocationProblem, columns: Columns, values: NDArray[np.int64], *, deadline: float
    ) -> None:
        self.problem, self.values, self.deadline = problem, values.copy(), deadline
        self.columns = replace(columns, objective=columns.objective / most_money(problem))
        self.rules = [problem.options.rules_of(model) for model in problem.models]
        self.required = problem.required_requests_per_s
        self.floors = np.array([rule.floor_share for rule in self.rules]) * self.required
        # what is settled: requests/s of each model that stay unserved, of classes that had their turn
        self.granted: dict[int, float] = {}
        self.proved = True
        self.log: list[str] = []

    def settle(self) -> ShortageResult | None:
        """All levels; None where floors cannot all be met: which of them, only a program tells."""
        if self.floors.any() and self._ask(self.floors) is not True:
            return None
        wanted = [m for m in range(len(self.rules)) if self.required[m] > 0]
        for priority in sorted({self.rules[m].priority for m in wanted}):
            members = [m for m in wanted if self.rules[m].priority == priority]
            # with one member the worst share and the rate are the same question
            worst = self._settle_worst(priority, members) if len(members) > 1 else self.rules[members[0]].share
            self._settle_rates(members, worst)
        return ShortageResult(
            values=self.values,
            shortfall=np.array([self._unserved(m) for m in range(len(self.rules))]),
            missing=np.zeros(len(self.rules), dtype=np.int64),
            proved=self.proved,
            log=self.log,
        )

    def _unserved(self, m: int) -> float:
        return unserved_rate(self.problem, self.columns, self.values, m)

    def _hard(self) -> NDArray[np.float64]:
        """Requests/s of each model that must be served whatever the level: what is settled, and floors."""
        hard = self.floors.copy()
        for m, unserved in self.granted.items():
            hard[m] = max(0.0, float(self.required[m]) - unserved)
        return hard

    def _settle_worst(self, priority: int, members: Sequence[int]) -> float:
        """The least worst weighted share unserved: halving what is open, and asking whether the best can be beaten."""
        least, best = 0.0, self._worst(members)
        until, number = self._until(), 0
        while best - least > 1.01 * SHARE_STEP and number < MAX_QUESTIONS:
            share = 0.0 if number == 0 else best - SHARE_STEP if number % 2 else (least + best) / 2
            answer = self._ask(self._at_share(members, share), until=until)
            number += 1
            if answer is None:
                break
            if not answer:
                least = share
            elif self._worst(members) < best:
                best = self._worst(members)
            else:  # what could be gained is within the tolerance of being served
                least = best
        self.proved &= best - least <= 1.01 * SHARE_STEP
        self.log.append(f"level worst {priority}: {best:.6g}, proved above {least:.6g} by {number} questions")
        return best

    def _worst(self, members: Sequence[int]) -> float:
        """Worst weighted share unserved of the plan at hand."""
        return max(self.rules[m].share * self._unserved(m) / float(self.required[m]) for m in members)

    def _at_share(self, members: Sequence[int], share: float) -> NDArray[np.float64]:
        """Requests/s of each model [M] when the members' worst weighted share unserved is ``share``."""
        demand = self._hard()
        for m in members:
            lost = min(1.0, share / self.rules[m].share)
            demand[m] = max(demand[m], float(self.required[m]) * (1 - lost))
        return demand

    def _until(self) -> float:
        now = time.monotonic()
        return now + max(0.1, TIME_SHARE * (self.deadline - now))

    def _ask(self, demand: NDArray[np.float64], *, until: float | None = None) -> bool | None:
        """Whether a plan serves ``demand`` [M]; it is kept then. None where the time did not suffice."""
        weights = np.where(demand > 0, 1e3 / np.maximum(demand, 1e-12), 0.0)
        problem = replace(self.problem, required_requests_per_s=demand, shortfall_weight=weights)
        most = MOST_MONEY * (1 + 1e-6)

        def is_answered(search: Search) -> bool:
            return search.state.bound >= most or search.objective_of(search.state.values)[1] <= 0

        search = self._search(problem, until or self._until(), MOST_MONEY)
        search.stop_when, search.asked = is_answered, most
        search.run()
        if search.objective_of(search.state.values)[1] <= 0:
            self.values = search.state.values
            return True
        return False if search.state.bound >= most else None

    def _settle_rates(self, members: Sequence[int], worst: float) -> None:
        """The least rate unserved in all, no share above ``worst``; among equals the earlier models' first."""
        demand, weights = self._hard(), np.full(len(self.rules), math.inf)
        most = self.required - self.floors
        scale = 1 / float(self.required[list(members)].sum())
        for k, m in enumerate(members):
            demand[m] = self.required[m]
            weights[m] = scale * (1 + NAME_ORDER * 0.5**k)
            most[m] = min(most[m], worst / self.rules[m].share * float(self.required[m]) + 1e-9)
        problem = replace(self.problem, required_requests_per_s=demand, shortfall_weight=weights, most_unserved=most)
        until = self._until()
        now = time.monotonic()
        search = self._search(problem, now + (until - now) / 2, TIE_MONEY)
        if len(members) > 1:  # a program alone is quicker where only one model counts
            search.run()
        if search.state.objective - search.state.bound > PROVED:
            self._finish(search, until)
        if math.isfinite(search.state.objective):
            self.values = search.state.values
        self.proved &= search.state.objective - search.state.bound <= PROVED
        for m in members:
            self.granted[m] = self._unserved(m)
        total = sum(self.granted[m] for m in members)
        self.log.append(f"level total: {total:.6g} requests/s, bound {search.state.bound / scale:.6g}")

    def _finish(self, search: Search, until: float) -> None:
        """Leave what the search could not end to a program over all columns."""
        free = replace(search.columns, objective=np.zeros(len(search.columns)))
        program = build_program(search.problem, free)
        result = solve_arrays(
            program.arrays,
            time_limit_s=max(0.1, until - time.monotonic()),
            absolute_gap=PROVED / 2,
            start_values=start_point(search.problem, program, search.state.values),
            options={"mip_max_nodes": MAX_NODES},
        )
        if result.has_solution:
            values = whole_on(len(search.columns), result.solution(), np.arange(len(search.columns)))
            if values is not None:
                search.offer(values)
        if result.bound is not None:
            search.prove(result.bound)

    def _search(self, problem: AllocationProblem, deadline: float, money: float) -> Search:
        """A search that has not run, at the plan at hand, in which all supply together counts ``money``."""
        weights = problem.shortfall_weight
        if weights is None:  # never: every level gives them
            raise SolverFault("the levels' searches need weights")
        columns = replace(self.columns, objective=self.columns.objective * money)
        search = Search(problem, columns, weights, gap=0.0, deadline=deadline, begun=time.monotonic())
        search.offer(self.values)
        return search


def settle_by_programs(
    problem: AllocationProblem, search: Search, *, deadline: float, whole: int = MAX_COLUMNS
) -> ShortageResult:
    """Each level by programs, in turn, starting from the search's plan. ``whole``: most columns of one program."""
    rows = _looked_at(search)
    run = _Levels(problem, search, rows, whole=whole, deadline=deadline)
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


def _looked_at(search: Search) -> NDArray[np.int64]:
    """All columns; of very many what runs, what the plan uses and the best."""
    count = len(search.columns)
    if count <= MAX_PRICED:
        return np.arange(count)
    used = np.flatnonzero(search.columns.kept | (search.state.values > 0))
    return np.union1d(used, search.ranked_columns()[:MAX_PRICED])


class _Levels:
    """The levels settled so far and the plan that reaches them."""

    def __init__(
        self,
        problem: AllocationProblem,
        search: Search,
        rows: NDArray[np.int64],
        *,
        whole: int,
        deadline: float,
    ) -> None:
        self.problem, self.columns = problem, search.columns.take(rows)
        self.values = search.state.values[rows]
        self.is_priced = len(rows) > whole
        self.proved, self.deadline = len(rows) == len(search.columns), deadline
        self.settled: list[Settled] = []
        self.log: list[str] = []

    def settle(self, goal: Goal) -> None:
        """Minimise one goal under all earlier ones and hold what was reached; without time nothing is settled."""
        if time.monotonic() >= self.deadline:
            self.proved = False
            self.log.append(f"level {goal.kind} {goal.index}: no time left")
        elif self.is_priced:
            self._settle_priced(goal)
        else:
            self._settle_whole(goal)

    def _settle_priced(self, goal: Goal) -> None:
        """With columns chosen by prices. A class's rate settles its models', in their order, in the same step."""
        if goal.kind is GoalKind.MODEL and any(one.goal == goal for one in self.settled):
            return
        now = time.monotonic()
        until = now + PRICED_SHARE * (self.deadline - now)
        level = settle_priced(self.problem, self.columns, self.values, goal=goal, settled=self.settled, until=until)
        self.values = level.values
        self.proved &= level.proved
        if goal.kind is GoalKind.TOTAL:
            self.settled += [self._unserved(m) for m in self._members(goal.index)]
        else:
            self.settled.append(Settled(goal=goal, value=level.reached))
        self.log.append(f"level {goal.kind} {goal.index}: {level.reached:.6g}, proved above {level.bound:.6g}")

    def _members(self, priority: int) -> list[int]:
        problem = self.problem
        rules = [problem.options.rules_of(model) for model in problem.models]
        return [m for m, one in enumerate(rules) if one.priority == priority and problem.required_requests_per_s[m] > 0]

    def _unserved(self, m: int) -> Settled:
        value = unserved_rate(self.problem, self.columns, self.values, m)
        return Settled(goal=Goal(kind=GoalKind.MODEL, index=m), value=value)

    def _settle_whole(self, goal: Goal) -> None:
        program = build_program(self.problem, self.columns, goal=goal, settled=self.settled)
        start = start_point(self.problem, program, self.values)
        reached = self._value(program, start)
        if reached > 1e-9:
            result = solve_arrays(
                program.arrays,
                time_limit_s=max(0.1, TIME_SHARE * (self.deadline - time.monotonic())),
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
