"""The reference solver's cases: our optimum is the expected one and our bound is valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coral_tasks.allocation.check import check_counts
from coral_tasks.allocation.instances import problem_from_instance
from coral_tasks.allocation.solve import solve_counts, solve_plain
from coral_tasks.domain.errors import Infeasible, ValidationFailed
from coral_tasks.optimization.mip import SolverName, available_solvers

CASES = sorted((Path(__file__).parents[2] / "data" / "allocation_cases").glob("*.json"), key=lambda path: path.stem)
SMALL = [path for path in CASES if not path.stem.startswith(("core", "extended"))]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path):
    """Status and objective are the expected ones within 1e-6, the bound is not above the optimum, the check passes."""
    case = json.loads(path.read_text())
    problem, expected = problem_from_instance(case), case["expected"]
    if expected["status"] == "infeasible":
        with pytest.raises(Infeasible, match="no plan serves all"):
            solve_counts(problem, time_limit_s=30.0, gap=1e-9)
        return
    solved = solve_counts(problem, time_limit_s=60.0, gap=1e-9)
    assert solved.objective == pytest.approx(expected["objective"], rel=1e-6, abs=1e-6)
    assert solved.bound <= expected["objective"] * (1 + 1e-6) + 1e-6
    report = check_counts(problem, solved.counts)
    assert report.ok
    assert report.objective == pytest.approx(solved.objective, rel=1e-9, abs=1e-9)


OPEN_SOLVERS = [SolverName.HIGHS, SolverName.PULP_HIGHS, SolverName.PULP_CBC]
PLAIN = [(solver, path) for solver in OPEN_SOLVERS for path in SMALL] + [(SolverName.PULP_GUROBI, SMALL[0])]


@pytest.mark.parametrize(("solver", "path"), PLAIN, ids=lambda one: getattr(one, "stem", str(one)))
def test_plain_solvers_agree(solver, path):
    """HiGHS from arrays, HiGHS, CBC and (licensed) Gurobi through PuLP find one optimum."""
    if solver not in available_solvers():
        pytest.skip(f"{solver} is not installed")
    case = json.loads(path.read_text())
    problem, expected = problem_from_instance(case), case["expected"]
    if expected["status"] == "infeasible":
        with pytest.raises(Infeasible):
            solve_plain(problem, solver=solver, time_limit_s=30.0)
        return
    solved = solve_plain(problem, solver=solver, time_limit_s=30.0)
    assert solved.objective == pytest.approx(expected["objective"], rel=1e-6, abs=1e-6)


def test_bad_instance_names_everything():
    """Unknown phase, configuration and model are reported together."""
    case = json.loads(SMALL[0].read_text())["instance"]
    case["templates"] = [{"model": 99, "phase": "warmup", "nodes": {"nothing": 1}, "throughput": 1.0}]
    with pytest.raises(ValidationFailed) as caught:
        problem_from_instance(case)
    assert len(caught.value.violations) == 3


def test_missing_fields_are_named():
    """An object without the needed fields is refused by their names."""
    with pytest.raises(ValidationFailed, match=r"init_factor, templates"):
        problem_from_instance({"name": "empty"})


def test_bad_numbers_are_reported_together():
    """A negative price and a demand that is no number are two violations."""
    case = json.loads(SMALL[0].read_text())["instance"]
    case["price"][0][0] = -1.0
    case["demand"][0] = float("nan")
    with pytest.raises(ValidationFailed) as caught:
        problem_from_instance(case)
    assert "price_usd_per_hour[0, 0]" in str(caught.value)
    assert "demand_requests_per_s[0]" in str(caught.value)
