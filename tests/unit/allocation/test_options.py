"""Every option: what it does to the plan, worked out by hand, and its line in the explanation."""

from __future__ import annotations

import pytest

from coral_tasks.allocation.check import check_plan
from coral_tasks.allocation.explain import explain_plan
from coral_tasks.allocation.options import AllocationOptions, GpuCap, ModelRules
from coral_tasks.allocation.solve import solve_allocation
from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.names import Market, Runtime

EAST, WEST = "aws/east", "aws/west"


def solved(world, **options):
    """The problem, its plan, and the explanation's sentences as one text."""
    problem = world.problem(**options)
    plan = solve_allocation(problem, time_limit_s=20.0, gap=1e-9)
    assert check_plan(problem, plan).ok
    return plan, "\n".join(explain_plan(problem, plan, time_limit_s=20.0).sentences)


def cost(plan):
    return pytest.approx(plan.certificate.cost_usd_per_hour)


def total(plan):
    return sum(row.count for row in plan.instances)


def short(plan):
    return {row.model: pytest.approx(row.shortfall_requests_per_s) for row in plan.shortfalls}


@pytest.fixture
def two_regions(world):
    """One model, 4 requests/s, instances of 1: 1 USD in the east, 3 USD in the west, 9 nodes each."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 4.0)
    return world.pool(EAST, "L4x1", 1.0, 9).pool(WEST, "L4x1", 3.0, 9)


def test_allowed_regions(two_regions):
    """Kept out of the cheap region, four instances cost 12 instead of 4."""
    plan, text = solved(two_regions, model_rules=(ModelRules(model="m", allowed_regions=(WEST,)),))
    assert {row.region for row in plan.instances} == {WEST}
    assert cost(plan) == 12.0
    assert f"Keeping m in {WEST} costs 8.00 USD/h." in text


def test_minimum_instances(two_regions):
    """At least 6 where 4 suffice: two more at 1 USD."""
    plan, text = solved(two_regions, model_rules=(ModelRules(model="m", min_instances=6),))
    assert total(plan) == 6
    assert cost(plan) == 6.0
    assert "At least 6 instances of m costs 2.00 USD/h." in text


def test_minimum_instances_give_way(world):
    """Three nodes exist, four are the minimum: the explanation says which rule gives way."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 1.0).pool(EAST, "L4x1", 1.0, 3)
    _, text = solved(world, model_rules=(ModelRules(model="m", min_instances=4),))
    assert "m should have at least 4 instances; 3 is what supply and hard limits allow" in text
    assert "the hard cap wins" in text


def test_maximum_instances(world):
    """At most 2 instances for 4 requests/s: the large template (2 nodes, 1.9) wins though small ones do more."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"L4x1": 2}, 1.9)
    world.ask("m", 4.0).pool(EAST, "L4x1", 1.0, 9)
    plan, text = solved(world, model_rules=(ModelRules(model="m", max_instances=2),))
    assert total(plan) == 2
    assert short(plan) == {"m": 0.2}
    assert "At most 2 instances of m leaves 0.2 requests/s unserved." in text


def test_gpu_cap_of_one_type(world):
    """At most 2 L4: the rest runs on H100 at 5 USD."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"H100x1": 1}, 1.0).ask("m", 4.0)
    world.pool(EAST, "L4x1", 1.0, 9).pool(EAST, "H100x1", 5.0, 9)
    plan, text = solved(world, gpu_caps=(GpuCap(max_gpus=2, gpu_type="L4"),))
    assert cost(plan) == 2 * 1.0 + 2 * 5.0
    assert "The cap of 2 L4 costs 8.00 USD/h." in text


def test_gpu_cap_counts_gpus_not_nodes(world):
    """A node of four GPUs counts four times: 7 GPUs are one such node."""
    world.template("m", "a", {"L4x4": 1}, 1.0).ask("m", 3.0).pool(EAST, "L4x4", 1.0, 9)
    plan, _ = solved(world, gpu_caps=(GpuCap(max_gpus=7),))
    assert total(plan) == 1
    assert short(plan) == {"m": 2.0}


def test_budget(two_regions):
    """2.5 USD/h buy two instances: half is served, and the budget is named."""
    plan, text = solved(two_regions, budget_usd_per_hour=2.5)
    assert cost(plan) == 2.0
    assert short(plan) == {"m": 2.0}
    assert "The budget of 2.5 USD/h leaves 2 requests/s unserved." in text


def test_largest_change(world):
    """Three dear instances run; one may start per run: one is replaced by a cheap one, two stay."""
    world.template("m", "a", {"H100x1": 1}, 1.0).template("m", "a", {"L4x1": 1}, 1.0).ask("m", 3.0)
    world.pool(EAST, "L4x1", 1.0, 9).pool(EAST, "H100x1", 5.0, 9)
    world.run("m/aggregated/100ms/1*H100x1/vllm", EAST, 3)
    plan, text = solved(world, max_started_instances=1)
    assert cost(plan) == 2 * 5.0 + 1.0
    assert "The limit of 1 starts per run costs 8.00 USD/h." in text


