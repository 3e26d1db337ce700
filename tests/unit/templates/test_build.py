"""Template sets: what is kept and why, second rows for vLLM, refusals, pool and resuming."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.models import LatencySlo, RequestShape
from coral_tasks.domain.names import LatencySplit, ModelId, NodeConfigurationId, Phase, Runtime
from coral_tasks.domain.profiles import LimitedBy, ProfileSource, ProfileTable
from coral_tasks.domain.template_set import RUNTIME_CODES, TemplateSet
from coral_tasks.domain.templates import NodeCombination
from coral_tasks.templates import (
    BuildOptions,
    Reduction,
    build_template_set,
    build_template_sets,
    keep_large_chunk,
    keep_smaller,
    large_chunks,
    pool,
    set_key,
)

NAMES = ("A10Gx1", "L40Sx1", "L4x2")


def make_table(values: np.ndarray, *, degrees=(1, 1, 2), names=NAMES, model="toy", limits=None) -> ProfileTable:
    """A profile table of the first configurations; 10 bytes of memory per node, 10 bytes of checkpoint."""
    count = len(values)
    return ProfileTable(
        model=ModelId(model),
        num_layers=values.shape[1],
        checkpoint_bytes=10.0,
        phase=Phase.DECODE,
        slo=LatencySlo(ttft_s=1.0, tpot_s=0.05),
        shape=RequestShape(mean_prompt_tokens=10, p95_prompt_tokens=20, mean_output_tokens=5, p95_output_tokens=9),
        configurations=tuple(NodeConfigurationId(name) for name in names[:count]),
        node_memory_bytes=(10,) * count,
        tp_degree=tuple(degrees[:count]),
        throughput=values,
        limited_by=np.full(values.shape, LimitedBy.KV.value, np.uint8) if limits is None else limits,
        sources=(ProfileSource.ANALYTIC,) * count,
        provenance=("made up",) * count,
        version="v1",
    )


def random_table(seed: int, *, count: int = 3, layers: int = 6, quanta: int = 12, **options) -> ProfileTable:
    """Whole numbers with many ties and zeros."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 30, size=(count, layers, quanta)).astype(float)
    values = np.minimum.accumulate(np.maximum.accumulate(raw, axis=2), axis=1)
    return make_table(values, **options)


def values_by_nodes(templates: TemplateSet, runtime: Runtime | None = None) -> dict[tuple[int, ...], float]:
    """Throughput by sorted node list; of one runtime, or the best."""
    found: dict[tuple[int, ...], float] = {}
    for row in range(len(templates)):
        if runtime is None or RUNTIME_CODES[templates.runtime[row]] is runtime:
            nodes = tuple(np.repeat(np.arange(len(templates.configurations)), templates.node_counts[row]).tolist())
            found[nodes] = max(found.get(nodes, 0.0), float(templates.throughput[row]))
    return found


def replaceable(everything: dict[tuple[int, ...], float], nodes: tuple[int, ...]) -> bool:
    """Spelt out: one or two disjoint smaller combinations give as much."""
    goal = everything[nodes] * (1 - 1e-9)
    slots = range(len(nodes))
    proper = [s for size in range(1, len(nodes)) for s in itertools.combinations(slots, size)]

    def value(chosen) -> float:
        return everything.get(tuple(nodes[i] for i in chosen), 0.0)

    if any(value(one) >= goal for one in proper):
        return True
    pairs = itertools.combinations(proper, 2)
    return any(not set(a) & set(b) and value(a) + value(b) >= goal for a, b in pairs)


@pytest.mark.parametrize("split", list(LatencySplit))
@pytest.mark.parametrize("seed", range(5))
def test_kept_is_exactly_what_smaller_ones_cannot_replace(seed: int, split: LatencySplit) -> None:
    """Pairs reduction keeps a combination if and only if no one or two smaller ones give as much."""
    table = random_table(seed)
    options = BuildOptions(max_nodes=4, memory_ratio=None, latency_split=split)
    everything = build_template_set(
        table, BuildOptions(max_nodes=4, memory_ratio=None, latency_split=split, reduction=Reduction.NONE)
    )
    for runtime in (None, Runtime.VLLM):
        full = values_by_nodes(everything.templates, runtime)
        reduced = values_by_nodes(build_template_set(table, options).templates, runtime)
        irreducible = {nodes for nodes in full if not replaceable(full, nodes)}
        assert irreducible <= set(reduced)
        if runtime is Runtime.VLLM:
            extra = set(reduced) - irreducible
            best = values_by_nodes(everything.templates)
            assert all(not replaceable(best, nodes) for nodes in extra), "only rows that the other rule keeps"


