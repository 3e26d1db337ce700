"""Small runs whose every moment was worked out by hand, and queues against closed formulas."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fleet_kit import Fixed, plan, run, template, timing, trace

from coral_tasks.domain.names import Phase
from coral_tasks.domain.plan import ServedRate
from coral_tasks.domain.timing import TransferTiming
from coral_tasks.simulation import Router

pytestmark = pytest.mark.timeout(900)  # the first run on a machine compiles the event loop

MOMENTS = ("arrival", "first", "ready", "second", "finish")


def events(rows):
    """(time in ms, moment, request) of every moment that a request had, in order."""
    found = [
        (round(float(row[name]) * 1e3, 6), name, int(row["index"]))
        for row in rows
        for name in MOMENTS
        if math.isfinite(row[name])
    ]
    return sorted(found, key=lambda one: (one[0], one[2], MOMENTS.index(one[1])))


def test_disaggregated_run_event_by_event():
    """Three requests through prefill, hand-over of 50 ms and decode happen exactly when worked out on paper.

    Prefill takes 1 ms a token, 100 tokens a batch; a decode step 20 ms and 1 ms a sequence. Request 1 finds the
    prefill busy till 100, joins the decode step that starts at 213 and makes it 22 ms long.
    """
    source = Fixed(
        prefill=timing(per_prompt_token_s=0.001, max_batch_tokens=100),
        decode=timing(fixed_s=0.02, per_sequence_s=0.001),
    )
    both = plan((template(Phase.PREFILL), 1), (template(Phase.DECODE), 1))
    requests = trace([0.0, 0.05, 0.3], prompt=[100, 60, 40], output=[6, 2, 1])
    _, rows = run(both, requests, timing=source, transfer={"m": TransferTiming(fixed_s=0.05, per_token_s=0.0)})
    assert events(rows) == [
        (0, "arrival", 0),
        (50, "arrival", 1),
        (100, "first", 0),
        (150, "ready", 0),
        (160, "first", 1),
        (171, "second", 0),
        (210, "ready", 1),
        (235, "second", 1),
        (235, "finish", 1),
        (256, "finish", 0),
        (300, "arrival", 2),
        (340, "first", 2),
        (340, "ready", 2),
        (340, "finish", 2),
    ]


def test_long_prompt_in_a_pipeline_event_by_event():
    """Chunks of a long prompt follow each other through two stages; the next prompt enters behind the last chunk.

    250 tokens at 1 ms a token in chunks of 100, 100, 50: out of stage one at 100, 200, 250 and of stage two at 200,
    300, 350. The prompt of 50 enters at 250, stage two takes it at 350.
    """
    source = Fixed(prefill=timing(per_prompt_token_s=0.001, max_batch_tokens=100))
    one = plan((template(Phase.PREFILL, stages=2), 1))
    _, rows = run(one, trace([0.0, 0.0], prompt=[250, 50]), timing=source)
    assert [one for one in events(rows) if one[1] == "first"] == [(350, "first", 0), (400, "first", 1)]


def test_preemption_event_by_event():
    """A cache of 10 tokens: the youngest is taken off when two cannot both grow, computed again, and finishes.

    Prompts of 2, answers of 4, prefilled together till 6 ms. Requests 0 and 1 decode in steps of 10 ms; at 26 the
    cache is full, 1 is taken off. At 36 request 0 is done; 1 is computed again (5 tokens, 1 ms each) beside 2.
    """
    source = Fixed(
        prefill=timing(per_prompt_token_s=0.001),
        decode=timing(fixed_s=0.01, per_prompt_token_s=0.001, kv_capacity_tokens=10),
    )
    both = plan((template(Phase.PREFILL), 1), (template(Phase.DECODE), 1))
    result, rows = run(both, trace([0.0, 0.0, 0.0], prompt=2, output=4), timing=source)
    assert [one for one in events(rows) if one[1] in ("second", "finish")] == [
        (16, "second", 0),
        (16, "second", 1),
        (36, "finish", 0),
        (51, "finish", 1),
        (51, "second", 2),
        (71, "finish", 2),
    ]
    assert rows["preemptions"].tolist() == [0, 1, 0]
    assert max(one.kv_peak_tokens for one in result.instances if "decode" in one.template) == 10


def test_what_a_client_sees_behind_a_proxy():
    """TTFT ends with prefill and TPOT starts with the cache's arrival; a client's TTFT takes in hand-over and a step.

    Prefill 100 ms, hand-over 50 ms, two decode steps of 21 ms: TTFT 100, TPOT 21; the client waits 171 ms, then 21.
    """
    source = Fixed(prefill=timing(per_prompt_token_s=0.001), decode=timing(fixed_s=0.02, per_sequence_s=0.001))
    both = plan((template(Phase.PREFILL), 1), (template(Phase.DECODE), 1))
    transfer = {"m": TransferTiming(fixed_s=0.05, per_token_s=0.0)}
    result, _ = run(both, trace([0.0], prompt=100, output=3), timing=source, transfer=transfer)
    model = result.models[0]
    seen = (model.ttft, model.tpot, model.handover, model.client_ttft, model.client_tpot)
    assert [one.mean_s for one in seen] == pytest.approx([0.1, 0.021, 0.05, 0.171, 0.021])
    assert model.attainment == model.client_attainment == 1.0


def test_hand_over_may_cost_the_client_its_limit_but_not_the_phases():
    """A hand-over beyond the TTFT limit leaves the phases within theirs and the client without."""
    source = Fixed(prefill=timing(per_prompt_token_s=0.001), decode=timing(fixed_s=0.02))
    both = plan((template(Phase.PREFILL), 1), (template(Phase.DECODE), 1))
    transfer = {"m": TransferTiming(fixed_s=1.5, per_token_s=0.0)}
    result, _ = run(both, trace([0.0], prompt=100, output=3), timing=source, transfer=transfer)
    assert result.models[0].attainment == 1.0
    assert result.models[0].client_attainment == 0.0


def test_least_load_keeps_the_regions_planned_shares():
    """Regions planned for 3 and 1 requests/s get 300 and 100 of 400, whatever the load of their instances."""
    prefill, decode = template(Phase.PREFILL), template(Phase.DECODE)
    rates = [("r1", 3.0), ("r2", 1.0)]
    served = [
        ServedRate(model="m", region=region, disaggregated_requests_per_s=rate, aggregated_requests_per_s=0.0)
        for region, rate in rates
    ]
    rows = [(one, 1, region) for region, _ in rates for one in (prefill, decode)]
    source = Fixed(prefill=timing(per_prompt_token_s=1e-5), decode=timing(fixed_s=0.001))
    result, _ = run(
        plan(*rows, served=served),
        trace(np.arange(400) * 0.1, output=2),
        timing=source,
        router=Router.LEAST_LOADED,
    )
    finished = {(one.region, "decode" in one.template): one.num_finished for one in result.instances}
    assert finished == {("r1", False): 300, ("r1", True): 300, ("r2", False): 100, ("r2", True): 100}


def mean_and_error(values, num_batches=25):
    """Mean and its standard error from means of successive batches, since waits that follow each other are alike."""
    parts = np.array([part.mean() for part in np.array_split(values, num_batches)])
    return parts.mean(), parts.std(ddof=1) / math.sqrt(num_batches)


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.8])
def test_waits_of_fixed_service_follow_m_d_1(rho):
    """Poisson arrivals at one server of fixed service D wait rho·D / (2(1 − rho)), within 3.5 standard errors."""
    service = 0.1
    arrivals = np.cumsum(np.random.default_rng(11).exponential(service / rho, 60_000))
    source = Fixed(prefill=timing(per_prompt_token_s=0.001, max_batch_tokens=100))
    _, rows = run(plan((template(Phase.PREFILL), 1)), trace(arrivals), timing=source, drain_limit_s=1e4)
    mean, error = mean_and_error(rows["first"] - rows["arrival"] - service)
    expected = rho * service / (2 * (1 - rho))
    assert abs(mean - expected) < 3.5 * error
    assert error < 0.05 * expected


def erlang_c(servers, load):
    """Probability that an arrival waits in M/M/c; ``load`` = arrival rate times mean service."""
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(load**k / math.factorial(k) for k in range(servers)) + last)


@pytest.mark.parametrize(("servers", "rho"), [(1, 0.7), (4, 0.8), (16, 0.85)])
def test_waits_of_exponential_service_follow_m_m_c(servers, rho):
    """A decode instance of c sequences and geometric answers is M/M/c: mean wait C(c, a)·S / (c(1 − rho)).

    Steps of 1 ms whatever the batch, answers of 400 on average, so that lengths in whole steps are nearly exponential;
    a request that comes during a step waits for its end, at most 1 ms, which is allowed for.
    """
    step, mean_steps = 0.001, 400
    random = np.random.default_rng(5)
    count = 60_000
    steps = random.geometric(1 / mean_steps, count)
    service = step * mean_steps
    arrivals = np.cumsum(random.exponential(service / (servers * rho), count))
    source = Fixed(
        prefill=timing(per_prompt_token_s=1e-12),
        decode=timing(fixed_s=step, max_batch_sequences=servers, max_batch_tokens=10_000),
    )
    both = plan((template(Phase.PREFILL), 1), (template(Phase.DECODE), 1))
    _, rows = run(both, trace(arrivals, prompt=1, output=steps + 1), timing=source, drain_limit_s=1e4)
    mean, error = mean_and_error(rows["second"] - rows["ready"] - step)
    expected = erlang_c(servers, servers * rho) * service / (servers * (1 - rho))
    assert abs(mean - expected) < 3.5 * error + step
    assert error < 0.12 * expected


def test_groups_of_a_pipeline_never_take_the_same_room() -> None:
    """Two stages, so two groups decode at once; room for 60 tokens in all. A group's room is taken when its step
    begins, so that the other group cannot count on it: never more than 60 are held, and all answers end.
    """
    source = Fixed(
        prefill=timing(per_prompt_token_s=1e-5, kv_capacity_tokens=400),
        decode=timing(per_sequence_s=1e-4, kv_capacity_tokens=60, max_batch_tokens=7),
    )
    fleet = plan((template(Phase.PREFILL), 1), (template(Phase.DECODE, stages=2), 1))
    result, rows = run(fleet, trace([0.0, 0.0, 0.0], prompt=2, output=[30, 36, 58]), timing=source)
    (decode,) = [one for one in result.instances if "/decode/" in one.template]
    assert 58 <= decode.kv_peak_tokens <= 60
    assert result.models[0].num_by_outcome["completed"] == len(rows) == 3
