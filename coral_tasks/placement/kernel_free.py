"""Exact search with free latency shares, compiled (design 2.2).

Targets lie on a grid of levels. At one level, for every small multiset A, ``most`` says how many layers A can hold
within q quanta; it follows from the capacity staircases of its blocks by max-plus sums and is shared by all multisets
that contain A, so that "can n reach this level?" costs a few dozen short vector sums. Each multiset climbs level by
level until it fails; its optimum then lies between two levels. It is made exact by a depth-first walk over the
partitions, with the capacities of the lower level as bounds, that looks for anything strictly above the best value so
far. No tolerance is used anywhere. A stage may hold no layers inside the search: its nodes can join another stage,
which never hurts.

Owns only this search.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coral_tasks.placement.jit import compiled
from coral_tasks.placement.kernel_common import (
    Placements,
    best_without_one,
    fill_members,
    fill_sub_ids,
    pattern_row,
    stage_value,
)
from coral_tasks.placement.kernel_equal import bound_level
from coral_tasks.placement.kernel_partition import (
    NEVER,
    Scratch,
    add_stage,
    climb,
    fill_staircase,
    new_scratch,
    padded_width,
)

SHARED_SIZE = (0, 0, 1, 2, 2, 3, 4, 4, 5)
"""By list length N: largest multisets whose ``most`` is needed to judge the list. Every partition of N nodes either
has one block so large that the rest is at most this size, or can be cut in two groups of blocks of at most this size.
"""

PRUNED, DEEPER, COMPLETE = 0, 1, 2


class Splits(NamedTuple):
    """See ``patterns.PatternTables``."""

    entry: NDArray[np.int32]
    split_ptr: NDArray[np.int32]
    split_block: NDArray[np.uint16]
    split_rest: NDArray[np.uint16]


class Case(NamedTuple):
    """One node list: the table, its nodes and their number, its pattern row, ids of its sub-multisets by mask."""

    table: NDArray[np.float64]
    nodes: NDArray[np.int16]
    size: int
    row: int
    sub: NDArray[np.int32]


class Memo(NamedTuple):
    """By generation (level modulo 2) and id: which level is held; capacity with q quanta, [W]; and, up to the shared
    size only, most layers with q quanta and with Q - q quanta, and the jumps of the capacity, their count and q.
    """

    stamp: NDArray[np.int32]
    capacity: NDArray[np.int16]
    most: NDArray[np.int16]
    reach: NDArray[np.int16]
    num_jumps: NDArray[np.int16]
    jumps: NDArray[np.int16]
    padded: NDArray[np.int16]


class Walk(NamedTuple):
    """State of the walk over partitions: rest mask, position among its splits, block and partial sum by depth;
    exact staircases by mask, and for which version of the target they were made (entry 0 is the newest version).
    """

    rest_of: NDArray[np.int64]
    position: NDArray[np.int64]
    blocks: NDArray[np.int64]
    partial: NDArray[np.int16]
    exact: NDArray[np.int16]
    stamp: NDArray[np.int64]


@compiled
def new_memo(num_ids: int, num_shared: int, num_quanta: int) -> Memo:
    """An empty memo; -2 is no level."""
    width = padded_width(num_quanta)
    return Memo(
        np.full((2, num_ids), -2, dtype=np.int32),
        np.full((2, num_ids, width), NEVER, dtype=np.int16),
        np.full((2, num_shared, width), NEVER, dtype=np.int16),
        np.full((2, num_shared, width), NEVER, dtype=np.int16),
        np.zeros((2, num_shared), dtype=np.int16),
        np.zeros((2, num_shared, width), dtype=np.int16),
        np.full(2 * width, NEVER, dtype=np.int16),
    )


@compiled
def new_walk(size: int, num_quanta: int) -> Walk:
    """Arrays for lists of ``size`` nodes."""
    width = padded_width(num_quanta)
    return Walk(
        np.zeros(size + 1, dtype=np.int64),
        np.zeros(size + 1, dtype=np.int64),
        np.zeros(size + 1, dtype=np.int64),
        np.full((size + 2, width), NEVER, dtype=np.int16),
        np.full((1 << size, width), NEVER, dtype=np.int16),
        np.zeros(1 << size, dtype=np.int64),
    )


@compiled
def fill_memo(case: Case, splits: Splits, level: int, target: float, memo: Memo, members: NDArray[np.int64]) -> None:
    """Make sure that the memo of ``level`` holds every proper sub-multiset of the list."""
    g = level & 1
    for mask in range(1, (1 << case.size) - 1):
        e = splits.entry[case.row, mask]
        if e < 0 or memo.stamp[g, case.sub[mask]] == level:
            continue
        a = case.sub[mask]
        memo.stamp[g, a] = level
        count = fill_members(case.nodes, case.size, mask, members)
        fill_staircase(case.table, members, count, target, False, memo.capacity[g, a])
        if a < memo.most.shape[1]:
            fill_most(case, splits, e, g, memo)


@compiled
def fill_most(case: Case, splits: Splits, e: int, g: int, memo: Memo) -> None:
    """Jumps and most layers of the multiset at split entry ``e``, from those of its parts."""
    num_quanta = case.table.shape[2]
    a = case.sub[splits.split_block[splits.split_ptr[e]]]
    capacity, out = memo.capacity[g, a], memo.reach[g, a]
    count = 0
    for q in range(1, num_quanta + 1):
        if capacity[q] > capacity[q - 1]:
            memo.jumps[g, a, count] = q
            count += 1
    memo.num_jumps[g, a] = count
    for q in range(num_quanta + 1):
        out[q] = capacity[num_quanta - q]
    for i in range(splits.split_ptr[e] + 1, splits.split_ptr[e + 1]):
        add_split(case.sub[splits.split_block[i]], case.sub[splits.split_rest[i]], g, memo, out)
    for q in range(num_quanta + 1):
        memo.most[g, a, q] = out[num_quanta - q]


@compiled
def add_split(b: int, r: int, g: int, memo: Memo, out: NDArray[np.int16]) -> None:
    """Raise ``out`` (by quanta left over) to what block ``b`` with rest ``r`` can hold."""
    width = len(out)
    memo.padded[:width] = memo.reach[g, r]
    for jump in range(memo.num_jumps[g, b]):
        q = int(memo.jumps[g, b, jump])
        layers = memo.capacity[g, b, q]
        shifted = memo.padded[q : q + width]
        for x in range(width):
            value = np.int16(shifted[x] + layers)
            out[x] = max(out[x], value)


@compiled
def most_in_split(layers: NDArray[np.int16], reach: NDArray[np.int16]) -> int:
    """Most layers of two parts over all ways to share the quanta: with q quanta, and with the Q - q that are left."""
    best = np.int16(NEVER)
    for q in range(len(layers)):
        value = np.int16(layers[q] + reach[q])
        best = max(best, value)
    return int(best)


@compiled
def single_stage(case: Case, members: NDArray[np.int64]) -> float:
    """Throughput of all nodes in one stage."""
    count = fill_members(case.nodes, case.size, (1 << case.size) - 1, members)
    return stage_value(case.table, members, count, case.table.shape[1] - 1, case.table.shape[2] - 1)


@compiled
def reaches(case: Case, splits: Splits, level: int, target: float, memo: Memo, members: NDArray[np.int64]) -> bool:
    """Whether the list reaches ``target``, the memo of that level being filled."""
    if single_stage(case, members) >= target:
        return True
    g = level & 1
    num_shared = memo.most.shape[1]
    e = splits.entry[case.row, (1 << case.size) - 1]
    for i in range(splits.split_ptr[e] + 1, splits.split_ptr[e + 1]):
        b, r = case.sub[splits.split_block[i]], case.sub[splits.split_rest[i]]
        if r >= num_shared:
            b, r = r, b
        part = memo.most[g, b] if b < num_shared else memo.capacity[g, b]
        if most_in_split(part, memo.reach[g, r]) >= case.table.shape[1]:
            return True
    return False


@compiled
def extend(
    case: Case, splits: Splits, g: int, depth: int, target: float, memo: Memo, walk: Walk, members: NDArray[np.int64]
) -> int:
    """Take the next block at ``depth``: PRUNED, DEEPER (partial sum made), COMPLETE (a partition that may do)."""
    num_layers, num_quanta = case.table.shape[1], case.table.shape[2]
    i = walk.position[depth]
    walk.position[depth] = i + 1
    block, rest = int(splits.split_block[i]), int(splits.split_rest[i])
    b, r = case.sub[block], case.sub[rest]
    bounded = rest != 0 and r < memo.reach.shape[1]
    if depth == 0 and bounded and most_in_split(memo.capacity[g, b], memo.reach[g, r]) < num_layers:
        return PRUNED
    if walk.stamp[block] != walk.stamp[0]:
        walk.stamp[block] = walk.stamp[0]
        count = fill_members(case.nodes, case.size, block, members)
        fill_staircase(case.table, members, count, target, True, walk.exact[block])
    if depth == 0:
        walk.partial[1] = walk.exact[block]
    else:
        add_stage(walk.partial[depth], walk.exact[block], num_quanta, walk.partial[depth + 1])
    walk.blocks[depth] = block
    if rest == 0:
        return COMPLETE if walk.partial[depth + 1, num_quanta] >= num_layers else PRUNED
    if bounded and most_in_split(walk.partial[depth + 1], memo.reach[g, r]) < num_layers:
        return PRUNED
    walk.rest_of[depth + 1] = rest
    walk.position[depth + 1] = splits.split_ptr[splits.entry[case.row, rest]]
    return DEEPER


@compiled
def improve(
    case: Case,
    splits: Splits,
    g: int,
    target: float,
    first_only: bool,
    memo: Memo,
    walk: Walk,
    scratch: Scratch,
    out_row: int,
    out: Placements,
) -> float:
    """Best value strictly above ``target`` over all partitions, or ``target`` if there is none.

    The memo of generation ``g`` must hold a level at or below anything above ``target``: its capacities are bounds.
    Partitions are tried in a fixed order, large first blocks first, and only strict improvements count.
    """
    full = (1 << case.size) - 1
    if single_stage(case, scratch.members) > target:
        scratch.stages.masks[0] = full
        target = climb(case.table, case.nodes, case.size, 1, target, True, scratch, out_row, out)
        if first_only:
            return target
    walk.stamp[0] += 1
    walk.rest_of[0] = full
    walk.position[0] = splits.split_ptr[splits.entry[case.row, full]] + 1
    depth = 0
    while depth >= 0:
        if walk.position[depth] == splits.split_ptr[splits.entry[case.row, walk.rest_of[depth]] + 1]:
            depth -= 1
            continue
        found = extend(case, splits, g, depth, target, memo, walk, scratch.members)
        if found == DEEPER:
            depth += 1
        elif found == COMPLETE:
            scratch.stages.masks[: depth + 1] = walk.blocks[: depth + 1]
            # partial sums above this depth may belong to a lower target: the climb decides
            value = climb(case.table, case.nodes, case.size, depth + 1, target, True, scratch, out_row, out)
            if value > target:
                target = value
                walk.stamp[0] += 1
                if first_only:
                    return target
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
    splits: Splits,
    levels: NDArray[np.float64],
    num_shared: int,
    best: NDArray[np.float64],
    out: Placements,
) -> None:
    """Optimum of the multisets ``first`` to ``last``, all of ``size`` nodes; arguments as ``solve_equal``.

    ``levels``: rising grid from the smallest positive entry to beyond any reachable sum. ``num_shared``: number of
    ids up to SHARED_SIZE nodes.
    """
    num_quanta = table.shape[2]
    memo = new_memo(len(values), num_shared, num_quanta)
    walk = new_walk(size, num_quanta)
    scratch = new_scratch(size, num_quanta)
    sub = np.empty(1 << size, dtype=np.int32)
    at = np.empty(last - first, dtype=np.int64)
    for n in range(first, last):
        fill_sub_ids(slots[n], size, child, sub)
        low = best_without_one(sub, size, values)
        best[n - first] = low
        at[n - first] = bound_level(low, levels) if low > 0 else -1
    for level in range(-1, len(levels) - 1):
        for n in range(first, last):
            if at[n - first] == level:
                fill_sub_ids(slots[n], size, child, sub)
                case = Case(table, slots[n], size, pattern_row(slots[n], size), sub)
                at[n - first] = step(case, splits, level, levels, memo, walk, scratch, n - first, best, out)


@compiled
def step(
    case: Case,
    splits: Splits,
    level: int,
    levels: NDArray[np.float64],
    memo: Memo,
    walk: Walk,
    scratch: Scratch,
    n: int,
    best: NDArray[np.float64],
    out: Placements,
) -> int:
    """Ask whether row ``n``, which is known to reach ``level``, reaches the next one; the level to go on from.

    If not, its optimum is found and -2 returned. Level -1 is below all: from there a first placement is looked for,
    so that climbing starts near the optimum.
    """
    members = scratch.members
    fill_memo(case, splits, level + 1, levels[level + 1], memo, members)
    if reaches(case, splits, level + 1, levels[level + 1], memo, members):
        if level >= 0:
            return level + 1
        best[n] = improve(case, splits, 0, 0.0, True, memo, walk, scratch, n, out)
        return bound_level(best[n], levels)
    if level >= 0:
        fill_memo(case, splits, level, levels[level], memo, members)
        known = max(best[n], np.nextafter(levels[level], 0.0))
        value = improve(case, splits, level & 1, known, False, memo, walk, scratch, n, out)
        if value > known:
            best[n] = value
    return -2
