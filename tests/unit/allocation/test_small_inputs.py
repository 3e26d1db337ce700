"""Small inputs that tripped others, each with the right value worked out by hand."""

from __future__ import annotations

import pytest

from coral_tasks.allocation.check import check_plan
from coral_tasks.allocation.options import GpuCap, ModelRules
from coral_tasks.allocation.solve import solve_allocation
from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.names import Market
from coral_tasks.domain.plan import SolveStatus

REGION = "aws/us-east-2"
OTHER = "aws/ap-northeast-2"


def solved(world, previous=None, **options):
    """The plan, checked once more."""
    problem = world.problem(**options)
    plan = solve_allocation(problem, time_limit_s=20.0, gap=1e-9, previous=previous)
    assert check_plan(problem, plan).ok
    return plan


def counts(plan):
    """{(model/phase, nodes, region, market): count} of a plan."""
    return {
        ("/".join(row.template.split("/")[:2]), row.template.split("/")[-2], row.region, row.market.value): row.count
        for row in plan.instances
    }


def short(plan):
    """{model: unserved requests/s}."""
    return {row.model: pytest.approx(row.shortfall_requests_per_s) for row in plan.shortfalls}


def test_plain_case(world):
    """7 requests/s of 100 + 10 tokens: prefill 250/100 = 2.5 needs 3, decode 40/10 = 4 needs 2: 5 nodes at 2 USD."""
    world.template("m", "p", {"L4x1": 1}, 250.0).template("m", "d", {"L4x1": 1}, 40.0)
    world.ask("m", 7.0).pool(REGION, "L4x1", 2.0, 50)
    plan = solved(world)
    assert counts(plan) == {
        ("m/prefill", "1*L4x1", REGION, "on_demand"): 3,
        ("m/decode", "1*L4x1", REGION, "on_demand"): 2,
    }
    assert plan.certificate.cost_usd_per_hour == pytest.approx(10.0)
    assert plan.certificate.status is SolveStatus.OPTIMAL
    assert plan.certificate.bound_usd_per_hour == pytest.approx(10.0)


def test_one_node_where_two_are_wanted(world):
    """The cheap type would be used twice but exists once: one cheap node and one dear one."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"H100x1": 1}, 1.0)
    world.ask("m", 2.0).pool(REGION, "L4x1", 1.0, 1).pool(REGION, "H100x1", 5.0, 9)
    plan = solved(world)
    assert sorted(counts(plan).values()) == [1, 1]
    assert plan.certificate.cost_usd_per_hour == pytest.approx(6.0)


def test_gpu_cap_below_the_wish(world):
    """50 GPUs are wanted (30 prefill, 20 decode), 32 allowed: 19 + 12 (+1) serve 0.6 of 10: never above the cap."""
    world.template("m", "p", {"L4x1": 1}, 100.0 / 3).template("m", "d", {"L4x1": 1}, 5.0)
    world.ask("m", 10.0).pool(REGION, "L4x1", 1.0, 100)
    plan = solved(world, gpu_caps=(GpuCap(max_gpus=32),))
    by_phase = {key[0]: count for key, count in counts(plan).items()}
    assert sum(by_phase.values()) <= 32
    # 3 prefill nodes carry 1 request/s, 2 decode nodes carry 1: with 32, floor((32 * 3/5)) = 19 prefill = 6.333
    # and 13 decode = 6.5 requests/s: 6.333 are served, by 19 + 13
    assert by_phase == {"m/prefill": 19, "m/decode": 13}
    assert short(plan) == {"m": 10 - 19 / 3}


def test_unknown_availability_is_not_planned_on(world):
    """A configuration with a price and no availability row is unknown: nothing is planned there, and it is said."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"H100x1": 1}, 1.0)
    world.ask("m", 1.0).pool(REGION, "L4x1", 1.0, None).pool(REGION, "H100x1", 5.0, 9)
    problem = world.problem()
    assert ("L4x1", f"{REGION} on_demand", "availability unknown: only the nodes we hold are planned on") in (
        problem.excluded
    )
    assert solved(world).certificate.cost_usd_per_hour == pytest.approx(5.0)


def test_zero_availability_is_told_apart_from_unknown(world):
    """A row that says 0 nodes gives another reason than no row at all."""
    world.template("m", "a", {"L4x1": 1}, 1.0)
    world.ask("m", 1.0).pool(REGION, "L4x1", 1.0, 0)
    assert world.problem().excluded == (("L4x1", f"{REGION} on_demand", "no node available"),)


def test_what_we_hold_counts_as_available(world):
    """Zero more nodes can be had and two run: both stay."""
    world.template("m", "a", {"L4x1": 1}, 1.0)
    world.ask("m", 2.0).pool(REGION, "L4x1", 1.0, 0).run("m/aggregated/100ms/1*L4x1/vllm", REGION, 2)
    plan = solved(world)
    assert [(row.count, row.num_kept) for row in plan.instances] == [(2, 2)]
    assert not plan.shortfalls