@pytest.mark.parametrize("seed", range(3))
def test_counts_add_up(seed: int) -> None:
    """Every possible combination is counted under exactly one reason."""
    result = build_template_set(random_table(seed), BuildOptions(max_nodes=4, memory_ratio=3.0))
    counts = result.counts
    parts = counts.num_beyond_memory + counts.num_infeasible + counts.num_replaced_by_one
    assert counts.num_possible == 34  # 3 + 6 + 10 + 15 multisets of 1 to 4 nodes of 3 kinds
    assert parts + counts.num_replaced_by_two + counts.num_kept == counts.num_possible
    assert counts.num_beyond_memory == 15
    assert len(result.templates) == counts.num_kept + counts.num_vllm_extra


def test_any_number_of_parts_drops_at_least_as_much() -> None:
    """Chain reduction keeps a subset of what pairs reduction keeps, with the same throughput."""
    for seed in range(5):
        table = random_table(seed)
        kept = [
            values_by_nodes(
                build_template_set(table, BuildOptions(max_nodes=5, memory_ratio=None, reduction=kind)).templates
            )
            for kind in (Reduction.CHAIN, Reduction.PAIRS)
        ]
        assert kept[0].items() <= kept[1].items()


def test_a_requested_combination_is_kept() -> None:
    """What runs now is kept although two single nodes replace it, and counted apart."""
    table = make_table(np.full((1, 2, 4), 5.0))
    two = NodeCombination.of([NodeConfigurationId("A10Gx1")] * 2)
    without = build_template_set(table, BuildOptions(max_nodes=2))
    result = build_template_set(table, BuildOptions(max_nodes=2, keep=(two,)))
    assert [str(without.templates.nodes(row)) for row in range(len(without.templates))] == ["1*A10Gx1"]
    assert result.counts.num_kept_on_request == 1
    assert two in {result.templates.nodes(row) for row in range(len(result.templates))}


def test_the_best_vllm_placement_stands_beside_a_better_hybrid_one() -> None:
    """Where two nodes in one stage beat one node per stage both are there, and each says what can run it."""
    values = np.zeros((1, 2, 4))
    values[0, 0] = [1, 6, 6, 6]  # one layer
    values[0, 1] = [0, 0, 0, 4]  # both layers need the whole budget
    result = build_template_set(make_table(values), BuildOptions(max_nodes=2, reduction=Reduction.NONE))
    rows = {
        (str(result.templates.nodes(row)), RUNTIME_CODES[result.templates.runtime[row]]): row
        for row in range(len(result.templates))
    }
    assert result.templates.throughput[rows["2*A10Gx1", Runtime.HYBRID]] == 8.0
    assert result.templates.throughput[rows["2*A10Gx1", Runtime.VLLM]] == 6.0
    assert len(result.templates.placement(rows["2*A10Gx1", Runtime.VLLM]).stages) == 2


def test_unequal_degrees_are_hybrid() -> None:
    """A pipeline over nodes of different tensor parallel degrees has no vLLM row."""
    values = np.zeros((3, 2, 4))
    values[:, 0] = 5.0
    result = build_template_set(make_table(values), BuildOptions(max_nodes=2))
    runtimes = {
        str(result.templates.nodes(row)): RUNTIME_CODES[result.templates.runtime[row]]
        for row in range(len(result.templates))
    }
    assert runtimes["1*A10Gx1+1*L40Sx1"] is Runtime.VLLM
    assert runtimes["1*A10Gx1+1*L4x2"] is Runtime.HYBRID


def test_the_limit_is_that_of_the_slowest_stage() -> None:
    """A template is limited by what limits the cell of its slowest stage."""
    values = np.zeros((2, 2, 4))
    values[0, 0], values[1, 0] = 3.0, 9.0
    limits = np.full(values.shape, LimitedBy.LATENCY.value, np.uint8)
    limits[0] = LimitedBy.WEIGHTS.value
    result = build_template_set(make_table(values, limits=limits), BuildOptions(max_nodes=2, memory_ratio=None))
    row = [str(result.templates.nodes(r)) for r in range(len(result.templates))].index("1*A10Gx1+1*L40Sx1")
    assert result.templates.template(row).limited_by is LimitedBy.WEIGHTS


