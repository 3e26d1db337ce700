"""Exact optimum of every multiset of a combination tree, size by size (paper 4.2, design 2.2).

Owns the order of work and the arrays around the compiled searches. A chunk is a range of ids of one size; its result
depends on the table and on the optima of smaller sizes only, never on how ids are cut in chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.names import LatencySplit
from coral_tasks.placement.combinations import CombinationTree
from coral_tasks.placement.inherit import inherit_placements
from coral_tasks.placement.kernel_common import Placements
from coral_tasks.placement.kernel_equal import fill_layer_bounds, solve_equal
from coral_tasks.placement.kernel_free import SHARED_SIZE, Splits, solve_free
from coral_tasks.placement.kernel_vllm import solve_single_nodes
from coral_tasks.placement.patterns import pattern_tables

LEVEL_RATIO: Final = 1.04
"""Step of the grid of targets: finer means fewer partitions to walk at the end, coarser fewer levels to climb."""

MAX_LAYERS: Final = 1000
"""Layer sums must fit 16 bits, see ``kernel_partition.NEVER``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solutions:
    """Optima of a range of ids. ``throughput``: float64 [n], 0 where nothing fits.

    ``slot_stage`` int8 [n, N], ``stage_layers``, ``stage_quanta`` int16 [n, N]: placement, see TemplateSet; slot_stage
    is -1 throughout where throughput is 0 or equal to the best with one node fewer.
    """

    throughput: NDArray[np.float64]
    slot_stage: NDArray[np.int8]
    stage_layers: NDArray[np.int16]
    stage_quanta: NDArray[np.int16]

    @classmethod
    def empty(cls, count: int, max_nodes: int) -> Solutions:
        """Nothing found yet."""
        return cls(
            throughput=np.zeros(count),
            slot_stage=np.full((count, max_nodes), -1, dtype=np.int8),
            stage_layers=np.zeros((count, max_nodes), dtype=np.int16),
            stage_quanta=np.zeros((count, max_nodes), dtype=np.int16),
        )

    @classmethod
    def from_arrays(cls, stored: Mapping[str, NDArray[np.generic]], count: int, max_nodes: int) -> Solutions | None:
        """Inverse of ``arrays``; None unless names, shapes and types are right."""
        found = cls.empty(count, max_nodes)
        expected = found.arrays()
        if set(stored) != set(expected):
            return None
        for name, target in expected.items():
            if stored[name].shape != target.shape or stored[name].dtype != target.dtype:
                return None
            target[...] = stored[name]
        return found

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The columns by name, not copied."""
        return {
            "throughput": self.throughput,
            "slot_stage": self.slot_stage,
            "stage_layers": self.stage_layers,
            "stage_quanta": self.stage_quanta,
        }

    def put(self, first: int, part: Solutions) -> None:
        """Write the rows of ``part`` from row ``first`` on."""
        rows = slice(first, first + len(part.throughput))
        self.throughput[rows] = part.throughput
        self.slot_stage[rows] = part.slot_stage
        self.stage_layers[rows] = part.stage_layers
        self.stage_quanta[rows] = part.stage_quanta


def target_levels(table: NDArray[np.float64], max_nodes: int) -> NDArray[np.float64]:
    """Rising grid from the smallest positive entry to beyond any reachable sum; empty for an all-zero table.

    Built by multiplication only, so that it is the same on every machine.
    """
    positive = table[table > 0]
    if not positive.size:
        return np.empty(0)
    lowest, highest = float(positive.min()), float(positive.max()) * max_nodes
    steps = int(np.ceil(np.log(highest / lowest) / np.log(LEVEL_RATIO))) + 3
    return np.multiply.accumulate(np.concatenate([[lowest], np.full(steps, LEVEL_RATIO)]))


def layer_bounds(table: NDArray[np.float64], levels: NDArray[np.float64], max_nodes: int) -> NDArray[np.float64]:
    """Most layers that a node can carry at each level and number of equal stages, [K, N + 1, C].

    A node with throughput T in a stage of j layers that reaches t supplies at most min(1, T/t) of it.
    """
    bound = np.zeros((len(levels), max_nodes + 1, len(table)))
    fill_layer_bounds(table, levels, bound)
    return bound


def solve_chunk(
    table: NDArray[np.float64],
    tree: CombinationTree,
    split: LatencySplit,
    values: NDArray[np.float64],
    first: int,
    last: int,
) -> Solutions:
    """Optima of ids ``first`` to ``last``, all of one size. ``values``: optima by id of all smaller sizes."""
    found = Solutions.empty(last - first, tree.max_nodes)
    levels = target_levels(table, tree.max_nodes)
    if not len(levels) or last <= first:
        return found
    size = int(np.searchsorted(tree.offsets, first, side="right")) - 1
    smaller = values[: tree.offsets[size]]
    patterns = pattern_tables(tree.max_nodes)
    out = Placements(found.slot_stage, found.stage_layers, found.stage_quanta)
    if split is LatencySplit.EQUAL:
        parts = (patterns.part_ptr, patterns.part_mask)
        bounds = (levels, layer_bounds(table, levels, tree.max_nodes))
        solve_equal(table, tree.slots, tree.child, first, last, size, smaller, parts, bounds, found.throughput, out)
    else:
        splits = Splits(patterns.entry, patterns.split_ptr, patterns.split_block, patterns.split_rest)
        shared = int(tree.offsets[SHARED_SIZE[size] + 1])
        solve_free(
            table, tree.slots, tree.child, first, last, size, smaller, splits, levels, shared, found.throughput, out
        )
    return found


def solve_tree(table: NDArray[np.float64], tree: CombinationTree, split: LatencySplit) -> Solutions:
    """Optimum of every multiset of the tree, row by id (row 0, the empty one, is 0), in this process."""
    found = Solutions.empty(tree.total, tree.max_nodes)
    for size in range(1, tree.max_nodes + 1):
        first, last = int(tree.offsets[size]), int(tree.offsets[size + 1])
        found.put(first, solve_chunk(table, tree, split, found.throughput, first, last))
    return found


def solve_vllm(
    table: NDArray[np.float64], tree: CombinationTree, split: LatencySplit, tp_degree: NDArray[np.int64]
) -> Solutions:
    """Best placement stock vLLM can carry out, row by id: one node per stage, one tensor parallel degree throughout.

    Throughput 0 where there is none. Unlike the free optimum it can fall when a node is added, since every node
    must be a stage of its own.
    """
    found = Solutions.empty(tree.total, tree.max_nodes)
    out = Placements(found.slot_stage, found.stage_layers, found.stage_quanta)
    equal = split is LatencySplit.EQUAL
    for size in range(1, tree.max_nodes + 1):
        first, last = int(tree.offsets[size]), int(tree.offsets[size + 1])
        solve_single_nodes(table, tree.slots, first, last, size, tp_degree, equal, found.throughput, out)
    return found


def complete_placements(table: NDArray[np.float64], tree: CombinationTree, found: Solutions) -> None:
    """Give every row with a throughput a placement, in place."""
    out = Placements(found.slot_stage, found.stage_layers, found.stage_quanta)
    inherit_placements(table, tree.slots, tree.child, tree.offsets, found.throughput, out)
