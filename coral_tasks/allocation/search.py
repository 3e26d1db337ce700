"""The fast exact search: bound by decomposition, column generation, fixing by bounds, a small final program.

Owns the order of the steps and the anytime state: the best plan so far and the proved bound. Every plan it takes as
incumbent is recomputed on the columns; the independent check follows in ``solve``. Steps are limited by counts of
nodes and rounds, not by time, so that a run repeats on any machine; the clock only cuts a run short as a whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.columns import Columns
from coral_tasks.allocation.decompose import (
    UNTRACKED,
    Duals,
    Evaluation,
    Grid,
    ModelPlan,
    Tracked,
    build_core,
    build_grid,
    column_bounds,
    evaluate,
    no_duals,
)
from coral_tasks.allocation.greedy import greedy_plans
from coral_tasks.allocation.labels import Enumeration, Resource, TooManyLabels, whole_resource
from coral_tasks.allocation.master import Master
from coral_tasks.allocation.problem import SERVED_TOLERANCE, AllocationProblem
from coral_tasks.allocation.program import Cut, Goal, GoalKind, Program, Settled, build_program
from coral_tasks.domain.errors import SolverFault
from coral_tasks.optimization.mip import MipOutcome, MipResult, solve_arrays, whole_values

COARSE_GRID: Final = 1000
FINE_GRIDS: Final = (4000, 16000)
FINE_ROUNDS: Final = (3, 4)
"""Grids of the refinement, each for the columns that survived the one before, and its rounds of column generation."""
MAX_FINE_WORK: Final = 16000 * 4
"""Units times states of the finest grid worth its time: the products of two covers grow with the units' square."""
MAX_ROUNDS: Final = 60
POOR_GAP: Final = 0.05
FIRST_COLUMNS: Final = 120
FIRST_NODES: Final = 10
"""A plan this far from the bound after column generation is improved by a small program over the best columns."""
MAX_TIGHT_ROUNDS: Final = 40
CHOOSE_EVERY: Final = 5
CHOOSE_ROUNDS: Final = (9, 19, 39)
CHOOSE_NODES: Final = 20
"""Rounds after which the plans found so far are combined, so that a first plan comes early where supply is scarce."""
TIGHT_ENOUGH: Final = 2e-4
MAX_STALLED: Final = 5
MAX_STATES: Final = 24
MAX_LEVELS: Final = 6
"""States and levels of tracked supply in the dynamic program of one model and place."""
POLISH: Final = ((150, 300), (400, 1500), (1000, 1500))
"""Columns of the programs that look for better plans, each with the number that must be alive to make it worth it."""
FINAL_COLUMNS: Final = 4000
"""Most columns handed to the final program."""
TARGETS: Final = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
"""Shares of the gap up to which every way is looked at in turn: each one that is empty raises the bound."""
TIE_COLUMNS: Final = 300
TIE_NODES: Final = 200
TIE_TOLERANCE: Final = 1e-9
"""Plans within this relative distance cost the same."""


