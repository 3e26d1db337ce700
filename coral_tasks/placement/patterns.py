"""Partitions and splits of a sorted node list, prepared once for each pattern of repeated nodes.

Six sorted slots have only 32 patterns of "equal to the slot before", so what differs between combinations is only
which configuration fills a slot. A subset of slots is a bit mask; of masks that hold the same multiset only the
canonical one is kept (within a run of equal nodes the first slots). Owns these lists; knows no throughput.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PatternTables(NamedTuple):
    """Lists for every list length m = 1..N and pattern, at row ``2^(m-1) - 1 + bits`` (bit i: slot i+1 equals slot i).

    ``part_ptr``: int32 [rows, N + 2]; the partitions into S stages are rows ``part_ptr[row, S]`` to
    ``part_ptr[row, S + 1]`` of ``part_mask``: uint16 [.., N], one mask per stage.
    ``entry``: int32 [rows, 2^N], number of a canonical mask, -1 for others.
    ``split_ptr``: int32 [entries + 1] into ``split_block`` and ``split_rest``: the ways to cut a mask in a block that
    holds its first node and the rest (0 for none), largest block first.
    """

    part_ptr: NDArray[np.int32]
    part_mask: NDArray[np.uint16]
    entry: NDArray[np.int32]
    split_ptr: NDArray[np.int32]
    split_block: NDArray[np.uint16]
    split_rest: NDArray[np.uint16]


Counts = tuple[int, ...]
"""Nodes taken from each run of equal nodes."""


def _runs(size: int, bits: int) -> list[list[int]]:
    """Slots of each run of equal nodes."""
    runs = [[0]]
    for slot in range(1, size):
        if bits >> (slot - 1) & 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def _mask(runs: list[list[int]], counts: Counts) -> int:
    return sum(1 << slot for run, count in zip(runs, counts, strict=True) for slot in run[:count])


def _splits(counts: Counts) -> list[tuple[Counts, Counts]]:
    """(block, rest) with the block holding the first node, largest block first."""
    first = next(i for i, count in enumerate(counts) if count)
    ranges = [range(1 if i == first else 0, count + 1) for i, count in enumerate(counts)]
    blocks = sorted(product(*ranges), key=lambda block: (-sum(block), tuple(-count for count in block)))
    return [(block, tuple(a - b for a, b in zip(counts, block, strict=True))) for block in blocks]


def _partitions(counts: Counts, ceiling: tuple[int, Counts] | None = None) -> Iterator[tuple[Counts, ...]]:
    """Each partition once. Of blocks that start with the same kind of node the order is fixed by ``ceiling``."""
    if not any(counts):
        yield ()
        return
    first = next(i for i, count in enumerate(counts) if count)
    for block, rest in _splits(counts):
        if ceiling is not None and ceiling[0] == first and block > ceiling[1]:
            continue
        for others in _partitions(rest, (first, block)):
            yield (block, *others)


@lru_cache(maxsize=2)
def pattern_tables(max_nodes: int) -> PatternTables:
    """Tables for lists of up to ``max_nodes`` nodes; read-only."""
    part_ptr: list[list[int]] = []
    part_mask: list[list[int]] = []
    entries: list[list[int]] = []
    splits = [0]
    blocks: list[int] = []
    rests: list[int] = []
    for size in range(1, max_nodes + 1):
        for bits in range(1 << (size - 1)):
            runs = _runs(size, bits)
            part_ptr.append(_add_partitions(runs, part_mask, max_nodes))
            entries.append(_add_splits(runs, (splits, blocks, rests), max_nodes))
    tables = PatternTables(
        part_ptr=np.array(part_ptr, dtype=np.int32),
        part_mask=np.array(part_mask, dtype=np.uint16).reshape(-1, max_nodes),
        entry=np.array(entries, dtype=np.int32),
        split_ptr=np.array(splits, dtype=np.int32),
        split_block=np.array(blocks, dtype=np.uint16),
        split_rest=np.array(rests, dtype=np.uint16),
    )
    for table in tables:
        table.setflags(write=False)
    return tables


def _add_partitions(runs: list[list[int]], part_mask: list[list[int]], max_nodes: int) -> list[int]:
    full = tuple(len(run) for run in runs)
    found = sorted(_partitions(full), key=len)
    pointers = [len(part_mask)] * (max_nodes + 2)
    for stages in range(1, max_nodes + 1):
        part_mask += [
            [_mask(runs, block) for block in part] + [0] * (max_nodes - len(part))
            for part in found
            if len(part) == stages
        ]
        pointers[stages + 1] = len(part_mask)
    return pointers


def _add_splits(runs: list[list[int]], lists: tuple[list[int], list[int], list[int]], max_nodes: int) -> list[int]:
    pointers, blocks, rests = lists
    row = [-1] * (1 << max_nodes)
    for counts in product(*(range(len(run) + 1) for run in runs)):
        if not any(counts):
            continue
        row[_mask(runs, counts)] = len(pointers) - 1
        for block, rest in _splits(counts):
            blocks.append(_mask(runs, block))
            rests.append(_mask(runs, rest))
        pointers.append(len(blocks))
    return row
