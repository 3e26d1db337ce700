"""The enumeration by labels and the greedy first plan, against counting by hand and trying every combination."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

from coral_tasks.allocation.check import check_counts
from coral_tasks.allocation.columns import build_columns
from coral_tasks.allocation.counts import counts_from_columns
from coral_tasks.allocation.decompose import Duals, build_core, build_grid, column_bounds, evaluate, no_duals
from coral_tasks.allocation.greedy import greedy_plans
from coral_tasks.allocation.label_kernels import falling_cost, not_dominated, number_rows
from coral_tasks.allocation.labels import Enumeration, Resource, TooManyLabels
from coral_tasks.allocation.options import GpuCap, ModelRules
from coral_tasks.allocation.search import Search
from coral_tasks.domain.names import Market

EAST, WEST = "aws/east", "aws/west"


def core_of(problem):
    """Columns of every template, and the core over them."""
    columns = build_columns(problem, problem.usable_templates())
    return columns, build_core(problem, columns, np.full(len(problem.models), np.inf))


def enumerated(problem, target, prices=None, deadline=math.inf):
    """The best plan up to a target, at zero prices with every pool a resource, or at ``prices`` [Z, C] of a node with
    the priced pools alone, as the search does.
    """
    columns, core = core_of(problem)
    duals = no_duals(core) if prices is None else Duals(nodes=np.array(prices), sides=np.zeros(len(core.sides)))
    evaluation = evaluate(core, build_grid(core, 1000, rounds_up=True), duals)
    resources = [
        Resource(
            weights=np.where(columns.zone == z, problem.templates.nodes[columns.template, c].astype(np.int64), 0),
            limit=int(problem.available_nodes[z, c]),
            price=float(duals.nodes[z, c]),
            pool=(z, c),
        )
        for z, c in itertools.product(*map(range, problem.available_nodes.shape))
        if prices is None or duals.nodes[z, c] > 0
    ]
    alive = column_bounds(core, evaluation) <= target
    run = Enumeration(
        core=core, evaluation=evaluation, resources=resources, alive=alive, target=target, deadline=deadline
    )
    return columns, run.best()


def tried(problem, most):
    """Least cost of a plan that serves everything, by trying up to ``most`` of every column."""
    columns, _ = core_of(problem)
    best = math.inf
    for values in itertools.product(range(most + 1), repeat=len(columns)):
        report = check_counts(problem, counts_from_columns(columns, np.array(values)))
        if report.ok and not any(report.shortfall):
            best = min(best, report.cost + report.startup)
    return best


def test_the_run_s_end_ends_the_enumeration(world):
    """Past its deadline it gives up instead of going on for minutes; it never says that there is nothing."""
    world.template("a", "a", {"L4x1": 1}, 1.0).ask("a", 2.0)
    with pytest.raises(TooManyLabels):
        enumerated(world.pool(EAST, "L4x1", 1.0, 3).problem(), 7.0, deadline=time.monotonic())


def test_two_models_share_a_pool(world):
    """Both want 2 of the cheap pool of three: 3 cheap at 1 USD and one dear at 4 USD are the optimum, 7 USD."""
    for model in ("a", "b"):
        world.template(model, "a", {"L4x1": 1}, 1.0).template(model, "a", {"H100x1": 1}, 1.0).ask(model, 2.0)
    problem = world.pool(EAST, "L4x1", 1.0, 3).pool(EAST, "H100x1", 4.0, 9).problem()
    columns, best = enumerated(problem, 7.0)
    assert best is not None
    assert best[0] == pytest.approx(7.0)
    values = np.zeros(len(columns), dtype=np.int64)
    for j, n in best[1].items():
        values[j] = n
    report = check_counts(problem, counts_from_columns(columns, values))
    assert report.ok
    assert report.cost == pytest.approx(7.0)


def test_nothing_below_the_optimum(world):
    """Up to 6.9 USD there is no plan of the same problem."""
    for model in ("a", "b"):
        world.template(model, "a", {"L4x1": 1}, 1.0).template(model, "a", {"H100x1": 1}, 1.0).ask(model, 2.0)
    problem = world.pool(EAST, "L4x1", 1.0, 3).pool(EAST, "H100x1", 4.0, 9).problem()
    best = enumerated(problem, 6.9)[1]
    assert best is None or best[0] > 6.9


def test_a_way_that_is_cheaper_in_money_is_kept_whatever_its_pool_is_priced_at(world):
    """An L4 costs 1 USD and an H100 1.5 USD; with the L4 priced at 1 USD more the H100 looks better and uses less of
    what is priced, yet the plan up to 1.2 USD is the L4 at 1 USD: to lose it would prove a bound above the optimum.
    """
    world.template("m", "a", {"H100x1": 1}, 1.0).template("m", "a", {"L4x1": 1}, 1.0).ask("m", 1.0)
    problem = world.pool(EAST, "H100x1", 1.5, 9).pool(EAST, "L4x1", 1.0, 1).problem()
    assert problem.configurations == ("H100x1", "L4x1")
    best = enumerated(problem, 1.2, prices=[[0.0, 1.0]])[1]
    assert best is not None
    assert best[0] == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(40))
def test_prices_do_not_change_what_is_found(world, seed):
    """Two models, one pool scarce and priced at random: the best plan is that of trying every combination."""
    rng = np.random.default_rng(seed)
    for model in ("m", "n"):
        for name in ("L4x1", "H100x1"):
            world.template(model, "a", {name: 1}, float(rng.choice([0.6, 1.0, 1.7])))
        world.ask(model, float(rng.choice([1.0, 1.6, 2.4])))
    world.pool(EAST, "H100x1", float(rng.choice([0.7, 1.0, 1.3, 2.3])), 9)
    world.pool(EAST, "L4x1", float(rng.choice([0.7, 1.0, 1.3])), int(rng.integers(1, 5)))
    problem = world.problem()
    expected = tried(problem, 4)
    best = enumerated(problem, expected + 0.3, prices=[[0.0, float(rng.choice([0.4, 1.1]))]])[1]
    assert best is not None
    assert best[0] == pytest.approx(expected)


def test_prefill_surplus_is_allowed(world):
    """Prefill in steps of 6, decode in steps of 5 requests/s, 10 are asked: prefill carries 12 on 2 nodes."""
    world.template("m", "p", {"L4x1": 1}, 600.0).template("m", "d", {"H100x1": 1}, 50.0).ask("m", 10.0)
    problem = world.pool(EAST, "L4x1", 1.0, 9).pool(EAST, "H100x1", 4.0, 9).problem()
    best = enumerated(problem, 50.0)[1]
    assert best is not None
    assert best[0] == pytest.approx(2 * 1.0 + 2 * 4.0)


@pytest.mark.parametrize("seed", range(12))
def test_equal_to_trying_everything(world, seed):
    """Two regions, three phases, scarce pools: the enumeration finds what trying every combination finds."""
    rng = np.random.default_rng(seed)
    for phase, rate in (("p", 100.0), ("d", 10.0), ("a", 1.0)):
        for name in ("L4x1", "H100x1")[: int(rng.integers(1, 3))]:
            world.template("m", phase, {name: 1}, float(rate * rng.choice([0.6, 1.0, 1.7])))
    world.ask("m", float(rng.choice([1.0, 1.6])))
    for region in (EAST, WEST):
        for name in ("L4x1", "H100x1"):
            world.pool(region, name, float(rng.choice([0.7, 1.0, 2.3, 4.1])), int(rng.integers(0, 4)))
    problem = world.problem()
    if len(build_columns(problem, problem.usable_templates())) > 5:
        problem = world.problem(model_rules=(ModelRules(model="m", allowed_regions=(EAST,)),))
    expected = tried(problem, 3)
    best = enumerated(problem, 100.0)[1] if math.isfinite(expected) else None
    assert (math.inf if best is None else best[0]) == pytest.approx(expected)


def test_numbers_of_rows_differ_where_rows_do():
    """(1, 2) and (2, 1) have other numbers; two equal rows the same."""
    numbers = number_rows(np.array([[1, 2], [2, 1], [1, 2]]))
    assert numbers[0] == numbers[2] != numbers[1]


def test_numbers_too_large_are_all_different():
    """Where the product of sizes exceeds 62 bits no two rows count as equal: nothing is dropped wrongly."""
    assert len(set(number_rows(np.full((3, 8), 10**9)).tolist())) == 3


def test_falling_cost_keeps_the_cheaper_of_a_state():
    """Within a state, sorted by falling rate, what is not cheaper than an earlier one goes."""
    kept = falling_cost(np.array([1, 1, 1, 2]), np.array([3.0, 3.0, 2.0, 9.0]))
    assert kept.tolist() == [True, False, True, True]


def test_dominated_labels_go_and_one_of_equals_stays():
    """(2 nodes, rate 1, 5 USD) loses to (1, 1, 5); of two equal ones the first stays."""
    use = np.array([[2], [1], [1]])
    assert not_dominated(use, np.ones(3), np.full(3, 5.0)).tolist() == [False, True, False]


# -- the greedy first plan -------------------------------------------------------------------------------------------


def greedy(problem):
    """The reports of every greedy plan."""
    columns, core = core_of(problem)
    return [check_counts(problem, counts_from_columns(columns, values)) for values in greedy_plans(core)]


def test_greedy_takes_the_cheapest_that_fits(world):
    """3 requests/s on 2 cheap nodes and dear ones: two cheap and one dear, 7 USD."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"H100x1": 1}, 1.0).ask("m", 3.0)
    reports = greedy(world.pool(EAST, "L4x1", 1.0, 2).pool(EAST, "H100x1", 5.0, 9).problem())
    assert min(report.cost for report in reports) == pytest.approx(7.0)


