"""Exact search with equal latency shares, compiled (paper 4.2; design 2.2).

For one multiset: start at the best value with one node fewer; for each number of stages S that divides Q ask whether
any partition lies strictly above, i.e. whether the stages' layer capacities at that target add up to L; take the
partition with the most layers, climb to its exact optimum and ask again. Owns only this search.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_tasks.placement.jit import compiled
from coral_tasks.placement.kernel_common import (
    Placements,
    Stages,
    best_without_one,
    fill_members,
    fill_sub_ids,
    pattern_row,
    stage_value,
    trim_layers,
    write_placement,
)


@compiled
def capacity_above(
    table: NDArray[np.float64], members: NDArray[np.int64], count: int, share: int, target: float
) -> int:
    """Most layers that the first ``count`` members hold strictly above ``target`` with ``share + 1`` quanta."""
    low, high = 0, table.shape[1]
    while low < high:
        middle = (low + high) >> 1
        if stage_value(table, members, count, middle, share) > target:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def hopeless(bound: NDArray[np.float64], slots: NDArray[np.int16], size: int, num_layers: int) -> bool:
    """Whether the nodes' bounds on the layers they can carry do not add up to L."""
    total = 0.0
    for slot in range(size):
        total += bound[slots[slot]]
    return total < num_layers - 1e-6  # rounding of the bounds must never reject what just fits


@compiled
def bound_level(target: float, levels: NDArray[np.float64]) -> int:
    """Index of the largest level at or below ``target``; 0 if there is none, where bounds are widest."""
    low, high = 0, len(levels)
    while low + 1 < high:
        middle = (low + high) >> 1
        if levels[middle] <= target:
            low = middle
        else:
            high = middle
    return low


@compiled
def fill_layer_bounds(table: NDArray[np.float64], levels: NDArray[np.float64], bound: NDArray[np.float64]) -> None:
    """Write max over j of j * min(1, T[c, j, Q/S] / level) to ``bound`` [K, N + 1, C] for every S that divides Q."""
    count, num_layers, num_quanta = table.shape
    for stages in range(1, bound.shape[1]):
        if num_quanta % stages == 0:
            share = num_quanta // stages - 1
            for k in range(len(levels)):
                for c in range(count):
                    for layer in range(num_layers):
                        part = (layer + 1) * min(1.0, table[c, layer, share] / levels[k])
                        bound[k, stages, c] = max(bound[k, stages, c], part)


@compiled
def most_layers(
    part_mask: NDArray[np.uint16], first: int, last: int, num_stages: int, capacity: NDArray[np.int64]
) -> tuple[int, int]:
    """Partition with the largest sum of capacities, stages without any capacity excluded: (row, sum)."""
    best_row, best_sum = -1, 0
    for row in range(first, last):
        total = 0
        for s in range(num_stages):
            one = capacity[part_mask[row, s]]
            if one == 0:
                total = 0
                break
            total += one
        if total > best_sum:
            best_row, best_sum = row, total
    return best_row, best_sum


@compiled
def solve_equal(
    table: NDArray[np.float64],
    slots: NDArray[np.int16],
    child: NDArray[np.int32],
    first: int,
    last: int,
    size: int,
    values: NDArray[np.float64],
    patterns: tuple[NDArray[np.int32], NDArray[np.uint16]],
    bounds: tuple[NDArray[np.float64], NDArray[np.float64]],
    best: NDArray[np.float64],
    out: Placements,
) -> None:
    """Optimum of the multisets ``first`` to ``last``, all of ``size`` nodes.

    ``values``: optimum by id of everything smaller. ``patterns``: part_ptr, part_mask. ``bounds``: rising levels [K]
    and, per number of stages, the layers a node can carry at most, [K, size + 1, C]. Results go to ``best`` and
    ``out``, row 0 for ``first``; a row whose optimum is that of one node fewer keeps slot_stage -1.
    """
    part_ptr, part_mask = patterns
    levels, node_bound = bounds
    num_layers, num_quanta = table.shape[1], table.shape[2]
    sub = np.empty(1 << size, dtype=np.int32)
    capacity = np.zeros(1 << size, dtype=np.int64)
    stage_of = np.zeros(1 << size, dtype=np.int64)
    members = np.zeros(size, dtype=np.int64)
    stages = Stages(np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64))
    stamp = 0
    for n in range(first, last):
        nodes = slots[n]
        row = pattern_row(nodes, size)
        fill_sub_ids(nodes, size, child, sub)
        target = best_without_one(sub, size, values)
        for num_stages in range(1, min(size, num_layers) + 1):
            if num_quanta % num_stages:
                continue
            share = num_quanta // num_stages
            while not hopeless(node_bound[bound_level(target, levels), num_stages], nodes, size, num_layers):
                stamp += 1
                start, end = part_ptr[row, num_stages], part_ptr[row, num_stages + 1]
                for part in range(start, end):
                    for s in range(num_stages):
                        mask = part_mask[part, s]
                        if stage_of[mask] != stamp:
                            stage_of[mask] = stamp
                            count = fill_members(nodes, size, mask, members)
                            capacity[mask] = capacity_above(table, members, count, share - 1, target)
                part, total = most_layers(part_mask, start, end, num_stages, capacity)
                if total < num_layers:
                    break
                for s in range(num_stages):
                    stages.masks[s] = part_mask[part, s]
                    stages.layers[s] = capacity[part_mask[part, s]]
                    stages.shares[s] = share
                target = trim_layers(table, nodes, size, stages, num_stages)
                write_placement(n - first, nodes, size, stages, num_stages, out)
        best[n - first] = target
