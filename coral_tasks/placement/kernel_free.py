"""Exact search with free latency shares, compiled (design 2.2).

Targets lie on a grid of levels. At one level, for every multiset A, ``reach`` says how many layers A can hold within q
quanta; it follows from the capacity staircases of its blocks by max-plus sums and is shared by all multisets that
contain A, so that "can n reach this level?" costs a few dozen short vector sums. Each multiset climbs level by level
until it fails; its optimum then lies between two levels. It is made exact by a depth-first walk over the partitions,
with the capacities of the lower level as bounds, that looks for anything strictly above the best value so far. No
tolerance is used anywhere. A stage may hold no layers inside the search: its nodes can join another stage, which
never hurts.

Owns only this search.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coral_tasks.placement.jit import compiled
from coral_tasks.placement.kernel_common import (
    best_without_one,
    fill_sub_ids,
    join_masks,
    pattern_row,
    stage_value,
    trim_layers,
    write_placement,
)
from coral_tasks.placement.kernel_equal import bound_level

NEVER = -10_000
"""Stands for "not possible" in sums of layer counts; twice it still fits 16 bits."""

Memo = tuple[NDArray[np.int32], NDArray[np.int16], NDArray[np.int16], NDArray[np.int16], NDArray[np.int16]]
"""By generation and id: level stamp; capacity at q quanta [W]; reach with Q - q quanta [W]; jumps' count and q [W]."""


@compiled
def fill_staircase(
    table: NDArray[np.float64],
    slots: NDArray[np.int16],
    size: int,
    mask: int,
    target: float,
    strict: bool,
    capacity: NDArray[np.int16],
) -> None:
    """Layers that the nodes of ``mask`` hold at (or, if strict, above) ``target`` with q = 0..Q quanta."""
    num_layers, num_quanta = table.shape[1], table.shape[2]
    capacity[0] = 0
    layer = 0
    for share in range(num_quanta):
        while layer < num_layers:
            value = stage_value(table, slots, size, mask, layer, share)
            if value < target or (strict and value == target):
                break
            layer += 1
        capacity[share + 1] = layer


@compiled
def fill_memo(
    table: NDArray[np.float64],
    nodes: NDArray[np.int16],
    size: int,
    row: int,
    sub: NDArray[np.int32],
    splits: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16], NDArray[np.uint16]],
    level: int,
    target: float,
    memo: Memo,
    padded: NDArray[np.int16],
) -> None:
    """Make sure that the memo of ``level`` holds every proper sub-multiset of the list."""
    entry, split_ptr, split_block, split_rest = splits
    stamp, capacity, reach, num_jumps, jumps = memo
    num_quanta = table.shape[2]
    width = capacity.shape[2]
    g = level & 1
    for mask in range(1, (1 << size) - 1):
        e = entry[row, mask]
        if e < 0 or stamp[g, sub[mask]] == level:
            continue
        a = sub[mask]
        stamp[g, a] = level
        fill_staircase(table, nodes, size, mask, target, False, capacity[g, a])
        count = 0
        for q in range(1, num_quanta + 1):
            if capacity[g, a, q] > capacity[g, a, q - 1]:
                jumps[g, a, count] = q
                count += 1
        num_jumps[g, a] = count
        out = reach[g, a]
        for q in range(num_quanta + 1):
            out[q] = capacity[g, a, num_quanta - q]
        for i in range(split_ptr[e] + 1, split_ptr[e + 1]):
            b, r = sub[split_block[i]], sub[split_rest[i]]
            padded[:width] = reach[g, r]
            for jump in range(num_jumps[g, b]):
                q = int(jumps[g, b, jump])
                layers = capacity[g, b, q]
                shifted = padded[q : q + width]
                for x in range(width):
                    value = np.int16(shifted[x] + layers)
                    out[x] = max(out[x], value)


@compiled
def most_in_split(capacity: NDArray[np.int16], reach: NDArray[np.int16]) -> int:
    """Most layers of a block and a rest over all ways to share the quanta."""
    best = np.int16(NEVER)
    for q in range(len(capacity)):
        value = np.int16(capacity[q] + reach[q])
        best = max(best, value)
    return int(best)


@compiled
def reaches(
    table: NDArray[np.float64],
    nodes: NDArray[np.int16],
    size: int,
    row: int,
    sub: NDArray[np.int32],
    splits: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16], NDArray[np.uint16]],
    level: int,
    target: float,
    memo: Memo,
) -> bool:
    """Whether the list reaches ``target``, the memo of that level being filled."""
    entry, split_ptr, split_block, split_rest = splits
    _, capacity, reach, _, _ = memo
    num_layers, num_quanta = table.shape[1], table.shape[2]
    full = (1 << size) - 1
    if stage_value(table, nodes, size, full, num_layers - 1, num_quanta - 1) >= target:
        return True
    g = level & 1
    e = entry[row, full]
    for i in range(split_ptr[e] + 1, split_ptr[e + 1]):
        b, r = sub[split_block[i]], sub[split_rest[i]]
        if most_in_split(capacity[g, b], reach[g, r]) >= num_layers:
            return True
    return False