def test_greedy_buys_no_prefill_that_decode_cannot_use(world):
    """Decode nodes carry 2 of 5 requests/s: prefill is bought for 2, not for 5."""
    world.template("m", "p", {"L4x1": 1}, 100.0).template("m", "d", {"H100x1": 1}, 10.0).ask("m", 5.0)
    reports = greedy(world.pool(EAST, "L4x1", 1.0, 9).pool(EAST, "H100x1", 4.0, 2).problem())
    assert {report.cost for report in reports} == {2 * 1.0 + 2 * 4.0}
    assert {report.shortfall for report in reports} == {(3.0,)}


def test_greedy_serves_those_first_that_went_short(world):
    """The dear model takes the pool that the other needs; in another order both are served."""
    world.template("dear", "a", {"L4x1": 1}, 1.0).template("dear", "a", {"H100x1": 1}, 1.0).ask("dear", 2.0)
    world.template("cheap", "a", {"L4x1": 1}, 2.0).ask("cheap", 2.0)
    reports = greedy(world.pool(EAST, "L4x1", 1.0, 2).pool(EAST, "H100x1", 5.0, 9).problem())
    assert any(not any(report.shortfall) for report in reports)


def test_greedy_keeps_every_hard_limit(world):
    """Cap, budget, most started, spot share, maximum and minimum counts: every greedy plan passes the check."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("n", "a", {"L4x1": 1}, 1.0).ask("m", 6.0).ask("n", 6.0)
    world.pool(EAST, "L4x1", 1.0, 20).pool(EAST, "L4x1", 0.5, 20, Market.SPOT)
    rules = (ModelRules(model="m", max_spot_share=0.5, max_instances=5), ModelRules(model="n", min_instances=7))
    limits = {"gpu_caps": (GpuCap(max_gpus=11),), "budget_usd_per_hour": 9.0, "max_started_instances": 10}
    for report in greedy(world.problem(model_rules=rules, **limits)):
        assert report.ok
        assert report.cost > 0


def test_no_time_leaves_the_greedy_plan_and_no_bound(world):
    """With the deadline gone before the search begins there is a plan that serves everything, and nothing is proved."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 3.0)
    problem = world.pool(EAST, "L4x1", 1.0, 9).problem()
    columns, _ = core_of(problem)
    now = time.monotonic()
    search = Search(problem, columns, np.array([1e4]), gap=1e-9, deadline=now - 1.0, begun=now)
    state = search.run()
    assert state.values.tolist() == [3]
    assert state.objective == pytest.approx(3.0)
    assert state.bound <= 0
