"""What an SLO one step tighter costs: by hand, for one model and several, beside what runs, and where there is none.

Every model is aggregated: throughput is requests/s. An L4x1 costs 1 USD/h, an H100x1 5 USD/h.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from coral_tasks.allocation.check import check_plan
from coral_tasks.allocation.explain import explain_plan
from coral_tasks.allocation.slo_step import StepOutcome
from coral_tasks.allocation.solve import solve_allocation
from coral_tasks.allocation.tighter import with_tighter
from coral_tasks.allocation.whatif import compare_plans
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import Market, Runtime

EAST = "aws/us-east-2"
L4 = "m/aggregated/100ms/1*L4x1/vllm"
OF_M = "An SLO one step tighter (0.8 times: 0.8 s and 80 ms) for m would"


@pytest.fixture
def halved(world):
    """One model, 4 requests/s; an L4 carries 1, an H100 4, and half of that at the tighter SLO."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"H100x1": 1}, 4.0)
    world.tight("m", "a", {"L4x1": 1}, 0.5).tight("m", "a", {"H100x1": 1}, 2.0)
    return world.ask("m", 4.0).pool(EAST, "L4x1", 1.0, 20).pool(EAST, "H100x1", 5.0, 9)


def explained(world, *, tighter=None, time_limit_s=20.0, problem=None, **options):
    """Explanation of the best plan."""
    problem = problem or world.problem(**options)
    plan = solve_allocation(problem, gap=1e-9)
    sets = world.tighter() if tighter is None else tighter
    return explain_plan(problem, plan, time_limit_s=time_limit_s, tighter=sets)


def test_half_the_throughput_doubles_the_cost(halved) -> None:
    """4 L4 at 1 USD become 8: 4 USD/h more, in the sentence and in the data; one model alone has no "all at once"."""
    told = explained(halved)
    assert f"{OF_M} cost 4.00 USD/h more." in told.sentences
    (step,) = told.slo_steps
    assert (step.model, step.slo, step.factor) == ("m", LatencySlo(ttft_s=0.8, tpot_s=0.08), 0.8)
    assert step.outcome is StepOutcome.SOLVED
    assert step.cost_usd_per_hour == pytest.approx(4.0)
    assert (step.loses_requests_per_s, step.exact) == (0.0, True)


def test_the_json_tells_the_same(halved) -> None:
    """Machines read the step by its fields."""
    (step,) = msgspec.json.decode(msgspec.json.encode(explained(halved)))["slo_steps"]
    assert step["outcome"] == "solved"
    assert step["slo"] == {"ttft_s": 0.8, "tpot_s": 0.08, "percentile": 99.0}
    assert step["cost_usd_per_hour"] == pytest.approx(4.0)


def test_a_step_that_changes_nothing_costs_nothing(halved) -> None:
    """Where the tighter templates are as fast, the sentence says nothing instead of 0.00."""
    halved.tight_rows.clear()
    halved.tight("m", "a", {"L4x1": 1}, 1.0)
    assert f"{OF_M} cost nothing more." in explained(halved).sentences


@pytest.mark.parametrize("phases", ["a", "pd"])
def test_a_model_that_nothing_holds_is_a_plain_answer(halved, phases) -> None:
    """Empty tighter sets: no template, all 4 requests/s would go unserved, and no cost is made up."""
    halved.tight_rows.clear()
    for phase in phases:
        halved.tight("m", phase)
    told = explained(halved)
    assert "No template holds m at 0.8 times its limits (0.8 s and 80 ms)." in told.sentences
    (step,) = told.slo_steps
    assert (step.outcome, step.cost_usd_per_hour) == (StepOutcome.NO_TEMPLATE, None)
    assert step.loses_requests_per_s == pytest.approx(4.0)


def test_one_phase_alone_holds_no_request(world) -> None:
    """Prefill keeps the tighter SLO, decode does not: nothing can serve the model."""
    world.template("m", "p", {"L4x1": 1}, 100.0).template("m", "d", {"L4x1": 1}, 10.0)
    world.tight("m", "p", {"L4x1": 1}, 80.0).tight("m", "d")
    world.ask("m", 2.0, prompt=100, output=10).pool(EAST, "L4x1", 1.0, 9)
    (step,) = explained(world).slo_steps
    assert step.outcome is StepOutcome.NO_TEMPLATE
    assert step.loses_requests_per_s == pytest.approx(2.0)


