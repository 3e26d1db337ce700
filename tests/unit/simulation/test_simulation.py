"""The event simulator against closed forms, conservation laws and plans that change or break."""

import math
from dataclasses import replace

import numpy as np
import pytest

from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.models import LatencySlo, RequestShape
from coral_tasks.domain.names import LatencySplit, Market, Phase, Runtime
from coral_tasks.domain.plan import (
    AllocationPlan,
    Certificate,
    PlannedInstances,
    Shortfall,
    SolveStatus,
)
from coral_tasks.domain.profiles import LimitedBy
from coral_tasks.domain.templates import NodeCombination, Placement, ServingTemplate, Stage, template_id
from coral_tasks.domain.timing import StageTiming, TransferTiming
from coral_tasks.simulation import (
    NodeLoss,
    Outcome,
    PlanEpoch,
    RequestTrace,
    Router,
    SimulationOptions,
    poisson_trace,
    scale_rate,
    simulate,
)

pytestmark = pytest.mark.timeout(900)  # the first run on a machine compiles the event loop

SLO = LatencySlo(ttft_s=1.0, tpot_s=0.1)
PRICES = {("r1", "L4x1", Market.ON_DEMAND): 1.0, ("r2", "L4x1", Market.ON_DEMAND): 2.0}


class Fixed:
    """A timing source with one timing for each phase."""

    def __init__(self, **by_phase):
        self.by_phase = by_phase

    def stage_timing(self, *, model, phase, configuration, num_layers):
        return self.by_phase.get(phase.value)


def timing(**values):
    return StageTiming(**{"fixed_s": 0.0, "per_prompt_token_s": 0.0, "per_sequence_s": 0.0, **values})


