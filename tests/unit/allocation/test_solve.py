"""The solve as a whole: supervision, warm start, determinism, and what is proved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coral_tasks.allocation import supervise
from coral_tasks.allocation.check import check_plan
from coral_tasks.allocation.explain import explain_plan
from coral_tasks.allocation.slo_step import NO_TIGHTER
from coral_tasks.allocation.solve import solve_allocation, solve_counts
from coral_tasks.allocation.whatif import compare_plans, with_demand_factor, with_more_nodes, with_price_factor
from coral_tasks.domain.errors import SolverFault, UnknownName
from coral_tasks.domain.plan import SolveStatus

ROOT = Path(__file__).resolve().parents[3]
CASES = ROOT / "tests" / "data" / "allocation_cases"
EAST, WEST = "aws/east", "aws/west"


@pytest.fixture
def pair(world):
    """One model on a cheap pool of two and a dear pool."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"H100x1": 1}, 1.0).ask("m", 3.0)
    return world.pool(EAST, "L4x1", 1.0, 2).pool(EAST, "H100x1", 5.0, 9)


def test_supervised_solve_gives_the_same_plan(pair):
    """The child's answer is the plan that the parent would have found."""
    problem = pair.problem()
    assert supervise.solve_supervised(problem, time_limit_s=20.0, gap=1e-9) == solve_allocation(problem, gap=1e-9)


HANG = """
import sys, time
from multiprocessing.connection import Connection
from coral_tasks.allocation.counts import counts_from_dict
pipe = Connection(int(sys.argv[2]), readable=False)
pipe.send((counts_from_dict({(0, 0): 2, (1, 0): 1}), 1.0))
time.sleep(60)
"""
"""A child that hands one plan over and then never ends."""
MUTE = "raise SystemExit(3)"
"""A child that ends without a word."""
BROKEN_OFF = "import os, sys; os.write(int(sys.argv[2]), b'\\x00\\x00\\x00\\x50half')"
"""A child that ends in the middle of a message."""


def run_instead(monkeypatch, script):
    """Let another script take the place of the child's program; it gets the same arguments."""
    monkeypatch.setattr(
        supervise, "child_command", lambda path, answers: (sys.executable, "-c", script, str(path), str(answers))
    )


def test_hanging_solver_is_stopped_and_its_best_plan_returned(pair, monkeypatch):
    """A child that does not keep its limit is ended; its last checked plan counts, with the bound it had."""
    problem = pair.problem()
    rows = {str(problem.templates.template_id(t)): t for t in range(2)}
    assert list(rows.values()) == [0, 1]
    run_instead(monkeypatch, HANG)
    plan = supervise.solve_supervised(problem, time_limit_s=0.1, grace_s=8.0)
    assert plan.certificate.status is SolveStatus.TIME_LIMIT
    assert plan.certificate.bound_usd_per_hour == 1.0
    assert check_plan(problem, plan).ok


def test_dying_solver_leaves_the_last_plan(pair, monkeypatch):
    """A child that dies leaves the last plan in force."""
    problem = pair.problem()
    last = solve_allocation(problem, gap=1e-9)
    run_instead(monkeypatch, MUTE)
    plan = supervise.solve_supervised(problem, time_limit_s=1.0, previous=last)
    assert plan.instances == last.instances
    assert plan.certificate.status is SolveStatus.TIME_LIMIT


def test_solver_that_ends_within_a_message_leaves_the_last_plan(pair, monkeypatch):
    """A child killed while it writes is like one that says nothing."""
    problem = pair.problem()
    last = solve_allocation(problem, gap=1e-9)
    run_instead(monkeypatch, BROKEN_OFF)
    plan = supervise.solve_supervised(problem, time_limit_s=1.0, previous=last)
    assert plan.instances == last.instances


SCRIPT = """
import numpy as np
from coral_tasks.allocation.instances import problem_from_instance
from coral_tasks.allocation.supervise import SolveRequest, _fallback, _in_child
import json, sys, time
problem = problem_from_instance(json.load(open(sys.argv[1])))
request = SolveRequest(problem=problem, time_limit_s=20.0, gap=1e-9, previous=None)
print(_in_child(request, deadline=time.monotonic() + 60.0)[1].objective)
"""


def test_script_without_main_guard_may_solve_supervised(tmp_path):
    """A plain script gets its answer once: the child does not run it again. "single" costs what its case states."""
    case = CASES / "single.json"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(case)], capture_output=True, text=True, timeout=100, check=True, cwd=ROOT
    )
    expected = json.loads(case.read_text())["expected"]["objective"]
    assert [float(line) for line in done.stdout.split()] == [pytest.approx(expected)]