def test_a_phase_without_tokens_is_not_missed(world) -> None:
    """A model that only reads needs no decode template at the tighter SLO: 2 L4 become 4."""
    world.template("m", "p", {"L4x1": 1}, 100.0).tight("m", "p", {"L4x1": 1}, 50.0).tight("m", "d")
    world.ask("m", 2.0, prompt=100).pool(EAST, "L4x1", 1.0, 9)
    problem = replace(world.problem(), output_tokens=np.array([0.0]))
    (step,) = explained(world, problem=problem).slo_steps
    assert step.cost_usd_per_hour == pytest.approx(2.0)


def test_templates_that_the_options_forbid_do_not_count(halved) -> None:
    """Only vLLM is allowed and only hybrid templates keep the tighter SLO: said as such."""
    halved.tight_rows.clear()
    halved.tight("m", "a", {"L4x1": 1}, 0.5, Runtime.HYBRID)
    told = explained(halved, allowed_runtimes=(Runtime.VLLM,))
    assert "The options leave no template that holds m at 0.8 times its limits (0.8 s and 80 ms)." in told.sentences
    assert told.slo_steps[0].outcome is StepOutcome.NOTHING_ALLOWED
    assert f"{OF_M} cost 4.00 USD/h more." in explained(halved).sentences


def test_where_supply_ends_the_loss_is_told(world) -> None:
    """4 L4 are all there is: at the tighter SLO they carry 2 of 4 requests/s."""
    world.template("m", "a", {"L4x1": 1}, 1.0).tight("m", "a", {"L4x1": 1}, 0.5)
    told = explained(world.ask("m", 4.0).pool(EAST, "L4x1", 1.0, 4))
    assert f"{OF_M} leave 2 requests/s more unserved." in told.sentences
    assert told.slo_steps[0].loses_requests_per_s == pytest.approx(2.0)


def test_paper_mode_without_a_plan_is_told(world) -> None:
    """Where unserved load is forbidden and 4 L4 do not serve it, no plan is left: at most all of it is lost."""
    world.template("m", "a", {"L4x1": 1}, 1.0).tight("m", "a", {"L4x1": 1}, 0.5)
    world.ask("m", 4.0).pool(EAST, "L4x1", 1.0, 4)
    problem = replace(world.problem(), shortfall_weight=np.array([np.inf]))
    told = explained(world, problem=problem)
    assert f"{OF_M} leave at most 4 requests/s more unserved." in told.sentences


# Several models --------------------------------------------------------------------------------------------------


@pytest.fixture
def two(halved):
    """Beside m a model n of 2 requests/s on L4 alone, and 10 L4: own 6, m tighter 8 + 2, n tighter 4 + 4."""
    halved.template("n", "a", {"L4x1": 1}, 1.0).tight("n", "a", {"L4x1": 1}, 0.5).ask("n", 2.0)
    halved.availability = [one for one in halved.availability if one.configuration != "L4x1"]
    return halved.pool(EAST, "L4x1", None, 10)


def test_two_models_one_by_one_and_at_once(two) -> None:
    """4 and 2 USD/h more; at once 12 L4 would be needed and 10 exist: 8 L4 and an H100 for m, 13 against 6 USD/h."""
    told = explained(two)
    assert f"{OF_M} cost 4.00 USD/h more." in told.sentences
    assert f"{OF_M.replace(' m ', ' n ')} cost 2.00 USD/h more." in told.sentences
    assert "An SLO one step tighter (0.8 times) for all models at once would cost 7.00 USD/h more." in told.sentences
    assert [step.model for step in told.slo_steps] == ["m", "n", None]
    assert told.slo_steps[2].cost_usd_per_hour == pytest.approx(7.0)


def test_a_model_without_tighter_sets_is_named(two) -> None:
    """The library has a tighter SLO of m only: n is named, and nothing is said of all at once."""
    told = explained(two, tighter=[one for one in two.tighter() if one.model == "m"])
    assert f"{OF_M} cost 4.00 USD/h more." in told.sentences
    assert any(text.startswith("The library holds no templates of a tighter SLO of n:") for text in told.sentences)
    assert [(step.model, step.outcome.value) for step in told.slo_steps] == [("m", "solved"), ("n", "not_in_library")]


