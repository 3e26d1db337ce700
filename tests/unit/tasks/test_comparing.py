"""The evaluation's cases and its report, on the core setup with small node combinations."""

import json
import math

import pytest

from coral_tasks.catalog import load_catalog
from coral_tasks.domain.errors import UnknownName, ValidationFailed
from coral_tasks.tasks.comparing import (
    CompareRequest,
    compare_and_report,
    compare_helix,
    demand_mix,
    make_trace,
    make_world,
    offered_nodes,
    read_offered,
    trace_file,
)
from coral_tasks.tasks.demand import TRACE_OF

pytestmark = pytest.mark.timeout(900)  # the first simulation on a machine compiles the event loop

SMALL = {"latency_split": "equal", "max_nodes": 1}


def test_demand_mixes_keep_the_total_and_lean_as_they_say():
    """Large-heavy gives the largest model three times the smallest one's rate; small-heavy the other way round."""
    setup = load_catalog().setup("core")
    sizes = {one.model.id: one.model.checkpoint_bytes for one in setup.models}
    largest, smallest = max(sizes, key=sizes.get), min(sizes, key=sizes.get)
    for case, ratio in (("default", 1.0), ("large-heavy", 3.0), ("small-heavy", 1 / 3)):
        mix = demand_mix(setup, case)
        assert sum(mix.values()) == pytest.approx(30.0)
        assert mix[largest] / mix[smallest] == pytest.approx(ratio)


def test_comparison_is_complete_and_the_same_twice(tmp_path):
    """Every planner gets cost, goodput and ratio, requests add up, the page is written, and a rerun gives the same."""
    request = CompareRequest(work=tmp_path, num_epochs=2, epoch_s=20.0, startup_s=5.0, library=SMALL, supply=40.0)
    summary, path = compare_and_report(request)
    again, _ = compare_and_report(request)
    for one in (summary, again):
        one.pop("solve_seconds")
        for row in one["planners"]:
            row.pop("solve_seconds")
    assert summary == again
    assert [row["name"] for row in summary["baselines"]] == list(request.planners)
    coral, *baselines = summary["planners"]
    for row, ratio in zip(baselines, summary["baselines"], strict=True):
        assert ratio["cost_ratio"] == pytest.approx(row["usd_per_hour"] / coral["usd_per_hour"])
        # A baseline that leaves more of the demand out may well cost less.
        if row["shortfall_requests_per_s"] <= coral["shortfall_requests_per_s"] + 1e-9:
            assert row["planned_usd_per_hour"] >= coral["planned_usd_per_hour"] - 1e-6
    for row in summary["planners"]:
        counts = {name: sum(model["outcomes"].values()) for name, model in row["models"].items()}
        assert counts == {name: sum(coral["models"][name]["outcomes"].values()) for name in counts}
    assert "homo" in path.read_text(encoding="utf-8")
    assert json.loads(path.with_suffix(".json").read_text())["setup"] == "core"


def test_scarce_offers_fewer_nodes_than_default(tmp_path):
    """The same seed offers about 3.5 / 12 of the nodes when scarce, in every epoch the same to every planner."""
    total = {}
    for case in ("default", "scarce"):
        world = make_world(CompareRequest(work=tmp_path, case=case, library=SMALL))
        offered = offered_nodes(world)
        assert offered == offered_nodes(world)
        total[case] = sum(offered[0].values())
    assert total["scarce"] / total["default"] == pytest.approx(3.5 / 12, rel=0.25)


