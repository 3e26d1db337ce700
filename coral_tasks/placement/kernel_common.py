"""Compiled pieces that both searches share: pattern of a node list, sub-multisets, stage sums, exact layer splits.

Owns arithmetic only. A stage's throughput is always the sum over its nodes in configuration order, starting at the
first, so that equal stages have bitwise equal values and every comparison can be strict.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_tasks.placement.jit import compiled


@compiled
def pattern_row(slots: NDArray[np.int16], size: int) -> int:
    """Row of the pattern tables for a sorted node list."""
    bits = 0
    for i in range(size - 1):
        if slots[i + 1] == slots[i]:
            bits |= 1 << i
    return (1 << (size - 1)) - 1 + bits


@compiled
def fill_sub_ids(slots: NDArray[np.int16], size: int, child: NDArray[np.int32], sub: NDArray[np.int32]) -> None:
    """Id of the sub-multiset of every mask of a node list, the full one excepted."""
    sub[0] = 0
    for slot in range(size):
        high = 1 << slot
        for low in range(high):
            mask = high | low
            if mask != (1 << size) - 1:
                sub[mask] = child[sub[low], slots[slot]]


@compiled
def best_without_one(sub: NDArray[np.int32], size: int, values: NDArray[np.float64]) -> float:
    """Most throughput of the list without one of its nodes: adding a node never hurts."""
    full = (1 << size) - 1
    best = 0.0
    for slot in range(size):
        if size > 1:
            best = max(best, values[sub[full ^ (1 << slot)]])
    return best


@compiled
def stage_value(
    table: NDArray[np.float64], slots: NDArray[np.int16], size: int, mask: int, layer: int, share: int
) -> float:
    """Throughput of the nodes of ``mask`` with ``layer + 1`` layers and ``share + 1`` quanta."""
    total = 0.0
    for slot in range(size):
        if mask >> slot & 1:
            total += table[slots[slot], layer, share]
    return total


@compiled
def trim_layers(
    table: NDArray[np.float64],
    slots: NDArray[np.int16],
    size: int,
    masks: NDArray[np.int64],
    layers: NDArray[np.int64],
    shares: NDArray[np.int64],
    num_stages: int,
) -> float:
    """Take surplus layers away, always from the slowest stage; return the throughput reached.

    ``layers``: layers of each stage, at least 1, L or more in all; changed in place to L in all. ``shares``: quanta.
    With shares fixed the result is optimal: what remains are the L largest values of the stages' merged lists.
    """
    num_layers = table.shape[1]
    surplus = -num_layers
    values = np.empty(num_stages)
    for s in range(num_stages):
        surplus += layers[s]
        values[s] = stage_value(table, slots, size, masks[s], layers[s] - 1, shares[s] - 1)
    while surplus > 0:
        slowest = -1
        for s in range(num_stages):
            if layers[s] > 1 and (slowest < 0 or values[s] < values[slowest]):
                slowest = s
        layers[slowest] -= 1
        surplus -= 1
        values[slowest] = stage_value(table, slots, size, masks[slowest], layers[slowest] - 1, shares[slowest] - 1)
    best = np.inf
    for s in range(num_stages):
        best = min(best, values[s])
    return best


@compiled
def join_masks(nodes: NDArray[np.int16], size: int, left: int, right: int) -> int:
    """Mask of the multiset union: canonical masks of two stages may share the first slots of a run of equal nodes."""
    for slot in range(size):
        if right >> slot & 1:
            for free in range(size):
                if nodes[free] == nodes[slot] and not left >> free & 1:
                    left |= 1 << free
                    break
    return left


@compiled
def write_placement(
    row: int,
    nodes: NDArray[np.int16],
    size: int,
    masks: NDArray[np.int64],
    layers: NDArray[np.int64],
    shares: NDArray[np.int64],
    num_stages: int,
    out: tuple[NDArray[np.int8], NDArray[np.int16], NDArray[np.int16]],
) -> None:
    """Store stage of each slot, layers and quanta of each stage in row ``row`` of the three output arrays.

    Masks are canonical, so equal nodes of different stages may name the same slot: each takes the next free one.
    """
    slot_stage, stage_layers, stage_quanta = out
    slot_stage[row, :] = -1
    stage_layers[row, :] = 0
    stage_quanta[row, :] = 0
    for s in range(num_stages):
        stage_layers[row, s] = layers[s]
        stage_quanta[row, s] = shares[s]
        for slot in range(size):
            if masks[s] >> slot & 1:
                for free in range(size):
                    if slot_stage[row, free] < 0 and nodes[free] == nodes[slot]:
                        slot_stage[row, free] = s
                        break