def test_a_model_that_cannot_be_served_counts_at_once(two) -> None:
    """Nothing holds n tighter: at once its 2 requests/s go unserved, while m is served."""
    two.tight_rows = [row for row in two.tight_rows if row[0] != "n"]
    told = explained(two.tight("n", "a"))
    assert [step.outcome.value for step in told.slo_steps] == ["solved", "no_template", "solved"]
    assert told.slo_steps[2].loses_requests_per_s == pytest.approx(2.0)


def test_steps_of_two_sizes_have_no_common_factor(two) -> None:
    """m was built at 0.8 and n at 0.5 times its limits: each says its own, all at once says none."""
    sets = [one if one.model == "m" else replace(one, slo=LatencySlo(ttft_s=0.5, tpot_s=0.05)) for one in two.tighter()]
    told = "\n".join(explained(two, tighter=sets).sentences)
    assert "An SLO one step tighter (0.5 times: 0.5 s and 50 ms) for n would cost 2.00 USD/h more." in told
    assert "An SLO one step tighter for all models at once would cost 7.00 USD/h more." in told


def test_limits_with_two_factors_are_told_without_one(halved) -> None:
    """Half the TTFT and 0.8 times the TPOT is no single factor; the limits themselves are told."""
    sets = [replace(one, slo=LatencySlo(ttft_s=0.5, tpot_s=0.08)) for one in halved.tighter()]
    told = explained(halved, tighter=sets)
    assert "An SLO one step tighter (0.5 s and 80 ms) for m would cost 4.00 USD/h more." in told.sentences


def test_a_model_nobody_asks_for_has_no_step(two) -> None:
    """n has no demand: only m is told of, and nothing of all at once."""
    two.demand = [one if one.model == "m" else replace(one, requests_per_s=0.0) for one in two.demand]
    assert [step.model for step in explained(two).slo_steps] == ["m"]


def test_a_model_without_own_templates_has_no_step(two) -> None:
    """What serves nothing today cannot get tighter; the shortage is told elsewhere."""
    assert [step.model for step in explained(two.ask("o", 1.0)).slo_steps] == ["m", "n", None]


def test_steps_without_time_are_named(two) -> None:
    """No time at all: every step is named with how to get it, and none has a figure."""
    told = explained(two, time_limit_s=0.0)
    assert (
        "No time was left to find what an SLO one step tighter would cost for m, n, all models at once; coral explain"
        " --time-limit-s gives more."
    ) in told.sentences
    assert {(step.outcome, step.cost_usd_per_hour) for step in told.slo_steps} == {(StepOutcome.NO_TIME, None)}


# What runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("throughput", "more"),
    [
        (1.0, "nothing more"),  # the 4 L4 that run carry on: no start
        (
            0.5,
            "6.00 USD/h more, start-up charge 2.00 of it",
        ),  # 4 L4 carry on and 4 start: 4 USD/h and 0.5 x 4 for starting
    ],
)
def test_the_same_machines_are_not_started_again(halved, throughput, more) -> None:
    """4 L4 run under the looser SLO's id; K = 0.5."""
    halved.tight_rows.clear()
    halved.tight("m", "a", {"L4x1": 1}, throughput).run(L4, EAST, 4)
    assert f"{OF_M} cost {more}." in explained(halved, startup_factor=0.5).sentences


def test_machines_that_the_tighter_set_does_not_hold_are_replaced(halved) -> None:
    """Only an H100 keeps the tighter SLO: 5 USD/h, and 2.5 for starting it, against 4."""
    halved.tight_rows.clear()
    halved.tight("m", "a", {"H100x1": 1}, 4.0).run(L4, EAST, 4)
    assert (
        f"{OF_M} cost 3.50 USD/h more, start-up charge 2.50 of it." in explained(halved, startup_factor=0.5).sentences
    )


def test_another_runtime_is_another_start(halved) -> None:
    """The tighter set has the L4 as hybrid only: the same nodes, but engines that must start, 0.5 x 4."""
    halved.tight_rows.clear()
    halved.tight("m", "a", {"L4x1": 1}, 1.0, Runtime.HYBRID).run(L4, EAST, 4)
    told = explained(halved, startup_factor=0.5).sentences
    assert f"{OF_M} cost 2.00 USD/h more, start-up charge 2.00 of it." in told


