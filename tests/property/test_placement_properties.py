"""Properties of the exact placement on random tables: feasible, optimal, monotone, independent of names and order."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_tasks.domain.names import LatencySplit
from coral_tasks.placement.check import check_solutions
from coral_tasks.placement.combinations import build_tree
from coral_tasks.placement.search import Solutions, complete_placements, solve_chunk, solve_tree


@st.composite
def tables(draw, max_configurations: int = 3) -> np.ndarray:
    """Monotone tables with ties, zeros and values whose sums are not exact in binary."""
    count = draw(st.integers(1, max_configurations))
    layers = draw(st.integers(1, 7))
    quanta = draw(st.sampled_from([1, 4, 6, 12]))
    seed = draw(st.integers(0, 2**32 - 1))
    unit = draw(st.sampled_from([1.0, 0.1, 1e-7, 12345.678]))
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, draw(st.sampled_from([3, 10, 1000])), size=(count, layers, quanta)) * unit
    return np.minimum.accumulate(np.maximum.accumulate(raw, axis=2), axis=1)


splits = st.sampled_from(list(LatencySplit))


def _solve(table: np.ndarray, split: LatencySplit, max_nodes: int) -> tuple[Solutions, object]:
    tree = build_tree(max_nodes=max_nodes, num_configurations=len(table))
    return solve_tree(table, tree, split), tree


@given(tables(), splits, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_every_placement_keeps_the_rules_and_reaches_its_throughput(table, split, max_nodes) -> None:
    """What the search returns is feasible and as fast as it says, recomputed without the search."""
    found, tree = _solve(table, split, max_nodes)
    complete_placements(table, tree, found)
    positive = found.throughput > 0
    rows = Solutions(**{name: column[positive] for name, column in found.arrays().items()})
    check_solutions(table, tree.slots[positive], rows, equal_shares=split is LatencySplit.EQUAL)


@given(tables(), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_free_shares_are_never_worse(table, max_nodes) -> None:
    """Every combination is at least as fast with free shares as with equal ones."""
    equal, _ = _solve(table, LatencySplit.EQUAL, max_nodes)
    free, _ = _solve(table, LatencySplit.FREE, max_nodes)
    assert (free.throughput >= equal.throughput).all()


@given(tables(), splits)
@settings(max_examples=40, deadline=None)
def test_a_node_more_is_never_worse(table, split) -> None:
    """Throughput does not fall when a node is added, nor when the table rises."""
    found, tree = _solve(table, split, 4)
    for row in range(1, tree.total):
        nodes = [int(c) for c in tree.slots[row] if c >= 0]
        for one in set(nodes):
            fewer = list(nodes)
            fewer.remove(one)
            assert found.throughput[row] >= found.throughput[tree.id_of(fewer)]
    better, _ = _solve(table * 2.0, split, 4)
    assert (better.throughput == found.throughput * 2.0).all()


@given(tables(), splits, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_configurations_does_not_matter(table, split, random) -> None:
    """Reordering configurations changes no optimum beyond the last bits of a sum."""
    order = list(range(len(table)))
    random.shuffle(order)
    found, tree = _solve(table, split, 4)
    turned, other = _solve(np.ascontiguousarray(table[order]), split, 4)
    for row in range(1, other.total):
        nodes = [order[int(c)] for c in other.slots[row] if c >= 0]
        assert np.isclose(turned.throughput[row], found.throughput[tree.id_of(nodes)], rtol=1e-12, atol=0)


@given(tables(), splits, st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_chunks_do_not_matter(table, split, chunk) -> None:
    """Cutting the work in chunks of any size gives the same optima and the same placements, byte for byte."""
    whole, tree = _solve(table, split, 4)
    pieces = Solutions.empty(tree.total, tree.max_nodes)
    for size in range(1, 5):
        first, last = int(tree.offsets[size]), int(tree.offsets[size + 1])
        for start in range(first, last, chunk):
            stop = min(start + chunk, last)
            pieces.put(start, solve_chunk(table, tree, split, pieces.throughput, start, stop))
    for name, column in whole.arrays().items():
        assert column.tobytes() == pieces.arrays()[name].tobytes(), name


@given(tables(max_configurations=2), splits)
@settings(max_examples=25, deadline=None)
def test_no_placement_is_better(table, split) -> None:
    """On three nodes no layer split, latency split or partition, all tried, beats the optimum."""
    _, num_layers, num_quanta = table.shape
    nodes = [0, 0, len(table) - 1]
    found, tree = _solve(table, split, 3)
    best = found.throughput[tree.id_of(nodes)]
    partitions = ([[0, 1, 2]], [[0, 1], [2]], [[0, 2], [1]], [[1, 2], [0]], [[0], [1], [2]])
    for part in partitions:
        stages = len(part)
        for layers in _compositions(num_layers, stages):
            for quanta in _shares(num_quanta, stages, split):
                value = min(
                    sum(table[nodes[k], j - 1, q - 1] for k in group)
                    for group, j, q in zip(part, layers, quanta, strict=True)
                )
                assert value <= best


def _compositions(total: int, parts: int):
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def _shares(total: int, parts: int, split: LatencySplit):
    if split is LatencySplit.FREE:
        return list(_compositions(total, parts))
    return [(total // parts,) * parts] if total % parts == 0 else []


def test_shared_sizes_cover_every_partition() -> None:
    """For each list length every partition has one block with a small enough rest, or splits in two small groups."""
    from coral_tasks.placement.kernel_free import SHARED_SIZE

    for count in range(2, 9):
        limit = SHARED_SIZE[count]
        for blocks in _integer_partitions(count, count):
            if len(blocks) == 1:
                continue
            sums = {0}
            for block in blocks:
                sums |= {one + block for one in sums}
            halves = any(one <= limit and count - one <= limit for one in sums)
            assert halves or any(count - block <= limit for block in blocks), (count, blocks)


def _integer_partitions(total: int, largest: int):
    if total == 0:
        yield ()
    for first in range(min(total, largest), 0, -1):
        for rest in _integer_partitions(total - first, first):
            yield (first, *rest)
