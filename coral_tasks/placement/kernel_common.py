"""Compiled pieces that both searches share: pattern of a node list, sub-multisets, stage sums, exact layer splits.

Owns arithmetic only. A stage's throughput is always the sum over its nodes in configuration order, starting at the
first, so that equal stages have bitwise equal values and every comparison can be strict.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coral_tasks.placement.jit import compiled


class Stages(NamedTuple):
    """Stages of one node list: canonical mask of its nodes, layers, quanta."""

    masks: NDArray[np.int64]
    layers: NDArray[np.int64]
    shares: NDArray[np.int64]


class Placements(NamedTuple):
    """Output rows, see ``search.Solutions``."""

    slot_stage: NDArray[np.int8]
    stage_layers: NDArray[np.int16]
    stage_quanta: NDArray[np.int16]


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
def fill_members(nodes: NDArray[np.int16], size: int, mask: int, members: NDArray[np.int64]) -> int:
    """Configurations of the nodes of ``mask``, in order; returns how many there are."""
    count = 0
    for slot in range(size):
        if mask >> slot & 1:
            members[count] = nodes[slot]
            count += 1
    return count


@compiled
def stage_value(table: NDArray[np.float64], members: NDArray[np.int64], count: int, layer: int, share: int) -> float:
    """Throughput of the first ``count`` members with ``layer + 1`` layers and ``share + 1`` quanta."""
    total = 0.0
    for i in range(count):
        total += table[members[i], layer, share]
    return total


@compiled
def trim_layers(
    table: NDArray[np.float64], nodes: NDArray[np.int16], size: int, stages: Stages, num_stages: int
) -> float:
    """Take surplus layers away, always from the slowest stage; return the throughput reached.

    Layers of each stage must be at least 1, and L or more in all; they are changed in place to L in all. With shares
    fixed the result is optimal: what remains are the L largest values of the stages' merged lists.
    """
    surplus = -table.shape[1]
    members = np.empty(size, dtype=np.int64)
    values = np.empty(num_stages)
    for s in range(num_stages):
        surplus += stages.layers[s]
        count = fill_members(nodes, size, stages.masks[s], members)
        values[s] = stage_value(table, members, count, stages.layers[s] - 1, stages.shares[s] - 1)
    while surplus > 0:
        slowest = -1
        for s in range(num_stages):
            if stages.layers[s] > 1 and (slowest < 0 or values[s] < values[slowest]):
                slowest = s
        stages.layers[slowest] -= 1
        surplus -= 1
        count = fill_members(nodes, size, stages.masks[slowest], members)
        values[slowest] = stage_value(table, members, count, stages.layers[slowest] - 1, stages.shares[slowest] - 1)
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
    row: int, nodes: NDArray[np.int16], size: int, stages: Stages, num_stages: int, out: Placements
) -> None:
    """Store stage of each slot, layers and quanta of each stage in row ``row`` of the output.

    Masks are canonical, so equal nodes of different stages may name the same slot: each takes the next free one.
    """
    out.slot_stage[row, :] = -1
    out.stage_layers[row, :] = 0
    out.stage_quanta[row, :] = 0
    for s in range(num_stages):
        out.stage_layers[row, s] = stages.layers[s]
        out.stage_quanta[row, s] = stages.shares[s]
        for slot in range(size):
            if stages.masks[s] >> slot & 1:
                for free in range(size):
                    if out.slot_stage[row, free] < 0 and nodes[free] == nodes[slot]:
                        out.slot_stage[row, free] = s
                        break