def test_the_order_of_configurations_does_not_matter() -> None:
    """The same table with configurations in another order gives the same set and the same key."""
    table = random_table(3)
    values = table.throughput[::-1].copy()
    turned = make_table(values, names=NAMES[::-1], degrees=(2, 1, 1))
    options = BuildOptions(max_nodes=3)
    assert set_key(table, options) == set_key(turned, options)
    one, other = (build_template_set(each, options).templates for each in (table, turned))
    assert one.ids == other.ids
    assert one.throughput.tobytes() == other.throughput.tobytes()
    assert one.slot_stage.tobytes() == other.slot_stage.tobytes()


def test_nothing_fits_is_an_empty_set() -> None:
    """A table of zeros gives no templates and counts every combination as infeasible."""
    result = build_template_set(make_table(np.zeros((2, 3, 4))), BuildOptions(max_nodes=2))
    assert len(result.templates) == 0
    assert result.counts.num_infeasible == result.counts.num_possible == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_nodes": 0}, "N_max must be a whole number from 1 to 8"),
        ({"max_nodes": 9}, "N_max must be a whole number from 1 to 8"),
        ({"max_nodes": 2.5}, "N_max must be a whole number from 1 to 8"),
        ({"memory_ratio": 0.0}, "rho must be finite and above zero"),
        ({"memory_ratio": -1.0}, "rho must be finite and above zero"),
        ({"memory_ratio": float("nan")}, "rho must be finite and above zero"),
        ({"memory_ratio": float("inf")}, "rho must be finite and above zero"),
    ],
)
def test_a_wrong_option_is_refused(changes: dict, message: str) -> None:
    """N_max and rho out of range are refused by name."""
    with pytest.raises(ValidationFailed, match=message):
        BuildOptions(**changes)


def _broken(change) -> np.ndarray:
    values = np.ones((2, 3, 4))
    change(values)
    return values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.__setitem__((0, 2, 3), 2.0), "must not rise with layers"),
        (lambda v: v.__setitem__((0, 0, 0), 2.0), "must not fall with the latency share"),
        (lambda v: v.__setitem__((1, 1, 1), float("nan")), "must be finite"),
        (lambda v: v.__setitem__((1, 1, 1), float("inf")), "must be finite"),
        (lambda v: v.__setitem__((1, slice(None), 0), -1.0), "must not be negative"),
    ],
)
def test_a_broken_table_is_refused(change, message: str) -> None:
    """A table that is not monotone, or holds NaN, infinite or negative entries, is refused by name and cell."""
    with pytest.raises(ValidationFailed, match=message):
        make_table(_broken(change))


def test_no_layers_are_refused() -> None:
    """A layer count of 0 is refused."""
    with pytest.raises(ValidationFailed, match="throughput must have shape"):
        make_table(np.ones((2, 0, 4)))


def test_two_configurations_of_one_name_are_refused() -> None:
    """A configuration listed twice is refused by name."""
    with pytest.raises(ValidationFailed, match=r"configuration is listed twice .*L4x2"):
        make_table(np.ones((2, 3, 4)), names=("L4x2", "L4x2"))


def test_unknown_limits_and_memory_are_refused_together() -> None:
    """A build names every broken rule of its table at once."""
    table = make_table(np.ones((1, 2, 4)), limits=np.zeros((1, 2, 4), np.uint8), degrees=(0,))
    with pytest.raises(ValidationFailed) as refusal:
        build_template_set(table, BuildOptions())
    assert len(refusal.value.violations) == 2


