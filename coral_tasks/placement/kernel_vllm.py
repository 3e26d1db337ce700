"""Best placement that stock vLLM can carry out, compiled: one node per stage, one tensor parallel degree.

With the partition fixed only layers and shares are open. Owns only this search.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_tasks.placement.jit import compiled
from coral_tasks.placement.kernel_common import trim_layers, write_placement
from coral_tasks.placement.kernel_equal import capacity_above
from coral_tasks.placement.kernel_free import climb


@compiled
def has_one_degree(nodes: NDArray[np.int16], size: int, tp_degree: NDArray[np.int64]) -> bool:
    """Whether all nodes use the same tensor parallel degree."""
    for slot in range(1, size):
        if tp_degree[nodes[slot]] != tp_degree[nodes[0]]:
            return False
    return True


@compiled
def equal_shares_of_single_nodes(
    table: NDArray[np.float64],
    nodes: NDArray[np.int16],
    size: int,
    stages: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
) -> float:
    """Throughput with one node per stage and equal shares, layers and shares filled in; 0 if nothing fits."""
    masks, layers, shares = stages
    num_layers, num_quanta = table.shape[1], table.shape[2]
    if num_quanta % size:
        return 0.0
    total = 0
    for s in range(size):
        shares[s] = num_quanta // size
        layers[s] = capacity_above(table, nodes, size, masks[s], shares[s] - 1, 0.0, num_layers)
        if layers[s] == 0:
            return 0.0
        total += layers[s]
    if total < num_layers or size > num_layers:
        return 0.0
    return trim_layers(table, nodes, size, masks, layers, shares, size)


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
    out: tuple[NDArray[np.int8], NDArray[np.int16], NDArray[np.int16]],
) -> None:
    """Optimum of ids ``first`` to ``last`` of ``size`` nodes with one node per stage, by id in ``best`` and ``out``.

    0 where the degrees differ or nothing fits.
    """
    width = (table.shape[2] + 16) // 16 * 16
    work = (np.zeros((size, width), dtype=np.int16), np.zeros((size + 1, width), dtype=np.int16))
    stages = (np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64))
    for n in range(first, last):
        nodes = slots[n]
        if not has_one_degree(nodes, size, tp_degree):
            continue
        for slot in range(size):
            stages[0][slot] = 1 << slot
        if equal:
            best[n] = equal_shares_of_single_nodes(table, nodes, size, stages)
            if best[n] > 0:
                write_placement(n, nodes, size, stages[0], stages[1], stages[2], size, out)
        elif size <= table.shape[1]:
            best[n] = climb(table, nodes, size, stages, size, 0.0, False, work, n, out)
