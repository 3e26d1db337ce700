"""The reduction from costs to T[j, q] against small cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_tasks.catalog import load_catalog
from coral_tasks.catalog.catalog import Setup, SetupModel
from coral_tasks.domain.errors import Unavailable, ValidationFailed
from coral_tasks.domain.hardware import NodeConfiguration
from coral_tasks.domain.models import LatencySlo, RequestShape, ServedModel
from coral_tasks.domain.names import Phase
from coral_tasks.domain.profiles import LimitedBy, ProfileSource
from coral_tasks.profiling import MemoryParameters, build_profile_tables, build_profiles
from coral_tasks.profiling.costs import HALF_ROUND_TRIP_S, LayerCosts, Work, hop_s, work_for
from coral_tasks.profiling.memory import Parallelism, choose_parallelism
from coral_tasks.profiling.roofline import RooflineSource
from coral_tasks.profiling.tables import (
    QUEUE_SHARE,
    envelope,
    long_prompt_s,
    reduce_costs,
    round_significant,
    sequence_room,
)

CATALOG = load_catalog()
ROOFLINE = RooflineSource.load()
FAST_NETWORK = 1e15


def node(name: str, network: float = FAST_NETWORK) -> NodeConfiguration:
    """A configuration with a network so fast that hops cost half a round trip only."""
    return replace(CATALOG.configuration(name), network_bytes_per_s=network)


def model_of(layers: int) -> ServedModel:
    """The toy model with another number of layers."""
    tiny = CATALOG.model("tiny")
    per_layer = (tiny.num_params - 2 * 512 * 128) / 8
    kinds = tiny.attention_kinds[:1] * layers
    return replace(tiny, num_layers=layers, attention_kinds=kinds, num_params=per_layer * layers + 2 * 512 * 128)


def shape_of(prompt: float = 96, output: float = 32, p95: float | None = None) -> RequestShape:
    """Requests of given mean length; p95 as the mean unless given."""
    return RequestShape(
        mean_prompt_tokens=prompt,
        p95_prompt_tokens=p95 or prompt,
        mean_output_tokens=output,
        p95_output_tokens=output,
    )


def costs_of(work: Work, layer_s: list[float], constant_s: float = 0.0) -> LayerCosts:
    """Costs with one time per layer for each batch, the same for all layers."""
    layers = np.repeat(np.asarray(layer_s)[:, None], work.model.num_layers, axis=1)
    return LayerCosts(
        layer_s=layers,
        constant_s=np.full(len(layer_s), constant_s),
        extrapolated=np.zeros(len(layer_s), dtype=bool),
        source=ProfileSource.ANALYTIC,
        provenance="test",
    )


def decode_work(sequences: tuple[int, ...], layers: int = 4, name: str = "L4x1") -> Work:
    """A decode grid of the toy model."""
    return Work(
        model=model_of(layers),
        configuration=node(name),
        split=Parallelism(tp=1),
        phase=Phase.DECODE,
        context_tokens=112,
        sequences=sequences,
    )


def slo(seconds: float) -> LatencySlo:
    """The same limit in both phases."""
    return LatencySlo(ttft_s=seconds, tpot_s=seconds)


def test_throughput_is_the_best_batch_that_meets_the_share() -> None:
    """Batches 1, 2, 4 take 1, 1.5 and 2 ms per layer: with 2 layers and half of 12 ms, 4 in 4.1 ms is the best."""
    work = decode_work((1, 2, 4))
    table = reduce_costs(work, costs_of(work, [1e-3, 1.5e-3, 2e-3]), slo(12e-3), shape_of(), MemoryParameters())
    hop = HALF_ROUND_TRIP_S
    assert table.throughput[1, 29] == pytest.approx(4 / (4e-3 + hop), rel=1e-4)
    # a quarter of the budget, 3 ms: only 1 sequence fits in 2.1 ms, two would take 3.1 ms
    assert table.throughput[1, 14] == pytest.approx(1 / (2e-3 + hop), rel=1e-4)
    assert table.limited_by[1, 14] == LimitedBy.LATENCY


def test_a_limit_below_a_lone_requests_time_is_the_slos_fault() -> None:
    """Where one sequence takes longer than the whole budget, every cell is 0 by latency, not by memory."""
    work = decode_work((1, 2))
    table = reduce_costs(work, costs_of(work, [5e-3, 6e-3]), slo(4e-3), shape_of(), MemoryParameters())
    assert not table.throughput.any()
    assert set(table.limited_by.ravel()) == {LimitedBy.LATENCY}


def test_a_ttft_below_a_lone_prompts_time_is_the_slos_fault() -> None:
    """Qwen3-32B on an H100 with 1 ms to the first token: no layer fits, and the limit is latency wherever it fits."""
    entry = CATALOG.setup("core").models[0]
    work = work_for(entry.model, node("H100x1"), Parallelism(tp=1), Phase.PREFILL, entry.shape, MemoryParameters())
    costs = ROOFLINE.costs(work)
    assert costs is not None
    table = reduce_costs(work, costs, LatencySlo(ttft_s=1e-3, tpot_s=1e-3), entry.shape, MemoryParameters())
    assert not table.throughput.any()
    assert set(table.limited_by[:30].ravel()) == {LimitedBy.LATENCY}


def test_a_limit_out_of_reach_of_a_lone_request_is_reported_for_the_model() -> None:
    """Phi-4 with 1 ms to the first token: the report says infeasible by SLO, with what the fastest node would need."""
    setup = CATALOG.setup("core")
    entry = next(one for one in setup.models if one.model.id == "phi-4-14b")
    hasty = entry._replace(slo=LatencySlo(ttft_s=1e-3, tpot_s=entry.slo.tpot_s))
    report = build_profiles(replace(setup, models=(hasty,)), sources=[ROOFLINE])
    (found,) = report.unreachable
    assert (found.model, found.phase, found.limit_s) == ("phi-4-14b", Phase.PREFILL, 1e-3)
    assert found.needed_s > 0.01
    assert not report.tables[0].throughput.any()
    assert build_profiles(replace(setup, models=(entry,)), sources=[ROOFLINE]).unreachable == ()


def test_without_room_for_one_request_the_cache_is_the_limit() -> None:
    """Weights fit but no request of p95 length does: 0 by KV, though average requests would fit."""
    work = decode_work((1,))
    long = shape_of(p95=1e9)
    table = reduce_costs(work, costs_of(work, [1e-3]), slo(1.0), long, MemoryParameters())
    assert not table.throughput.any()
    assert set(table.limited_by.ravel()) == {LimitedBy.KV}
    assert sequence_room(work, long, MemoryParameters()).weights_fit.all()


def test_70b_on_one_l4_holds_no_more_layers_than_its_memory() -> None:
    """Ten layers of Llama 3 70B in BF16 fit on an L4 in any position; from the eleventh on T is 0 by weights."""
    setup = replace(CATALOG.setup("extended"), configurations=(CATALOG.configuration("L4x1"),))
    entry = next(one for one in setup.models if one.model.id == "llama3-70b")
    for table in build_profile_tables(replace(setup, models=(entry,)), sources=[ROOFLINE]):
        assert not table.throughput[0, 10:].any()
        assert set(table.limited_by[0, 10:].ravel()) == {LimitedBy.WEIGHTS}
        assert table.throughput[0, 8, -1] > 0


def test_littles_law_caps_the_rate_by_what_stays_on_the_node() -> None:
    """With room for N sequences that stay for the whole budget, no more than N / budget sequences/s flow."""
    work = decode_work((1, 2, 4, 8))
    parameters, limit = MemoryParameters(), slo(60.0)
    # One quantum is 1 s; at 10 ms the batch of 8 alone would give 800/s, more than the cache of a small card can hold.
    stay = 0.01 + HALF_ROUND_TRIP_S + 59.0
    small = replace(work.configuration.gpu, memory_bytes=int(1.2e9))
    tight = replace(work, configuration=replace(work.configuration, gpu=small))
    room = sequence_room(tight, shape_of(), parameters).sequences[0]
    assert 8 < room < 8 / 0.0101 * stay
    capped = reduce_costs(tight, costs_of(tight, [0.01] * 4), limit, shape_of(), parameters)
    assert capped.throughput[0, 0] == pytest.approx(room / stay, rel=1e-4)
    assert capped.limited_by[0, 0] == LimitedBy.KV
    # With the whole budget the sequences stay 0.0101 s only: the cache no longer binds.
    assert capped.throughput[0, 59] == pytest.approx(8 / (0.01 + HALF_ROUND_TRIP_S), rel=1e-4)


def test_the_largest_batch_of_the_grid_is_limited_by_layers() -> None:
    """Where neither the cache nor the budget stops a larger batch, only fewer layers would help."""
    work = decode_work((1, 2))
    table = reduce_costs(work, costs_of(work, [1e-3, 1e-3]), slo(1.0), shape_of(), MemoryParameters())
    assert table.limited_by[0, 59] == LimitedBy.LAYERS


def test_prefill_counts_prompt_tokens() -> None:
    """Two prompts of 96 tokens in 4 layers of 1 ms: 192 tokens per 4.1 ms, of which a queue may use its share."""
    work = replace(decode_work((1, 2)), phase=Phase.PREFILL, context_tokens=96)
    table = reduce_costs(work, costs_of(work, [1e-3, 1e-3]), slo(1.0), shape_of(), MemoryParameters())
    assert table.throughput[3, 59] == pytest.approx(QUEUE_SHARE * 192 / (4e-3 + HALF_ROUND_TRIP_S), rel=1e-4)


def test_a_limit_on_the_median_is_planned_on_mean_lengths_without_a_queue() -> None:
    """The same batch at the 50th percentile counts whole, however long the longest prompts are."""
    work = replace(decode_work((1, 2)), phase=Phase.PREFILL, context_tokens=96)
    limit = LatencySlo(ttft_s=1.0, tpot_s=1.0, percentile=50)
    table = reduce_costs(work, costs_of(work, [1e-3, 1e-3]), limit, shape_of(p95=9600), MemoryParameters())
    assert table.throughput[3, 59] == pytest.approx(192 / (4e-3 + HALF_ROUND_TRIP_S), rel=1e-4)


def test_a_long_prompt_must_meet_the_limit_after_a_wait() -> None:
    """40 us a token: 960 tokens take 38.5 ms, two waits 7.88 ms; a limit of 45 ms is too little, 47 is enough."""
    work = replace(decode_work((1, 2)), phase=Phase.PREFILL, context_tokens=96)
    costs = costs_of(work, [0.96e-3, 1.92e-3])
    for seconds, fits in ((45e-3, False), (47e-3, True)):
        table = reduce_costs(work, costs, slo(seconds), shape_of(p95=960), MemoryParameters())
        assert bool(table.throughput[3, 59]) is fits
    assert table.limited_by[3, 30] == LimitedBy.LATENCY  # half the budget: the long prompt alone does not fit


def test_time_of_a_long_prompt_pays_the_constant_for_every_chunk() -> None:
    """Batches of 96 and 192 tokens take 2 and 3 ms: constant 1 ms, so 300 tokens in two chunks take 2 + 300/96 ms."""
    work = replace(decode_work((1, 2), layers=1), phase=Phase.PREFILL, context_tokens=96)
    assert long_prompt_s(work, np.array([[2e-3], [3e-3]]), shape_of(p95=300))[0] == pytest.approx(5.125e-3)
    lone = replace(work, sequences=(1,))
    assert long_prompt_s(lone, np.array([[2e-3]]), shape_of(p95=300))[0] == pytest.approx(2e-3 * 300 / 96)


def test_a_hop_moves_hidden_state_and_residual_in_and_out() -> None:
    """1000 tokens of width 128: 2 tensors x 2 bytes x 128 x 1000, in and out, over 1 MB/s, and half a round trip."""
    work = replace(decode_work((1000,)), configuration=node("L4x1", network=1e6), phase=Phase.DECODE)
    assert hop_s(work)[0] == pytest.approx(2 * 2 * 2 * 128 * 1000 / 1e6 + HALF_ROUND_TRIP_S)


def test_the_slowest_position_of_a_stage_counts() -> None:
    """Layers of 1, 3, 1 and 3 ms: one layer costs 3 ms, two 4 ms, three 7 ms."""
    work = decode_work((1,))
    costs = replace(costs_of(work, [0.0]), layer_s=np.asarray([[1e-3, 3e-3, 1e-3, 3e-3]]))
    assert costs.stage_s()[0].tolist() == pytest.approx([3e-3, 4e-3, 7e-3, 8e-3])


def test_the_envelope_never_promises_more_than_a_cell_showed() -> None:
    """A dent in j or q lowers its neighbours; nothing is raised, and the largest change is told."""
    raw = np.asarray([[4.0, 3.0, 8.0], [5.0, 6.0, 6.0]])
    lower, repaired = envelope(raw)
    assert lower.tolist() == [[3.0, 3.0, 8.0], [3.0, 3.0, 6.0]]
    assert repaired == pytest.approx(0.5)


def test_a_monotone_table_is_left_alone() -> None:
    """Nothing to repair: same figures, no change reported."""
    raw = np.asarray([[1.0, 2.0], [0.5, 2.0]])
    lower, repaired = envelope(raw)
    assert lower.tolist() == raw.tolist()
    assert repaired == 0.0


def test_costs_that_break_monotony_by_much_are_refused() -> None:
    """Layers that save time would make T rise with layers: beyond the limit that is an error with its size."""
    work = decode_work((1,))
    with pytest.raises(ValidationFailed, match=r"tiny L4x1 decode: monotony broken by \d+%"):
        reduce_costs(work, costs_of(work, [-2e-3], 10e-3), slo(1.0), shape_of(), MemoryParameters())


def test_a_small_break_of_monotony_is_repaired_and_told() -> None:
    """Layers that save one percent are noise: the table is made monotone and the change reported."""
    work = decode_work((1,))
    table = reduce_costs(work, costs_of(work, [-1e-4], 10e-3), slo(1.0), shape_of(), MemoryParameters())
    assert 0 < table.repaired < 0.05
    assert (np.diff(table.throughput, axis=0) <= 0).all()


def test_rounding_keeps_six_digits() -> None:
    """123456.7 becomes 123457, 0 stays 0, small figures keep their digits."""
    assert round_significant(np.asarray([123456.7, 0.0, 0.001234567])).tolist() == [123457.0, 0.0, 0.00123457]


@settings(max_examples=40, deadline=None)
@given(
    times=st.lists(st.floats(1e-5, 1e-2), min_size=1, max_size=5),
    constant=st.floats(0, 5e-3),
    budget=st.floats(1e-3, 1.0),
    memory=st.floats(1.0e9, 4e9),
)
def test_tables_are_monotone_whatever_the_costs(
    times: list[float], constant: float, budget: float, memory: float
) -> None:
    """T never rises with layers and never falls with the share, and 0 cells say why."""
    work = decode_work(tuple(2**i for i in range(len(times))))
    gpu = replace(work.configuration.gpu, memory_bytes=int(memory))
    work = replace(work, configuration=replace(work.configuration, gpu=gpu))
    table = reduce_costs(work, costs_of(work, times, constant), slo(budget), shape_of(), MemoryParameters())
    assert (np.diff(table.throughput, axis=0) <= 0).all()
    assert (np.diff(table.throughput, axis=1) >= 0).all()
    assert LimitedBy.LAYERS not in set(table.limited_by[table.throughput == 0])


def test_a_batch_outside_the_measured_range_is_marked() -> None:
    """Cells that rest on an extrapolated batch carry the mark, others do not."""
    work = decode_work((1, 8))
    costs = replace(costs_of(work, [1e-3, 1e-3]), extrapolated=np.asarray([False, True]))
    table = reduce_costs(work, costs, slo(1.0), shape_of(), MemoryParameters())
    assert table.extrapolated[table.throughput > 0].all()
    lone = reduce_costs(
        work, replace(costs, layer_s=costs.layer_s * [[1], [10_000]]), slo(1.0), shape_of(), MemoryParameters()
    )
    assert not lone.extrapolated.any()


def test_a_setup_is_built_with_its_version_and_sources() -> None:
    """The same inputs give the same version; another memory fraction another one."""
    setup = CATALOG.setup("core")
    small = replace(setup, models=setup.models[2:], configurations=setup.configurations[:2])
    first, again = (build_profile_tables(small, sources=[ROOFLINE]) for _ in range(2))
    other = build_profile_tables(small, sources=[ROOFLINE], parameters=MemoryParameters(gpu_memory_fraction=0.8))
    assert [table.version for table in first] == [table.version for table in again]
    assert first[0].version != other[0].version
    assert first[0].sources == (ProfileSource.ANALYTIC,) * 2
    assert [table.phase for table in first] == [Phase.PREFILL, Phase.DECODE]


def test_a_configuration_without_profile_is_left_out_and_said() -> None:
    """A machine without GPU has no database or analytic profile: it is not in the table and stands under missing."""
    setup = CATALOG.setup("core")
    entry: SetupModel = setup.models[0]
    nodes = (CATALOG.configuration("L4x1"), CATALOG.configuration("cpu"))
    report = build_profiles(replace(setup, models=(entry,), configurations=nodes), sources=[ROOFLINE])
    assert report.tables[0].configurations == ("L4x1",)
    assert {(one.configuration, one.phase) for one in report.missing} == {
        ("cpu", phase) for phase in ("prefill", "decode")
    }


def test_a_model_without_any_profile_is_unavailable() -> None:
    """If no configuration of the setup can be timed, there is no table and the error names the model."""
    setup: Setup = CATALOG.setup("cpu")
    with pytest.raises(Unavailable, match="tiny, prefill: no node configuration"):
        build_profile_tables(setup, sources=[ROOFLINE])


def test_prefill_batches_stay_within_the_engines_batched_tokens() -> None:
    """Prompts of 600 tokens: an L4 takes up to 3 at once (2048 tokens), an H100 up to 12 (8192)."""
    for name, most in (("L4x1", 3), ("H100x1", 12)):
        model = CATALOG.model("qwen3-32b")
        split = choose_parallelism(model, node(name))
        work = work_for(model, node(name), split, Phase.PREFILL, shape_of(prompt=600), MemoryParameters())
        assert max(work.sequences) == most
