"""The independent check: a right plan passes, and each kind of wrong plan is refused with its own message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coral_tasks.allocation.check import check_counts, check_plan
from coral_tasks.allocation.counts import counts_from_dict
from coral_tasks.allocation.options import GpuCap, ModelRules
from coral_tasks.allocation.solve import solve_allocation
from coral_tasks.domain.names import Market, Runtime

EAST, WEST = "aws/east", "aws/west"


@pytest.fixture
def filled(world):
    """One model, templates 0 (L4, vllm) and 1 (H100, hybrid), two regions, spot in the east."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"H100x1": 1}, 2.0, Runtime.HYBRID).ask("m", 4.0)
    world.pool(EAST, "L4x1", 1.0, 5).pool(EAST, "H100x1", 5.0, 5).pool(EAST, "L4x1", 0.5, 5, Market.SPOT)
    return world.pool(WEST, "L4x1", 1.5, 5)


def zone(problem, region, market=Market.ON_DEMAND):
    """Index of a zone."""
    return next(
        z for z, one in enumerate(problem.zones) if problem.regions[one.region] == region and one.market is market
    )


def test_figures_are_recomputed(filled):
    """2 x 1 + 1 x 5 USD/h, half of it charged again for starting; 2 + 2 requests/s are served."""
    problem = filled.problem(startup_factor=0.5)
    east = zone(problem, EAST)
    report = check_counts(problem, counts_from_dict({(0, east): 2, (1, east): 1}))
    assert report.ok
    assert (report.cost, report.startup, report.shortfall) == (7.0, 3.5, (0.0,))


def test_start_up_is_charged_for_new_instances_only(filled):
    """Of three instances two run already."""
    filled.run("m/aggregated/100ms/1*L4x1/vllm", EAST, 2)
    problem = filled.problem(startup_factor=0.5)
    report = check_counts(problem, counts_from_dict({(0, zone(problem, EAST)): 3}))
    assert report.startup == 0.5
    assert report.num_started == 1


@pytest.mark.parametrize(
    ("options", "counts", "message"),
    [
        ({}, {(0, EAST): 6}, "6 x L4x1 used, 5 available"),
        ({"gpu_caps": (GpuCap(max_gpus=2),)}, {(0, EAST): 3}, "3 GPUs used, cap 2 GPU"),
        ({"gpu_caps": (GpuCap(max_gpus=0, region=EAST, model="m"),)}, {(0, EAST): 1}, "cap 0 GPU in aws/east for m"),
        ({"budget_usd_per_hour": 2.0}, {(0, EAST): 3}, "nodes cost 3 USD/h, budget 2"),
        ({"max_started_instances": 1}, {(0, EAST): 2}, "2 instances started, at most 1"),
        ({"excluded_configurations": ("L4x1",)}, {(0, EAST): 1}, "uses L4x1, which is excluded"),
        ({"allowed_runtimes": (Runtime.VLLM,)}, {(1, EAST): 1}, "uses runtime hybrid"),
        ({"model_rules": (ModelRules(model="m", max_instances=1),)}, {(0, EAST): 2}, "2 instances, at most 1"),
        ({"model_rules": (ModelRules(model="m", allowed_regions=(WEST,)),)}, {(0, EAST): 1}, "runs in aws/east"),
        ({"model_rules": (ModelRules(model="m", allowed_runtimes=(Runtime.VLLM,)),)}, {(1, EAST): 1}, "runtime hybrid"),
        ({"model_rules": (ModelRules(model="m", max_spot_share=0.25),)}, {(0, "spot"): 2}, "spot nodes carry 2"),
    ],
)
def test_broken_rules_are_named(filled, options, counts, message):
    """Each hard rule is judged by its own sentence."""
    problem = filled.problem(**options)
    places = {EAST: zone(problem, EAST), "spot": zone(problem, EAST, Market.SPOT)}
    report = check_counts(problem, counts_from_dict({(t, places[where]): n for (t, where), n in counts.items()}))
    assert any(message in violation for violation in report.violations), report.violations


def test_unknown_rows_are_refused(filled):
    """A template row or a zone that does not exist is no plan."""
    report = check_counts(filled.problem(), counts_from_dict({(99, 0): 1}))
    assert report.violations == ("unknown template row 99 or zone 0",)


def tampered(plan, **changes):
    """The plan with other figures in its certificate."""
    return replace(plan, certificate=replace(plan.certificate, **changes))


def test_misstated_figures_are_refused(filled):
    """A cost or a shortfall that is not what the instances give is refused."""
    problem = filled.problem()
    plan = solve_allocation(problem, gap=1e-9)
    assert check_plan(problem, plan).ok
    wrong = check_plan(problem, tampered(plan, cost_usd_per_hour=1.0))
    assert any("stated cost 1.0" in violation for violation in wrong.violations)
    charged = check_plan(problem, tampered(plan, startup_usd_per_hour=1.0))
    assert any("stated start-up 1.0" in violation for violation in charged.violations)


def test_template_with_other_nodes_is_refused(filled):
    """A plan whose carried template claims a throughput that the library does not have is refused."""
    problem = filled.problem()
    plan = solve_allocation(problem, gap=1e-9)
    forged = tuple(replace(template, throughput=template.throughput * 2) for template in plan.templates)
    report = check_plan(problem, replace(plan, templates=forged))
    assert any("not in the library" in violation for violation in report.violations)


def test_missing_capacity_shows_as_shortfall(filled):
    """An empty plan leaves all demand unserved; without weights that is a statement, no violation."""
    report = check_counts(filled.problem(), counts_from_dict({}))
    assert report.ok
    assert report.shortfall == (4.0,)