def test_running_rows_of_one_combination_join(halved) -> None:
    """Two ids of one machine kind, one of them of an SLO that left the library, are one running row after the step."""
    old = replace(halved.sets()[0].template(0), id="m/aggregated/90ms/1*L4x1/vllm")
    halved.known = [old]
    halved.run(L4, EAST, 2).run(old.id, EAST, 1)
    problem = halved.problem(startup_factor=0.5)
    assert sorted(problem.running.count.tolist()) == [1, 2]
    changed = with_tighter(problem, halved.tighter(), ["m"]).problem
    assert changed.running.count.tolist() == [3]
    assert changed.templates.template_id(int(changed.running.template[0])) == "m/aggregated/80ms/1*L4x1/vllm"
    assert changed.startable.tolist() == [True, True]


# The exchange of rows --------------------------------------------------------------------------------------------


def test_other_models_keep_their_rows(two) -> None:
    """Only m's templates change; n's ids, rates and nodes stay, and every new row is found with its own throughput."""
    problem = two.problem()
    changed = with_tighter(problem, two.tighter(), ["m"]).problem
    named = {
        changed.templates.template_id(row): changed.templates.throughput[row] for row in range(len(changed.templates))
    }
    assert named == {
        "m/aggregated/80ms/1*L4x1/vllm": 0.5,
        "m/aggregated/80ms/1*H100x1/vllm": 2.0,
        "n/aggregated/100ms/1*L4x1/vllm": 1.0,
    }
    for row in range(len(changed.templates)):
        template = changed.templates.serving_template(row)
        assert (template.id, template.throughput) == (
            changed.templates.template_id(row),
            changed.templates.throughput[row],
        )
    assert problem.templates.template_id(0).split("/")[2] == "100ms"


def test_a_plan_at_the_tighter_slo_is_checked_like_every_plan(two) -> None:
    """The changed problem is solved and its plan checked against it: 10 L4, of which 2 stay with n."""
    two.run("n/aggregated/100ms/1*L4x1/vllm", EAST, 2)
    changed = with_tighter(two.problem(), two.tighter(), ["m"]).problem
    plan = solve_allocation(changed, gap=1e-9)
    assert check_plan(changed, plan).ok
    assert {row.template: (row.count, row.num_kept) for row in plan.instances} == {
        "m/aggregated/80ms/1*L4x1/vllm": (8, 0),
        "n/aggregated/100ms/1*L4x1/vllm": (2, 2),
    }


def test_templates_on_unknown_configurations_are_left_out(halved) -> None:
    """A tighter template on a B200, of which the plan knows no price, is not planned on, and a note says so."""
    halved.tight("m", "a", {"B200x8": 1}, 90.0)
    changed = with_tighter(halved.problem(), halved.tighter(), ["m"]).problem
    assert len(changed.templates) == 2
    assert changed.notes[-1] == (
        "m: tighter templates for aggregated that use B200x8 are left out, since the plan knows no price of it"
    )
    assert f"{OF_M} cost 4.00 USD/h more." in explained(halved).sentences


def test_the_comparison_keeps_the_same_machines_together(halved) -> None:
    """4 L4 under one id become 8 under the other: 4 keep, 4 start, none stops."""
    halved.run(L4, EAST, 4)
    before = solve_allocation(halved.problem(), gap=1e-9)
    after = solve_allocation(with_tighter(halved.problem(), halved.tighter(), ["m"]).problem, gap=1e-9)
    difference = compare_plans(before, after)
    tight = "m/aggregated/80ms/1*L4x1/vllm"
    assert difference.retuned == (f"4 x {L4} in {EAST} on_demand as {tight}",)
    assert difference.started == (f"4 x {tight} in {EAST} on_demand",)
    assert difference.stopped == ()
    assert (difference.cost_before, difference.cost_after) == (4.0, 8.0)


def test_spot_machines_stay_in_their_market(halved) -> None:
    """What runs on spot carries over in its own zone."""
    halved.pool(EAST, "L4x1", 0.5, 20, Market.SPOT).run(L4, EAST, 4, Market.SPOT)
    problem = halved.problem(startup_factor=0.5)
    changed = with_tighter(problem, halved.tighter(), ["m"]).problem
    assert changed.zones[int(changed.running.zone[0])].market is Market.SPOT
    assert changed.running.count.tolist() == [4]
