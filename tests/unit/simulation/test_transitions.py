"""Plans that follow each other, and unequal nodes in a stage: routes and shares against figures worked out by hand."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fleet_kit import SLO, Fixed, plan, run, template, timing, trace

from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import Phase
from coral_tasks.domain.plan import ServedRate
from coral_tasks.domain.templates import NodeCombination, Placement, Stage, template_id
from coral_tasks.simulation import Outcome, PlanEpoch, SimulationOptions
from coral_tasks.simulation.fleet import stage_shapes

pytestmark = pytest.mark.timeout(900)  # the first run on a machine compiles the event loop

QUICK = Fixed(prefill=timing(per_prompt_token_s=1e-6))


def served(**by_region):
    return [
        ServedRate(model="m", region=region, disaggregated_requests_per_s=rate, aggregated_requests_per_s=0.0)
        for region, rate in by_region.items()
    ]


def by_entry(rows, first_s, last_s):
    """Requests that arrived in [first, last) by the instance they entered, most first."""
    inside = rows[(rows["arrival"] >= first_s) & (rows["arrival"] < last_s)]
    return sorted(np.bincount(inside["entry"]).tolist(), reverse=True)


def test_after_a_change_each_region_gets_its_new_share():
    """Four instances of r1 become two, r2 gets one, and serves a third: 100 of 300 requests after the change.

    The two that leave must not count as holders of r1's share, else r2 would get half.
    """
    prefill = template(Phase.PREFILL)
    epochs = [
        PlanEpoch(start_s=0.0, plan=plan((prefill, 4), served=served(r1=4.0))),
        PlanEpoch(start_s=30.0, plan=plan((prefill, 2), (prefill, 1, "r2"), served=served(r1=2.0, r2=1.0))),
    ]
    _, rows = run(epochs, trace(np.arange(700) * 0.1), timing=QUICK, startup_s=10.0)
    assert (rows["outcome"] == Outcome.COMPLETED).all()
    assert [count for count in by_entry(rows, 0.0, 40.0) if count] == [100, 100, 100, 100]
    assert by_entry(rows, 40.0, 70.0)[:3] == [100, 100, 100]


def test_routes_change_when_the_newcomers_are_ready_and_not_before():
    """While C and C' start, A and B serve half each by the old plan; then A, C and C' a third each, and B drains."""
    kept, leaving, new = (template(Phase.PREFILL, stages=count) for count in (1, 2, 3))
    epochs = [
        PlanEpoch(start_s=0.0, plan=plan((kept, 1), (leaving, 1), served=served(r1=3.0))),
        PlanEpoch(start_s=10.0, plan=plan((kept, 1), (new, 2), served=served(r1=3.0))),
    ]
    _, rows = run(epochs, trace(np.arange(500) * 0.1), timing=QUICK, startup_s=10.0)
    assert (rows["outcome"] == Outcome.COMPLETED).all()
    assert [count for count in by_entry(rows, 0.0, 20.0) if count] == [100, 100]
    assert [count for count in by_entry(rows, 20.0, 50.0) if count] == [100, 100, 100]


def test_a_plan_that_changes_again_before_its_instances_are_ready_loses_nothing():
    """Start-up of 15 s with a plan every 10 s: what the second plan ordered is ready at 25 s, the third's at 35 s."""
    one, two, three = (template(Phase.PREFILL, stages=count) for count in (1, 2, 3))
    epochs = [PlanEpoch(start_s=10.0 * k, plan=plan((which, 1))) for k, which in enumerate((one, two, three))]
    result, rows = run(epochs, trace(np.arange(500) * 0.1), timing=QUICK, startup_s=15.0)
    assert (rows["outcome"] == Outcome.COMPLETED).all()
    finished = {instance.template: instance.num_finished for instance in result.instances}
    assert [finished[which.id] for which in (one, two, three)] == [250, 100, 150]


class ByNode:
    """A timing source with one timing for each configuration."""

    def __init__(self, **by_configuration):
        self.by_configuration = by_configuration

    def stage_timing(self, *, model, phase, configuration, num_layers):
        return self.by_configuration[configuration]


def test_a_node_of_little_cache_gets_the_share_its_cache_sustains():
    """Two nodes of one speed, 1000 tokens/s at the limit, one with room for 25 sequences only: 4 to 1.

    100 sequences of a batch take 0.05 + 100 * 0.0005 = 0.1 s. A sequence holds 200 tokens for the 0.1 s of a step, so
    room for 5000 tokens sustains 25 / 0.1 = 250 tokens/s. Together 1250 tokens/s, and 25 / 0.2 = 125 sequences.
    """
    nodes = NodeCombination.of(["L4x1", "L4x2"])
    decode = template(Phase.DECODE)
    decode = replace(
        decode,
        id=template_id(model="m", phase=Phase.DECODE, slo=SLO, nodes=nodes, runtime=decode.runtime),
        nodes=nodes,
        placement=Placement(stages=(Stage(nodes=nodes, num_layers=8, num_quanta=60),), total_quanta=60),
    )
    line = {"fixed_s": 0.05, "per_sequence_s": 0.0005}
    source = ByNode(L4x1=timing(**line, kv_capacity_tokens=1e6), L4x2=timing(**line, kv_capacity_tokens=5000))
    shape = RequestShape(mean_prompt_tokens=100, p95_prompt_tokens=100, mean_output_tokens=100, p95_output_tokens=100)
    (stage,) = stage_shapes(decode, shape, SimulationOptions(timing=source))
    assert [node.share for node in stage.nodes] == pytest.approx([0.8, 0.2])
    assert stage.kv_capacity_tokens == pytest.approx(25_000)


def test_nodes_with_room_to_spare_share_by_speed():
    """A prefill node twice as fast (500 and 1000 prompt tokens/s) takes two thirds; its cache does not bind."""
    nodes = NodeCombination.of(["L4x1", "L4x2"])
    prefill = template(Phase.PREFILL)
    prefill = replace(
        prefill,
        id=template_id(model="m", phase=Phase.PREFILL, slo=SLO, nodes=nodes, runtime=prefill.runtime),
        nodes=nodes,
        placement=Placement(stages=(Stage(nodes=nodes, num_layers=8, num_quanta=60),), total_quanta=60),
    )
    source = ByNode(
        L4x1=timing(per_prompt_token_s=0.002, kv_capacity_tokens=600),
        L4x2=timing(per_prompt_token_s=0.001, kv_capacity_tokens=6000),
    )
    shape = RequestShape(mean_prompt_tokens=100, p95_prompt_tokens=100, mean_output_tokens=10, p95_output_tokens=10)
    (stage,) = stage_shapes(prefill, shape, SimulationOptions(timing=source))
    assert [node.share for node in stage.nodes] == pytest.approx([1 / 3, 2 / 3])
    assert stage.kv_capacity_tokens == pytest.approx(1800)