def test_held_nodes_count_without_any_availability_row(world):
    """Availability is unknown but one node is held: exactly that one is planned on."""
    world.template("m", "a", {"L4x1": 1}, 1.0)
    world.ask("m", 2.0).pool(REGION, "L4x1", 1.0, None).run("m/aggregated/100ms/1*L4x1/vllm", REGION, 1)
    plan = solved(world)
    assert [(row.count, row.num_kept) for row in plan.instances] == [(1, 1)]
    assert short(plan) == {"m": 1.0}


def test_free_price_without_the_reserved_mark_is_refused(world):
    """Price 0 is a reserved node or a mistake."""
    with pytest.raises(ValidationFailed, match="price 0 is allowed only for reserved nodes"):
        world.pool(REGION, "L4x1", 0.0, 5)


def test_reserved_nodes_are_used_first_and_to_their_number(world):
    """Five nodes are needed, three are reserved: three at 0 and two at 2 USD."""
    world.template("m", "a", {"L4x1": 1}, 1.0)
    world.ask("m", 5.0).pool(REGION, "L4x1", 0.0, 3, Market.RESERVED).pool(REGION, "L4x1", 2.0, 9)
    plan = solved(world)
    assert {row.market.value: row.count for row in plan.instances} == {"reserved": 3, "on_demand": 2}
    assert plan.certificate.cost_usd_per_hour == pytest.approx(4.0)


def test_demand_zero_for_one_model(world):
    """A model without demand loses its instances; nothing is divided by zero."""
    world.template("idle", "a", {"L4x1": 1}, 1.0).template("busy", "a", {"L4x1": 1}, 1.0)
    world.ask("idle", 0.0).ask("busy", 2.0).pool(REGION, "L4x1", 1.0, 9)
    world.run("idle/aggregated/100ms/1*L4x1/vllm", REGION, 2)
    plan = solved(world)
    assert {key[0]: count for key, count in counts(plan).items()} == {"busy/aggregated": 2}


def test_demand_zero_for_all(world):
    """Nothing is asked: nothing runs, and that is optimal."""
    world.template("m", "a", {"L4x1": 1}, 1.0)
    world.ask("m", 0.0).pool(REGION, "L4x1", 1.0, 9).run("m/aggregated/100ms/1*L4x1/vllm", REGION, 3)
    plan = solved(world)
    assert plan.instances == ()
    assert plan.certificate.status is SolveStatus.OPTIMAL
    assert plan.certificate.gap == 0


def test_prefill_and_decode_share_a_region(world):
    """Prefill is cheap in the east, decode fits only in the west: both are bought in the west."""
    world.template("m", "p", {"L4x1": 1}, 100.0).template("m", "d", {"H100x1": 1}, 10.0)
    world.ask("m", 3.0).pool(REGION, "L4x1", 1.0, 9)
    world.pool(OTHER, "L4x1", 2.0, 9).pool(OTHER, "H100x1", 4.0, 9)
    plan = solved(world)
    assert {key[2] for key in counts(plan)} == {OTHER}
    assert plan.certificate.cost_usd_per_hour == pytest.approx(3 * 2.0 + 3 * 4.0)


def test_prefill_without_decode_is_never_bought(world):
    """No region offers decode nodes: nothing is bought, everything is short."""
    world.template("m", "p", {"L4x1": 1}, 100.0).template("m", "d", {"H100x1": 1}, 10.0)
    world.ask("m", 3.0).pool(REGION, "L4x1", 1.0, 9)
    plan = solved(world)
    assert plan.instances == ()
    assert short(plan) == {"m": 3.0}
    assert plan.certificate.shortage_proved


def test_minimum_instances_above_supply(world):
    """At least four are wanted, three nodes exist: three run; the hard cap wins and nothing is short."""
    world.template("m", "a", {"L4x1": 1}, 1.0)
    world.ask("m", 1.0).pool(REGION, "L4x1", 1.0, 3)
    plan = solved(world, model_rules=(ModelRules(model="m", min_instances=4),))
    assert sum(counts(plan).values()) == 3
    assert not plan.shortfalls


def test_minimum_instances_are_met_where_supply_allows(world):
    """One instance would do, two are the rule: two run."""
    world.template("m", "a", {"L4x1": 1}, 1.0)
    world.ask("m", 1.0).pool(REGION, "L4x1", 1.0, 3)
    plan = solved(world, model_rules=(ModelRules(model="m", min_instances=2),))
    assert sum(counts(plan).values()) == 2


def test_model_without_template(world):
    """A model with demand and no template is short as a whole; the other is served."""
    world.template("m", "a", {"L4x1": 1}, 1.0)
    world.ask("m", 2.0).ask("ghost", 1.5).pool(REGION, "L4x1", 2.0, 3)
    plan = solved(world)
    assert sum(counts(plan).values()) == 2
    assert short(plan) == {"ghost": 1.5}


