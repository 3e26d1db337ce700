"""The exact search against the oracle's cases and a spelt-out brute force."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.names import LatencySplit
from coral_tasks.placement.check import check_solutions
from coral_tasks.placement.combinations import build_tree
from coral_tasks.placement.search import Solutions, complete_placements, solve_tree, solve_vllm

CASES = json.loads((Path(__file__).parents[2] / "data" / "placement_cases.json").read_text())


def _decode(entry: dict) -> np.ndarray:
    table = np.zeros((len(entry["steps"]), entry["L"], entry["Q"]))
    for c, rows in enumerate(entry["steps"]):
        for j, flat in enumerate(rows):
            for q, value in zip(flat[::2], flat[1::2], strict=True):
                table[c, j, int(q) - 1 :] = value
    return table


TABLES = {name: _decode(entry) for name, entry in CASES["tables"].items()}


def _solve(table: np.ndarray, nodes: list[int], mode: str) -> tuple[Solutions, object]:
    tree = build_tree(
        max_nodes=len(nodes),
        num_configurations=len(table),
        max_counts=np.bincount(nodes, minlength=len(table)),
    )
    found = solve_tree(table, tree, LatencySplit(mode))
    complete_placements(table, tree, found)
    return found, tree


def _partitions(items: list[int]):
    if not items:
        yield []
        return
    for smaller in _partitions(items[1:]):
        yield [[items[0]], *smaller]
        for i in range(len(smaller)):
            yield [*smaller[:i], [items[0], *smaller[i]], *smaller[i + 1 :]]


def _compositions(total: int, parts: int):
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(edges))


def _brute_force(table: np.ndarray, nodes: list[int], mode: str) -> float:
    _, num_layers, num_quanta = table.shape
    best = 0.0
    for part in _partitions(nodes):
        stages = len(part)
        if mode == "equal":
            splits = [(num_quanta // stages,) * stages] if num_quanta % stages == 0 else []
        else:
            splits = list(_compositions(num_quanta, stages))
        for layers in _compositions(num_layers, stages):
            for quanta in splits:
                value = min(
                    sum(table[c, j - 1, q - 1] for c in sorted(group))
                    for group, j, q in zip(part, layers, quanta, strict=True)
                )
                best = max(best, float(value))
    return best


def _random_table(rng: np.random.Generator, count: int, layers: int, quanta: int) -> np.ndarray:
    raw = rng.integers(0, 9, size=(count, layers, quanta)).astype(float)
    raw = np.maximum.accumulate(raw, axis=2)
    return np.minimum.accumulate(raw, axis=1)


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["id"])
def test_the_optimum_is_that_of_the_oracle(case: dict) -> None:
    """Every case of the oracle has exactly its stated throughput, with a placement that keeps the rules."""
    table = TABLES[case["table"]]
    found, tree = _solve(table, case["nodes"], case["mode"])
    row = tree.id_of(case["nodes"])
    assert found.throughput[row] == pytest.approx(case["throughput"], rel=1e-9, abs=0)
    positive = found.throughput > 0
    rows = Solutions(**{name: getattr(found, name)[positive] for name in Solutions.__slots__})
    check_solutions(table, tree.slots[positive], rows, equal_shares=case["mode"] == "equal")


@pytest.mark.parametrize("mode", ["equal", "free"])
@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_that_of_brute_force(mode: str, seed: int) -> None:
    """On tiny random tables with many ties and zeros every multiset has the value found by trying everything."""
    rng = np.random.default_rng(seed)
    table = _random_table(rng, 2, int(rng.integers(1, 6)), int(rng.choice([4, 6, 12])))
    tree = build_tree(max_nodes=4 if mode == "equal" else 3, num_configurations=2)
    found = solve_tree(table, tree, LatencySplit(mode))
    for row in range(1, tree.total):
        nodes = [int(c) for c in tree.slots[row] if c >= 0]
        assert found.throughput[row] == _brute_force(table, nodes, mode), nodes


def test_more_layers_than_a_byte_holds() -> None:
    """A model of 300 layers over equal nodes splits them evenly: two nodes of 1/j each give 1/150 together."""
    layers = np.arange(1, 301)
    table = np.repeat((1.0 / layers)[None, :, None], 60, axis=2)
    tree = build_tree(max_nodes=2, num_configurations=1)
    for split in LatencySplit:
        found = solve_tree(table, tree, split)
        assert found.throughput[1:].tolist() == [1 / 300, 2 / 300]


def test_an_all_zero_table_has_no_placement() -> None:
    """Where nothing fits the optimum is zero for every combination, and there is no placement."""
    tree = build_tree(max_nodes=3, num_configurations=2)
    for split in LatencySplit:
        found = solve_tree(np.zeros((2, 4, 60)), tree, split)
        assert not found.throughput.any()
        assert (found.slot_stage == -1).all()


def test_equal_shares_leave_out_stage_counts_that_do_not_divide_the_budget() -> None:
    """Seven nodes that need one stage each cannot share 60 quanta equally, but can share 63."""
    table = np.zeros((1, 7, 63))
    table[0, 0, 8:] = 1.0
    tree = build_tree(max_nodes=7, num_configurations=1)
    assert solve_tree(table, tree, LatencySplit.EQUAL).throughput[-1] == 1.0
    assert solve_tree(table[:, :, :60].copy(), tree, LatencySplit.EQUAL).throughput[-1] == 0.0


@pytest.mark.parametrize("size", [0, -1, 9])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    """N_max below 1 or above 8 is refused by name."""
    with pytest.raises(ValidationFailed, match="N_max must be a whole number from 1 to 8"):
        build_tree(max_nodes=size, num_configurations=2)


def test_vllm_needs_one_degree_and_one_node_per_stage() -> None:
    """Two nodes of one degree become two stages; nodes of different degrees have no vLLM placement."""
    table = np.ones((2, 2, 4)) * np.array([3.0, 5.0])[:, None, None]
    tree = build_tree(max_nodes=2, num_configurations=2)
    same = solve_vllm(table, tree, LatencySplit.FREE, np.array([1, 1]))
    row = tree.id_of([0, 1])
    assert same.throughput[row] == 3.0
    assert same.slot_stage[row].tolist() == [0, 1]
    other = solve_vllm(table, tree, LatencySplit.FREE, np.array([1, 2]))
    assert other.throughput[row] == 0.0
    assert other.throughput[tree.id_of([1])] == 5.0
