"""Best placement that stock vLLM can carry out, compiled: one node per stage, one tensor parallel degree.

With the partition fixed only layers and shares are open. Owns only this search.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_tasks.placement.jit import compiled
from coral_tasks.placement.kernel_common import Placements, fill_members, trim_layers, write_placement
from coral_tasks.placement.kernel_equal import capacity_above
from coral_tasks.placement.kernel_partition import Scratch, climb, new_scratch


@compiled
def has_one_degree(nodes: NDArray[np.int16], size: int, tp_degree: NDArray[np.int64]) -> bool:
    """Whether all nodes use the same tensor parallel degree."""
    for slot in range(1, size):
        if tp_degree[nodes[slot]] != tp_degree[nodes[0]]:
            return False
    return True


@compiled
def equal_shares_of_single_nodes(
    table: NDArray[np.float64], nodes: NDArray[np.int16], size: int, scratch: Scratch
) -> float:
    """Throughput with one node per stage and equal shares, layers and shares filled in; 0 if nothing fits."""
    stages = scratch.stages
    num_layers, num_quanta = table.shape[1], table.shape[2]
    if num_quanta % size:
        return 0.0
    total = 0
    for s in range(size):
        count = fill_members(nodes, size, stages.masks[s], scratch.members)
        stages.shares[s] = num_quanta // size
        stages.layers[s] = capacity_above(table, scratch.members, count, stages.shares[s] - 1, 0.0)
        if stages.layers[s] == 0:
            return 0.0
        total += stages.layers[s]
    if total < num_layers or size > num_layers:
        return 0.0
    return trim_layers(table, nodes, size, stages, size)


@compiled
def solve_single_nodes(
    table: NDArray[np.float64],
    slots: NDArray[np.int16],
    first: int,
    last: int,
    size: int,
    tp_degree: NDArray[np.int64],
    equal: bool,
    best: NDArray[np.float64],
    out: Placements,
) -> None:
    """Optimum of ids ``first`` to ``last`` of ``size`` nodes with one node per stage, by id in ``best`` and ``out``.

    0 where the degrees differ or nothing fits.
    """
    scratch = new_scratch(size, table.shape[2])
    for n in range(first, last):
        nodes = slots[n]
        if not has_one_degree(nodes, size, tp_degree):
            continue
        for slot in range(size):
            scratch.stages.masks[slot] = 1 << slot
        if equal:
            best[n] = equal_shares_of_single_nodes(table, nodes, size, scratch)
            if best[n] > 0:
                write_placement(n, nodes, size, scratch.stages, size, out)
        elif size <= table.shape[1]:
            best[n] = climb(table, nodes, size, size, 0.0, False, scratch, n, out)
