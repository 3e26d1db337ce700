"""Homo and Cauchy: homogeneous templates, chosen model by model by cost efficiency.

Taken from the source (design 7, after the paper's section 6.1): Homo serves each model on the best homogeneous
template, greedily; Cauchy lets prefill and decode differ, each of them homogeneous, and goes by each model's own cost
efficiency. Neither sees the other models.

What had to be decided, since the description is that short:

- *homogeneous*: all nodes of an instance have one node configuration (``same="gpu_type"`` would allow all sizes of one
  card; the difference can be measured with it).
- *cost efficiency*: price over request rate of a full template, among the homogeneous templates of up to N_max nodes;
  the winner is then started as often as needed, rounded up (``choice="efficiency"``, what the words say). The stronger
  reading ``choice="whole"`` ranks by what the whole instances for the remaining demand cost, so rounding is part of
  the choice; the comparison shows both.
- Homo: prefill and decode of a model stand on the same configuration; Cauchy: any two.
- both phases stand in the same region and market, since the KV cache stays in its region.
- greedy: models in the order of the problem, each takes its best offer as far as nodes are left, then the next best,
  until it is served or nothing is left that serves it.
- running instances are not looked at: these baselines plan every interval anew (ties go to lower numbers, so an
  unchanged input gives the same plan).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.problem import SERVED_TOLERANCE, AllocationProblem
from coral_tasks.baselines.assembly import DECODE, PREFILL, Counts, assemble_plan, instance_price, used_nodes
from coral_tasks.domain.names import NodeConfigurationId
from coral_tasks.domain.plan import AllocationPlan

type Sameness = Literal["configuration", "gpu_type"]
type Choice = Literal["efficiency", "whole"]

_SHORT_LIST: Final = 12
"""Offers of each phase that are combined with each other; the rest are dearer alone and hardly win as a pair."""


def plan_homo(
    problem: AllocationProblem, *, same: Sameness = "configuration", choice: Choice = "efficiency"
) -> AllocationPlan:
    """One homogeneous configuration for both phases of a model."""
    counts = _Greedy(problem, same=same, choice=choice, phases_alike=True).run()
    return assemble_plan(problem, counts, planner="homo")


def plan_cauchy(
    problem: AllocationProblem, *, same: Sameness = "configuration", choice: Choice = "efficiency"
) -> AllocationPlan:
    """One homogeneous configuration for each phase of a model."""
    counts = _Greedy(problem, same=same, choice=choice, phases_alike=False).run()
    return assemble_plan(problem, counts, planner="cauchy")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """``count`` instances of a template in a zone."""

    template: int
    zone: int
    count: int
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    rate: float
    cost: float
    unit_cost: float
    offers: tuple[_Offer, ...]

    def rank(self, choice: Choice) -> tuple[float, float, tuple[tuple[int, int], ...]]:
        """Cheapest per request first, then the larger one, then by number."""
        unit = self.unit_cost if choice == "efficiency" else self.cost / self.rate
        return unit, -self.rate, tuple((one.template, one.zone) for one in self.offers)


class _Greedy:
    """One run over all models. Mutable; lives only inside the planner."""

    def __init__(self, problem: AllocationProblem, *, same: Sameness, choice: Choice, phases_alike: bool) -> None:
        self.problem, self.choice, self.phases_alike = problem, choice, phases_alike
        self.kind = homogeneous_kinds(problem, same)
        self.usable = problem.usable_templates() & (self.kind >= 0)
        self.allowed = problem.allowed()
        self.left = problem.available_nodes.astype(np.int64).copy()

    def run(self) -> Counts:
        """Counts of all models."""
        counts: Counts = {}
        for m in range(len(self.problem.models)):
            self._serve(m, counts)
        return counts

    def _serve(self, m: int, counts: Counts) -> None:
        required = float(self.problem.required_requests_per_s[m])
        open_rate = required
        while open_rate > SERVED_TOLERANCE * max(1.0, required):
            pairs = [pair for z in range(len(self.problem.zones)) for pair in self._pairs(m, z, open_rate)]
            if not pairs:
                return
            best = min(pairs, key=lambda pair: pair.rank(self.choice))
            for offer in best.offers:
                key = (offer.template, offer.zone)
                counts[key] = counts.get(key, 0) + offer.count
            self.left -= used_nodes(self.problem, _counts_of(best))
            open_rate -= best.rate

    def _pairs(self, m: int, z: int, rate: float) -> Iterator[_Pair]:
        """Every way to serve up to ``rate`` of model m in zone z with one template for each phase."""
        if not self.allowed[m, z]:
            return
        tokens = ((PREFILL, self.problem.prompt_tokens[m]), (DECODE, self.problem.output_tokens[m]))
        needed = [phase for phase, count in tokens if count > 0]
        lists = [self._candidates(m, p, z, rate) for p in needed]
        for group in itertools.product(*lists):
            kinds = {int(self.kind[t]) for t in group}
            if self.phases_alike and len(kinds) > 1:
                continue
            pair = self._fit(group, z, rate)
            if pair is not None:
                yield pair

    def _candidates(self, m: int, phase: int, z: int, rate: float) -> list[int]:
        """Templates of one phase, cheapest for ``rate`` first; all of them where both phases must be alike."""
        templates = self.problem.templates
        mine = np.flatnonzero(self.usable & (templates.model == m) & (templates.phase == phase))
        mine = mine[(templates.nodes[mine] <= self.left[z]).all(axis=1)]
        ordered = [t for _, t in sorted((self._dearness(int(t), z, rate), int(t)) for t in mine)]
        return ordered if self.phases_alike else ordered[:_SHORT_LIST]

    def _unit_cost(self, t: int, z: int) -> float:
        return instance_price(self.problem, t, z) / float(self.problem.request_rate[t])

    def _dearness(self, t: int, z: int, rate: float) -> float:
        return self._unit_cost(t, z) if self.choice == "efficiency" else self._offer(t, z, rate).cost

    def _offer(self, t: int, z: int, rate: float) -> _Offer:
        count = max(math.ceil(rate / float(self.problem.request_rate[t]) - 1e-9), 1)
        return _Offer(template=t, zone=z, count=count, cost=count * instance_price(self.problem, t, z))

    def _fit(self, group: tuple[int, ...], z: int, rate: float) -> _Pair | None:
        """The pair at ``rate``, or at the most that the nodes left allow; None if that is nothing."""
        if self._holds(group, z, rate):
            return self._pair(group, z, rate)
        # The rate can only stop at a whole number of instances of one of the templates.
        steps = {float(self.problem.request_rate[t]) for t in group}
        most = max(
            (k * step for step in steps for k in range(1, int(rate / step) + 1) if self._holds(group, z, k * step)),
            default=0.0,
        )
        return self._pair(group, z, most) if most > 0 else None

    def _holds(self, group: tuple[int, ...], z: int, rate: float) -> bool:
        need: NDArray[np.int64] = np.zeros(self.left.shape[1], dtype=np.int64)
        for t in group:
            need += self.problem.templates.nodes[t].astype(np.int64) * self._offer(t, z, rate).count
        return bool((need <= self.left[z]).all())

    def _pair(self, group: tuple[int, ...], z: int, rate: float) -> _Pair:
        offers = tuple(self._offer(t, z, rate) for t in group)
        carried = min(one.count * float(self.problem.request_rate[one.template]) for one in offers)
        return _Pair(
            rate=min(carried, rate),
            cost=sum(one.cost for one in offers),
            unit_cost=sum(self._unit_cost(t, z) for t in group),
            offers=offers,
        )


def _counts_of(pair: _Pair) -> Counts:
    return {(one.template, one.zone): one.count for one in pair.offers}


def homogeneous_kinds(problem: AllocationProblem, same: Sameness) -> NDArray[np.int64]:
    """Number of the one configuration (or GPU type) that a template's nodes share, -1 for mixed ones, shape (T,)."""
    names = [_kind_name(name, same) for name in problem.configurations]
    numbers = {name: k for k, name in enumerate(dict.fromkeys(names))}
    kinds = np.array([numbers[name] for name in names])
    present = np.stack([(problem.templates.nodes[:, kinds == k] > 0).any(axis=1) for k in range(len(numbers))], axis=1)
    return np.where(present.sum(axis=1) == 1, present.argmax(axis=1), -1)


def _kind_name(configuration: NodeConfigurationId, same: Sameness) -> str:
    return configuration if same == "configuration" else configuration.rpartition("x")[0] or configuration
