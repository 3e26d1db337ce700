"""Homo, Cauchy and Mélange on problems small enough to work out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from coral_tasks.allocation.check import check_plan
from coral_tasks.allocation.options import AllocationOptions
from coral_tasks.allocation.problem import AllocationProblem, Running, TemplateArrays, Zone
from coral_tasks.baselines import PLANNERS, plan_cauchy, plan_homo, plan_melange
from coral_tasks.baselines.melange import LengthBucket, length_buckets
from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.models import LatencySlo, RequestShape
from coral_tasks.domain.names import LatencySplit, Market, Phase, Runtime
from coral_tasks.domain.profiles import LimitedBy
from coral_tasks.domain.templates import NodeCombination, Placement, ServingTemplate, Stage

SLO = LatencySlo(ttft_s=1.0, tpot_s=0.1)
PHASES = (Phase.PREFILL, Phase.DECODE)
CONFIGURATIONS = ("A10Gx1", "L4x1")


def serving_template(row, nodes, phase, rate, model):
    names = [CONFIGURATIONS[c] for c, count in enumerate(nodes) for _ in range(count)]
    combination = NodeCombination.of(names)
    return ServingTemplate(
        id=f"t{row}",
        model=f"m{model}",
        phase=PHASES[phase],
        slo=SLO,
        nodes=combination,
        throughput=rate,
        placement=Placement(stages=(Stage(nodes=combination, num_layers=8, num_quanta=60),), total_quanta=60),
        latency_split=LatencySplit.EQUAL,
        runtime=Runtime.HYBRID,
        limited_by=LimitedBy.LATENCY,
        sources=(),
    )


def problem(templates, *, price, available, demand, num_regions=1):
    """Templates are (model, phase, nodes by configuration, rate); lengths are 1 token, so rates are requests/s."""
    M, Z = len(demand), num_regions
    nodes = np.array([row[2] for row in templates], dtype=np.int16)
    arrays = TemplateArrays(
        model=np.array([row[0] for row in templates], dtype=np.int32),
        phase=np.array([row[1] for row in templates], dtype=np.int8),
        runtime=np.zeros(len(templates), dtype=np.int8),
        nodes=nodes,
        throughput=np.array([row[3] for row in templates], dtype=float),
        template_id=lambda t: f"t{t}",
        serving_template=lambda t: serving_template(t, nodes[t], templates[t][1], templates[t][3], templates[t][0]),
    )
    empty = np.zeros(0, dtype=np.int64)
    return AllocationProblem(
        library_version="v",
        models=tuple(f"m{m}" for m in range(M)),
        regions=tuple(f"r{r}" for r in range(num_regions)),
        configurations=CONFIGURATIONS,
        zones=tuple(Zone(region=r, market=Market.ON_DEMAND) for r in range(num_regions)),
        num_gpus=np.ones(2, dtype=np.int64),
        demand_requests_per_s=np.array(demand, dtype=float),
        required_requests_per_s=np.array(demand, dtype=float),
        prompt_tokens=np.ones(M),
        output_tokens=np.ones(M),
        price_usd_per_hour=np.broadcast_to(np.array(price, dtype=float), (Z, 2)).copy(),
        available_nodes=np.broadcast_to(np.array(available, dtype=np.int64), (Z, 2)).copy(),
        templates=arrays,
        running=Running(template=empty, zone=empty, count=empty),
        options=AllocationOptions(),
    )


# A10G is better at prefill (rate 4 for 2 USD), L4 at decode (rate 3 for 1 USD); a mixed pair of nodes beats both.
TEMPLATES = [
    (0, 0, (1, 0), 4.0),
    (0, 0, (0, 1), 1.0),
    (0, 1, (1, 0), 3.0),
    (0, 1, (0, 1), 3.0),
    (0, 0, (1, 1), 50.0),
    (0, 1, (1, 1), 50.0),
]


def rows(plan):
    return {(one.template, one.region): one.count for one in plan.instances}


def test_homo_takes_one_configuration_for_both_phases():
    """Homo compares A10G (2/4 + 2/3 per request) with L4 (1/1 + 1/3) and serves 6 requests/s on A10G alone."""
    plan = plan_homo(problem(TEMPLATES, price=(2.0, 1.0), available=(9, 9), demand=[6.0]))
    assert rows(plan) == {("t0", "r0"): 2, ("t2", "r0"): 2}
    assert plan.certificate.cost_usd_per_hour == 8.0


def test_cauchy_takes_the_best_configuration_of_each_phase():
    """Cauchy puts prefill on A10G and decode on L4, never on the mixed nodes that would be cheaper still."""
    plan = plan_cauchy(problem(TEMPLATES, price=(2.0, 1.0), available=(9, 9), demand=[6.0]))
    assert rows(plan) == {("t0", "r0"): 2, ("t3", "r0"): 2}
    assert plan.certificate.cost_usd_per_hour == 6.0


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_every_planner_gives_a_plan_that_the_independent_check_accepts(name):
    """Supply, figures and shortfalls of each baseline's plan stand up to allocation's own check, short or not."""
    for available in ((9, 9), (1, 1), (0, 0)):
        one = problem(TEMPLATES, price=(2.0, 1.0), available=available, demand=[6.0], num_regions=2)
        plan = PLANNERS[name](one)
        assert check_plan(one, plan).violations == ()


@pytest.mark.parametrize("plan_one", [plan_homo, plan_cauchy])
def test_scarcity_moves_to_the_next_offer_and_states_what_is_missing(plan_one):
    """With one A10G in all, Cauchy still uses it for prefill; Homo has no room for a pair there and takes L4."""
    plan = plan_one(problem(TEMPLATES, price=(2.0, 1.0), available=(1, 2), demand=[6.0]))
    (short,) = plan.shortfalls
    # Homo: one L4 each for prefill (1 request/s) and decode. Cauchy: A10G for prefill, two L4 for decode: 4 requests/s.
    assert short.shortfall_requests_per_s == pytest.approx(5.0 if plan_one is plan_homo else 2.0)


def test_efficiency_and_whole_choice_differ_by_rounding():
    """For 1 request/s a big efficient template is bought by 'efficiency' and the small one by 'whole'."""
    templates = [(0, 0, (1, 0), 1.0), (0, 0, (2, 0), 10.0), (0, 1, (1, 0), 1.0)]
    one = problem(templates, price=(2.0, 1.0), available=(9, 9), demand=[1.0])
    assert rows(plan_homo(one)) == {("t1", "r0"): 1, ("t2", "r0"): 1}
    assert rows(plan_homo(one, choice="whole")) == {("t0", "r0"): 1, ("t2", "r0"): 1}


def test_melange_mixes_kinds_of_one_node():
    """For 7 requests/s of decode Mélange rounds better than one kind: 2 L4 (rate 3) and 1 A10G (rate 1 at 0.4 USD)."""
    templates = [(0, 0, (0, 1), 100.0), (0, 1, (0, 1), 3.0), (0, 1, (1, 0), 1.0)]
    one = problem(templates, price=(0.4, 1.0), available=(9, 9), demand=[7.0])
    plan = plan_melange(one, num_slices=7)
    assert rows(plan) == {("t0", "r0"): 1, ("t1", "r0"): 2, ("t2", "r0"): 1}


def test_melange_packs_buckets_of_unequal_length():
    """Half the requests are three times as long as the others: the same tokens, so the same load, cut into more pieces.

    6 requests/s of mean 2 output tokens: 3 of 1 token and 3 of 3 tokens. An L4 makes 2 tokens/s, so it carries 2 of the
    short or 2/3 of the long ones: 1.5 + 4.5 = 6 nodes, as many as 6 requests/s of mean length need.
    """
    templates = [(0, 0, (0, 1), 100.0), (0, 1, (0, 1), 2.0)]
    one = problem(templates, price=(0.4, 1.0), available=(9, 9), demand=[6.0])
    one = replace(one, prompt_tokens=np.array([10.0]), output_tokens=np.array([2.0]))
    buckets = {one.models[0]: [LengthBucket(share=0.5, prompt_tokens=10, output_tokens=o) for o in (1, 3)]}
    for given in (None, buckets):
        plan = plan_melange(one, buckets=given, num_slices=12)
        assert rows(plan) == {("t0", "r0"): 1, ("t1", "r0"): 6}
        assert plan.shortfalls == ()


def test_buckets_keep_the_means_of_their_shape():
    """Four quarters whose mean prompt and answer are the shape's own; answers without spread are all alike."""
    shape = RequestShape(mean_prompt_tokens=100, p95_prompt_tokens=300, mean_output_tokens=20, p95_output_tokens=20)
    found = length_buckets(shape)
    assert sum(one.share for one in found) == 1.0
    assert sum(one.share * one.prompt_tokens for one in found) == pytest.approx(100)
    assert {round(one.output_tokens, 6) for one in found} == {20.0}
    short, long = sorted({one.prompt_tokens for one in found})
    # spread s = 0.9318 for p95 = 3 means: the mean below the median is 2 Phi(-s) of the whole
    assert (short, long) == pytest.approx((2 * 0.17573 * 100, 2 * 0.82427 * 100), rel=2e-3)