@compiled
def add_stage(partial: NDArray[np.int16], capacity: NDArray[np.int16], num_quanta: int, out: NDArray[np.int16]) -> None:
    """Most layers within q quanta after one more stage; ``capacity[0]`` counts only where it is not NEVER."""
    for q in range(num_quanta + 1):
        out[q] = np.int16(max(partial[q] + capacity[0], NEVER))
    for share in range(1, num_quanta + 1):
        layers = capacity[share]
        if layers > capacity[share - 1]:
            target = out[share : num_quanta + 1]
            for x in range(num_quanta + 1 - share):
                value = np.int16(partial[x] + layers)
                target[x] = max(target[x], value)


@compiled
def assign_shares(
    table: NDArray[np.float64],
    nodes: NDArray[np.int16],
    size: int,
    stages: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    num_stages: int,
    target: float,
    may_merge: bool,
    work: tuple[NDArray[np.int16], NDArray[np.int16]],
) -> tuple[float, int]:
    """Find layers and shares of fixed stages strictly above ``target``: (throughput, stages), (0, 0) if none.

    ``stages``: masks, layers, shares, filled in place. With ``may_merge`` a stage that is given no layers is joined
    to another; without it every stage keeps at least one layer.
    """
    masks, layers, shares = stages
    staircase, partial = work
    num_layers, num_quanta = table.shape[1], table.shape[2]
    partial[0, : num_quanta + 1] = 0
    for s in range(num_stages):
        fill_staircase(table, nodes, size, masks[s], target, True, staircase[s])
        if not may_merge:
            for q in range(num_quanta + 1):
                if staircase[s, q] == 0:
                    staircase[s, q] = NEVER
        add_stage(partial[s], staircase[s], num_quanta, partial[s + 1])
    if partial[num_stages, num_quanta] < num_layers:
        return 0.0, 0
    left = num_quanta
    while left > 0 and partial[num_stages, left - 1] >= num_layers:
        left -= 1
    for s in range(num_stages - 1, -1, -1):
        share = 0
        while staircase[s, share] + partial[s, left - share] != partial[s + 1, left]:
            share += 1
        shares[s], layers[s] = share, staircase[s, share]
        left -= share
    kept = drop_empty_stages(nodes, size, masks, layers, shares, num_stages)
    return trim_layers(table, nodes, size, masks, layers, shares, kept), kept


@compiled
def drop_empty_stages(
    nodes: NDArray[np.int16],
    size: int,
    masks: NDArray[np.int64],
    layers: NDArray[np.int64],
    shares: NDArray[np.int64],
    num_stages: int,
) -> int:
    """Join the nodes of stages without layers to the first stage that has some; return how many stages are left."""
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
    stages: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    num_stages: int,
    target: float,
    may_merge: bool,
    work: tuple[NDArray[np.int16], NDArray[np.int16]],
    row: int,
    out: tuple[NDArray[np.int8], NDArray[np.int16], NDArray[np.int16]],
) -> float:
    """Optimum of one partition above ``target``, its placement written to ``row``; ``target`` if it has none."""
    while True:
        value, kept = assign_shares(table, nodes, size, stages, num_stages, target, may_merge, work)
        if kept == 0:
            return target
        num_stages, target = kept, value
        write_placement(row, nodes, size, stages[0], stages[1], stages[2], kept, out)