def test_child_ends_with_its_parent(tmp_path):
    """A child whose standard input closes ends, though its solve has a minute left."""
    request = tmp_path / "request"
    os.mkfifo(request)
    reader, writer = os.pipe()
    child = subprocess.Popen(
        supervise.child_command(request, writer), stdin=subprocess.PIPE, pass_fds=(writer,), cwd=ROOT
    )
    os.close(writer)
    child.stdin.close()
    # the fifo keeps it waiting for its request: only the closed input can end it
    assert child.wait(timeout=60) == 1
    os.close(reader)


def test_dying_solver_without_any_fitting_plan_is_a_fault(pair, monkeypatch):
    """Nothing runs, nothing was planned and unserved load is forbidden: then there is nothing to return."""
    from dataclasses import replace

    problem = replace(pair.problem(), shortfall_weight=np.array([np.inf]))
    run_instead(monkeypatch, MUTE)
    with pytest.raises(SolverFault, match="no earlier plan fits"):
        supervise.solve_supervised(problem, time_limit_s=1.0)


def test_every_better_plan_is_handed_over(pair):
    """Whoever listens gets checked plans in falling order of objective, the last of them the result."""
    handed = []
    problem = pair.problem()
    solved = solve_counts(problem, gap=1e-9, on_plan=handed.append)
    assert handed
    assert handed[-1][0].as_dict() == solved.counts.as_dict()


def test_previous_plan_is_a_start(pair):
    """With no time at all the last plan is still there."""
    problem = pair.problem()
    last = solve_allocation(problem, gap=1e-9)
    again = solve_allocation(problem, time_limit_s=1e-6, previous=last)
    assert again.instances == last.instances


def test_no_time_at_all_gives_a_checked_plan(pair):
    """Never nothing: without time the plan may serve nothing, but it is checked and says so."""
    problem = pair.problem()
    plan = solve_allocation(problem, time_limit_s=1e-6)
    assert check_plan(problem, plan).ok
    assert plan.certificate.status is SolveStatus.TIME_LIMIT or not plan.shortfalls


def test_plan_id_depends_on_the_inputs(pair):
    """Other prices give another id even where the instances stay the same."""
    first = solve_allocation(pair.problem(), gap=1e-9)
    second = solve_allocation(with_price_factor(pair.problem(), 1.5, region=EAST), gap=1e-9)
    assert first.instances == second.instances
    assert first.id != second.id


def test_what_if_comparison(pair):
    """One more cheap node: one dear instance goes, one cheap one comes, 4 USD/h are saved."""
    problem = pair.problem()
    before = solve_allocation(problem, gap=1e-9)
    after = solve_allocation(with_more_nodes(problem, 1, region=EAST, configuration="L4x1"), gap=1e-9)
    difference = compare_plans(before, after)
    assert difference.saving == pytest.approx(4.0)
    assert difference.started == (f"1 x m/aggregated/100ms/1*L4x1/vllm in {EAST} on_demand",)
    assert difference.stopped == (f"1 x m/aggregated/100ms/1*H100x1/vllm in {EAST} on_demand",)


def test_what_if_refuses_unknown_names(pair):
    """A misspelt model is refused with the known names."""
    with pytest.raises(UnknownName, match="known: m"):
        with_demand_factor(pair.problem(), 2.0, "n")


def test_explanation_adds_up(pair):
    """Shares by model, region and configuration each add up to the plan's cost."""
    problem = pair.problem()
    plan = solve_allocation(problem, gap=1e-9)
    told = explain_plan(problem, plan)
    for of in ("model", "region", "configuration"):
        total = sum(share.cost_usd_per_hour for share in told.shares if share.of == of)
        assert total == pytest.approx(plan.certificate.cost_usd_per_hour)
    assert "The plan costs 7.00 USD/h" in told.sentences[0]
    assert "3 instances: 0 run already, 3 start, 0 stop." in told.sentences


def test_explanation_says_that_nothing_is_proved(pair):
    """A plan of no time at all has no bound, and the first sentence says so instead of stating 0.00."""
    problem = pair.problem()
    plan = solve_allocation(problem, time_limit_s=1e-6)
    first = explain_plan(problem, plan, time_limit_s=0.0).sentences[0]
    assert plan.certificate.bound_usd_per_hour == 0
    assert first.startswith("The plan costs 7.00 USD/h")
    assert "the time limit came before any proof" in first


def test_explanation_says_what_the_library_cannot_tell_of_slos(pair):
    """The library of the fixture holds one SLO, 1 s and 0.1 s/token: the explanation names it and says what to do."""
    problem = pair.problem()
    told = explain_plan(problem, solve_allocation(problem, gap=1e-9), time_limit_s=0.0)
    assert "SLO: m 1 s and 0.1 s/token." in told.sentences
    assert NO_TIGHTER in told.sentences
    assert "coral library build --slo-step 0.8" in NO_TIGHTER
    assert told.slo_steps == ()