def test_spot_share_falls_back_to_on_demand(world):
    """Half of 4 requests/s may run on spot at 1 USD, the rest on demand at 3."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 4.0)
    world.pool(EAST, "L4x1", 3.0, 9).pool(EAST, "L4x1", 1.0, 9, Market.SPOT)
    plan, text = solved(world, model_rules=(ModelRules(model="m", max_spot_share=0.5),))
    assert {row.market.value: row.count for row in plan.instances} == {"spot": 2, "on_demand": 2}
    assert cost(plan) == 8.0
    assert "At most 50% of m on spot nodes costs 4.00 USD/h." in text


def test_spot_switched_off(world):
    """Without spot everything is on demand."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 4.0)
    world.pool(EAST, "L4x1", 3.0, 9).pool(EAST, "L4x1", 1.0, 9, Market.SPOT)
    plan, _ = solved(world, use_spot=False)
    assert {row.market for row in plan.instances} == {Market.ON_DEMAND}


def test_reserved_nodes_in_the_explanation(world):
    """Reserved nodes are used first, and the explanation counts them."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 4.0)
    world.pool(EAST, "L4x1", 0.0, 3, Market.RESERVED).pool(EAST, "L4x1", 2.0, 9)
    plan, text = solved(world)
    assert cost(plan) == 2.0
    assert f"3 of 3 reserved nodes in {EAST} are used, at no further cost." in text


def test_headroom(two_regions):
    """With 80 % of capacity usable, 4 requests/s need capacity 5."""
    plan, text = solved(two_regions, headroom=0.8)
    assert cost(plan) == 5.0
    assert "The headroom (only 80% of capacity is used) costs 1.00 USD/h." in text


def test_excluded_configurations(world):
    """Without L4 the plan runs on H100."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"H100x1": 1}, 1.0).ask("m", 2.0)
    world.pool(EAST, "L4x1", 1.0, 9).pool(EAST, "H100x1", 5.0, 9)
    plan, text = solved(world, excluded_configurations=("L4x1",))
    assert cost(plan) == 10.0
    assert "Excluding L4x1 costs 8.00 USD/h." in text


@pytest.mark.parametrize("of_model", [True, False])
def test_allowed_runtimes(world, of_model):
    """The faster template needs the hybrid runtime: with vllm only, two instances instead of one."""
    world.template("m", "a", {"L4x1": 1}, 2.0, Runtime.HYBRID).template("m", "a", {"L4x1": 1}, 1.0, Runtime.VLLM)
    world.ask("m", 2.0).pool(EAST, "L4x1", 1.0, 9)
    rules = (ModelRules(model="m", allowed_runtimes=(Runtime.VLLM,)),)
    options = {"model_rules": rules} if of_model else {"allowed_runtimes": (Runtime.VLLM,)}
    plan, text = solved(world, **options)
    assert cost(plan) == 2.0
    assert f"Allowing only vllm{' for m' if of_model else ''} costs 1.00 USD/h." in text


def test_priority_classes_and_floor(world):
    """4 nodes for 4 + 4 requests/s: the low class gets its floor of a quarter, the high class the rest."""
    for model in ("high", "low"):
        world.template(model, "a", {"L4x1": 1}, 1.0).ask(model, 4.0)
    world.pool(EAST, "L4x1", 1.0, 4)
    rules = (ModelRules(model="high", priority=0), ModelRules(model="low", priority=1, floor_share=0.25))
    plan, text = solved(world, model_rules=rules)
    assert short(plan) == {"high": 1.0, "low": 3.0}
    assert plan.certificate.shortage_proved
    assert "Supply went to the higher priority class first, floors before all." in text


def test_equal_shares_inside_a_class(world):
    """4 nodes for 4 + 4 requests/s of equal standing: two each."""
    for model in ("a", "b"):
        world.template(model, "a", {"L4x1": 1}, 1.0).ask(model, 4.0)
    plan, _ = solved(world.pool(EAST, "L4x1", 1.0, 4))
    assert short(plan) == {"a": 2.0, "b": 2.0}


def test_unequal_shares_inside_a_class(world):
    """A model of share 3 loses a third of what one of share 1 loses: of 4 missing it bears 1."""
    for model in ("a", "b"):
        world.template(model, "a", {"L4x1": 1}, 1.0).ask(model, 4.0)
    plan, _ = solved(world.pool(EAST, "L4x1", 1.0, 4), model_rules=(ModelRules(model="a", share=3.0),))
    assert short(plan) == {"a": 1.0, "b": 3.0}