def test_low_priority_gives_way(world):
    """A low-priority model holds both nodes that a high-priority one needs: it loses them."""
    world.template("low", "a", {"L4x1": 1}, 1.0).template("high", "a", {"L4x1": 1}, 1.0)
    world.ask("low", 2.0).ask("high", 2.0).pool(REGION, "L4x1", 1.0, 2)
    world.run("low/aggregated/100ms/1*L4x1/vllm", REGION, 2)
    rules = (ModelRules(model="high", priority=0), ModelRules(model="low", priority=1))
    plan = solved(world, model_rules=rules, startup_factor=0.4)
    assert {key[0]: count for key, count in counts(plan).items()} == {"high/aggregated": 2}
    assert short(plan) == {"low": 2.0}


def test_separate_optima_exceed_the_pool(world):
    """Both models want the cheap pool of three alone (2 + 2): one instance moves to the dear pool."""
    for model in ("a", "b"):
        world.template(model, "a", {"L4x1": 1}, 1.0).template(model, "a", {"H100x1": 1}, 1.0).ask(model, 2.0)
    world.pool(REGION, "L4x1", 1.0, 3).pool(REGION, "H100x1", 4.0, 9)
    plan = solved(world)
    assert plan.certificate.cost_usd_per_hour == pytest.approx(3 * 1.0 + 4.0)
    assert not plan.shortfalls


def test_ties_do_not_flap(world):
    """Two regions cost the same: what runs after the first run stays in the second, with no start-up cost at all."""
    world.template("m", "a", {"L4x1": 1}, 1.0)
    world.ask("m", 2.0).pool(REGION, "L4x1", 1.0, 5).pool(OTHER, "L4x1", 1.0, 5)
    world.run("m/aggregated/100ms/1*L4x1/vllm", REGION, 1).run("m/aggregated/100ms/1*L4x1/vllm", OTHER, 1)
    plan = solved(world)
    assert {row.region: (row.count, row.num_kept) for row in plan.instances} == {REGION: (1, 1), OTHER: (1, 1)}


def test_a_free_instance_that_serves_nobody_goes(world):
    """Three free instances run where two serve all: two stay, the idle one goes though it costs nothing."""
    name = "m/aggregated/100ms/1*L4x1/vllm"
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 2.0)
    world.pool(REGION, "L4x1", 0.0, 8, market=Market.RESERVED).run(name, REGION, 3, market=Market.RESERVED)
    plan = solved(world)
    assert [(row.count, row.num_kept) for row in plan.instances] == [(2, 2)]


def test_equal_inputs_give_the_same_plan(world):
    """The same inputs give the same plan id, solved twice."""
    world.template("m", "a", {"L4x1": 1}, 1.0).template("m", "a", {"H100x1": 1}, 1.0)
    world.ask("m", 3.0).pool(REGION, "L4x1", 1.0, 2).pool(REGION, "H100x1", 1.0, 2).pool(OTHER, "L4x1", 1.0, 2)
    assert solved(world) == solved(world)


def test_throughput_a_thousandth_of_the_demand(world):
    """1000 requests/s from instances of 1: a thousand instances, none more."""
    world.template("m", "a", {"L4x1": 1}, 1.0)
    world.ask("m", 1000.0).pool(REGION, "L4x1", 1.0, 5000)
    plan = solved(world)
    assert list(counts(plan).values()) == [1000]
    assert plan.certificate.gap == pytest.approx(0.0, abs=1e-9)


def test_a_third_of_a_million_instances(world):
    """100,000 requests/s from instances of 0.3: 333,334 of them, proved, though no table of units tells them apart."""
    world.template("m", "a", {"L4x1": 1}, 0.3)
    world.ask("m", 100_000.0).pool(REGION, "L4x1", 3.0, 1_000_000)
    plan = solved(world)
    assert list(counts(plan).values()) == [333_334]
    assert plan.certificate.gap == pytest.approx(0.0, abs=1e-9)


def test_running_template_that_left_the_library_is_kept(world):
    """Its template is carried by the last plan: with a start-up cost above the saving it stays, none is started."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 2.0).pool(REGION, "L4x1", 2.0, 5)
    before = solved(world)
    old = before.templates[0]
    world.rows.clear()
    world.template("m", "a", {"H100x1": 1}, 1.0).pool(REGION, "H100x1", 1.9, 5)
    world.run(old.id, REGION, 1)
    world.known = [old]
    plan = solved(world, startup_factor=0.5)
    assert {key[1]: count for key, count in counts(plan).items()} == {"1*L4x1": 1, "1*H100x1": 1}
    assert plan.template(old.id) == old


def test_running_template_that_nobody_knows_is_replaced(world):
    """Neither library nor last plan knows it: its instance is replaced, the note says so, its demand is served."""
    world.template("m", "a", {"L4x1": 1}, 1.0).ask("m", 2.0).pool(REGION, "L4x1", 2.0, 5)
    world.run("m/aggregated/100ms/3*L4x1/hybrid", REGION, 1)
    assert "will be replaced" in world.problem().notes[0]
    assert sum(counts(solved(world)).values()) == 2