@dataclass(slots=True, kw_only=True)
class State:
    """Anytime state. ``objective``: money plus weighted shortage, infinite while unserved load is forbidden but left.

    ``values``: instances per column. ``bound``: proved. ``best``: the evaluation that proved most. ``trace``: CPU
    seconds of this process, objective and bound after each step.
    """

    values: NDArray[np.int64]
    objective: float
    bound: float
    best: Evaluation | None = None
    log: list[str] = field(default_factory=list)
    trace: list[tuple[float, float, float]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    def record(self) -> None:
        """Add where the search stands to the trace."""
        self.trace.append((time.process_time(), self.objective, self.bound))

    def note(self, step: str) -> None:
        """Add a line on where the search stands."""
        elapsed = time.monotonic() - self.begun
        self.record()
        self.log.append(f"{elapsed:8.3f} s  plan {self.objective:.6g}  bound {self.bound:.6g}  {step}")


class Search:
    """One run of the search over ``columns`` with shortfall ``weights`` (USD/h per request/s, infinite: forbidden)."""

    def __init__(
        self,
        problem: AllocationProblem,
        columns: Columns,
        weights: NDArray[np.float64],
        *,
        gap: float,
        deadline: float,
        begun: float,
    ) -> None:
        self.problem, self.columns, self.weights = problem, columns, weights
        self.gap, self.deadline = gap, deadline
        # When it gives up as long as its plan does not serve everything.
        self.served_by = math.inf
        self.minimum = np.array([problem.options.rules_of(model).min_instances for model in problem.models])
        self.minimum_price = 100 * float(columns.objective.max(initial=1.0)) if self.minimum.any() else 0.0
        self.core = build_core(problem, columns, weights)
        self.on_better: Callable[[Search], None] | None = None
        # For a question instead of an optimum: when it is answered, and the objective up to which a plan is looked for.
        self.stop_when: Callable[[Search], bool] | None = None
        self.asked: float | None = None
        none = np.zeros(len(columns), dtype=np.int64)
        self.state = State(values=none, objective=math.inf, bound=-math.inf, begun=begun)
        self.offer(none)
        self.cut_points: list[Evaluation] = []
        self.tracked: dict[tuple[int, int], Tracked] = {}
        self.master = Master(self.core, self._search_weights(), self._steep_weights())
        self.ceiling = math.inf
        self.first_duals = no_duals(self.core)

    def objective_of(self, values: NDArray[np.int64]) -> tuple[float, float]:
        """Money, and weighted shortage with missing minimum instances, of column values, USD/h."""
        money = math.fsum((self.columns.objective * values)[values > 0].tolist())
        shortage = 0.0
        for m in np.flatnonzero(self.problem.required_requests_per_s > 0):
            unserved = unserved_rate(self.problem, self.columns, values, int(m))
            if unserved > 0:
                too_much = bool(self.problem.excess_unserved(int(m), unserved) > 0)
                shortage += math.inf if too_much else float(self.weights[m]) * unserved
        return money, shortage + self.minimum_price * int(self._missing(values).sum())

    def _missing(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        held = np.bincount(self.columns.model, weights=values, minlength=len(self.minimum)).astype(np.int64)
        return np.maximum(self.minimum - held, 0)

    def offer(self, values: NDArray[np.int64]) -> bool:
        """Take a plan as incumbent if it is better by more than a tie; it must respect supply and side rows."""
        if not self._fits(values):
            return False
        money, shortage = self.objective_of(values)
        total = money + shortage
        if total < self.state.objective - TIE_TOLERANCE * max(1.0, abs(total)):
            self.state.values, self.state.objective = values.copy(), total
            self.state.record()
            if self.on_better is not None:
                self.on_better(self)
            return True
        return False

    def _fits(self, values: NDArray[np.int64]) -> bool:
        rows = np.flatnonzero(values)
        if (self._nodes_used(values) > self.problem.available_nodes).any() or (values > self.columns.upper).any():
            return False
        sides = (
            (row.weights[rows] * values[rows]).sum() <= row.upper + 1e-9 * max(1.0, row.upper)
            for row in self.core.sides
        )
        return all(bool(fits) for fits in sides)

    def _nodes_used(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = np.flatnonzero(values)
        used = np.zeros(self.problem.available_nodes.shape, dtype=np.int64)
        nodes = self.problem.templates.nodes[self.columns.template[rows]].astype(np.int64) * values[rows, None]
        np.add.at(used, self.columns.zone[rows], nodes)
        return used

    def until(self) -> float:
        """Monotonic time at which it gives up."""
        if self.served_by < self.deadline and self.objective_of(self.state.values)[1] > 0:
            return self.served_by
        return self.deadline

    def time_left(self) -> float:
        """Seconds until it gives up."""
        return self.until() - time.monotonic()

    def current_gap(self) -> float:
        """Gap relative to the money spent, shortage apart."""
        if not math.isfinite(self.state.objective):
            return math.inf
        money, _ = self.objective_of(self.state.values)
        return max(0.0, self.state.objective - self.state.bound) / max(money, 1e-9)

    def done(self) -> bool:
        """Whether the gap or the deadline is reached, or what was asked is answered (``stop_when``)."""
        answered = self.stop_when is not None and self.stop_when(self)
        return answered or self.time_left() <= 0 or self.current_gap() <= self.gap

    def raise_bound(self, evaluation: Evaluation) -> None:
        """Keep an evaluation if it proves more; money cannot be negative."""
        if self.state.best is None or evaluation.bound > self.state.bound:
            self.state.best = evaluation
        bound = max(min(evaluation.bound, self.ceiling), 0.0)
        if bound > self.state.bound:
            self.state.bound = bound
            self.state.record()

    def _best_duals(self) -> Duals:
        return self.state.best.duals if self.state.best is not None else self.first_duals

    def ranked_columns(self) -> NDArray[np.int64]:
        """Columns by the least objective of any solution that uses them, best first."""
        duals = self._best_duals()
        grid = build_grid(self.core, COARSE_GRID, rounds_up=True)
        bounds = column_bounds(self.core, evaluate(self.core, grid, duals, self.tracked))
        return np.lexsort((np.arange(len(bounds)), bounds))

    # -- steps ---------------------------------------------------------------------------------------------------

    def run(self) -> State:
        """All steps until the gap or the deadline is reached."""
        wanted = self.problem.required_requests_per_s.any() or self.minimum.any()
        if wanted and len(self.columns):
            self.start_greedily()
            if not self.done():
                self.generate()
            if not self.done():
                self.refine()
        else:
            # without demand the empty plan is optimal; without columns it is the only one
            self.state.bound = self.state.objective
        self.prefer_running()
        return self.state

    def start_greedily(self) -> None:
        """A first plan, whatever the size and the time limit."""
        for values in greedy_plans(self.core):
            self.offer(values)
        self.state.note("greedy plan")

    def generate(self) -> None:
        """Column generation: price the supply, collect plans, choose the best combination."""
        up = build_grid(self.core, COARSE_GRID, rounds_up=True)
        down = build_grid(self.core, COARSE_GRID, rounds_up=False)
        duals, best = no_duals(self.core), no_duals(self.core)
        for round_number in range(MAX_ROUNDS):
            evaluation = evaluate(self.core, up, duals)
            if evaluation.bound > self.state.bound or round_number == 0:
                best = duals
            self.raise_bound(evaluation)
            self.cut_points = [evaluation, *self.cut_points][:3]
            grew = self._collect(down, duals, evaluation)
            if round_number == 0 and self.offer(self._sum_of_models(down, duals)):
                self.state.note("plan at zero prices")
            value, money, target = self.master.relax()
            if self.done() or value - self.state.bound <= 1e-5 * max(1e-6, money):
                break
            if round_number in CHOOSE_ROUNDS:
                self.offer(self.master.choose(time_limit_s=max(0.1, self.time_left()), max_nodes=CHOOSE_NODES))
            if not grew and round_number > 0 and np.allclose(duals.nodes, target.nodes):
                break
            duals = best.towards(target, 0.4) if grew else target
        self.state.note(f"{round_number + 1} rounds, {len(self.master.plans)} model plans")
        if not self.done():
            self.offer(self.master.choose(time_limit_s=max(0.1, self.time_left()), max_nodes=50))
            self.state.note("best combination of plans")
        if not self.done():
            self.tighten(up, down)
        if self.asked is None and not self.done() and self.current_gap() > POOR_GAP:
            self._solve_small(self.ranked_columns()[:FIRST_COLUMNS], max_nodes=FIRST_NODES, proves=False)

    def tighten(self, up: Grid, down: Grid) -> None:
        """Column generation again where a model's own plan may not exceed supply: a better bound where it is scarce."""
        duals = best = self._best_duals()
        stalled, money = 0, 0.0
        for round_number in range(MAX_TIGHT_ROUNDS):
            evaluation = evaluate(self.core, up, duals, self.tracked)
            stalled = 0 if evaluation.bound > self.state.bound + 1e-5 * money else stalled + 1
            if evaluation.bound > self.state.bound:
                best = duals
            self.raise_bound(evaluation)
            self.cut_points = [evaluation, *self.cut_points][:3]
            grew = self._collect(down, duals, evaluation)
            if self._extend_tracking(evaluation):
                self.master.drop(self._exceeds_tracked)
            elif round_number == 0:
                return
            value, money, target = self.master.relax()
            close = value - self.state.bound <= TIGHT_ENOUGH * money
            if self.done() or close or stalled > MAX_STALLED:
                break
            if round_number % CHOOSE_EVERY == CHOOSE_EVERY - 1:
                self.offer(self.master.choose(time_limit_s=max(0.1, self.time_left()), max_nodes=CHOOSE_NODES))
            duals = best.towards(target, 0.4) if grew else target
        self.state.note(f"{round_number + 1} tight rounds, {len(self.master.plans)} model plans, relaxed {value:.6g}")
        if not self.done():
            self.offer(self.master.choose(time_limit_s=max(0.1, self.time_left()), max_nodes=200))
            self.state.note("best combination of tight plans")

    def _extend_tracking(self, evaluation: Evaluation) -> bool:
        """Track the supply that a model's own plan exceeds most, one pool for each place; True if any was added."""
        added = False
        for model in evaluation.models:
            plan = model.plan()
            if plan is None:
                continue
            used = self.master.nodes_used(plan)
            excess = (used - self.problem.available_nodes) / np.maximum(self.problem.available_nodes, 1)
            places = self.problem.place_of_zone()
            for place in range(self.problem.num_places):
                mine = np.where((places == place)[:, None], excess, 0.0)
                z, c = np.unravel_index(int(np.argmax(mine)), mine.shape)
                added |= bool(mine[z, c] > 0) and self._track(model.m, place, int(z), int(c))
        return added

    def _track(self, m: int, place: int, z: int, c: int) -> bool:
        old = self.tracked.get((m, place), UNTRACKED)
        if any(pool[:2] == (z, c) for pool in old.pools):
            return False
        levels = max(1, min(int(self.problem.available_nodes[z, c]), MAX_LEVELS))
        new = Tracked(pools=(*old.pools, (z, c, levels)))
        if new.num_states > MAX_STATES:
            return False
        self.tracked[m, place] = new
        return True

    def _exceeds_tracked(self, plan: ModelPlan) -> bool:
        used = self.master.nodes_used(plan)
        pools = [pool for (m, _), one in self.tracked.items() if m == plan.model for pool in one.pools]
        return any(used[z, c] > self.problem.available_nodes[z, c] for z, c, _ in pools)

    def _search_weights(self) -> NDArray[np.float64]:
        """Finite weights for the master: steep where unserved load is forbidden."""
        return np.where(np.isfinite(self.weights), self.weights, self._steep_weights())

    def _steep_weights(self) -> NDArray[np.float64]:
        """USD/h per unserved request/s, far above any cost of serving."""
        dearest = float(self.columns.objective.max(initial=1.0))
        required = np.maximum(self.problem.required_requests_per_s, 1e-12)
        return np.asarray(1000 * max(dearest, 1.0) / required * 10, dtype=np.float64)

    def _collect(self, down: Grid, duals: Duals, evaluation: Evaluation) -> bool:
        lower = evaluate(self.core, down, duals, self.tracked)
        grew = [self.master.add(model.plan()) for model in lower.models]
        grew += [self.master.add(model.plan()) for model in evaluation.models]
        return any(grew)

    def _sum_of_models(self, down: Grid, duals: Duals) -> NDArray[np.int64]:
        values = np.zeros(len(self.columns), dtype=np.int64)
        for model in evaluate(self.core, down, duals).models:
            plan = model.plan()
            if plan is not None:
                values[plan.columns] += plan.counts
        return values

    def refine(self, level: int = 0) -> None:
        """A better bound on a finer grid; then the columns that it leaves, on a finer grid still or in a program."""
        bounds, evaluation = self._refined_bounds(FINE_GRIDS[level], rounds=FINE_ROUNDS[level])
        if self.done() or self.enumerate(bounds, evaluation):
            return
        if self._can_refine(level + 1):
            self._narrow(bounds, level + 1)
            return
        before = len(bounds)
        order = np.lexsort((np.arange(before), bounds))
        for count, least_alive in POLISH:
            alive = int((bounds <= self._threshold()).sum())
            if self.done() or alive <= least_alive:
                break
            self._solve_small(order[:count], max_nodes=200, proves=False)
        if self.done():
            return
        if 0 < 2 * int((bounds <= self._threshold()).sum()) < before:
            self._narrow(bounds, level)
        else:
            self._final(bounds, order)

    def _can_refine(self, level: int) -> bool:
        states = max((one.num_states for one in self.tracked.values()), default=1)
        return level < len(FINE_GRIDS) and FINE_GRIDS[level] * states <= MAX_FINE_WORK

    def _refined_bounds(self, size: int, *, rounds: int) -> tuple[NDArray[np.float64], Evaluation]:
        """Column generation on a grid of ``size``; then what any solution with each column costs at least, [N]."""
        up, down = (build_grid(self.core, size, rounds_up=rounds_up) for rounds_up in (True, False))
        duals = best = self._best_duals()
        found: list[Evaluation] = []
        for _ in range(rounds):
            evaluation = evaluate(self.core, up, duals, self.tracked)
            self.raise_bound(evaluation)
            grew = self._collect(down, duals, evaluation)
            found.append(evaluation)
            best = max(found, key=lambda one: one.bound).duals
            _, _, target = self.master.relax()
            if self.done() or (not grew and np.allclose(duals.nodes, target.nodes)):
                break
            duals = best.towards(target, 0.4)
        found.sort(key=lambda one: -one.bound)
        self.cut_points = [*found[:2], *self.cut_points][:3]
        self.offer(self.master.choose(time_limit_s=max(0.1, self.time_left()), max_nodes=50))
        bounds = column_bounds(self.core, found[0])
        alive = int((bounds <= self._threshold()).sum())
        self.state.note(f"grid of {size}: {alive} of {len(bounds)} columns can improve the plan")
        return bounds, found[0]

    # -- enumeration ---------------------------------------------------------------------------------------------

    def enumerate(self, bounds: NDArray[np.float64], evaluation: Evaluation) -> bool:
        """Raise the bound step by step to the plan by looking at every combination below it; True once that is done.

        ``bounds``: least cost of any solution with each column, by ``evaluation``.
        """
        resources = self._resources(evaluation)
        if resources is None or self.minimum.any() or not math.isfinite(self.state.objective):
            return False
        for share in TARGETS if self.asked is None else (0.0, *TARGETS):
            top = self._threshold()
            target = evaluation.bound + share * (top - evaluation.bound)
            if self.asked is not None and share == 0:
                target = min(self.asked, top)
            if target <= self.state.bound and share < 1:
                continue
            try:
                found = self._best_below(resources, bounds, evaluation, target)
            except TooManyLabels:
                self.state.note(f"too many ways up to {target:.6g}")
                return False
            if self._settled(found, target):
                return True
            self.state.note(f"no plan up to {target:.6g}")
            if self.done():
                return True
        return True

    def _settled(self, found: tuple[float, NDArray[np.int64]] | None, target: float) -> bool:
        """Take what was found below a target: an optimal plan if there is one, else the target is proved."""
        optimal = found is not None and found[0] <= target
        if found is not None:
            self.offer(found[1])
        self.prove(found[0] if found is not None and optimal else target)
        return optimal

    def _best_below(
        self, resources: list[Resource], bounds: NDArray[np.float64], evaluation: Evaluation, target: float
    ) -> tuple[float, NDArray[np.int64]] | None:
        """The best plan of cost up to the target; resources that it would exceed are added to the list."""
        while True:
            run = Enumeration(
                core=self.core,
                evaluation=evaluation,
                resources=resources,
                alive=bounds <= target,
                target=target,
                deadline=self.until(),
            )
            best = run.best()
            if best is None:
                return None
            values = np.zeros(len(self.columns), dtype=np.int64)
            for j, n in best[1].items():
                values[j] = n
            if self._fits(values):
                return best[0], values
            self._add_exceeded(resources, values)

    def _resources(self, evaluation: Evaluation) -> list[Resource] | None:
        """Everything that has a price or is tracked; None where a limit of broken numbers has one."""
        duals = evaluation.duals
        pools = {(int(z), int(c)) for z, c in np.argwhere(duals.nodes > 0)}
        pools |= {pool[:2] for one in self.tracked.values() for pool in one.pools}
        found: list[Resource] = [self._pool_resource(z, c, float(duals.nodes[z, c])) for z, c in sorted(pools)]
        for k in np.flatnonzero(duals.sides > 0):
            row = self.core.sides[k]
            side = whole_resource(row.weights, row.upper, float(duals.sides[k]), int(k))
            if side is None:
                return None
            found.append(side)
        return found

    def _pool_resource(self, z: int, c: int, price: float) -> Resource:
        nodes = self.problem.templates.nodes[self.columns.template, c].astype(np.int64)
        weights = np.where(self.columns.zone == z, nodes, 0)
        return Resource(weights=weights, limit=int(self.problem.available_nodes[z, c]), price=price, pool=(z, c))

    def _add_exceeded(self, resources: list[Resource], values: NDArray[np.int64]) -> None:
        """Add what ``values`` exceeds. Raises TooManyLabels where that cannot be a resource."""
        before = len(resources)
        used = self._nodes_used(values)
        for z, c in np.argwhere(used > self.problem.available_nodes):
            resources.append(self._pool_resource(int(z), int(c), 0.0))
        for k, row in enumerate(self.core.sides):
            if float(row.weights @ values) > row.upper + 1e-9 * max(1.0, row.upper):
                side = whole_resource(row.weights, row.upper, 0.0, k)
                resources += [] if side is None else [side]
        if len(resources) == before:
            raise TooManyLabels

    def _narrow(self, bounds: NDArray[np.float64], level: int) -> None:
        """Go on with the columns that can improve the plan, what runs and what the plan uses.

        A solution with any other column costs no less than the plan does now, so what is proved of the rest is proved
        of all up to that: the ceiling of its bound.
        """
        chosen = (bounds <= self._threshold()) | self.columns.kept | (self.state.values > 0)
        rows = np.flatnonzero(chosen)
        inner = Search(
            self.problem,
            self.columns.take(rows),
            self.weights,
            gap=self.gap,
            deadline=self.deadline,
            begun=self.state.begun,
        )
        self._hand_down(inner, rows)
        inner.refine(level)
        self.state.bound = max(self.state.bound, inner.state.bound)

    def _hand_down(self, inner: Search, rows: NDArray[np.int64]) -> None:
        """Give a search over ``rows`` alone what is known so far; better plans of it come back at once."""
        inner.stop_when, inner.asked, inner.served_by = self.stop_when, self.asked, self.served_by
        inner.tracked, inner.ceiling = self.tracked, min(self.ceiling, self.state.objective)
        inner.state.log, inner.state.trace = self.state.log, self.state.trace
        inner.state.bound = self.state.bound
        inner.offer(self.state.values[rows])
        duals = self._best_duals()
        # a side row that none of the rows is part of is no row of the inner search
        price_of = {row.name: price for row, price in zip(self.core.sides, duals.sides, strict=True)}
        sides = np.array([price_of[row.name] for row in inner.core.sides], dtype=np.float64)
        inner.first_duals = Duals(nodes=duals.nodes, sides=sides)
        place = np.full(len(self.columns), -1, dtype=np.int64)
        place[rows] = np.arange(len(rows))
        for plan in self.master.plans:
            if (place[plan.columns] >= 0).all():
                inner.master.add(replace(plan, columns=place[plan.columns]))

        def take_back(search: Search) -> None:
            values = np.zeros(len(self.columns), dtype=np.int64)
            values[rows] = search.state.values
            self.offer(values)

        inner.on_better = take_back

    def _threshold(self) -> float:
        return self.state.objective * (1 + 1e-12) + 1e-9

    def _final(self, bounds: NDArray[np.float64], order: NDArray[np.int64]) -> None:
        alive = order[bounds[order] <= self._threshold()]
        complete = len(alive) <= FINAL_COLUMNS
        self._solve_small(alive[:FINAL_COLUMNS], max_nodes=None, proves=complete)

    def _solve_small(self, rows: NDArray[np.int64], *, max_nodes: int | None, proves: bool) -> None:
        rows = np.union1d(rows, np.flatnonzero(self.state.values))
        kept = np.flatnonzero(self.columns.kept)
        rows = np.union1d(rows, kept)
        columns = self.columns.take(rows)
        program = build_program(self.problem, columns, cuts=self._cuts(rows), minimum_price=self.minimum_price)
        options: dict[str, object] = {} if max_nodes is None else {"mip_max_nodes": max_nodes}
        money = max(self.objective_of(self.state.values)[0], 1e-9) if math.isfinite(self.state.objective) else 1.0
        result = solve_arrays(
            program.arrays,
            time_limit_s=max(0.1, self.time_left()),
            gap=0.0,
            absolute_gap=max(1e-9, 0.5 * self.gap * money),
            start_values=self._start(program, self.state.values[rows]),
            options=options,
            listener=_Progress(self, rows, proves=proves),
        )
        self._take(result, rows)
        if proves:
            self._prove(result)
        self.state.note(f"program of {len(rows)} columns, {result.outcome}")

    def prefer_running(self) -> None:
        """Among plans of the same cost take one that starts the fewest nodes, then one that holds the fewest.

        Only where ties can occur: what runs costs no more than another start of it, or something costs nothing.
        """
        costless = self.columns.objective == 0
        ties = self.columns.kept.any() and (self.problem.options.startup_factor == 0 or costless.any())
        idle = (self.state.values[costless] > 0).any()
        if not (ties or idle) or not math.isfinite(self.state.objective) or self.time_left() <= 0:
            return
        rows = self._tie_columns()
        columns = self.columns.take(rows)
        money = Settled(goal=Goal(kind=GoalKind.MONEY), value=self.state.objective)
        program = build_program(
            self.problem,
            columns,
            goal=Goal(kind=GoalKind.STARTED),
            settled=[money],
            minimum_price=self.minimum_price,
        )
        result = solve_arrays(
            program.arrays,
            time_limit_s=max(0.1, self.time_left()),
            start_values=self._start(program, self.state.values[rows]),
            options={"mip_max_nodes": TIE_NODES},
        )
        values = self._whole(result, rows)
        if values is not None and self._fits(values):
            total = sum(self.objective_of(values))
            if total <= self.state.objective + TIE_TOLERANCE * max(1.0, abs(total)):
                self.state.values, self.state.objective = values, total
                self.state.note("ties given to what runs")

    def _tie_columns(self) -> NDArray[np.int64]:
        """What runs, what the plan uses, and the columns that a plan of this cost can use, best first."""
        chosen = np.flatnonzero(self.columns.kept | (self.state.values > 0))
        if self.state.best is None:
            return chosen
        return np.union1d(chosen, self.ranked_columns()[:TIE_COLUMNS])

    def _start(self, program: Program, values: NDArray[np.int64]) -> NDArray[np.float64] | None:
        if not math.isfinite(self.state.objective):
            return None
        return start_point(self.problem, program, values)

    def _take(self, result: MipResult, rows: NDArray[np.int64]) -> None:
        values = self._whole(result, rows)
        if values is not None:
            self.offer(values)

    def _whole(self, result: MipResult, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Instances of all columns from a program over ``rows``; None without a whole solution: the incumbent stays."""
        return whole_on(len(self.columns), result.solution(), rows) if result.has_solution else None

    def _prove(self, result: MipResult) -> None:
        """What an ended program proves."""
        if result.outcome is MipOutcome.INFEASIBLE:
            proved = self.state.objective
        else:
            proved = result.bound if result.bound is not None else -math.inf
        self.prove(proved)

    def prove(self, proved: float) -> None:
        """Take a bound on the columns that are left: the others cost at least what the plan does, or the ceiling."""
        bound = min(proved, self.state.objective, self.ceiling)
        if bound > self.state.bound:
            self.state.bound = bound
            self.state.record()

    def _cuts(self, rows: NDArray[np.int64]) -> list[Cut]:
        cuts = []
        for evaluation in self.cut_points:
            for model in evaluation.models:
                mine = np.flatnonzero(self.columns.model[rows] == model.m)
                weight = float(self.weights[model.m])
                if math.isfinite(model.value):
                    cuts.append(
                        Cut(
                            model=model.m,
                            columns=mine,
                            values=evaluation.cost[rows[mine]],
                            shortfall_value=weight if math.isfinite(weight) else 0.0,
                            lower=model.value,
                        )
                    )
        return cuts


class _Progress:
    """Plans and bounds of a program over ``rows`` while it is solved. ``proves``: whether its bound holds for all."""

    def __init__(self, search: Search, rows: NDArray[np.int64], *, proves: bool) -> None:
        self.search, self.rows, self.proves = search, rows, proves

    def on_solution(self, values: NDArray[np.float64]) -> None:
        """Offer a whole solution at once."""
        whole = whole_on(len(self.search.columns), values, self.rows)
        if whole is not None:
            self.search.offer(whole)

    def on_bound(self, bound: float) -> None:
        """Keep the bound."""
        if self.proves:
            self.search.prove(bound)


def whole_on(count: int, solution: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Instances of all ``count`` columns from a solution of a program over ``rows``; None where it is not whole."""
    values = np.zeros(count, dtype=np.int64)
    try:
        values[rows] = whole_values(solution[: len(rows)])
    except SolverFault:
        return None
    return values


def unserved_rate(problem: AllocationProblem, columns: Columns, values: NDArray[np.int64], m: int) -> float:
    """Requests/s of a model that column values leave unserved; below the tolerance it is zero."""
    mine = np.flatnonzero((columns.model == m) & (values > 0))
    required = float(problem.required_requests_per_s[m])
    served = 0.0
    for place in range(problem.num_places):
        pd, agg = served_in(problem, columns, values, mine, place)
        served += pd + agg
    missing = required - served
    return 0.0 if missing <= SERVED_TOLERANCE * max(1.0, required) else missing


def served_in(
    problem: AllocationProblem, columns: Columns, values: NDArray[np.int64], mine: NDArray[np.int64], place: int
) -> tuple[float, float]:
    """Requests/s that the columns ``mine`` of one model serve in a place, disaggregated and aggregated."""
    here = mine[columns.place[mine] == place]
    carried = columns.rate[here] * values[here]
    rates = [math.fsum(carried[columns.phase[here] == phase].tolist()) for phase in range(3)]
    if not len(mine):
        return 0.0, 0.0
    m = int(columns.model[mine[0]])
    tokens = (problem.prompt_tokens[m], problem.output_tokens[m])
    return min(rates[phase] for phase in range(2) if tokens[phase] > 0), rates[2]


def start_point(problem: AllocationProblem, program: Program, values: NDArray[np.int64]) -> NDArray[np.float64]:
    """A full solution of ``program`` from the instances of its columns, for the solver to start from."""
    point = np.zeros(program.arrays.num_columns)
    point[: len(values)] = values
    M, P = len(problem.models), problem.num_places
    first = len(values)
    for m in range(M):
        mine = np.flatnonzero((program.columns.model == m) & (values > 0))
        left = float(problem.required_requests_per_s[m])
        for place in range(P):
            pd, agg = served_in(problem, program.columns, values, mine, place)
            point[first + m * P + place] = min(pd, left)
            left -= point[first + m * P + place]
            point[first + M * P + m * P + place] = min(agg, left)
            left -= point[first + M * P + m * P + place]
        point[program.shortfall[m]] = max(0.0, left) / program.shortfall_scale[m]
    for m, column in program.floor_slack.items():
        rules = problem.options.rules_of(problem.models[m])
        required = float(problem.required_requests_per_s[m])
        unserved = point[program.shortfall[m]] * program.shortfall_scale[m]
        point[column] = max(0.0, unserved - (1 - rules.floor_share) * required)
    for members, column in program.worst.values():
        shares = [problem.options.rules_of(problem.models[m]).share for m in members]
        unserved_shares = [
            share * point[program.shortfall[m]] * program.shortfall_scale[m] / float(problem.required_requests_per_s[m])
            for share, m in zip(shares, members, strict=True)
        ]
        point[column] = max(unserved_shares)
    for m, column in program.minimum_slack.items():
        least = problem.options.rules_of(problem.models[m]).min_instances
        point[column] = max(0, least - int(values[program.columns.model == m].sum()))
    return point