def test_what_one_more_node_saves(world):
    """The cheap pool of one is used up; one more saves 5 - 1."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"H100x1": 1}, 1.0).ask("m", 2.0)
    world.pool(EAST, "L4x1", 1.0, 1).pool(EAST, "H100x1", 5.0, 9)
    _, text = solved(world)
    assert f"All 1 L4x1 in {EAST} are used; one more would save 4.00 USD/h." in text


def test_shortage_names_model_and_supply(world):
    """Two nodes for three requests/s: the explanation says what is short, what is used up and what helps."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 3.0).pool(EAST, "L4x1", 1.0, 2)
    _, text = solved(world)
    assert f"m: 1 of 3 requests/s are not served: supply is used up: L4x1 in {EAST} (2 of 2)." in text
    assert f"What would help most: one more L4x1 in {EAST}." in text


def test_shortage_of_a_model_without_template(world):
    """Another reason, told apart: no template at all."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 1.0).ask("ghost", 1.0).pool(EAST, "L4x1", 1.0, 2)
    _, text = solved(world)
    assert "ghost: 1 of 1 requests/s are not served: the library has no template for it" in text


def test_shortage_by_an_option_names_the_option(two_regions):
    """The budget is what is short: lifting it is what would help."""
    _, text = solved(two_regions, budget_usd_per_hour=2.5)
    assert "What would help most: lifting the budget of 2.5 USD/h." in text


def test_unknown_names_are_refused_together(world):
    """Rules about an unknown model, region and configuration are three violations, raised at once."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 1.0).pool(EAST, "L4x1", 1.0, 2)
    rules = (ModelRules(model="x"), ModelRules(model="m", allowed_regions=("moon",)))
    with pytest.raises(ValidationFailed) as caught:
        world.problem(model_rules=rules, excluded_configurations=("T4x1",))
    text = str(caught.value)
    assert "3 violations" in text
    assert "unknown model" in text
    assert "unknown region" in text
    assert "unknown configuration is excluded" in text


@pytest.mark.parametrize(
    ("field", "value"),
    [("headroom", 0.0), ("headroom", 1.1), ("startup_factor", -1.0), ("budget_usd_per_hour", float("nan"))],
)
def test_bad_options_are_refused(field, value):
    """Options check themselves and name the field."""
    with pytest.raises(ValidationFailed, match=field):
        AllocationOptions(**{field: value})


def test_ban_of_a_region_is_costed(two_regions):
    """Without the cheap region four instances cost 12 instead of 4; without the unused one the plan is the same."""
    _, text = solved(two_regions, startup_factor=0.0)
    assert f"Without region {EAST} the plan would cost 8.00 USD/h more." in text
    assert f"would cost nothing: region {WEST}, runtimes other than vllm." in text


def test_ban_that_loses_load_is_told(two_regions):
    """Where the west has two nodes only, two of four requests/s are lost without the east."""
    two_regions.availability = [row for row in two_regions.availability if row.region != WEST]
    _, text = solved(two_regions.pool(WEST, "L4x1", None, 2))
    assert f"Without region {EAST}, 2 requests/s more would go unserved." in text


def test_vllm_only_is_costed(world):
    """One hybrid instance of 2 on one node against two vLLM instances of 1: 1 USD more."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"A10x1": 1}, 2.0, Runtime.HYBRID).ask("m", 2.0)
    _, text = solved(world.pool(EAST, "L4x1", 1.0, 9).pool(EAST, "A10x1", 1.0, 9), startup_factor=0.0)
    assert "Without runtimes other than vllm the plan would cost 1.00 USD/h more." in text


def test_limit_that_no_surviving_column_is_under(world):
    """Model m has prefill only and drops out; the spot limit on it then holds nothing, and n still gets its 6 nodes.

    The budget of 6 USD buys 6 nodes of 0.04 requests/s for n.
    """
    world.template("m", "p", {"L4x1": 1}, 0.4).template("m", "p", {"A10x1": 1}, 0.4)
    world.template("n", "a", {"L4x1": 1}, 0.04)
    world.ask("m", 0.5).ask("n", 7.3).pool(EAST, "L4x1", 1.0, 8).pool(EAST, "A10x1", 0.7, 1, Market.SPOT)
    problem = world.problem(model_rules=(ModelRules(model="m", max_spot_share=0.5),), budget_usd_per_hour=6.0)
    plan = solve_allocation(problem, time_limit_s=20.0, gap=1e-6)
    assert {row.template.split("/")[0]: row.count for row in plan.instances} == {"n": 6}
    assert short(plan) == {"m": 0.5, "n": 7.3 - 6 * 0.04}


def test_a_slower_template_fits_a_spot_share_that_a_faster_one_breaks(world):
    """Half of 1 request/s may come from spot. Of two templates on an L4 the hybrid one carries 0.6, too much for spot
    at 1 USD; the other carries 0.5: one of it on spot and one instance on demand at 4 USD, 5 against 8 USD.
    """
    world.template("m", "a", {"L4x1": 1}, 0.5).template("m", "a", {"L4x1": 1}, 0.6, Runtime.HYBRID).ask("m", 1.0)
    world.pool(EAST, "L4x1", 4.0, 9).pool(EAST, "L4x1", 1.0, 9, Market.SPOT)
    plan, _ = solved(world, model_rules=(ModelRules(model="m", max_spot_share=0.5),))
    assert cost(plan) == 5.0