def template(phase, *, stages=1, throughput=1000.0, model="m", nodes_per_stage=1):
    placement = Placement(
        stages=tuple(
            Stage(nodes=NodeCombination.of(["L4x1"] * nodes_per_stage), num_layers=8, num_quanta=60 // stages)
            for _ in range(stages)
        ),
        total_quanta=60,
    )
    return ServingTemplate(
        id=template_id(model=model, phase=phase, slo=SLO, nodes=placement.nodes, runtime=Runtime.VLLM),
        model=model,
        phase=phase,
        slo=SLO,
        nodes=placement.nodes,
        throughput=throughput,
        placement=placement,
        latency_split=LatencySplit.EQUAL,
        runtime=Runtime.VLLM,
        limited_by=LimitedBy.LATENCY,
        sources=(),
    )


def plan(*rows, shortfalls=()):
    """Rows of (template, count) or (template, count, region)."""
    rows = [(*row, "r1")[:3] for row in rows]
    templates = {one.id: one for one, _, _ in rows}
    return AllocationPlan(
        id="p",
        library_version="v",
        instances=tuple(
            PlannedInstances(template=one.id, region=region, market=Market.ON_DEMAND, count=count, num_kept=0)
            for one, count, region in rows
        ),
        templates=tuple(templates.values()),
        served=(),
        shortfalls=tuple(shortfalls),
        certificate=Certificate(
            status=SolveStatus.OPTIMAL,
            cost_usd_per_hour=0,
            startup_usd_per_hour=0,
            bound_usd_per_hour=0,
            gap=0,
            shortage_proved=True,
        ),
    )


def trace(arrivals, prompt=100, output=1, models=("m",), model=None):
    count = len(arrivals)
    return RequestTrace(
        models=tuple(models),
        arrival_s=np.array(arrivals, dtype=float),
        model=np.zeros(count, dtype=np.int64) if model is None else np.array(model),
        prompt_tokens=np.broadcast_to(np.array(prompt, dtype=np.int64), (count,)).copy(),
        output_tokens=np.broadcast_to(np.array(output, dtype=np.int64), (count,)).copy(),
    )


def run(plan_or_epochs, requests, **options):
    """Result and all records, in the order of the requests."""
    records = []
    result = simulate(
        plan_or_epochs,
        requests,
        prices=PRICES,
        options=SimulationOptions(**options),
        sink=lambda rows: records.append(rows.copy()),
    )
    rows = np.concatenate(records) if records else np.zeros(0)
    return result, rows[np.argsort(rows["index"])] if len(rows) else rows


ONE_AT_A_TIME = Fixed(prefill=timing(per_prompt_token_s=0.001, max_batch_tokens=100))
BOTH = Fixed(
    prefill=timing(per_prompt_token_s=0.001),
    decode=timing(fixed_s=0.02, per_sequence_s=0.001, max_batch_sequences=64),
)


def test_single_request_takes_exactly_its_own_work():
    """One lone request takes its prefill to the first token, then the hand-over and ten steps of a batch of one."""
    both = plan((template(Phase.PREFILL), 1), (template(Phase.DECODE), 1))
    transfer = {"m": TransferTiming(fixed_s=0.01, per_token_s=0.0001)}
    _, rows = run(both, trace([5.0], prompt=100, output=11), timing=BOTH, transfer=transfer)
    assert rows["first"][0] - 5.0 == pytest.approx(0.1)
    assert rows["finish"][0] - rows["first"][0] == pytest.approx(0.02 + 10 * 0.021)


def test_deterministic_queue():
    """Arrivals every 0.1 s to a server that takes exactly 0.1 s never wait; every 0.05 s the k-th waits k·0.05 s."""
    one = plan((template(Phase.PREFILL), 1))
    _, rows = run(one, trace(np.arange(50) * 0.1), timing=ONE_AT_A_TIME)
    assert rows["first"] - rows["arrival"] == pytest.approx(np.full(50, 0.1))
    _, rows = run(one, trace(np.arange(50) * 0.05), timing=ONE_AT_A_TIME)
    assert rows["first"] - rows["arrival"] == pytest.approx(0.1 + np.arange(50) * 0.05)


def test_poisson_queue_matches_pollaczek_khinchine():
    """Poisson arrivals to one server of fixed service D wait rho·D / (2(1 − rho)) on average (M/D/1)."""
    rate, service = 7.0, 0.1
    gaps = np.random.default_rng(4).exponential(1 / rate, 60_000)
    result, rows = run(plan((template(Phase.PREFILL), 1)), trace(np.cumsum(gaps)), timing=ONE_AT_A_TIME)
    rho = rate * service
    wait = (rows["first"] - rows["arrival"]).mean() - service
    assert wait == pytest.approx(rho * service / (2 * (1 - rho)), rel=0.05)
    assert result.instances[0].utilisation[0] == pytest.approx(rho, rel=0.02)


def test_littles_law():
    """Mean number in the system equals arrival rate times mean time in it, by integrating the records."""
    gaps = np.random.default_rng(9).exponential(0.2, 4000)
    requests = trace(np.cumsum(gaps), output=20)
    _, rows = run(plan((template(Phase.PREFILL), 1), (template(Phase.DECODE), 1)), requests, timing=BOTH)
    grid = np.linspace(10, requests.duration_s - 10, 20_000)
    inside = (np.searchsorted(np.sort(rows["arrival"]), grid) - np.searchsorted(np.sort(rows["finish"]), grid)).mean()
    assert inside == pytest.approx(
        len(rows) / requests.duration_s * (rows["finish"] - rows["arrival"]).mean(), rel=0.02
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_pipeline_fill_and_rate(stages):
    """A pipeline of S equal stages gives its first answer after S stage times, then one per stage time."""
    one = plan((template(Phase.PREFILL, stages=stages), 1))
    _, rows = run(one, trace(np.zeros(20)), timing=ONE_AT_A_TIME)
    assert np.sort(rows["first"]) == pytest.approx(0.1 * (stages + np.arange(20)))


def test_full_decode_batch_runs_at_the_sum_of_its_terms():
    """B sequences that decode together have TPOT fixed + B·per_sequence + per_context·context."""
    source = Fixed(
        prefill=timing(per_prompt_token_s=1e-9),
        decode=timing(fixed_s=0.01, per_sequence_s=0.001, per_context_token_s=1e-5, max_batch_sequences=10),
    )
    both = plan((template(Phase.PREFILL), 1), (template(Phase.DECODE), 1))
    _, rows = run(both, trace(np.zeros(10), prompt=100, output=3), timing=source)
    # Two steps: contexts 10·(100+1) and 10·(100+2).
    expected = 2 * (0.01 + 10 * 0.001) + 1e-5 * 10 * (101 + 102)
    assert (rows["finish"] - rows["first"]).max() == pytest.approx(expected, rel=1e-3)


def test_decode_batch_limit_queues_the_rest():
    """With room for 2 sequences, 6 equal requests decode in three rounds."""
    source = Fixed(prefill=timing(per_prompt_token_s=1e-9), decode=timing(fixed_s=0.1, max_batch_sequences=2))
    both = plan((template(Phase.PREFILL), 1), (template(Phase.DECODE), 1))
    _, rows = run(both, trace(np.zeros(6), output=6), timing=source)
    assert np.sort(rows["finish"]) == pytest.approx([0.5, 0.5, 1.0, 1.0, 1.5, 1.5], abs=1e-5)


def test_data_parallel_nodes_share_a_stage():
    """Two equal nodes in a stage halve the variable part of its time, not the constant part."""
    source = Fixed(prefill=timing(fixed_s=0.05, per_prompt_token_s=0.001))
    for nodes, expected in ((1, 0.15), (2, 0.1)):
        one = plan((template(Phase.PREFILL, nodes_per_stage=nodes), 1))
        _, rows = run(one, trace([0.0]), timing=source)
        assert rows["first"][0] == pytest.approx(expected)


def test_aggregated_instance_chunks_prompts_between_decodes():
    """A long prompt on an aggregated instance is cut to the token budget, beside the sequences that decode."""
    source = Fixed(aggregated=timing(fixed_s=0.01, per_prompt_token_s=1e-4, max_batch_tokens=101))
    one = plan((template(Phase.AGGREGATED, throughput=5.0), 1))
    requests = trace([0.0, 0.0], prompt=[1, 1000], output=[100, 1])
    _, rows = run(one, requests, timing=source)
    # First step: prompt of 1 and 100 of the other; then 9 steps with 1 decoding and 100 prompt tokens each.
    assert rows["first"][1] == pytest.approx(0.01 + 101e-4 + 9 * (0.01 + 100e-4))
    assert rows["finish"][0] == pytest.approx(rows["first"][1] + 90 * 0.01)


def test_cache_is_never_overfull_and_preempted_requests_end():
    """With a small cache some sequences are preempted, the peak stays within capacity and all tokens are made."""
    source = Fixed(
        prefill=timing(per_prompt_token_s=1e-6),
        decode=timing(fixed_s=0.01, per_prompt_token_s=1e-6, max_batch_sequences=64, kv_capacity_tokens=1000),
    )
    both = plan((template(Phase.PREFILL), 1), (template(Phase.DECODE), 1))
    result, rows = run(both, trace(np.arange(40) * 0.001, prompt=100, output=300), timing=source)
    decode = next(one for one in result.instances if "decode" in one.template)
    assert decode.kv_peak_tokens <= 1000
    assert result.models[0].num_preemptions > 0
    assert (rows["generated"] == 300).all()
    assert (rows["outcome"] == Outcome.COMPLETED).all()


def test_request_longer_than_every_cache_is_told_apart():
    """A request that no instance can hold ends as TOO_LONG and blocks nobody."""
    source = Fixed(prefill=timing(per_prompt_token_s=1e-6), decode=timing(fixed_s=0.01, kv_capacity_tokens=500))
    both = plan((template(Phase.PREFILL), 1), (template(Phase.DECODE), 1))
    result, rows = run(both, trace([0.0, 0.1, 0.2], prompt=[100, 600, 100], output=10), timing=source)
    assert result.statement == "every request ended, but 1 longer than any instance can hold"
    assert rows["outcome"].tolist() == [Outcome.COMPLETED, Outcome.TOO_LONG, Outcome.COMPLETED]


def test_router_follows_the_weights():
    """Two prefill instances of throughput 3:1 get three requests to one."""
    fast, slow = template(Phase.PREFILL, throughput=3000.0), template(Phase.PREFILL, throughput=1000.0, stages=2)
    both = plan((fast, 1), (slow, 1))
    result, _ = run(both, trace(np.arange(400) * 0.5), timing=ONE_AT_A_TIME)
    assert sorted(one.num_finished for one in result.instances) == [100, 300]


def test_least_loaded_router_waits_less_than_round_robin():
    """With prompts of very unequal length two servers with a common view of their queues wait less on average."""
    random = np.random.default_rng(5)
    requests = trace(np.cumsum(random.exponential(0.08, 4000)), prompt=random.choice([20, 420], 4000))
    source = Fixed(prefill=timing(per_prompt_token_s=0.0005, max_batch_tokens=500))
    waits = {}
    for router in Router:
        result, rows = run(plan((template(Phase.PREFILL), 2)), requests, timing=source, router=router)
        waits[router] = (rows["first"] - rows["arrival"]).mean()
        assert sum(one.num_finished for one in result.instances) == 4000
    assert waits[Router.LEAST_LOADED] < 0.9 * waits[Router.WEIGHTED_ROUND_ROBIN]


def test_prefill_and_decode_share_a_region():
    """The cache stays in its region where that has decode instances; a region without any sends it elsewhere."""
    rows = [(template(Phase.PREFILL), 1, "r1"), (template(Phase.DECODE), 1, "r1")]
    both = plan(*rows, (template(Phase.PREFILL), 1, "r2"), (template(Phase.DECODE), 1, "r2"))
    result, _ = run(both, trace(np.arange(100) * 0.1, output=5), timing=BOTH)
    assert result.num_cross_region == 0
    result, _ = run(plan(rows[1], (template(Phase.PREFILL), 1, "r2")), trace([0.0], output=5), timing=BOTH)
    assert result.num_cross_region == 1


def test_node_loss_restarts_what_was_there():
    """Requests on a lost node start over on the other instance; without one they cannot be routed."""
    prefill = template(Phase.PREFILL)
    loss = NodeLoss(time_s=0.55, template=prefill.id, region="r1", market=Market.ON_DEMAND, number=0)
    requests = trace(np.arange(20) * 0.05)
    result, rows = run(plan((prefill, 2)), requests, timing=ONE_AT_A_TIME, losses=(loss,))
    assert (rows["outcome"] == Outcome.COMPLETED).all()
    assert result.models[0].num_retries > 0
    assert result.instances[0].billed_s == pytest.approx(0.55)
    _, rows = run(plan((prefill, 1)), requests, timing=ONE_AT_A_TIME, losses=(loss,))
    assert set(rows["outcome"]) == {Outcome.COMPLETED, Outcome.UNROUTABLE}


def test_loss_without_retries_is_counted_as_lost():
    """With no retries allowed, what was on the lost node ends as LOST."""
    prefill = template(Phase.PREFILL)
    loss = NodeLoss(time_s=0.55, template=prefill.id, region="r1", market=Market.ON_DEMAND)
    result, _ = run(plan((prefill, 2)), trace(np.zeros(20)), timing=ONE_AT_A_TIME, losses=(loss,), max_retries=0)
    outcomes = result.models[0].num_by_outcome
    assert outcomes["lost"] > 0
    assert sum(outcomes.values()) == 20


def test_epochs_start_and_drain_without_losing_requests():
    """A second plan with other instances takes over when they are ready; old ones drain, nothing is lost."""
    old, new = template(Phase.PREFILL), template(Phase.PREFILL, stages=2)
    epochs = [PlanEpoch(start_s=0.0, plan=plan((old, 1))), PlanEpoch(start_s=10.0, plan=plan((new, 1)))]
    requests = trace(np.arange(200) * 0.1)
    result, rows = run(epochs, requests, timing=ONE_AT_A_TIME, startup_s=3.0)
    assert (rows["outcome"] == Outcome.COMPLETED).all()
    by_template = {one.template: one for one in result.instances}
    assert by_template[old.id].num_finished == pytest.approx(130, abs=2)
    assert by_template[old.id].billed_s == pytest.approx(13.0, abs=0.2)
    assert by_template[new.id].billed_s == pytest.approx(requests.duration_s - 10.0)
    # two nodes for the new pipeline, one for the old, 1 USD/h each
    expected = (by_template[old.id].billed_s + 2 * by_template[new.id].billed_s) / 3600
    assert result.cost_usd == pytest.approx(expected)


def test_unstable_plan_ends_with_a_statement():
    """Demand above capacity ends at the in-flight limit and names model, need and plan."""
    requests = trace(np.arange(5000) * 0.01)
    result, _ = run(plan((template(Phase.PREFILL), 1)), requests, timing=ONE_AT_A_TIME, max_in_flight=500)
    assert not result.stable
    assert "unstable: more than 500 requests in flight" in result.statement
    assert "m needs 10002 prompt tokens/s in prefill, planned 1000" in result.statement
    assert sum(result.models[0].num_by_outcome.values()) == 5000


def test_unstable_plan_ends_at_the_drain_limit():
    """What is unfinished at the drain limit is counted and stated."""
    result, _ = run(plan((template(Phase.PREFILL), 1)), trace(np.zeros(100)), timing=ONE_AT_A_TIME, drain_limit_s=2.0)
    assert "unfinished 2 s after the last arrival" in result.statement
    assert result.models[0].num_by_outcome["unfinished"] == pytest.approx(80, abs=1)


def test_one_very_long_answer_does_not_make_a_plan_unstable():
    """A single answer still in work at the drain limit is stated as that, and counted as unfinished."""
    output = np.full(2000, 2)
    output[-1] = 5000
    both = plan((template(Phase.PREFILL), 2), (template(Phase.DECODE), 1))
    result, _ = run(both, trace(np.arange(2000) * 0.1, output=output), timing=BOTH, drain_limit_s=10.0)
    assert result.stable
    assert result.statement == "1 long answers still in work 10 s after the last arrival"
    assert result.models[0].num_by_outcome["unfinished"] == 1


def test_admission_turns_away_what_the_plan_does_not_cover():
    """A plan short of half the demand lets in its capacity times the utilisation, and says the rest is refused."""
    short = Shortfall(model="m", required_requests_per_s=10.0, shortfall_requests_per_s=5.0)
    one = plan((template(Phase.PREFILL), 1), shortfalls=[short])
    result, _ = run(one, trace(np.arange(1000) * 0.1), timing=ONE_AT_A_TIME, admission_utilisation=1.0)
    assert result.models[0].num_by_outcome["refused"] == pytest.approx(500, abs=1)


def test_admission_follows_the_plan_in_force():
    """Short of half the demand till 50 s and of nothing after it: half of the first 500 are refused, then none."""
    short = Shortfall(model="m", required_requests_per_s=10.0, shortfall_requests_per_s=5.0)
    prefill = template(Phase.PREFILL)
    epochs = [
        PlanEpoch(start_s=0.0, plan=plan((prefill, 1), shortfalls=[short])),
        PlanEpoch(start_s=50.0, plan=plan((prefill, 2))),
    ]
    _, rows = run(epochs, trace(np.arange(1000) * 0.1), timing=ONE_AT_A_TIME, admission_utilisation=1.0)
    refused = rows["outcome"] == Outcome.REFUSED
    assert refused[:500].sum() == pytest.approx(250, abs=1)
    assert not refused[500:].any()


def test_dropping_late_requests_does_not_make_a_plan_keep_up():
    """20 requests/s of 100 tokens on 1000 tokens/s, half dropped as late: said with need and plan, and not stable."""
    requests = trace(np.arange(1000) * 0.05)
    result, _ = run(plan((template(Phase.PREFILL), 1)), requests, timing=ONE_AT_A_TIME, shed_late=True)
    assert not result.stable
    shed = result.models[0].num_by_outcome["shed"]
    need = "(m needs 2002 prompt tokens/s in prefill, planned 1000"
    assert result.statement.startswith(f"every request ended, but {shed} dropped as late {need}")


def test_late_requests_can_be_shed():
    """With shedding on, an overloaded queue drops what waited past its TTFT and the rest waits no longer than that."""
    result, rows = run(
        plan((template(Phase.PREFILL), 1)), trace(np.arange(1000) * 0.05), timing=ONE_AT_A_TIME, shed_late=True
    )
    done = rows[rows["outcome"] == Outcome.COMPLETED]
    assert (done["first"] - done["arrival"]).max() <= SLO.ttft_s + 0.1 + 1e-9
    assert result.models[0].num_by_outcome["shed"] == pytest.approx(500, abs=20)


def test_goodput_counts_only_requests_within_both_limits():
    """Goodput is the rate of requests whose TTFT and TPOT both hold; the others still complete."""
    _, late = run(plan((template(Phase.PREFILL), 1)), trace(np.zeros(20)), timing=ONE_AT_A_TIME)
    assert (late["outcome"] == Outcome.COMPLETED).all()
    result, _ = run(plan((template(Phase.PREFILL), 1)), trace([0.0] * 20 + [100.0]), timing=ONE_AT_A_TIME)
    # the first 10 of 20 (0.1 s each) meet 1.0 s, and the lone one at the end
    assert result.models[0].num_within_slo == 11
    assert result.models[0].goodput_requests_per_s == pytest.approx(11 / 100.0)
    assert result.attainment == pytest.approx(11 / 21)


def test_same_input_same_records_whatever_the_chunks():
    """Records are equal to the byte on a second run and with another chunk size."""
    shape = RequestShape(mean_prompt_tokens=200, p95_prompt_tokens=600, mean_output_tokens=20, p95_output_tokens=60)
    requests = poisson_trace({"m": (20.0, shape)}, duration_s=60, seed=3)
    both = plan((template(Phase.PREFILL, stages=2), 3), (template(Phase.DECODE, stages=3), 2))
    first = run(both, requests, chunk_requests=100_000)[1]
    assert run(both, requests, chunk_requests=100_000)[1].tobytes() == first.tobytes()
    assert run(both, requests, chunk_requests=7)[1].tobytes() == first.tobytes()


def test_promised_timing_keeps_its_promise_at_full_load():
    """Without tables a decode template at its full batch runs at exactly its throughput and its TPOT."""
    decode = template(Phase.DECODE, throughput=500.0, stages=2)
    source = Fixed(prefill=timing(per_prompt_token_s=1e-9))
    # tau = 0.05 s a stage, so 25 sequences in each of two batches
    _, rows = run(plan((template(Phase.PREFILL), 1), (decode, 1)), trace(np.zeros(50), output=101), timing=source)
    tpot = (rows["finish"] - rows["first"]) / 100
    assert tpot == pytest.approx(np.full(50, 0.1), rel=0.02)


@pytest.mark.parametrize(
    ("arrivals", "prompt", "output", "message"),
    [
        ([], 1, 1, "the trace is empty"),
        ([0.0, 2.0, 1.0], 1, 1, "request 2: arrival_s must not fall: the trace is out of order"),
        ([0.0, math.nan], 1, 1, "request 1: arrival_s must be finite"),
        ([-1.0], 1, 1, "arrival_s must be finite and not negative"),
        ([0.0, 1e300], 1, 1, "request 1: arrival_s counts seconds from the start"),
        ([0.0], 0, 1, "prompt_tokens must be at least 1"),
        ([0.0], 1, 0, "output_tokens must be at least 1"),
        ([0.0], 10**9, 1, "prompt_tokens must be at most 1000000"),
        ([0.0], 1, 10**9, "output_tokens must be at most 1000000"),
    ],
)
def test_bad_traces_are_refused(arrivals, prompt, output, message):
    """A broken trace is refused with row and rule."""
    with pytest.raises(ValidationFailed, match=message):
        trace(arrivals, prompt=prompt, output=output)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_without_sense_is_refused(rate):
    """A trace cannot be stretched to no, a negative or an endless rate."""
    with pytest.raises(ValidationFailed, match="requests_per_s must be finite and above zero"):
        scale_rate(trace([0.0, 1.0]), requests_per_s=rate)


def test_many_broken_rows_are_counted():
    """More than ten broken rows are summed up by their number."""
    with pytest.raises(ValidationFailed, match=r"prompt_tokens must be at least 1 .found 500 requests in all"):
        trace(np.zeros(500), prompt=0)


def test_plan_for_other_models_is_refused():
    """A trace that asks for a model no plan knows is refused with the planned ones."""
    with pytest.raises(ValidationFailed, match=r"no plan knows; planned: m .found other"):
        run(plan((template(Phase.PREFILL), 1)), trace([0.0], models=("other",)))


def test_missing_price_is_refused():
    """A node without a price is an error, not a free node."""
    with pytest.raises(ValidationFailed, match="r3 L4x1 on_demand: no price"):
        run(plan((template(Phase.PREFILL), 1, "r3")), trace([0.0]))


def test_epochs_must_follow_each_other():
    """Plans out of order, or none at time 0, are refused."""
    one = plan((template(Phase.PREFILL), 1))
    with pytest.raises(ValidationFailed, match="the first plan must start at 0"):
        run([PlanEpoch(start_s=1.0, plan=one)], trace([0.0]))
    with pytest.raises(ValidationFailed, match="plans must follow in time"):
        run([PlanEpoch(start_s=t, plan=one) for t in (0.0, 5.0, 5.0)], trace([0.0]))


def test_model_wholly_short_is_refused_at_the_door_not_an_error():
    """A plan that states a model's whole demand as shortfall runs, and every request of it is refused."""
    short = Shortfall(model="x", required_requests_per_s=1.0, shortfall_requests_per_s=1.0)
    both = plan((template(Phase.PREFILL), 1), shortfalls=[short])
    result, _ = run(both, trace([0.0, 1.0], models=("m", "x"), model=[0, 1]), timing=ONE_AT_A_TIME)
    assert [one.num_by_outcome["refused"] for one in result.models] == [0, 1]


def test_zero_length_span_has_no_division_by_zero():
    """A lone request at time 0 that takes 0.1 s counts over these: 10 requests/s, and 0.1 s of a node are paid."""
    result, _ = run(plan((template(Phase.PREFILL), 1)), trace([0.0]), timing=ONE_AT_A_TIME)
    assert result.goodput_requests_per_s == pytest.approx(10.0)
    assert result.cost_usd == pytest.approx(0.1 / 3600)
    assert replace(result.models[0], model="m").num_requests == 1
