"""In which order instances start and stop (design 3.4). Owns the search; knows neither plans nor agents.

Items are grouped: all starts of one template, region and market are alike, and so are stops. A start needs free
nodes and adds capacity; a stop frees nodes and takes capacity. The search finds the order whose worst relative
fall below the floors is least: exact over the lattice of counts while that is small, else greedy.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coral_tasks.dispatch.capacity import Offer, served_capacity, worst_dip
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import Market, ModelId, NodeConfigurationId, RegionId

MAX_STATES = 5_000
_EPSILON = 1e-9

Pool = tuple[RegionId, NodeConfigurationId, Market]
Order = list[tuple[bool, int]]
"""Pairs (is a start, index of its group), in the order to carry out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """``count`` equal starts or stops. ``nodes``: per pool, how many one item needs or frees.

    ``offer``: what one item adds or takes; None if it serves nothing.
    """

    count: int
    nodes: Mapping[Pool, int]
    offer: Offer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderProblem:
    """Everything the search needs. ``steady``: offers that stay throughout. ``free``: nodes free at the beginning."""

    starts: tuple[Group, ...]
    stops: tuple[Group, ...]
    free: Mapping[Pool, int]
    steady: tuple[Offer, ...]
    shapes: Mapping[ModelId, RequestShape]

    def capacity(self, state: Sequence[int]) -> dict[str, float]:
        """Capacity once ``state`` (starts done, then stops done, by group) is reached."""
        running = list(state[: len(self.starts)])
        running += [group.count - done for group, done in zip(self.stops, state[len(self.starts) :], strict=True)]
        offers = [
            replace(group.offer, throughput=group.offer.throughput * count)
            for group, count in zip((*self.starts, *self.stops), running, strict=True)
            if group.offer is not None
        ]
        return served_capacity([*self.steady, *offers], self.shapes)

    def floors(self) -> dict[str, float]:
        """min(old, new) by key; keys that either side lacks have no floor."""
        old = self.capacity([0] * (len(self.starts) + len(self.stops)))
        new = self.capacity([group.count for group in (*self.starts, *self.stops)])
        return {key: min(value, new[key]) for key, value in old.items() if min(value, new.get(key, 0.0)) > 0}

    def free_after(self, state: Sequence[int]) -> dict[Pool, int]:
        """Free nodes in ``state``; negative if it cannot exist."""
        free = dict(self.free)
        for index, group in enumerate((*self.starts, *self.stops)):
            sign = -1 if index < len(self.starts) else 1
            for pool, count in group.nodes.items():
                free[pool] = free.get(pool, 0) + sign * count * state[index]
        return free


def best_order(problem: OrderProblem) -> tuple[Order, float]:
    """An order with the least worst dip (exact up to MAX_STATES states) and that dip as a share of its floor.

    ValueError if not all starts fit even after all stops.
    """
    goal = tuple(group.count for group in (*problem.starts, *problem.stops))
    if any(count < 0 for count in problem.free_after(goal).values()):
        raise ValueError("the starts need more nodes than there are")
    if all(count >= 0 for count in problem.free_after(_all_started(problem)).values()):
        # everything fits beside what runs: nothing dips if all starts come first
        return [move for is_start in (True, False) for move in _all_moves(problem, is_start=is_start)], 0.0
    if math.prod(count + 1 for count in goal) <= MAX_STATES:
        return _exact(problem, goal)
    return _greedy(problem, goal)


def _all_started(problem: OrderProblem) -> tuple[int, ...]:
    return (*(group.count for group in problem.starts), *(0 for _ in problem.stops))


def _all_moves(problem: OrderProblem, *, is_start: bool) -> Order:
    groups = problem.starts if is_start else problem.stops
    return [(is_start, index) for index, group in enumerate(groups) for _ in range(group.count)]


