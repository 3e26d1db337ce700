"""Lossless reduction of the library for one run: templates that smaller ones packed inside their nodes replace.

Owns which rows may be left out without changing the optimum; not what they cost. Lossless as long as costs and limits
are per node, so models under a rule that counts instances or rates keep everything (notes in design 2.3).
"""

from __future__ import annotations

from math import comb
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.kernels import pack_rates
from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.domain.names import Market

MAX_TABLE_ROWS: Final = 3_000_000
"""Multisets that fit the packing table; beyond, a model's templates are kept as they are."""


def reduced_templates(problem: AllocationProblem) -> NDArray[np.bool_]:
    """Templates worth a column for new instances, [T]. Rates above the required rate count as the required rate.

    Running templates are not spared here: kept instances have columns of their own.
    """
    keep = problem.usable_templates()
    if problem.startable is not None:
        keep &= problem.startable
    keep &= np.isfinite(problem.request_rate)
    needed = (problem.required_requests_per_s > 0) | _minimum_instances(problem)
    keep &= needed[problem.templates.model]
    counted = _models_with_counts(problem)
    tables: dict[int, _Multisets] = {}
    for m in range(len(problem.models)):
        if counted[m] or problem.required_requests_per_s[m] <= 0:
            continue
        for phase in range(3):
            chosen = np.flatnonzero(keep & (problem.templates.model == m) & (problem.templates.phase == phase))
            if len(chosen):
                keep[chosen] = _irreducible(problem, chosen, m, tables)
    return keep


def _minimum_instances(problem: AllocationProblem) -> NDArray[np.bool_]:
    return np.array([problem.options.rules_of(model).min_instances > 0 for model in problem.models], dtype=np.bool_)


def _models_with_counts(problem: AllocationProblem) -> NDArray[np.bool_]:
    """Models under a rule that counts instances, so that two small ones do not replace a large one, or rates.

    A limit on the rate that spot nodes carry makes the slower of two templates on the same nodes the better one where
    the faster one is above it.
    """
    per_run = problem.options.max_started_instances is not None
    has_spot = any(zone.market is Market.SPOT for zone in problem.zones)
    rules = [problem.options.rules_of(model) for model in problem.models]
    found = [per_run or one.max_instances is not None or (has_spot and 0 < one.max_spot_share < 1) for one in rules]
    return np.array(found, dtype=np.bool_)


class _Multisets:
    """All multisets of up to K of C configurations in rank order, with the lookups that the packing needs."""

    def __init__(self, configurations: int, most: int) -> None:
        self.most = most
        self.binomial = np.zeros((configurations + most + 1, most + 2), dtype=np.int64)
        for n in range(self.binomial.shape[0]):
            for k in range(self.binomial.shape[1]):
                self.binomial[n, k] = comb(n, k)
        sizes = [comb(configurations + k - 1, k) for k in range(1, most + 1)]
        self.start = np.zeros(most + 2, dtype=np.int64)
        np.cumsum(sizes, out=self.start[2:])
        self.members = np.zeros((sum(sizes), most), dtype=np.uint8)
        self.size_of = np.repeat(np.arange(1, most + 1), sizes)
        for k in range(1, most + 1):
            self.members[self.start[k] : self.start[k + 1], :k] = _multisets(configurations, k)

    def rank(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Table row of multisets of one size, given as sorted configuration indices [N, size]."""
        size = members.shape[1]
        total = np.full(len(members), self.start[size], dtype=np.int64)
        for i in range(size):
            total += self.binomial[members[:, i] + i, i + 1]
        return total


def _multisets(configurations: int, size: int) -> NDArray[np.uint8]:
    """Sorted multisets of ``size`` in rank order (last member is the most significant), [N, size]."""
    rows = np.zeros((1, 0), dtype=np.uint8)
    for _ in range(size):
        # prefix rows whose last member is at most c, followed by c, for c = 0, 1, …
        last = rows[:, -1] if rows.shape[1] else np.zeros(1, dtype=np.uint8)
        blocks = []
        for c in range(configurations):
            fitting = rows[last <= c]
            blocks.append(np.hstack([fitting, np.full((len(fitting), 1), c, dtype=np.uint8)]))
        rows = np.vstack(blocks)
    return rows


def _irreducible(
    problem: AllocationProblem, chosen: NDArray[np.int64], m: int, tables: dict[int, _Multisets]
) -> NDArray[np.bool_]:
    nodes = problem.templates.nodes[chosen].astype(np.int64)
    sizes = nodes.sum(axis=1)
    used = np.flatnonzero(nodes.any(axis=0))
    most = int(sizes.max())
    if most > 8 or comb(len(used) + most, most) > MAX_TABLE_ROWS:
        return _undominated(nodes, problem.request_rate[chosen])
    table = tables.setdefault(len(used) * 16 + most, None) or _Multisets(len(used), most)  # type: ignore[arg-type]
    tables[len(used) * 16 + most] = table
    capped = np.minimum(problem.request_rate[chosen], problem.required_requests_per_s[m])
    row = _rows_of(nodes[:, used], sizes, table)
    rate = np.zeros(len(table.size_of))
    np.maximum.at(rate, row, capped)
    best, keep = np.zeros(len(rate)), np.zeros(len(rate), dtype=np.bool_)
    pack_rates(table.members, table.size_of, table.start, table.binomial, rate, best, keep)
    kept = keep[row] & (capped >= rate[row])
    # one row per node combination: of equals (two runtimes) the first stays
    first = np.full(len(rate), -1, dtype=np.int64)
    order = np.flatnonzero(kept)[::-1]
    first[row[order]] = order
    return np.asarray(kept & (first[row] == np.arange(len(row))), dtype=np.bool_)


def _rows_of(nodes: NDArray[np.int64], sizes: NDArray[np.int64], table: _Multisets) -> NDArray[np.int64]:
    row = np.zeros(len(nodes), dtype=np.int64)
    for size in np.unique(sizes):
        here = np.flatnonzero(sizes == size)
        flat = np.repeat(np.tile(np.arange(nodes.shape[1]), len(here)), nodes[here].ravel())
        row[here] = table.rank(flat.reshape(len(here), size))
    return row


def _undominated(nodes: NDArray[np.int64], rate: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where the table would be too large: drop only exact repeats of a node combination with no higher rate."""
    order = np.lexsort((np.arange(len(rate)), -rate, *nodes.T))
    same = (np.diff(nodes[order], axis=0) == 0).all(axis=1)
    keep = np.ones(len(rate), dtype=np.bool_)
    keep[order[1:][same]] = False
    return keep