def test_bucket_shares_must_add_up():
    """Shares of 0.5 and 0.4 are refused by model."""
    templates = [(0, 0, (0, 1), 100.0), (0, 1, (0, 1), 3.0)]
    one = problem(templates, price=(0.4, 1.0), available=(9, 9), demand=[6.0])
    shares = [LengthBucket(share=share, prompt_tokens=1, output_tokens=1) for share in (0.5, 0.4)]
    with pytest.raises(ValidationFailed, match="shares must add up to 1"):
        plan_melange(one, buckets={one.models[0]: shares})


def test_melange_leaves_out_pipelines():
    """Mélange uses templates of one node only, even where two nodes are far better."""
    plan = plan_melange(problem(TEMPLATES, price=(2.0, 1.0), available=(99, 99), demand=[6.0]))
    assert {one.template for one in plan.instances} <= {"t0", "t1", "t2", "t3"}
    assert plan.shortfalls == ()


def test_two_models_share_the_supply_in_order():
    """The first model of the problem takes the nodes, the second gets what is left, and the shortfall is its own."""
    templates = [*TEMPLATES[:4], *((1, *row[1:]) for row in TEMPLATES[:4])]
    plan = plan_cauchy(problem(templates, price=(2.0, 1.0), available=(2, 2), demand=[6.0, 6.0]))
    assert [one.model for one in plan.shortfalls] == ["m1"]
    assert plan.shortfalls[0].shortfall_requests_per_s == 6.0


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_zero_demand_needs_nothing(name):
    """A model without demand gets no instance and no shortfall."""
    plan = PLANNERS[name](problem(TEMPLATES, price=(2.0, 1.0), available=(9, 9), demand=[0.0]))
    assert (plan.instances, plan.shortfalls) == ((), ())
    assert math.isclose(plan.certificate.cost_usd_per_hour, 0.0)


def test_same_input_same_plan():
    """A planner gives the same plan with the same id twice."""
    one = problem(TEMPLATES, price=(2.0, 1.0), available=(9, 9), demand=[6.0], num_regions=2)
    for planner in PLANNERS.values():
        assert planner(one) == planner(one)
