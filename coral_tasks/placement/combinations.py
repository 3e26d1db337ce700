"""Node combinations as a tree of sorted lists: every allowed multiset once, each with its sub-multisets at hand.

Owns enumeration under N_max, the memory limit and per-configuration limits; knows nothing of throughput.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import ValidationFailed, Violation

MAX_NODES: Final = 8
"""Largest N_max offered: the partition lists grow with the Bell numbers."""

MAX_COMBINATIONS: Final = 20_000_000
"""Refuse larger libraries: their arrays alone would fill the memory of a common machine."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CombinationTree:
    """Multisets of at most ``max_nodes`` configurations, by id; id 0 is the empty one.

    Ids run by size, then by sorted node list. ``offsets``: int64 [max_nodes + 2], ids of size m are
    ``offsets[m]`` to ``offsets[m + 1]``. ``slots``: int16 [total, max_nodes], configuration of each node, rising,
    -1 beyond the last. ``child``: int32 [offsets[max_nodes], C], id after a node of configuration c is appended,
    -1 where that is not allowed or c is below the last node. ``num_beyond_limit``: multisets left out.
    """

    max_nodes: int
    offsets: NDArray[np.int64]
    slots: NDArray[np.int16]
    child: NDArray[np.int32]
    num_beyond_limit: int

    @property
    def total(self) -> int:
        """Number of multisets, the empty one included."""
        return int(self.offsets[-1])

    def id_of(self, nodes: list[int]) -> int:
        """Id of a list of configuration indices; -1 if it is not allowed."""
        found = 0
        for c in sorted(nodes):
            found = int(self.child[found, c]) if found >= 0 else -1
        return found


def build_tree(
    *,
    max_nodes: int,
    num_configurations: int,
    node_memory: NDArray[np.float64] | None = None,
    memory_limit: float = np.inf,
    max_counts: NDArray[np.int64] | None = None,
) -> CombinationTree:
    """Every multiset of 1 to ``max_nodes`` nodes whose memory in all is at most ``memory_limit``.

    ``node_memory``: one figure above zero per configuration, in the limit's unit. ``max_counts``: most nodes of each
    configuration. Raises ValidationFailed for a size outside 1 to MAX_NODES or too many combinations.
    """
    _check_size(max_nodes)
    memory = np.zeros(num_configurations) if node_memory is None else node_memory
    limits = np.full(num_configurations, max_nodes) if max_counts is None else max_counts
    level = np.full((1, max_nodes), -1, dtype=np.int16)
    used = np.zeros(1)
    levels, children, start = [level], [], 0
    for size in range(max_nodes):
        level, used, child = _grow(level, used, size, memory, memory_limit, limits)
        start += len(levels[-1])
        children.append(np.where(child >= 0, child + start, -1).astype(np.int32))
        levels.append(level)
        _check_total(start + len(level))
    sizes = [len(one) for one in levels]
    total = sum(sizes)
    return CombinationTree(
        max_nodes=max_nodes,
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        slots=np.concatenate(levels),
        child=np.concatenate(children),
        num_beyond_limit=comb(num_configurations + max_nodes, max_nodes) - total,
    )


def _grow(
    level: NDArray[np.int16],
    used: NDArray[np.float64],
    size: int,
    memory: NDArray[np.float64],
    memory_limit: float,
    limits: NDArray[np.int64],
) -> tuple[NDArray[np.int16], NDArray[np.float64], NDArray[np.int64]]:
    """Append one node to each list of ``size`` nodes: new lists, their memory, and who became whose child."""
    count = len(memory)
    last = level[:, size - 1] if size else np.zeros(len(level), dtype=np.int16)
    allowed = np.arange(count)[None, :] >= last[:, None]
    allowed &= used[:, None] + memory[None, :] <= memory_limit
    for c in range(count):
        allowed[:, c] &= (level == c).sum(axis=1) < limits[c]
    parent, appended = np.nonzero(allowed)
    child = np.full(allowed.shape, -1, dtype=np.int64)
    child[parent, appended] = np.arange(len(parent))
    grown = level[parent].copy()
    grown[:, size] = appended
    return grown, used[parent] + memory[appended], child


def _check_size(max_nodes: int) -> None:
    if not 1 <= max_nodes <= MAX_NODES:
        rule = f"N_max must be a whole number from 1 to {MAX_NODES}"
        raise ValidationFailed([Violation(table="build_options", row="max_nodes", value=str(max_nodes), rule=rule)])


def _check_total(total: int) -> None:
    if total > MAX_COMBINATIONS:
        rule = f"more than {MAX_COMBINATIONS} node combinations: lower N_max, rho or the number of configurations"
        raise ValidationFailed([Violation(table="build_options", row="", value=str(total), rule=rule)])
