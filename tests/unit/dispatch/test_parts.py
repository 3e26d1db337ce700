"""Routing tables, inventory, epochs, observation and start specs, each alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace as with_

from coral_tasks.dispatch.epochs import EpochStore
from coral_tasks.dispatch.inventory import read_endpoints, write_endpoints
from coral_tasks.dispatch.observation import build_observation
from coral_tasks.dispatch.planner import plan_transition
from coral_tasks.dispatch.routing import (
    Route,
    RoutingTable,
    litellm_config,
    read_routing,
    routing_json,
    write_routing,
)
from coral_tasks.dispatch.specs import num_gpus, start_specs, tensor_parallel_degree
from coral_tasks.domain.errors import StorageFault, ValidationFailed
from coral_tasks.domain.fleet import InstanceState
from coral_tasks.domain.names import InstanceId, Market, ModelId, NodeConfigurationId, Phase, Runtime
from coral_tasks.protocol.controller_machine import spec_for
from coral_tasks.protocol.messages import NodeReport, Report, SlotState, StartSpec
from coral_tasks.tasks.dispatching import read_plan, write_plan

sys.path.insert(0, str(Path(__file__).parents[2] / "protocol"))
from fleet_builders import REGION, plan, template

TWO = template("two", stages=(("L4x1",), ("L4x1",)), layers=(3, 5), throughput=25.0)


def route(name: str, weight: float, *, phase: Phase = Phase.AGGREGATED) -> Route:
    endpoint = f"http://10.0.0.1:{len(name)}000"
    return Route(
        model=ModelId("m"), phase=phase, region=REGION, instance=InstanceId(name), endpoint=endpoint, weight=weight
    )


TABLE = RoutingTable.of(
    epoch=3, step=2, routes=[route("yy", 30.0), route("x", 10.0), route("zzz", 5.0, phase=Phase.DECODE)]
)


def test_shares_are_weights_over_their_sum() -> None:
    """10 and 30 tokens/s make a quarter and three quarters; phases are apart."""
    groups = json.loads(routing_json(TABLE))["groups"]
    shares = {(group["phase"], one["instance"]): one["share"] for group in groups for one in group["instances"]}
    assert shares == {("aggregated", "x"): 0.25, ("aggregated", "yy"): 0.75, ("decode", "zzz"): 1.0}


def test_the_litellm_configuration_has_an_entry_per_instance() -> None:
    """Model name, address and weight are where LiteLLM's proxy reads them; phases have names of their own."""
    document = json.loads(litellm_config(TABLE))
    first = document["model_list"][0]
    assert first["model_name"] == "m"
    assert first["litellm_params"] == {"model": "hosted_vllm/m", "api_base": "http://10.0.0.1:1000/v1", "weight": 10.0}
    assert [one["model_name"] for one in document["model_list"]] == ["m", "m", "m:decode"]
    settings = {"routing_strategy": "simple-shuffle", "enable_weighted_failover": True, "max_fallbacks": 2}
    assert document["router_settings"] == settings  # as many failovers as the largest group has instances


