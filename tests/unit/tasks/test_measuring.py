"""Which node configurations are due for measuring, on which node, with which grid; nothing is started here."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from coral_tasks.catalog import load_catalog
from coral_tasks.dispatch.observation import build_observation
from coral_tasks.domain.errors import EngineFault, UnknownName, ValidationFailed
from coral_tasks.domain.names import ModelId, NodeConfigurationId, Phase
from coral_tasks.profiling.measured import MeasuredRow
from coral_tasks.profiling.runner import as_records
from coral_tasks.protocol.messages import NodeReport, Report, SlotState
from coral_tasks.tasks import measuring, nightly

CORE = load_catalog().setup("core")
NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def node(name: str, **changes: object) -> NodeReport:
    """An idle L4x1 node with real vLLM."""
    fields = {
        "node": name,
        "region": "aws/us-east-2",
        "configuration": "L4x1",
        "market": "on_demand",
        "engine": "vllm",
        "address": "127.0.0.1",
        "master_port": 1,
        "state": SlotState.EMPTY,
    }
    return NodeReport(**{**fields, **changes})


def seen(*nodes: NodeReport):
    """An observation of one agent with ``nodes``."""
    report = Report(request="r", agent="a", incarnation="i", epoch=1, round=1, accepted=True, nodes=nodes)
    return build_observation({"a": report}, ["a"])


def row(model: str, configuration: str, status: str, at: datetime) -> MeasuredRow:
    """One row of a measurement."""
    ok = status == "ok"
    return MeasuredRow(
        model=ModelId(model),
        configuration=NodeConfigurationId(configuration),
        phase=Phase.DECODE,
        num_layers=2,
        tp_degree=1,
        sequences=1,
        tokens=128,
        status=status,
        median_s=1e-3 if ok else None,
        spread_s=0.0 if ok else None,
        num_repeats=3 if ok else 0,
        detail="",
        vllm="",
        torch="",
        driver="",
        device="",
        measured_at=at.isoformat(),
        code_version="1",
    )


def test_one_idle_node_of_each_due_configuration() -> None:
    """The first idle node by name is taken; busy, excluded and simulated nodes and other configurations are not."""
    fleet = seen(
        node("a", state=SlotState.PROFILING),
        node("b", excluded="crashed"),
        node("c", engine="simulated"),
        node("e"),
        node("d"),
        node("f", configuration="L40Sx2"),
        node("g", configuration="H100x8"),
        node("h", configuration="A10Gx1"),
    )
    due = {"L4x1": ["phi-4-14b"], "L40Sx2": ["qwen3-32b", "phi-4-14b"], "A10Gx1": [], "H100x8": ["phi-4-14b"]}
    planned = measuring.plan_assignments(CORE, fleet, due)
    assert {(one.configuration, one.node, one.models) for one in planned} == {
        ("L4x1", "d", ("phi-4-14b",)),
        ("L40Sx2", "f", ("qwen3-32b", "phi-4-14b")),
    }
    assert measuring.plan_assignments(CORE, seen(node("c", engine="simulated")), due) == ()


def test_a_model_is_due_if_nothing_young_was_timed() -> None:
    """Fresh ok rows settle a model on that configuration only; old ones and failed ones do not."""
    old = datetime(2026, 10, 1, tzinfo=UTC)
    rows = [
        row("phi-4-14b", "L4x1", "ok", NOW),
        row("qwen3-32b", "L4x1", "ok", old),
        row("gpt-oss-20b", "L4x1", "failed", NOW),
        row("llama3-70b", "L4x1", "ok", NOW),
    ]
    due = measuring.due_models(CORE, rows, oldest=datetime(2026, 11, 1, tzinfo=UTC))
    assert due["L4x1"] == ["qwen3-32b", "gpt-oss-20b"]
    assert due["L40Sx2"] == ["qwen3-32b", "gpt-oss-20b", "phi-4-14b"]


def test_without_an_inventory_nothing_is_planned(tmp_path, monkeypatch) -> None:
    """A home that knows no agents, as on the first night of a demo, measures nothing and asks nobody."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    assert nightly.plan_measurements("r", {}) == []
    with pytest.raises(UnknownName, match=r"unknown setup; known: .*core"):
        nightly.plan_measurements("r", {"setup": "cores"})


@pytest.mark.parametrize("name", ["core", "extended", "cpu"])
def test_every_nightly_grid_is_one_that_the_runner_takes(name: str) -> None:
    """For each model of a setup, on each configuration: within the context, bounded in a step, around its requests."""
    setup = load_catalog().setup(name)
    for entry in setup.models:
        options = measuring.nightly_options(entry)
        assert options["tokens"][0] == round(entry.shape.mean_prompt_tokens)
        assert max(options["sequences"]) * max(options["tokens"]) <= measuring.MOST_BATCHED_TOKENS
        request = json.loads(measuring.job_request(entry.model.id, setup.configurations[0].id, options, 1000.0))
        assert request["timeout_s"] == pytest.approx(475.0)


def test_a_request_that_the_runner_would_refuse_is_refused_before_a_node_is_asked() -> None:
    """Unknown names list the known ones; a grid that cannot be names its rule."""
    with pytest.raises(UnknownName, match=r"unknown node configuration; known: .*L4x1"):
        measuring.job_request("phi-4-14b", "L4x3", {}, 100.0)
    with pytest.raises(ValidationFailed, match="needs two or more layer counts"):
        measuring.job_request("phi-4-14b", "L4x1", {"layer_counts": [2, 2]}, 100.0)


def test_rows_of_something_else_are_a_fault() -> None:
    """A node that measured another model or machine than it was asked for is not believed."""
    request = {"model": "phi-4-14b", "configuration": "L4x1"}
    good = row("phi-4-14b", "L4x1", "ok", NOW)
    text = json.dumps(as_records([good]))
    assert measuring._rows_asked_for(text, request, "job j") == (good,)
    for stranger in (replace(good, model=ModelId("tiny")), replace(good, configuration=NodeConfigurationId("L4x2"))):
        with pytest.raises(EngineFault, match=r"job j measured .*, not phi-4-14b on L4x1"):
            measuring._rows_asked_for(json.dumps(as_records([good, stranger])), request, "job j")