@compiled
def improve(
    table: NDArray[np.float64],
    nodes: NDArray[np.int16],
    size: int,
    row: int,
    sub: NDArray[np.int32],
    splits: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16], NDArray[np.uint16]],
    g: int,
    target: float,
    first_only: bool,
    memo: Memo,
    walk: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int16], NDArray[np.int16], NDArray[np.int64]],
    stages: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    work: tuple[NDArray[np.int16], NDArray[np.int16]],
    out_row: int,
    out: tuple[NDArray[np.int8], NDArray[np.int16], NDArray[np.int16]],
) -> float:
    """Best value strictly above ``target`` over all partitions, or ``target`` if there is none.

    The memo of generation ``g`` must hold a level at or below anything above ``target``: its capacities are bounds.
    ``walk``: rest masks and split positions by depth, exact staircases by mask, partial sums by depth, stamps.
    """
    entry, split_ptr, split_block, split_rest = splits
    _, capacity, reach, _, _ = memo
    rest_of, position, exact, partial, stamp = walk
    num_layers, num_quanta = table.shape[1], table.shape[2]
    full = (1 << size) - 1
    single = stage_value(table, nodes, size, full, num_layers - 1, num_quanta - 1)
    if single > target:
        stages[0][0] = full
        target = climb(table, nodes, size, stages, 1, target, True, work, out_row, out)
        if first_only:
            return target
    version = stamp[0] + 1
    depth = 0
    rest_of[0] = full
    position[0] = split_ptr[entry[row, full]] + 1
    while depth >= 0:
        e = entry[row, rest_of[depth]]
        i = position[depth]
        if i == split_ptr[e + 1]:
            depth -= 1
            continue
        position[depth] = i + 1
        block, rest = int(split_block[i]), int(split_rest[i])
        b = sub[block]
        if depth == 0 and most_in_split(capacity[g, b], reach[g, sub[rest]]) < num_layers:
            continue
        if stamp[block] != version:
            stamp[block] = version
            fill_staircase(table, nodes, size, block, target, True, exact[block])
        if depth == 0:
            partial[1] = exact[block]
        else:
            add_stage(partial[depth], exact[block], num_quanta, partial[depth + 1])
        stages[0][depth] = block
        if rest:
            if most_in_split(partial[depth + 1], reach[g, sub[rest]]) >= num_layers:
                depth += 1
                rest_of[depth] = rest
                position[depth] = split_ptr[entry[row, rest]]
            continue
        if partial[depth + 1, num_quanta] < num_layers:
            continue
        for d in range(depth + 1):
            work_mask = stages[0][d]
            rest_of[size + 1 + d] = work_mask
        value = climb(table, nodes, size, stages, depth + 1, target, True, work, out_row, out)
        for d in range(depth + 1):
            stages[0][d] = rest_of[size + 1 + d]
        if value > target:
            target = value
            version += 1
            if first_only:
                break
    stamp[0] = version
    return target


@compiled
def solve_free(
    table: NDArray[np.float64],
    slots: NDArray[np.int16],
    child: NDArray[np.int32],
    first: int,
    last: int,
    size: int,
    values: NDArray[np.float64],
    splits: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16], NDArray[np.uint16]],
    levels: NDArray[np.float64],
    best: NDArray[np.float64],
    out: tuple[NDArray[np.int8], NDArray[np.int16], NDArray[np.int16]],
) -> None:
    """Optimum of the multisets ``first`` to ``last``, all of ``size`` nodes; arguments as ``solve_equal``.

    ``levels``: rising grid from the smallest positive entry to beyond any reachable sum.
    """
    num_quanta = table.shape[2]
    width = (num_quanta + 16) // 16 * 16
    num_ids = len(values)
    memo = (
        np.full((2, num_ids), -2, dtype=np.int32),
        np.full((2, num_ids, width), NEVER, dtype=np.int16),
        np.full((2, num_ids, width), NEVER, dtype=np.int16),
        np.zeros((2, num_ids), dtype=np.int16),
        np.zeros((2, num_ids, width), dtype=np.int16),
    )
    padded = np.full(2 * width, NEVER, dtype=np.int16)
    walk = (
        np.zeros(2 * size + 2, dtype=np.int64),
        np.zeros(size + 1, dtype=np.int64),
        np.full((1 << size, width), NEVER, dtype=np.int16),
        np.full((size + 2, width), NEVER, dtype=np.int16),
        np.zeros(1 << size, dtype=np.int64),
    )
    work = (np.zeros((size, width), dtype=np.int16), np.zeros((size + 1, width), dtype=np.int16))
    stages = (np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64))
    sub = np.empty(1 << size, dtype=np.int32)
    done = -5
    at = np.empty(last - first, dtype=np.int64)
    for n in range(first, last):
        fill_sub_ids(slots[n], size, child, sub)
        low = best_without_one(sub, size, values)
        best[n - first] = low
        at[n - first] = bound_level(low, levels) if low > 0 else -1
    for level in range(-1, len(levels) - 1):
        for n in range(first, last):
            if at[n - first] != level:
                continue
            nodes = slots[n]
            row = pattern_row(nodes, size)
            fill_sub_ids(nodes, size, child, sub)
            low = best[n - first]
            fill_memo(table, nodes, size, row, sub, splits, level + 1, levels[level + 1], memo, padded)
            if reaches(table, nodes, size, row, sub, splits, level + 1, levels[level + 1], memo):
                if level < 0:
                    low = improve(
                        table, nodes, size, row, sub, splits, 0, 0.0, True, memo, walk, stages, work, n - first, out
                    )
                    best[n - first] = low
                    at[n - first] = bound_level(low, levels)
                else:
                    at[n - first] = level + 1
                continue
            at[n - first] = done
            if level < 0:
                continue
            fill_memo(table, nodes, size, row, sub, splits, level, levels[level], memo, padded)
            known = max(low, np.nextafter(levels[level], 0.0))
            value = improve(
                table, nodes, size, row, sub, splits, level & 1, known, False, memo, walk, stages, work, n - first, out
            )
            if value > known:
                best[n - first] = value
