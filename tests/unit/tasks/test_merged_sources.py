"""Several sources of one table, and metrics of the engines that agents say run."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coral_tasks.dispatch.observation import Observation, build_observation
from coral_tasks.domain.errors import SourceFault
from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.names import (
    InstanceId,
    Market,
    ModelId,
    NodeConfigurationId,
    NodeId,
    Phase,
    RegionId,
    TemplateId,
)
from coral_tasks.ingestion.agents import InventorySource, merged_batch
from coral_tasks.ingestion.batch import SourceBatch
from coral_tasks.ingestion.prometheus import PrometheusSource
from coral_tasks.ingestion.rows import availability_rows
from coral_tasks.settings import Settings
from coral_tasks.tasks import dispatching
from coral_tasks.tasks.sources import configured_source, metrics_targets
from data_contracts.contract import GateContext
from data_contracts.gate import check_table
from data_contracts.registry import contract_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def stated(name: str, **counts: int | str) -> SourceBatch:
    """A CSV of on-demand nodes by configuration."""
    lines = ["region,configuration,market,available_nodes,observed_at,source"]
    lines += [f"r,{one},on_demand,{count},{NOW.isoformat()},{name}" for one, count in counts.items()]
    return SourceBatch(
        table="availability", data="\n".join([*lines, ""]).encode(), suffix=".csv", source=name, observed_at=NOW
    )


def node(name: str, configuration: str) -> Node:
    """A node of region r."""
    return Node(
        id=NodeId(name),
        region=RegionId("r"),
        configuration=NodeConfigurationId(configuration),
        market=Market.ON_DEMAND,
    )


def instance(name: str, phase: Phase, state: InstanceState) -> ServingInstance:
    """An instance on the node of its own name."""
    return ServingInstance(
        id=InstanceId(name),
        template=TemplateId("t"),
        model=ModelId("m"),
        phase=phase,
        region=RegionId("r"),
        market=Market.ON_DEMAND,
        state=state,
        stage_nodes=((NodeId(name),),),
    )


def observed(*instances: ServingInstance, unreachable: tuple[str, ...] = ()) -> Observation:
    """What agents would say; instance i listens at http://i:8000."""
    nodes = tuple(node(one.id, "A") for one in instances)
    return replace(
        build_observation({}, []),
        fleet=Fleet(nodes=nodes, instances=instances),
        endpoints={one.id: f"http://{one.id}:8000" for one in instances},
        unreachable=unreachable,
    )


def test_the_lowest_ceiling_holds_but_never_below_what_is_held() -> None:
    """File 4 and quota 64 give 4; quota 2 with three nodes held gives 3; a pool of one source keeps its figure."""
    held = InventorySource(
        nodes=tuple(node(name, "B") for name in "xyz"), observed_at=NOW, num_agents=3, num_answered=3
    )
    batch = merged_batch([stated("file", A=4, C=7), stated("quota", A=64, B=2)], [held(NOW)], GateContext(now=NOW))
    outcome = check_table(contract_of("availability"), batch.raw(), GateContext(now=NOW))
    assert outcome.table is not None
    rows = {str(row.configuration): row.available_nodes for row in availability_rows(outcome.table)}
    assert rows == {"A": 4, "B": 3, "C": 7}
    assert batch.source == "file + quota + node agents"


def test_before_the_first_machine_of_a_cloud_nothing_is_held() -> None:
    """No agent to ask is no fault: the file's 4 stand; alone, such an inventory is refused as every empty table is."""
    nobody = InventorySource(nodes=(), observed_at=NOW, num_agents=0, num_answered=0)
    batch = merged_batch([stated("file", A=4)], [nobody(NOW)], GateContext(now=NOW))
    outcome = check_table(contract_of("availability"), batch.raw(), GateContext(now=NOW))
    assert outcome.table is not None
    assert [row.available_nodes for row in availability_rows(outcome.table)] == [4]
    assert check_table(contract_of("availability"), nobody(NOW).raw(), GateContext(now=NOW)).table is None


def test_a_bad_part_is_not_merged_away() -> None:
    """A negative count beside a good quota reaches the gate as it came, with its own row."""
    bad = stated("file", A=-1)
    assert merged_batch([stated("quota", A=64), bad], [], GateContext(now=NOW)) == bad


