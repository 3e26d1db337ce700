"""Column generation over whole model plans (Dantzig-Wolfe): which plan each model takes under the common supply.

Owns the small master program: its linear relaxation prices the supply, its integer form gives plans. Every generated
plan is feasible for its model; leaving a model unserved is one of its plans.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.decompose import Duals, ModelPlan, _Core
from coral_tasks.optimization.mip import MipResult, ProgramBuilder, solve_arrays


def _key(plan: ModelPlan) -> tuple[int, bytes, bytes]:
    return plan.model, plan.columns.tobytes(), plan.counts.tobytes()


class Master:
    """The generated plans and what each uses of supply and side rows."""

    def __init__(self, core: _Core, search_weights: NDArray[np.float64], steep: NDArray[np.float64]) -> None:
        self.core = core
        self._steep = steep
        self.plans: list[ModelPlan] = []
        self._weights = search_weights
        self._known: set[tuple[int, bytes, bytes]] = set()
        self._cost: list[float] = []
        self._usage: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        self._cells = core.problem.available_nodes.size
        self._limits = np.concatenate(
            [core.problem.available_nodes.ravel().astype(np.float64), [row.upper for row in core.sides]]
        )
        self._models = [int(m) for m in np.flatnonzero(core.problem.required_requests_per_s > 0)]
        empty = np.zeros(0, dtype=np.int64)
        for m in self._models:
            unserved = float(core.problem.required_requests_per_s[m])
            self.add(ModelPlan(model=m, columns=empty, counts=empty, unserved=unserved))

    def add(self, plan: ModelPlan | None) -> bool:
        """Take a plan in; False where there is none or it is known."""
        if plan is None:
            return False
        key = _key(plan)
        if key in self._known:
            return False
        self._known.add(key)
        self.plans.append(plan)
        self._cost.append(self._plan_cost(plan))
        self._usage.append(self._plan_usage(plan))
        return True

    def drop(self, unfit: Callable[[ModelPlan], bool]) -> None:
        """Forget plans that ``unfit`` names; what is forgotten may come again."""
        stay = [k for k, plan in enumerate(self.plans) if not unfit(plan)]
        self.plans = [self.plans[k] for k in stay]
        self._cost = [self._cost[k] for k in stay]
        self._usage = [self._usage[k] for k in stay]
        self._known = {_key(plan) for plan in self.plans}

    def _plan_cost(self, plan: ModelPlan) -> float:
        money = float((self.core.columns.objective[plan.columns] * plan.counts).sum())
        return money + float(self._weights[plan.model]) * plan.unserved + self._forbidden(plan)

    def _forbidden(self, plan: ModelPlan) -> float:
        """A cost far above all others for what a plan leaves unserved beyond what it may."""
        excess = float(self.core.problem.excess_unserved(plan.model, plan.unserved))
        return excess * float(self._steep[plan.model])

    def nodes_used(self, plan: ModelPlan) -> NDArray[np.int64]:
        """Nodes of a plan by zone and configuration, [Z, C]."""
        columns, problem = self.core.columns, self.core.problem
        used = np.zeros(problem.available_nodes.shape, dtype=np.int64)
        nodes = problem.templates.nodes[columns.template[plan.columns]].astype(np.int64) * plan.counts[:, None]
        np.add.at(used, columns.zone[plan.columns], nodes)
        return used

    def _plan_usage(self, plan: ModelPlan) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        usage = np.zeros(len(self._limits))
        usage[: self._cells] = self.nodes_used(plan).ravel()
        for k, row in enumerate(self.core.sides):
            usage[self._cells + k] = float((row.weights[plan.columns] * plan.counts).sum())
        rows = np.flatnonzero(usage)
        return rows, usage[rows]

    def relax(self) -> tuple[float, float, Duals]:
        """Value of the linear relaxation, the money in it (weighted shortage apart), and its prices."""
        result, rows = self._solve(integer=False, time_limit_s=60.0, max_nodes=0)
        prices = np.zeros(len(self._limits))
        duals = result.row_duals if result.row_duals is not None else np.zeros(0)
        for k, row in enumerate(rows):
            prices[row] = max(0.0, -float(duals[k]))
        nodes = prices[: self._cells].reshape(self.core.problem.available_nodes.shape)
        value = float(result.objective or 0.0)
        shares = result.values if result.values is not None else np.zeros(len(self.plans))
        shortage = sum(
            float(share * self._weights[plan.model] * plan.unserved)
            for share, plan in zip(shares, self.plans, strict=True)
        )
        return value, max(value - shortage, 0.0), Duals(nodes=nodes, sides=prices[self._cells :])

    def choose(self, *, time_limit_s: float, max_nodes: int) -> NDArray[np.int64]:
        """The best combination found of one plan for each model, as values on the columns, [N]."""
        result, _ = self._solve(integer=True, time_limit_s=time_limit_s, max_nodes=max_nodes)
        values = np.zeros(len(self.core.columns), dtype=np.int64)
        if result.values is not None:
            for k in np.flatnonzero(result.values > 0.5):
                values[self.plans[k].columns] += self.plans[k].counts
        return values

    def _solve(self, *, integer: bool, time_limit_s: float, max_nodes: int) -> tuple[MipResult, list[int]]:
        builder = ProgramBuilder()
        chosen = builder.add_columns(np.array(self._cost), upper=1.0, integer=integer)
        rows = sorted({int(row) for used, _ in self._usage for row in used})
        entries: dict[int, tuple[list[int], list[float]]] = {row: ([], []) for row in rows}
        for k, (used, amounts) in enumerate(self._usage):
            for row, amount in zip(used.tolist(), amounts.tolist(), strict=True):
                entries[row][0].append(k)
                entries[row][1].append(amount)
        for row in rows:
            builder.add_row(entries[row][0], entries[row][1], upper=float(self._limits[row]))
        for m in self._models:
            mine = [k for k, plan in enumerate(self.plans) if plan.model == m]
            builder.add_row(chosen[mine], np.ones(len(mine)), lower=1.0, upper=1.0)
        options: dict[str, object] = {"mip_max_nodes": max_nodes} if integer else {}
        result = solve_arrays(builder.build(), time_limit_s=time_limit_s, gap=1e-6, options=options)
        return result, rows
