"""Conservation laws of the event simulator on random fleets and traces: nothing lost, doubled, early or too large."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.names import Market, Phase
from coral_tasks.domain.timing import TransferTiming
from coral_tasks.simulation import NodeLoss, Outcome, PlanEpoch, RequestTrace, Router

_KIT = Path(__file__).parents[1] / "unit" / "simulation" / "fleet_kit.py"
_SPEC = importlib.util.spec_from_file_location("fleet_kit", _KIT)
kit = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kit)

pytestmark = pytest.mark.timeout(900)  # the first run on a machine compiles the event loop


@st.composite
def timings(draw, phase: str):
    """A node's timing with a cache and a batch that are often too small."""
    return kit.timing(
        fixed_s=draw(st.sampled_from([0.0, 0.001, 0.03])),
        per_prompt_token_s=draw(st.sampled_from([1e-5, 1e-3])),
        per_sequence_s=draw(st.sampled_from([1e-4, 0.002])),
        per_context_token_s=draw(st.sampled_from([0.0, 1e-5])),
        hop_s=draw(st.sampled_from([0.0, 0.001])),
        max_batch_tokens=draw(st.sampled_from([7, 64, 4096])),
        max_batch_sequences=draw(st.sampled_from([1, 3, 64])),
        kv_capacity_tokens=draw(st.sampled_from([60.0, 200.0, 5000.0, math.inf])),
    )


@st.composite
def fleets(draw):
    """Plans (one, or two that follow), the timings of their phases, options."""
    source = kit.Fixed(**{phase.value: draw(timings(phase.value)) for phase in Phase})
    epochs = []
    for start in [0.0, draw(st.sampled_from([1.0, 4.0]))][: draw(st.integers(1, 2))]:
        rows = []
        for region in kit.REGIONS[: draw(st.integers(1, 2))]:
            if draw(st.booleans()):
                stages = draw(st.sampled_from([1, 2, 3]))
                rows.append((kit.template(Phase.PREFILL, stages=stages), draw(st.integers(1, 2)), region))
                rows.append((kit.template(Phase.DECODE, stages=stages), draw(st.integers(1, 2)), region))
            else:
                one = kit.template(Phase.AGGREGATED, stages=draw(st.sampled_from([1, 2])), throughput=5.0)
                rows.append((one, draw(st.integers(1, 2)), region))
        epochs.append(PlanEpoch(start_s=start, plan=kit.plan(*rows)))
    options = {
        "timing": source,
        "transfer": {"m": TransferTiming(fixed_s=draw(st.sampled_from([0.0, 0.05])), per_token_s=1e-5)},
        "startup_s": draw(st.sampled_from([0.0, 0.7])),
        "cold_start": draw(st.booleans()),
        "shed_late": draw(st.booleans()),
        "max_retries": draw(st.integers(0, 2)),
        "micro_batches": draw(st.sampled_from([None, 1, 4])),
        "router": draw(st.sampled_from(list(Router))),
        "chunk_requests": draw(st.sampled_from([3, 1000])),
        "max_in_flight": draw(st.sampled_from([20, 1000])),
        "drain_limit_s": draw(st.sampled_from([1.0, 300.0])),
    }
    lost = epochs[0].plan.instances[0]
    if draw(st.booleans()):
        time_s = draw(st.sampled_from([0.5, 2.0]))
        loss = NodeLoss(time_s=time_s, template=lost.template, region=lost.region, market=Market.ON_DEMAND)
        options["losses"] = (loss,)
    return epochs, options


@st.composite
def traces(draw):
    """Up to 120 requests, in bursts and alone, lengths from one token on."""
    seed, count = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 120))
    random = np.random.default_rng(seed)
    gaps = random.exponential(draw(st.sampled_from([0.002, 0.1])), count) * random.integers(0, 2, count)
    return RequestTrace(
        models=("m",),
        arrival_s=np.cumsum(gaps),
        model=np.zeros(count, dtype=np.int64),
        prompt_tokens=random.integers(1, draw(st.sampled_from([3, 90, 400])), count),
        output_tokens=random.integers(1, draw(st.sampled_from([2, 12, 60])), count),
    )


