"""Golden LPs of the placement program, one for each constraint family, and its agreement with the exact search.

Set CORAL_REGENERATE_GOLDEN=1 to write the files anew; a change of the formulation is then a visible diff.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from coral_tasks.domain.names import LatencySplit
from coral_tasks.optimization.mip import SolverName
from coral_tasks.optimization.placement_ilp import (
    CONSTRAINT_FAMILIES,
    PlacementData,
    build_placement_program,
    placement_throughput,
    solve_placement_program,
)
from coral_tasks.placement.combinations import build_tree
from coral_tasks.placement.search import solve_tree

FOLDER = Path(__file__).parent / "placement"
MAX_LINES = 40


def _tiny(family: str) -> PlacementData:
    """Two nodes of two configurations and two layers; shares free where the family is about shares."""
    free = family in {"one_share", "latency_budget"}
    num_nodes = 1 if family == "product" else 2
    table = np.arange(8.0, 0.0, -1.0).reshape(2, 2, 2).copy()
    table[:, :, 1] += 8
    return PlacementData(
        table=table,
        nodes=tuple(range(num_nodes)),
        num_stages=num_nodes,
        latency_split=LatencySplit.FREE if free else LatencySplit.EQUAL,
    )


def _name(family) -> str:
    return family.__name__.removeprefix("add_").removesuffix("_constraint")


def _lines(family, tmp_path: Path) -> list[str]:
    problem, _ = build_placement_program(_tiny(_name(family)), [family])
    problem.writeLP(str(tmp_path / "program.lp"))
    return (tmp_path / "program.lp").read_text().splitlines()


@pytest.mark.parametrize("family", CONSTRAINT_FAMILIES, ids=_name)
def test_a_family_has_its_golden_program(family, tmp_path: Path) -> None:
    """What a constraint family states on the tiny instance is what its file says, without regard to order."""
    lines = _lines(family, tmp_path)
    path = FOLDER / f"{_name(family)}.lp"
    if os.environ.get("CORAL_REGENERATE_GOLDEN") == "1":
        path.write_text("\n".join(lines) + "\n")
    golden = path.read_text().splitlines()
    assert len(golden) < MAX_LINES
    assert sorted(line.strip() for line in lines) == sorted(line.strip() for line in golden)


def test_every_golden_file_has_a_family() -> None:
    """No file is left over from a family that is gone."""
    assert {path.stem for path in FOLDER.glob("*.lp")} == {_name(family) for family in CONSTRAINT_FAMILIES}


def _table(seed: int, quanta: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 50, size=(2, 4, quanta)).astype(float)
    return np.minimum.accumulate(np.maximum.accumulate(raw, axis=2), axis=1)


@pytest.mark.parametrize("solver", [SolverName.PULP_HIGHS, SolverName.PULP_CBC])
@pytest.mark.parametrize("split", list(LatencySplit))
@pytest.mark.parametrize("seed", range(3))
def test_the_program_agrees_with_the_search(solver: SolverName, split: LatencySplit, seed: int) -> None:
    """On small tables the program, solved to its optimum, reaches exactly what the search says is best."""
    if solver is SolverName.PULP_CBC and shutil.which("cbc") is None:
        pytest.skip("no program named cbc on the path")
    table = _table(seed, 6 if split is LatencySplit.EQUAL else 4)
    nodes = [0, 0, 1] if split is LatencySplit.EQUAL else [0, 1]
    best, stages, proved = solve_placement_program(table, nodes, split, solver=solver)
    tree = build_tree(max_nodes=len(nodes), num_configurations=2)
    assert proved
    assert best == solve_tree(table, tree, split).throughput[tree.id_of(nodes)]
    if stages:
        assert placement_throughput(table, stages) == best
        assert sorted(c for stage in stages for c in stage.nodes) == nodes
        assert sum(stage.layers for stage in stages) == 4
        assert sum(stage.quanta for stage in stages) <= table.shape[2]


def test_where_nothing_fits_the_program_says_so() -> None:
    """An all-zero table has throughput 0 and no stages."""
    best, stages, proved = solve_placement_program(np.zeros((1, 2, 2)), [0, 0], LatencySplit.EQUAL)
    assert (best, stages, proved) == (0.0, (), True)
