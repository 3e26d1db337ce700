"""Optimum of one partition with free latency shares, compiled (design 2.2).

At a target the most layers that a stage holds with q quanta is a staircase in q; the most layers of all stages within
the budget is a max-plus sum of staircases. Climbing: find layers and shares strictly above the target, take the
throughput they reach as the next target, until there are none. Owns only this search.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coral_tasks.placement.jit import compiled
from coral_tasks.placement.kernel_common import (
    Placements,
    Stages,
    fill_members,
    join_masks,
    stage_value,
    trim_layers,
    write_placement,
)

NEVER = -10_000
"""Stands for "not possible" in sums of layer counts; twice it still fits 16 bits."""


class Scratch(NamedTuple):
    """Working arrays of a climb: the stages; layers by stage and q; the table's value at that many layers; partial
    sums after each stage; configurations of one stage's nodes.
    """

    stages: Stages
    staircase: NDArray[np.int16]
    edge: NDArray[np.float64]
    partial: NDArray[np.int16]
    members: NDArray[np.int64]


@compiled
def padded_width(num_quanta: int) -> int:
    """Row length for q = 0..Q, a multiple of 16 so that whole vectors are worked on."""
    return (num_quanta + 16) // 16 * 16


@compiled
def new_scratch(size: int, num_quanta: int) -> Scratch:
    """Working arrays for lists of ``size`` nodes."""
    width = padded_width(num_quanta)
    return Scratch(
        Stages(np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)),
        np.zeros((size, width), np.int16),
        np.zeros((size, width), np.float64),
        np.zeros((size + 1, width), np.int16),
        np.zeros(size, np.int64),
    )


@compiled
def fill_staircase(
    table: NDArray[np.float64],
    members: NDArray[np.int64],
    count: int,
    target: float,
    strict: bool,
    capacity: NDArray[np.int16],
) -> None:
    """Layers that the members hold at (or, if strict, above) ``target`` with q = 0..Q quanta."""
    num_layers, num_quanta = table.shape[1], table.shape[2]
    capacity[0] = 0
    layer = 0
    for share in range(num_quanta):
        while layer < num_layers:
            value = stage_value(table, members, count, layer, share)
            if value < target or (strict and value == target):
                break
            layer += 1
        capacity[share + 1] = layer


@compiled
def fill_edges(
    table: NDArray[np.float64],
    members: NDArray[np.int64],
    count: int,
    capacity: NDArray[np.int16],
    edge: NDArray[np.float64],
) -> None:
    """The table's value at each step of a staircase; infinite where it holds nothing."""
    for q in range(table.shape[2] + 1):
        edge[q] = np.inf
        if capacity[q] > 0:
            edge[q] = stage_value(table, members, count, capacity[q] - 1, q - 1)


@compiled
def lower_staircase(
    table: NDArray[np.float64],
    members: NDArray[np.int64],
    count: int,
    target: float,
    capacity: NDArray[np.int16],
    edge: NDArray[np.float64],
) -> None:
    """Bring a strict staircase and its edges to a higher target: only steps whose edge is reached change."""
    for q in range(1, table.shape[2] + 1):
        while edge[q] <= target:
            capacity[q] -= 1
            edge[q] = np.inf
            if capacity[q] > 0:
                edge[q] = stage_value(table, members, count, capacity[q] - 1, q - 1)


@compiled
def add_stage(partial: NDArray[np.int16], capacity: NDArray[np.int16], num_quanta: int, out: NDArray[np.int16]) -> None:
    """Most layers within q quanta after one more stage, which may hold none where ``capacity`` says 0."""
    for q in range(num_quanta + 1):
        out[q] = np.int16(max(partial[q] + capacity[0], NEVER))
    for share in range(1, num_quanta + 1):
        layers = capacity[share]
        if layers > capacity[share - 1]:
            shifted = out[share : num_quanta + 1]
            for x in range(num_quanta + 1 - share):
                value = np.int16(partial[x] + layers)
                shifted[x] = max(shifted[x], value)


