"""A first plan without any solver: models in turn take what is cheapest for what they still lack and fits what is left.

Owns a plan that respects supply and every hard limit, always found, quickly and whatever the size; knows nothing about
how far from the optimum it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation import kernels
from coral_tasks.allocation.decompose import _Core
from coral_tasks.allocation.problem import SERVED_TOLERANCE

MAX_TRIES: Final = 8
"""Orders of the models that are tried."""
MAX_WAYS: Final = 200
"""Times that one model may take a further way to be served."""

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class _Left:
    """What is left: nodes [Z, C] and of each side row [S]."""

    nodes: IntArray
    sides: FloatArray

    def copy(self) -> _Left:
        """A copy to try things on."""
        return _Left(nodes=self.nodes.copy(), sides=self.sides.copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Instances that one place can start now: columns with counts, what they serve and cost, and what is left then."""

    picks: tuple[tuple[IntArray, IntArray], ...]
    served: float
    cost: float
    left: _Left


def greedy_plans(core: _Core) -> list[IntArray]:
    """Values on the columns, [N] each: the dearest models first, then again with those first that went short.

    Higher priority classes come first in all of them, and floors before all.
    """
    problem, dearest = core.problem, _cost_of_demand(core)
    priority = [problem.options.rules_of(model).priority for model in problem.models]
    order = sorted(range(len(priority)), key=lambda m: (priority[m], -dearest[m], m))
    plans = []
    for _ in range(MAX_TRIES):
        greedy = _Greedy(core)
        plans.append(greedy.plan(order))
        short = {m for m in order if not greedy.serves_all_of(m)}
        again = sorted(order, key=lambda m: (priority[m], m not in short))
        if again == order:
            break
        order = again
    return plans


def _cost_of_demand(core: _Core) -> list[float]:
    """What each model's demand costs at least, phase by phase, whole numbers and supply apart; USD/h."""
    columns, problem = core.columns, core.problem
    found = []
    for m in range(len(problem.models)):
        rows = np.flatnonzero(columns.model == m)
        unit = columns.objective[rows] / np.minimum(columns.rate[rows], max(problem.required_requests_per_s[m], 1e-12))
        found.append(float(unit.min(initial=np.inf) * problem.required_requests_per_s[m]) if len(rows) else 0.0)
    return found


class _Greedy:
    """One plan in the making."""

    def __init__(self, core: _Core) -> None:
        self.core = core
        self.values = np.zeros(len(core.columns), dtype=np.int64)
        self.left = _Left(
            nodes=core.problem.available_nodes.astype(np.int64),
            sides=np.array([row.upper for row in core.sides], dtype=np.float64),
        )
        self.served = np.zeros(len(core.problem.models))
        self._objective = core.columns.objective
        self._ones = np.ones(len(core.columns))

    def plan(self, order: list[int]) -> IntArray:
        """Serve every model in turn."""
        problem = self.core.problem
        rules = [problem.options.rules_of(model) for model in problem.models]
        for m in order:
            if rules[m].floor_share > 0:
                self._serve(m, rules[m].floor_share * float(problem.required_requests_per_s[m]))
        for m in order:
            self._serve(m, float(problem.required_requests_per_s[m]) - self.served[m])
        for m in order:
            self._start_minimum(m, rules[m].min_instances)
        return self.values

    def serves_all_of(self, m: int) -> bool:
        """Whether a model's whole demand is served."""
        left = float(self.core.problem.required_requests_per_s[m] - self.served[m])
        return left <= self._tolerance(m)

    def _tolerance(self, m: int) -> float:
        return 0.1 * SERVED_TOLERANCE * max(1.0, float(self.core.problem.required_requests_per_s[m]))

    def _serve(self, m: int, need: float) -> None:
        """Take ways until the need is met or nothing fits."""
        tolerance = self._tolerance(m)
        for _ in range(MAX_WAYS):
            if need <= tolerance:
                return
            ways = [way for way in self._ways(m, need) if way.served > tolerance]
            if not ways:
                return
            best = min(ways, key=lambda way: way.cost / way.served)
            for columns, counts in best.picks:
                np.add.at(self.values, columns, counts)
            self.left, need = best.left, need - best.served
            self.served[m] += best.served

    def _ways(self, m: int, need: float) -> list[_Way]:
        places = range(self.core.problem.num_places)
        return [way for place in places for way in (self._pair(m, place, need), self._joint(m, place, need))]

    def _joint(self, m: int, place: int, need: float) -> _Way:
        left = self.left.copy()
        picks, served = self._fill(self.core.group(m, place, 2), need, left)
        return self._way((picks,), min(served, need), left)

    def _pair(self, m: int, place: int, need: float) -> _Way:
        """Prefill for the need, decode for what prefill carries, then prefill again for no more than decode carries."""
        problem, groups = self.core.problem, [self.core.group(m, place, phase) for phase in range(2)]
        needed = [phase for phase, tokens in enumerate((problem.prompt_tokens, problem.output_tokens)) if tokens[m] > 0]
        reach = need
        for _ in range(2):
            left, picks = self.left.copy(), []
            for phase in needed:
                taken, served = self._fill(groups[phase], reach, left)
                picks.append(taken)
                reach = min(reach, served)
        return self._way(tuple(picks), reach, left)

    def _way(self, picks: tuple[tuple[IntArray, IntArray], ...], served: float, left: _Left) -> _Way:
        cost = sum(float((self._objective[columns] * counts).sum()) for columns, counts in picks)
        return _Way(picks=picks, served=served, cost=cost, left=left)

    def _fill(
        self, group: tuple[int, int], need: float, left: _Left, *, by_number: bool = False
    ) -> tuple[tuple[IntArray, IntArray], float]:
        """Columns of a group with counts, and the rate that they carry together; takes what they use from ``left``."""
        first, last = group
        columns = self.core.columns
        rows, weights = self._side_weights(first, last)
        sides = left.sides[rows]
        picked, counts, carried = kernels.fill(
            (
                self._objective[first:last],
                (self._ones if by_number else columns.rate)[first:last],
                columns.upper[first:last] - self.values[first:last],
                self.core.local_template[first:last],
                columns.zone[first:last],
            ),
            self.core.node_rows,
            need,
            left.nodes,
            (weights, sides),
        )
        left.sides[rows] = sides
        return (picked + first, counts), float(carried)

    def _side_weights(self, first: int, last: int) -> tuple[IntArray, FloatArray]:
        """Side rows that bind columns of a group, and their weights there."""
        rows = [k for k, row in enumerate(self.core.sides) if row.weights[first:last].any()]
        weights = [self.core.sides[k].weights[first:last] for k in rows]
        return np.array(rows, dtype=np.int64), np.array(weights, dtype=np.float64).reshape(len(rows), last - first)

    def _start_minimum(self, m: int, least: int) -> None:
        """Start the cheapest instances that fit until the model has its minimum number."""
        problem = self.core.problem
        for place in range(problem.num_places):
            for phase in (2, 0, 1):
                first, last = self.core.group(m, 0, 0)[0], self.core.group(m, problem.num_places - 1, 2)[1]
                missing = least - int(self.values[first:last].sum())
                if missing <= 0:
                    return
                (columns, counts), _ = self._fill(
                    self.core.group(m, place, phase), float(missing), self.left, by_number=True
                )
                np.add.at(self.values, columns, counts)