@given(fleets(), traces())
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_doubled_early_or_too_large(fleet, requests) -> None:
    """Every request ends once with its own lengths; tokens made match, moments follow, caches and bills keep bounds."""
    epochs, options = fleet
    result, rows = kit.run(epochs, requests, **options)
    assert result.num_requests == len(requests)
    never_arrived = len(requests) - len(rows)
    assert never_arrived == 0 or not result.stable
    assert rows["index"].tolist() == list(range(len(rows)))  # those that arrived: each once
    assert (rows["prompt"] == requests.prompt_tokens[: len(rows)]).all()
    assert (rows["output"] == requests.output_tokens[: len(rows)]).all()
    counts = np.bincount(rows["outcome"], minlength=len(Outcome))
    counts[Outcome.UNFINISHED] += never_arrived
    assert result.models[0].num_by_outcome == {one.name.lower(): int(counts[one]) for one in Outcome}
    done = rows[rows["outcome"] == Outcome.COMPLETED]
    assert (done["generated"] == done["output"]).all()
    assert (rows["generated"] <= rows["output"]).all()
    assert (rows["generated"][rows["outcome"] == Outcome.TOO_LONG] <= 1).all()
    _moments_follow(rows, done)
    _bounds_hold(result, options)


def _moments_follow(rows, done) -> None:
    assert (rows["finish"] >= rows["arrival"]).all()
    assert (done["first"] > done["arrival"]).all()
    assert (done["ready"] >= done["first"]).all()
    long = done[done["output"] > 1]
    assert (long["second"] > long["ready"]).all()
    assert (long["finish"] >= long["second"]).all()
    assert (done["finish"] >= done["ready"]).all()


def _bounds_hold(result, options) -> None:
    for one in result.instances:
        phase = one.template.split("/")[1]
        assert one.kv_peak_tokens <= options["timing"].by_phase[phase].kv_capacity_tokens
        assert all(0 <= share <= 1 for share in one.utilisation)
        assert one.billed_s >= 0
    # 1 USD/h a node: the bill is the time of every node
    nodes = {one.template: one.template.split("/")[3] for one in result.instances}
    hours = sum(one.billed_s * int(nodes[one.template].split("*")[0]) for one in result.instances) / 3600
    assert math.isclose(result.cost_usd, hours, rel_tol=1e-9, abs_tol=1e-12)
    assert result.peak_in_flight <= options["max_in_flight"]


@given(fleets(), traces())
@settings(max_examples=25, deadline=None)
def test_same_input_same_bytes_whatever_the_chunks(fleet, requests) -> None:
    """A second run, and a run fed in other portions, give the same records to the byte."""
    epochs, options = fleet
    first = kit.run(epochs, requests, **options)[1].tobytes()
    assert kit.run(epochs, requests, **options)[1].tobytes() == first
    assert kit.run(epochs, requests, **{**options, "chunk_requests": 11})[1].tobytes() == first


@given(traces(), st.integers(2, 5))
@settings(max_examples=25, deadline=None)
def test_slower_stages_never_finish_the_work_sooner(requests, factor) -> None:
    """With every time of a single prefill server stretched, no request's first token comes sooner. One at a time: a
    slower server that batches may cut its batches elsewhere, and a request then waits for another's prompt or does not.
    """
    one = kit.plan((kit.template(Phase.PREFILL), 1))
    moments = []
    for stretch in (1, factor):
        times = {"fixed_s": 0.01 * stretch, "per_prompt_token_s": 1e-3 * stretch}
        source = kit.Fixed(prefill=kit.timing(**times, max_batch_sequences=1))
        lone = RequestTrace(
            models=requests.models,
            arrival_s=requests.arrival_s,
            model=requests.model,
            prompt_tokens=requests.prompt_tokens,
            output_tokens=np.ones(len(requests), dtype=np.int64),
        )
        moments.append(kit.run(one, lone, timing=source, micro_batches=1, drain_limit_s=1e6)[1]["first"])
    assert (moments[1] >= moments[0] - 1e-9).all()


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20), st.sampled_from(["prompt_tokens", "output_tokens"]))
def test_a_trace_is_refused_exactly_when_a_length_is_below_one(lengths, name) -> None:
    """Lengths of 0 or less are refused by name and row; all others are taken."""
    count = len(lengths)
    fields = {key: np.ones(count, dtype=np.int64) for key in ("prompt_tokens", "output_tokens")}
    fields[name] = np.array(lengths)
    given_times = {"arrival_s": np.arange(count, dtype=float), "model": np.zeros(count, dtype=np.int64)}
    if min(lengths) >= 1:
        RequestTrace(models=("m",), **given_times, **fields)
        return
    with pytest.raises(ValidationFailed, match=f"{name} must be at least 1"):
        RequestTrace(models=("m",), **given_times, **fields)