@compiled
def start_staircases(
    table: NDArray[np.float64],
    nodes: NDArray[np.int16],
    size: int,
    num_stages: int,
    target: float,
    may_merge: bool,
    scratch: Scratch,
) -> None:
    """Strict staircases and edges of all stages. Without merging, holding nothing is not possible."""
    for s in range(num_stages):
        count = fill_members(nodes, size, scratch.stages.masks[s], scratch.members)
        fill_staircase(table, scratch.members, count, target, True, scratch.staircase[s])
        fill_edges(table, scratch.members, count, scratch.staircase[s], scratch.edge[s])
        if not may_merge:
            forbid_empty(scratch.staircase[s], table.shape[2])


@compiled
def forbid_empty(capacity: NDArray[np.int16], num_quanta: int) -> None:
    """Turn 0 layers into "not possible"."""
    for q in range(num_quanta + 1):
        if capacity[q] == 0:
            capacity[q] = NEVER


@compiled
def lower_staircases(
    table: NDArray[np.float64],
    nodes: NDArray[np.int16],
    size: int,
    num_stages: int,
    target: float,
    may_merge: bool,
    scratch: Scratch,
) -> None:
    """Bring all stages to a higher target."""
    for s in range(num_stages):
        count = fill_members(nodes, size, scratch.stages.masks[s], scratch.members)
        lower_staircase(table, scratch.members, count, target, scratch.staircase[s], scratch.edge[s])
        if not may_merge:
            forbid_empty(scratch.staircase[s], table.shape[2])


@compiled
def assign_shares(num_layers: int, num_quanta: int, num_stages: int, scratch: Scratch) -> bool:
    """Share the quanta so that the stages hold the most layers; whether these are L or more."""
    partial, staircase, stages = scratch.partial, scratch.staircase, scratch.stages
    partial[0, : num_quanta + 1] = 0
    for s in range(num_stages):
        add_stage(partial[s], staircase[s], num_quanta, partial[s + 1])
    if partial[num_stages, num_quanta] < num_layers:
        return False
    left = num_quanta
    for s in range(num_stages - 1, -1, -1):
        share = 0
        while staircase[s, share] + partial[s, left - share] != partial[s + 1, left]:
            share += 1
        stages.shares[s], stages.layers[s] = share, staircase[s, share]
        left -= share
    return True


@compiled
def drop_empty_stages(nodes: NDArray[np.int16], size: int, stages: Stages, num_stages: int) -> int:
    """Join the nodes of stages without layers to the first stage that has some; return how many stages are left."""
    masks, layers, shares = stages
    kept, idle = 0, 0
    for s in range(num_stages):
        if layers[s] == 0:
            idle = join_masks(nodes, size, idle, masks[s])
        else:
            masks[kept], layers[kept], shares[kept] = masks[s], layers[s], shares[s]
            kept += 1
    masks[0] = join_masks(nodes, size, masks[0], idle)
    return kept


@compiled
def climb(
    table: NDArray[np.float64],
    nodes: NDArray[np.int16],
    size: int,
    num_stages: int,
    target: float,
    may_merge: bool,
    scratch: Scratch,
    row: int,
    out: Placements,
) -> float:
    """Optimum above ``target`` of the partition in ``scratch.stages.masks``, its placement written to ``row``.

    ``target`` if it has none. With ``may_merge`` a stage that is given no layers is joined to another, which never
    hurts; without it every stage keeps at least one layer.
    """
    num_layers, num_quanta = table.shape[1], table.shape[2]
    start_staircases(table, nodes, size, num_stages, target, may_merge, scratch)
    while assign_shares(num_layers, num_quanta, num_stages, scratch):
        kept = drop_empty_stages(nodes, size, scratch.stages, num_stages)
        target = trim_layers(table, nodes, size, scratch.stages, kept)
        write_placement(row, nodes, size, scratch.stages, kept, out)
        if kept < num_stages:
            num_stages = kept
            start_staircases(table, nodes, size, num_stages, target, may_merge, scratch)
        else:
            lower_staircases(table, nodes, size, num_stages, target, may_merge, scratch)
    return target
