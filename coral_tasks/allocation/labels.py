"""Every way to serve each model that can be part of a plan below a target, and the best combination of them.

Owns the enumeration by labels: partial plans with their rate, adjusted cost and use of the resources that couple
models. A label goes when the decomposition's bound on what is missing puts it above the target, or when another one
uses no more, serves as much and costs no more, in money: adjusted costs alone would let a label win by leaving unused
what has a price, which is no gain where nobody else needs it. What is left is complete: where no combination fits
under the target, the target is a proved bound. Limited by numbers of labels; by time only where the whole run is.
Knows no solver.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation import kernels, label_kernels
from coral_tasks.allocation.decompose import Evaluation, ModelValue, Tracked, _Core, _Cover, _Place
from coral_tasks.allocation.problem import SERVED_TOLERANCE

MAX_LABELS: Final = 200_000
"""Labels of one set; beyond, the enumeration gives up."""
MAX_MADE: Final = 2**20
"""Labels made of the columns of one group, those beaten later included."""
MAX_JOINS: Final = 400_000_000
"""Pairs of labels looked at in one join."""
MAX_WORK: Final = 50_000_000
"""Steps of making labels, all groups together; beyond, the enumeration gives up. Those that end take up to 11 million
on the benchmarks' instances."""
LOOK_AFTER: Final = 10_000_000
"""Steps, or pairs, after which the clock is looked at."""
MAX_COMPARED: Final = 4_000
"""Labels of one set that are compared each with each."""
NONE: Final = -1

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class TooManyLabels(Exception):
    """The enumeration would not end in reasonable time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resource:
    """What couples models: Σ weight x ≤ limit in whole numbers. ``pool``: (zone, configuration), or None and ``side``.

    ``price``: its dual, USD/h per unit.
    """

    weights: IntArray
    limit: int
    price: float
    pool: tuple[int, int] | None = None
    side: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labels:
    """N partial plans. ``use``: of each resource, [N, K]; ``rate``: requests/s, at most what is required; ``cost``:
    adjusted, USD/h; ``origin``: entry of the history.
    """

    use: IntArray
    rate: FloatArray
    cost: FloatArray
    origin: IntArray

    def __len__(self) -> int:
        return len(self.cost)

    def take(self, rows: IntArray | NDArray[np.bool_]) -> Labels:
        """The labels of ``rows``."""
        return Labels(use=self.use[rows], rate=self.rate[rows], cost=self.cost[rows], origin=self.origin[rows])


@dataclass(slots=True, kw_only=True)
class _History:
    """How labels came about: an entry adds ``copies`` of ``column`` to entry ``first``, or joins it with ``second``."""

    parts: list[tuple[IntArray, IntArray, IntArray, IntArray]] = field(default_factory=list)
    size: int = 0

    def add(self, first: IntArray, second: IntArray, column: IntArray, copies: IntArray) -> IntArray:
        """New entries; their numbers."""
        self.parts.append((first, second, column, copies))
        self.size += len(first)
        return np.arange(self.size - len(first), self.size, dtype=np.int64)

    def columns_of(self, origin: int) -> dict[int, int]:
        """Counts of columns of one label."""
        first, second, column, copies = (np.concatenate([part[k] for part in self.parts]) for k in range(4))
        counts: dict[int, int] = {}
        todo = [origin]
        while todo:
            at = todo.pop()
            if at == NONE:
                continue
            if column[at] >= 0:
                counts[int(column[at])] = counts.get(int(column[at]), 0) + int(copies[at])
            todo += [int(first[at]), int(second[at])]
        return counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rest:
    """Least cost of what a label lacks, by state of the tracked supply that it uses and units that it covers, [S, G+1].

    ``tracked``: (resource, supply, levels, scale) of each tracked pool, [P, 4].
    """

    table: FloatArray
    tracked: IntArray

    def by_use(self) -> _Rest:
        """The same table, given by the state left, read by the state used."""
        return _Rest(table=np.ascontiguousarray(self.table[::-1]), tracked=self.tracked)


_NOTHING: Final = np.zeros((0, 4), dtype=np.int64)


def whole_resource(weights: FloatArray, upper: float, price: float, side: int) -> Resource | None:
    """A side row as a resource; None where its weights are not whole."""
    whole = np.rint(weights)
    if not np.array_equal(whole, weights):
        return None
    return Resource(weights=whole.astype(np.int64), limit=math.floor(upper + 1e-9), price=price, side=side)


@dataclass(slots=True, kw_only=True)
class Enumeration:
    """One enumeration: all plans of cost up to ``target``, with the columns ``alive`` [N], under ``resources``.

    ``deadline``: monotonic time at which it gives up.
    """

    core: _Core
    evaluation: Evaluation
    resources: Sequence[Resource]
    alive: NDArray[np.bool_]
    target: float
    deadline: float = math.inf
    history: _History = field(default_factory=_History)
    work: int = 0
    slots: NDArray[np.int32] = field(default_factory=lambda: np.full(2 * MAX_MADE, NONE, dtype=np.int32))

    def best(self) -> tuple[float, dict[int, int]] | None:
        """The least objective up to the target, resources alone respected, and its columns; None where there is none.

        Raises TooManyLabels.
        """
        slack = self.target - self.evaluation.bound
        every = self._empty()
        for model in self.evaluation.models:
            plans = _Serving(self, model, slack).plans()
            every = self._join(every, plans, _Rest(table=np.zeros((1, 2)), tracked=_NOTHING), 1.0, slack, least=False)
            if not len(every):
                return None
        money = self.money_of(every)
        at = int(np.lexsort((every.origin, money))[0])
        total = math.fsum(model.value for model in self.evaluation.models) + float(money[at])
        return total, self.history.columns_of(int(every.origin[at]))

    @property
    def limits(self) -> IntArray:
        """Limit of each resource, [K]."""
        return np.array([resource.limit for resource in self.resources], dtype=np.int64)

    def _empty(self) -> Labels:
        none = np.full(1, NONE, dtype=np.int64)
        return Labels(
            use=np.zeros((1, len(self.resources)), dtype=np.int64), rate=np.zeros(1), cost=np.zeros(1), origin=none
        )

    def group(self, group: tuple[int, int], rest: _Rest, required: float, ceiling: float) -> Labels:
        """Labels of one phase in one place from its columns."""
        rows = np.flatnonzero(self.alive[group[0] : group[1]]) + group[0]
        use, rate, cost, parent, column, copies, beaten = self._made(rows, rest, required, ceiling)
        kept = np.flatnonzero(beaten < 0)
        if len(kept) > MAX_LABELS:
            raise TooManyLabels
        first = self.history.size
        before = np.where(parent >= 0, parent + first, NONE)
        added = np.concatenate([[NONE], rows[column[1:]]]).astype(np.int64)
        origin = self.history.add(before, np.full(len(parent), NONE, dtype=np.int64), added, copies)
        made = Labels(use=use[kept].astype(np.int64), rate=rate[kept], cost=cost[kept], origin=origin[kept])
        return self._thinned(made)

    def _made(self, rows: IntArray, rest: _Rest, required: float, ceiling: float) -> list[NDArray[Any]]:
        """Every label of the columns ``rows``: use, rate, cost, parent, column, copies and beaten (kernels' order)."""
        columns = self.core.columns
        limits = (
            self.use_of(rows),
            columns.rate[rows],
            self.evaluation.cost[rows],
            columns.upper[rows],
            self.limits,
            self.scales(),
        )
        table = (rest.table, rest.tracked, required, ceiling)
        room = label_kernels.room_for_labels(MAX_MADE, len(self.resources), self.slots)
        at, steps = np.array([1, 0, 0, 1], dtype=np.int64), room.work
        most = MAX_WORK - self.work
        while not label_kernels.extend_labels(limits, table, room, at, int(steps[0]) + LOOK_AFTER, most):
            if at[0] >= MAX_MADE or steps[0] > most:
                raise TooManyLabels
            self.require_time()
        self.work += int(steps[0])
        count = int(at[0])
        label_kernels.free_slots(self.slots, room.taken, count)
        # copies, so that the room for more can be given back
        return [part[:count].copy() for part in room[:7]]

    def require_time(self) -> None:
        """Raises TooManyLabels once the time is up."""
        if time.monotonic() >= self.deadline:
            raise TooManyLabels

    def _thinned(self, labels: Labels) -> Labels:
        """Without labels that another one beats in use, rate and money, where few enough to compare each with each.

        In money, not in adjusted cost: with less use of what has a price, a label may be better adjusted and still cost
        more. Less use and no more money are no more adjusted cost either, so what stays is as good in every bound.
        """
        if not 1 < len(labels) <= MAX_COMPARED:
            return labels
        return labels.take(label_kernels.not_dominated(labels.use, labels.rate, self.money_of(labels)))

    def money_of(self, labels: Labels) -> FloatArray:
        """Cost of labels without the prices of what they use, USD/h, [N]."""
        prices: FloatArray = np.array([resource.price for resource in self.resources], dtype=np.float64)
        return np.asarray(labels.cost - labels.use @ prices, dtype=np.float64)

    def use_of(self, rows: IntArray) -> IntArray:
        """What one instance of each column uses of each resource, [rows, K]."""
        parts = [resource.weights[rows] for resource in self.resources]
        return np.array(parts, dtype=np.int64).reshape(len(parts), len(rows)).T.copy()

    def scales(self) -> IntArray:
        """What a unit of each resource adds to the number of a use, [K]; raises TooManyLabels beyond 62 bits."""
        sizes = [int(limit) + 1 for limit in self.limits]
        if math.prod(sizes) >= 2**62:
            raise TooManyLabels
        return np.array([math.prod(sizes[:k]) for k in range(len(sizes))], dtype=np.int64)

    def _join(self, one: Labels, other: Labels, rest: _Rest, required: float, ceiling: float, *, least: bool) -> Labels:
        """Every pair of labels below the ceiling: rates are the lesser of both (``least``) or added."""
        self.require_time()
        if len(one) * len(other) > MAX_JOINS:
            raise TooManyLabels
        other = other.take(np.argsort(other.cost, kind="stable"))
        first, second = self._pairs(one, other, (rest.table, rest.tracked, required, ceiling), least=least)
        rates = one.rate[first], other.rate[second]
        none = np.full(len(first), NONE, dtype=np.int64)
        joined = Labels(
            use=one.use[first] + other.use[second],
            rate=np.minimum(*rates) if least else np.minimum(rates[0] + rates[1], required),
            cost=one.cost[first] + other.cost[second],
            origin=self.history.add(one.origin[first], other.origin[second], none, none),
        )
        return self._thinned(best_of(joined))

    def _pairs(
        self, one: Labels, other: Labels, rest: tuple[FloatArray, IntArray, float, float], *, least: bool
    ) -> tuple[IntArray, IntArray]:
        """Pairs below the ceiling, as rows of both; looked at in parts, so that the clock is seen in between."""
        step = max(1, LOOK_AFTER // max(1, len(other)))
        parts: list[tuple[IntArray, IntArray]] = []
        count = 0
        for begin in range(0, len(one), step):
            self.require_time()
            part = one.take(np.arange(begin, min(begin + step, len(one))))
            first, second = label_kernels.join_labels(
                (part.use, part.rate, part.cost),
                (other.use, other.rate, other.cost),
                self.limits,
                rest,
                least,
                MAX_LABELS - count,
            )
            count += len(first)
            if count >= MAX_LABELS:
                raise TooManyLabels
            parts.append((first + begin, second))
        empty = np.zeros(0, dtype=np.int64)
        if not parts:
            return empty, empty
        return np.concatenate([first for first, _ in parts]), np.concatenate([second for _, second in parts])


class _Serving:
    """The plans of one model."""

    def __init__(self, run: Enumeration, model: ModelValue, slack: float) -> None:
        self.run, self.model = run, model
        self.required = float(run.core.problem.required_requests_per_s[model.m])
        self.ceiling = model.value + slack

    def plans(self) -> Labels:
        """Complete plans, cost over the model's least one, shortfall paid; rates set to zero."""
        run, model = self.run, self.model
        every = run._empty()  # noqa: SLF001 - both classes are one algorithm
        for k, (place, others) in enumerate(zip(model.places, model.others(), strict=True)):
            here = self._of_place(place, others)
            left = np.ascontiguousarray(model.suffix[k + 1][::-1])[None, :]
            every = self._join(every, here, _Rest(table=left, tracked=_NOTHING), least=False)
        return self._completed(every)

    def _completed(self, labels: Labels) -> Labels:
        unserved = self.required - labels.rate
        served = unserved <= SERVED_TOLERANCE * max(1.0, self.required)
        weight = float(self.run.core.weights[self.model.m])
        lost = np.where(served, 0.0, weight * np.maximum(unserved, 0.0) if math.isfinite(weight) else np.inf)
        lost[self.run.core.problem.excess_unserved(self.model.m, unserved) > 0] = np.inf
        cost = labels.cost + lost
        kept = np.flatnonzero(cost <= self.ceiling)
        run = self.run
        full = Labels(
            use=labels.use[kept],
            rate=np.zeros(len(kept)),
            cost=cost[kept] - self.model.value,
            origin=labels.origin[kept],
        )
        return run._thinned(best_of(full))  # noqa: SLF001 - both classes are one algorithm

    def _join(self, one: Labels, other: Labels, rest: _Rest, *, least: bool) -> Labels:
        return self.run._join(one, other, rest, self.required, self.ceiling, least=least)  # noqa: SLF001 - as above

    def _of_place(self, place: _Place, others: FloatArray) -> Labels:
        """Labels of all phases in one place; ``others``: least cost of the other places by units covered here."""
        states, G = place.last + 1, len(others)
        tracked = self._tracked(place.tracked)
        joint_rest, pair_rest = np.full((states, G), np.inf), np.full((states, G), np.inf)
        for s in range(states):
            self.run.require_time()
            kernels.beside(place.pairs[s], others, joint_rest[s])
            kernels.beside(place.joint.value[s], others, pair_rest[s])
        pairs = self._pairs(place, pair_rest, tracked)
        joint = self._phase(place, 2, joint_rest, tracked)
        return self._join(pairs, joint, _Rest(table=others[None, :], tracked=_NOTHING), least=False)

    def _pairs(self, place: _Place, pair_rest: FloatArray, tracked: IntArray) -> Labels:
        prefill, decode = place.covers[0], place.covers[1]
        if prefill is None or decode is None:
            return self._phase(place, 0 if decode is None else 1, pair_rest, tracked)
        one = self._phase(place, 0, _beside(place, decode, pair_rest), tracked)
        other = self._phase(place, 1, _beside(place, prefill, pair_rest), tracked)
        return self._join(one, other, _Rest(table=pair_rest, tracked=tracked).by_use(), least=True)

    def _phase(self, place: _Place, phase: int, rest: FloatArray, tracked: IntArray) -> Labels:
        """Labels of one phase; ``rest``: least cost of all else by state left and units covered by the phase."""
        cover = place.covers[phase]
        if cover is None:
            return self.run._empty()  # noqa: SLF001 - as above
        lacking = self._lacking(place, cover, rest)
        group = self.run.core.group(self.model.m, place.place, phase)
        found = self.run.group(group, _Rest(table=lacking, tracked=tracked), self.required, self.ceiling)
        done = _Rest(table=rest, tracked=tracked).by_use()
        bound = label_kernels.label_bounds(
            found.use, found.rate, found.cost, (done.table, done.tracked, self.required, self.ceiling)
        )
        return found.take(np.flatnonzero(bound <= self.ceiling))

    def _lacking(self, place: _Place, cover: _Cover, rest: FloatArray) -> FloatArray:
        """Least cost of more of a phase and of all the rest, by state that the phase uses and units, [S, G+1]."""
        out = np.full_like(rest, np.inf)
        for s in range(place.last + 1):
            self.run.require_time()
            for budget in range(s, place.last + 1):
                more = int(place.within[budget, s])
                if more >= 0:
                    kernels.beside(cover.value[more], rest[place.last - budget], out[s])
        return out

    def _tracked(self, tracked: Tracked) -> IntArray:
        where = {resource.pool: k for k, resource in enumerate(self.run.resources)}
        rows, scale = [], 1
        for z, c, levels in tracked.pools:
            rows.append((where[z, c], max(1, int(self.run.core.problem.available_nodes[z, c])), levels, scale))
            scale *= levels + 1
        return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _beside(place: _Place, partner: _Cover, pair_rest: FloatArray) -> FloatArray:
    """Least cost of partner and all else by state left and units that a phase covers, used or not."""
    out = np.empty_like(pair_rest)
    kernels.pair_up(partner.value, pair_rest, place.within, out)
    return np.minimum.accumulate(out, axis=1)


def best_of(labels: Labels) -> Labels:
    """Without labels of the same use that serve no more and cost no less than another one."""
    state = label_kernels.number_rows(labels.use)
    order = np.lexsort((labels.origin, labels.cost, -labels.rate, state))
    kept = label_kernels.falling_cost(state[order], labels.cost[order])
    return labels.take(order[kept])