def test_poisson_arrivals_draw_lengths_from_the_whole_trace(tmp_path):
    """A trace that turns from short to long half way gives the mean of both, prompt and answer still together."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for second in range(4000):
        prompt, answer = (100, 10) if second < 2000 else (300, 30)
        lines.append(f"2023-11-16 {18 + second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}.0,{prompt},{answer}")
    for kind in ("conv", "code"):
        (tmp_path / f"azure_{kind}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    request = CompareRequest(work=tmp_path, traces=tmp_path, num_epochs=1, epoch_s=300.0)
    setup = load_catalog().setup("core")
    trace = make_trace(request, setup, demand_mix(setup, "default"))
    recorded = [k for k, model in enumerate(trace.models) if model in TRACE_OF]
    for k in recorded:
        mine = trace.model == k
        prompts, answers = trace.prompt_tokens[mine], trace.output_tokens[mine]
        assert set(zip(prompts.tolist(), answers.tolist(), strict=True)) == {(100, 10), (300, 30)}
        assert prompts.mean() == pytest.approx(200, rel=0.05)  # about 3,000 requests: 2 % is one standard error
    assert recorded


def test_unknown_names_list_the_known_ones(tmp_path):
    """A wrong case, arrival kind or router is refused with what there is."""
    with pytest.raises(UnknownName, match="default, large-heavy, scarce, small-heavy"):
        CompareRequest(work=tmp_path, case="rich")
    with pytest.raises(UnknownName, match="poisson, trace"):
        CompareRequest(work=tmp_path, arrivals="bursts")
    with pytest.raises(UnknownName, match="least_loaded"):
        CompareRequest(work=tmp_path, router="random")
    with pytest.raises(UnknownName, match="equal, free"):
        CompareRequest(work=tmp_path, library={"latency_split": "fair"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"headroom": value}, "headroom must be above 0 and at most 1") for value in (0.0, -1.0, 1.5, math.nan)),
        *(({"supply": value}, "supply must be finite and above zero") for value in (0.0, -1.0, math.nan, math.inf)),
        *(({"slowdown": value}, "slowdown must be finite and above zero") for value in (0.0, -1.0, math.inf)),
        ({"time_limit_s": math.nan}, "time_limit_s must be finite and above zero"),
        ({"num_epochs": 0}, "num_epochs must be finite and above zero"),
        ({"seed": -1}, "seed must be finite and not negative"),
    ],
)
def test_numbers_without_sense_are_refused_before_any_work(tmp_path, changes, message):
    """Each number is refused by its name, and nothing is built for it."""
    with pytest.raises(ValidationFailed, match=message):
        CompareRequest(work=tmp_path, **changes)
    assert not list(tmp_path.iterdir())


OFFERED = "epoch,region,configuration,available_nodes\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("a,b\n1,2\n", "missing: epoch, region, configuration, available_nodes"),
        (OFFERED, "nodes.csv, epoch 0: no rows"),
        (OFFERED + "0,r,L4x1,3\n", "nodes.csv, epoch 1: no rows"),
        (OFFERED + "0,r,L4x1,-3\n", "row 0: available_nodes must be a whole number of at least 0 .found -3"),
        (OFFERED + "0,r,L4x1,3.7\n", "available_nodes must be a whole number of at least 0 .found 3.7"),
        (OFFERED + "0,r,L4x1,\n", "available_nodes must be a whole number of at least 0 .found nan"),
        (OFFERED + "0,r,L4x1,some\n", "available_nodes must be a whole number of at least 0 .found some"),
        (OFFERED + "-1,r,L4x1,3\n", "epoch must be a whole number of at least 0 .found -1"),
        (OFFERED + "0,r,L4x1,3\n0,r,L4x1,4\n", "row 1: a node is listed twice"),
    ],
)
def test_bad_availability_is_refused_by_row_and_rule(tmp_path, text, message):
    """Each kind of bad availability has its message; unknown is not zero and a part of a node is none."""
    path = tmp_path / "nodes.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValidationFailed, match=message):
        read_offered(path, 2)


def test_nodes_that_the_setup_does_not_know_are_refused(tmp_path):
    """A region or configuration without a price in the setup is a wrong name, not a node that nobody takes."""
    path = tmp_path / "nodes.csv"
    path.write_text(OFFERED + "0,aws/us-east-2,L4x1,3\n0,aws/nowhere,L4x1,3\n", encoding="utf-8")
    world = make_world(CompareRequest(work=tmp_path, library=SMALL, num_epochs=1, availability=path))
    with pytest.raises(ValidationFailed, match=r"aws/nowhere L4x1: the setup has no price") as failed:
        offered_nodes(world)
    assert "us-east-2" not in str(failed.value)


def test_missing_traces_and_measurements_say_what_is_needed(tmp_path):
    """An empty trace folder and a Helix run without its files name what is missing."""
    with pytest.raises(ValidationFailed, match="exactly one trace whose name holds 'conv'"):
        trace_file(tmp_path, "conv")
    with pytest.raises(ValidationFailed, match="--measured FOLDER"):
        compare_helix(CompareRequest(work=tmp_path))