@dataclass(slots=True, kw_only=True)
class _Search:
    """Reads of one problem that the search repeats, remembered."""

    problem: OrderProblem
    floors: dict[str, float]
    dips: dict[tuple[int, ...], float]

    def dip(self, state: tuple[int, ...]) -> float:
        if state not in self.dips:
            found = worst_dip(self.problem.capacity(state), self.floors)
            self.dips[state] = found if found > _EPSILON else 0.0
        return self.dips[state]

    def fits(self, state: tuple[int, ...]) -> bool:
        return all(count >= 0 for count in self.problem.free_after(state).values())


def _moves(state: tuple[int, ...], goal: tuple[int, ...], num_starts: int) -> list[tuple[bool, int, tuple[int, ...]]]:
    found = []
    for index, (done, wanted) in enumerate(zip(state, goal, strict=True)):
        if done < wanted:
            is_start = index < num_starts
            after = (*state[:index], done + 1, *state[index + 1 :])
            found.append((is_start, index if is_start else index - num_starts, after))
    return found


def _exact(problem: OrderProblem, goal: tuple[int, ...]) -> tuple[Order, float]:
    """Bottleneck Dijkstra: least worst dip first, then few changes between starting and stopping."""
    search = _Search(problem=problem, floors=problem.floors(), dips={})
    origin = tuple(0 for _ in goal)
    heap: list[tuple[float, int, int, tuple[int, ...], bool]] = [(0.0, 0, 0, origin, True)]
    came_from: dict[tuple[int, ...], tuple[tuple[int, ...], bool, int]] = {}
    reached: dict[tuple[int, ...], tuple[float, int]] = {}
    done: set[tuple[int, ...]] = set()
    sequence = 0
    while heap:
        worst, waves, _, state, starting = heapq.heappop(heap)
        if state == goal:
            return _walk_back(came_from, state), worst
        if state in done:
            continue
        done.add(state)
        for is_start, group, after in _moves(state, goal, len(problem.starts)):
            if after in done or not search.fits(after):
                continue
            sequence += 1
            entry = (max(worst, search.dip(after)), waves + (is_start != starting), sequence, after, is_start)
            if after not in reached or entry[:2] < reached[after]:
                reached[after] = entry[:2]
                came_from[after] = (state, is_start, group)
                heapq.heappush(heap, entry)
    raise ValueError("no order exists")


def _walk_back(came_from: dict[tuple[int, ...], tuple[tuple[int, ...], bool, int]], state: tuple[int, ...]) -> Order:
    order: Order = []
    while state in came_from:
        state, is_start, group = came_from[state]
        order.append((is_start, group))
    return order[::-1]


def _greedy(problem: OrderProblem, goal: tuple[int, ...]) -> tuple[Order, float]:
    """Start whatever fits; then stop all that can go without a dip; else the one stop whose dip is least."""
    search = _Search(problem=problem, floors=problem.floors(), dips={})
    state, order, worst = tuple(0 for _ in goal), list[tuple[bool, int]](), 0.0
    while state != goal:
        moves = _moves(state, goal, len(problem.starts))
        starts = [move for move in moves if move[0] and search.fits(move[2])]
        stops = [move for move in moves if not move[0]]
        is_start, group, after = starts[0] if starts else min(stops, key=lambda move: (search.dip(move[2]), move[1]))
        batch = not is_start and search.dip(after) <= 0
        order.append((is_start, group))
        state, worst = after, max(worst, search.dip(after))
        if batch:
            state = _stop_all_that_may(search, state, goal, order)
    return order, worst


def _stop_all_that_may(search: _Search, state: tuple[int, ...], goal: tuple[int, ...], order: Order) -> tuple[int, ...]:
    """Go on stopping while no capacity is missed, so that stops come in few waves."""
    while True:
        moves = _moves(state, goal, len(search.problem.starts))
        harmless = [move for move in moves if not move[0] and search.dip(move[2]) <= 0]
        if not harmless:
            return state
        order.append(harmless[0][:2])
        state = harmless[0][2]