def test_tables_are_written_whole_and_read_back(tmp_path: Path) -> None:
    """Both files appear together, nothing temporary stays, and a damaged table is a fault."""
    write_routing(tmp_path / "routing", TABLE)
    assert read_routing(tmp_path / "routing" / "routing.json") == TABLE
    assert sorted(path.name for path in (tmp_path / "routing").iterdir()) == ["litellm.yaml", "routing.json"]
    (tmp_path / "routing" / "routing.json").write_text('{"epoch": 1}')
    with pytest.raises(StorageFault, match="routing table"):
        read_routing(tmp_path / "routing" / "routing.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFault, match="routing table in"):
        write_routing(tmp_path / "file", TABLE)


def test_the_inventory_round_trips_and_refuses_mistakes(tmp_path: Path) -> None:
    """Names and addresses come back; a missing, malformed or double entry is named."""
    file = tmp_path / "agents.toml"
    write_endpoints(file, {"b": "tcp://127.0.0.1:2", "a.b-c": "tcp://127.0.0.1:1"})
    assert read_endpoints(file) == {"a.b-c": "tcp://127.0.0.1:1", "b": "tcp://127.0.0.1:2"}
    for text, message in [
        ("[agents.a]\nendpoint = 'http://x'", "must be tcp://"),
        ("[agents.a]\nendpoint = 'tcp://x:1'\n[agents.b]\nendpoint = 'tcp://x:1'", "listed twice"),
        ("[agents.a]\nport = 1", "unknown field|missing required field"),
        ("[agents", "agents"),
    ]:
        file.write_text(text)
        with pytest.raises(ValidationFailed, match=message):
            read_endpoints(file)
    with pytest.raises(ValidationFailed, match="No such file"):
        read_endpoints(tmp_path / "none.toml")


def test_epochs_only_grow_also_among_processes(tmp_path: Path) -> None:
    """Four processes take 25 epochs each at the same time: 100 different numbers; a lost store catches up."""
    path = tmp_path / "epochs.sqlite"
    script = (
        "import sys; from pathlib import Path\n"
        "from coral_tasks.dispatch.epochs import EpochStore\n"
        "print(*[EpochStore(path=Path(sys.argv[1])).next_epoch('p') for _ in range(25)])\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) for _ in range(4)]
    taken = [int(word) for child in children for word in child.communicate(timeout=60)[0].split()]
    assert sorted(taken) == list(range(1, 101))
    assert EpochStore(path=path).next_epoch("p", at_least=500) == 501
    (tmp_path / "bad").write_bytes(b"garbage" * 500)
    with pytest.raises(StorageFault, match="epoch store"):
        EpochStore(path=tmp_path / "bad").next_epoch("p")


def node_report(name: str, state: SlotState, spec: StartSpec | None, **fields: object) -> NodeReport:
    base = {"region": REGION, "configuration": "L4x1", "market": Market.ON_DEMAND, "engine": "simulated"}
    own = {"node": name, "address": f"host-{name}", "master_port": 9, "state": state, "spec": spec}
    return NodeReport(**{**base, **own, "endpoint": f"http://{name}", **fields})


def report(agent: str, *nodes: NodeReport, epoch: int = 1, accepted: bool = True) -> Report:
    return Report(
        request="r", agent=agent, incarnation=f"{agent}1", epoch=epoch, round=0, accepted=accepted, nodes=nodes
    )


def specs() -> tuple[StartSpec, StartSpec]:
    """The two parts of one pipeline on nodes a and b."""
    empty = [node_report(name, SlotState.EMPTY, None) for name in "ab"]
    seen = build_observation({"x": report("x", *empty)}, ["x"])
    wanted = plan({"two": 1}, TWO)
    (head,) = start_specs(plan_transition(wanted, seen.fleet), wanted, seen, {ModelId("m"): "org/m"}).values()
    return head, spec_for(head, "b")


def test_start_specs_carry_the_template_to_the_agents() -> None:
    """Layers, nodes, timing and meeting point come from template and head; ranks follow pipeline order."""
    head, follower = specs()
    assert [(stage.num_layers, stage.nodes) for stage in head.stages] == [(3, ("a",)), (5, ("b",))]
    assert (head.rank, follower.rank, head.tp_degree, head.model_name) == (0, 1, 1, "org/m")
    assert (head.master_address, head.master_port) == ("host-a", 9)
    assert head.latency_s == pytest.approx(0.1)
    assert head.same_run(follower)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (SlotState.READY, SlotState.READY, InstanceState.READY),
        (SlotState.READY, SlotState.STARTING, InstanceState.STARTING),
        (SlotState.BACKOFF, SlotState.READY, InstanceState.STARTING),
        (SlotState.DRAINING, SlotState.READY, InstanceState.DRAINING),
        (SlotState.DRAINED, SlotState.DRAINED, InstanceState.DRAINING),
        (SlotState.READY, SlotState.FAILED, InstanceState.FAILED),
        (SlotState.STOPPING, SlotState.READY, InstanceState.FAILED),
        (SlotState.READY, None, InstanceState.FAILED),
        (None, SlotState.READY, InstanceState.FAILED),
    ],
)
def test_parts_add_up_to_one_instance(first, second, expected: InstanceState) -> None:
    """Ready only if every part is; a part that is missing, failed or ending makes the whole fail."""
    parts = [
        node_report(name, state or SlotState.EMPTY, spec if state else None, in_flight=2)
        for name, state, spec in zip("ab", (first, second), specs(), strict=True)
    ]
    seen = build_observation({"x": report("x", parts[0]), "y": report("y", parts[1])}, ["x", "y", "z"])
    (only,) = seen.fleet.instances
    assert only.state is expected
    assert set(only.nodes) == {name for name, state in zip("ab", (first, second), strict=True) if state}
    assert seen.unreachable == ("z",)


def test_parts_that_contradict_each_other_fail() -> None:
    """Two nodes that claim the same instance with different layers, or swapped places, are no instance."""
    head, follower = specs()
    other = with_(follower, throughput=99.0)
    swapped = with_(head, rank=1), with_(follower, rank=0)
    for one, two in ((head, other), swapped):
        parts = [node_report("a", SlotState.READY, one), node_report("b", SlotState.READY, two)]
        (only,) = build_observation({"x": report("x", *parts)}, ["x"]).fleet.instances
        assert only.state is InstanceState.FAILED


def test_an_observation_says_who_is_excluded_superseded_and_doubled() -> None:
    """Reasons, ids not to be used again, newest epoch, refused fences, and a node that two agents claim."""
    bad = node_report("a", SlotState.EMPTY, None, excluded="kept crashing", retired=("old",))
    busy = node_report("b", SlotState.PROFILING, None)
    seen = build_observation({"x": report("x", bad, busy, epoch=7, accepted=False), "y": report("y", bad)}, ["x", "y"])
    assert set(seen.excluded) == {"a", "b"}
    assert seen.excluded["a"] == "kept crashing"
    assert (seen.used_ids, seen.newest_epoch, seen.superseded) == ({"old"}, 7, ("x",))
    assert seen.trouble == ("node a is reported by x and by y; the latter ignored",)


def test_tensor_parallel_degree_is_the_number_of_gpus() -> None:
    """L4x4 gives 4; vLLM cannot mix counts; an id without a count is refused."""
    assert tensor_parallel_degree(template("t", stages=(("L4x4",), ("A10Gx4",)))) == 4
    mixed = template("t", stages=(("L4x4",), ("A10Gx2",)))
    assert mixed.runtime is Runtime.VLLM
    with pytest.raises(ValidationFailed, match="same number of GPUs"):
        tensor_parallel_degree(mixed)
    with pytest.raises(ValidationFailed, match="ends in x and its number of GPUs"):
        num_gpus(NodeConfigurationId("L4"))


def test_plans_round_trip_as_files(tmp_path: Path) -> None:
    """A plan comes back equal; a missing or damaged file is an expected refusal."""
    wanted = plan({"two": 2}, TWO)
    write_plan(tmp_path / "plan.json", wanted)
    assert read_plan(tmp_path / "plan.json") == wanted
    (tmp_path / "plan.json").write_text('{"id": 1}')
    with pytest.raises(ValidationFailed, match="1 violation"):
        read_plan(tmp_path / "plan.json")