def test_engines_that_serve_are_the_ones_metrics_are_expected_from() -> None:
    """Ready and draining instances count, by host and port; starting and failed ones have nothing to say."""
    seen = observed(
        instance("a", Phase.DECODE, InstanceState.READY),
        instance("b", Phase.PREFILL, InstanceState.DRAINING),
        instance("c", Phase.DECODE, InstanceState.STARTING),
        instance("d", Phase.DECODE, InstanceState.FAILED),
    )
    assert [(one.instance, one.phase) for one in metrics_targets(seen)] == [
        ("a:8000", Phase.DECODE),
        ("b:8000", Phase.PREFILL),
    ]


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (observed(unreachable=("agent-2",)), "no answer from agents agent-2"),
        (observed(), "no instance runs that could be asked; demand is unknown, not zero"),
    ],
)
def test_demand_is_unknown_when_agents_are_silent_or_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Observation, text: str
) -> None:
    """Without a whole inventory an instance that is down looks like one that is gone, so nothing is counted."""
    (tmp_path / "agents.toml").write_text("")
    (tmp_path / "sources.json").write_text(
        json.dumps({"demand": {"kind": "prometheus", "address": "http://127.0.0.1:9"}})
    )
    monkeypatch.setattr(dispatching, "observe", lambda *_, **__: seen)
    monkeypatch.setattr("coral_tasks.ingestion.prometheus.get_json", _empty)
    found = configured_source(Settings(home=tmp_path), "demand")
    assert found is not None
    with pytest.raises(SourceFault, match=text):
        found[0](NOW)


def _empty(*_: object, **__: object) -> dict[str, object]:
    return {"status": "success", "data": {"resultType": "vector", "result": []}}


def test_a_merged_source_is_read_from_the_file_of_sources(tmp_path: Path) -> None:
    """``merged`` names its parts; the batch says where each figure came from."""
    for name, count in (("a", 4), ("b", 9)):
        (tmp_path / f"{name}.csv").write_bytes(contract_csv(count, datetime.now(UTC).replace(microsecond=0)))
    parts = [{"kind": "file", "path": str(tmp_path / f"{name}.csv")} for name in "ab"]
    (tmp_path / "sources.json").write_text(json.dumps({"availability": {"kind": "merged", "sources": parts}}))
    found = configured_source(Settings(home=tmp_path), "availability")
    assert found is not None
    table = found[0](datetime.now(UTC)).raw().table
    assert table is not None
    assert table.column("available_nodes").to_pylist() == [4]


def contract_csv(count: int, at: datetime) -> bytes:
    """One pool of the default setup."""
    header = "region,configuration,market,available_nodes,observed_at,source\n"
    return f"{header}aws/us-east-2,L4x1,on_demand,{count},{at.isoformat()},test\n".encode()


def test_engines_of_the_last_window_are_remembered_and_then_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that stopped two minutes ago is asked about, one of an hour ago is not, a broken memory is none."""
    (tmp_path / "agents.toml").write_text("")
    named = {"demand": {"kind": "prometheus", "address": "http://127.0.0.1:9"}}
    (tmp_path / "sources.json").write_text(json.dumps(named))
    asked: list[tuple[list[str], list[str]]] = []

    def call(self: PrometheusSource, _: datetime) -> SourceBatch:
        asked.append(([one.instance for one in self.targets], [one.instance for one in self.past]))
        return stated("x", A=1)

    monkeypatch.setattr(PrometheusSource, "__call__", call)
    found = configured_source(Settings(home=tmp_path), "demand")
    assert found is not None
    both = observed(*(instance(name, Phase.DECODE, InstanceState.READY) for name in "ab"))
    one = observed(instance("a", Phase.DECODE, InstanceState.READY))
    for seen, minutes in ((both, 0), (one, 2), (one, 62)):
        monkeypatch.setattr(dispatching, "observe", lambda *_, seen=seen, **__: seen)
        found[0](NOW + timedelta(minutes=minutes))
    assert asked == [(["a:8000", "b:8000"], []), (["a:8000"], ["a:8000", "b:8000"]), (["a:8000"], [])]
    (tmp_path / "cache" / "metrics_targets.json").write_text("{")
    found[0](NOW + timedelta(minutes=63))
    assert asked[-1] == (["a:8000"], [])