class Keeper:
    """Chunks in memory; stops the build after ``stop_after`` of them."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.chunks: dict = {}
        self.stop_after = stop_after
        self.num_saved = 0

    def load(self, key, first, last):
        return self.chunks.get((key, first, last))

    def save(self, key, first, last, arrays) -> None:
        if self.stop_after is not None and self.num_saved >= self.stop_after:
            raise KeyboardInterrupt
        self.num_saved += 1
        self.chunks[key, first, last] = {name: values.copy() for name, values in arrays.items()}


def test_an_interrupted_build_goes_on_and_gives_the_same(monkeypatch) -> None:
    """After an interruption only chunks not yet kept are solved, and the result is that of an undisturbed build."""
    monkeypatch.setattr(pool, "CHUNK_SIZE", 4)
    tables, options = [random_table(7), random_table(8, model="other")], BuildOptions(max_nodes=3)
    undisturbed = dict(build_template_sets(tables, options))
    keeper = Keeper(stop_after=4)
    with pytest.raises(KeyboardInterrupt):
        list(build_template_sets(tables, options, keeper=keeper))
    assert keeper.num_saved == 4
    keeper.stop_after = None
    resumed = dict(build_template_sets(tables, options, keeper=keeper))
    num_chunks = 2 * (1 + 2 + 3)  # 3, 6 and 10 combinations in chunks of 4, two tables
    assert keeper.num_saved == num_chunks
    assert set(resumed) == {set_key(table, options) for table in tables}
    for key, result in undisturbed.items():
        assert resumed[key].templates.ids == result.templates.ids
        assert resumed[key].templates.slot_stage.tobytes() == result.templates.slot_stage.tobytes()
        assert resumed[key].counts == result.counts


def test_chunks_solved_elsewhere_give_the_same_set(monkeypatch) -> None:
    """Chunks of the largest size, solved one by one and in any order, are all that the build then takes: it solves
    nothing again and gives the set of an undisturbed build. A set of one chunk is not worth spreading.
    """
    table, options = random_table(7), BuildOptions(max_nodes=3)
    assert large_chunks(table, options) == []
    ((_, undisturbed),) = build_template_sets([table], options)
    monkeypatch.setattr(pool, "CHUNK_SIZE", 4)
    chunks = large_chunks(table, options)
    assert [last - first for first, last in chunks] == [4, 4, 2]  # 10 combinations of three nodes of three kinds
    keeper = Keeper()
    keep_smaller(table, options, keeper)
    assert keeper.num_saved == 1 + 2  # 3 single nodes, 6 pairs
    for first, last in reversed(chunks):
        keep_large_chunk(table, options, keeper, first, last)
    assert keeper.num_saved == 1 + 2 + 3
    ((_, spread),) = build_template_sets([table], options, keeper=keeper)
    assert keeper.num_saved == 1 + 2 + 3
    assert spread.counts == undisturbed.counts
    for name in ("node_counts", "throughput", "runtime", "slot_stage", "stage_layers", "stage_quanta"):
        assert getattr(spread.templates, name).tobytes() == getattr(undisturbed.templates, name).tobytes()


def test_a_chunk_without_the_smaller_sizes_solves_them_first(monkeypatch) -> None:
    """A worker that comes before the smaller sizes are kept is not wrong, only slower."""
    monkeypatch.setattr(pool, "CHUNK_SIZE", 4)
    table, options = random_table(8), BuildOptions(max_nodes=3)
    keeper, alone = Keeper(), Keeper()
    keep_smaller(table, options, keeper)
    for one in (keeper, alone):
        keep_large_chunk(table, options, one, *large_chunks(table, options)[1])
    assert {key: values["throughput"].tobytes() for key, values in alone.chunks.items()} == {
        key: values["throughput"].tobytes() for key, values in keeper.chunks.items()
    }


def test_a_damaged_chunk_is_solved_again() -> None:
    """A kept chunk of the wrong shape counts as absent."""
    keeper = Keeper()
    table, options = random_table(9), BuildOptions(max_nodes=2)
    ((key, first),) = build_template_sets([table], options, keeper=keeper)
    for chunk in keeper.chunks.values():
        chunk["throughput"] = np.zeros(1)
    ((again, second),) = build_template_sets([table], options, keeper=keeper)
    assert key == again
    assert first.templates.throughput.tobytes() == second.templates.throughput.tobytes()


@pytest.mark.integration
def test_the_number_of_processes_does_not_matter(monkeypatch) -> None:
    """Two processes give the same sets, byte for byte, as none."""
    tables, options = [random_table(1), random_table(2, model="other")], BuildOptions(max_nodes=3)
    monkeypatch.setattr(pool, "CHUNK_SIZE", 4)
    steps = []
    alone = dict(build_template_sets(tables, options))
    shared = dict(build_template_sets(tables, options, processes=2, on_progress=steps.append))
    assert set(alone) == set(shared)
    assert steps[-1].done == steps[-1].total == 2 * 19
    for key, result in alone.items():
        for name in ("node_counts", "throughput", "runtime", "slot_stage", "stage_layers", "stage_quanta"):
            assert getattr(result.templates, name).tobytes() == getattr(shared[key].templates, name).tobytes()


def test_no_processes_are_refused() -> None:
    """A build needs at least one process."""
    with pytest.raises(ValidationFailed, match="processes must be at least 1"):
        list(build_template_sets([random_table(0)], BuildOptions(), processes=0))
