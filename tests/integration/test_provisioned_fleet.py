"""Allocation runs on a fleet that lives in a cloud alone: machines are launched, used and given back; EC2 is local."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cloud_bench import FLEET, Cloud, cloud

from coral_tasks.domain.errors import Unavailable
from coral_tasks.domain.names import Market, NodeConfigurationId, RegionId
from coral_tasks.domain.transition import NodeRequest
from coral_tasks.settings import Settings
from coral_tasks.tasks import allocation, dispatching, fleet_access, inputs, nightly, publishing
from coral_tasks.tasks.planning import read_plan

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MODELS = ("qwen3-32b", "gpt-oss-20b", "phi-4-14b")
BEFORE_SENDING = (allocation.gate, allocation.solve, allocation.check, allocation.decide)


def _plan(run_id: str, requests_per_s: float) -> None:
    """A run up to its decision: demand for phi-4-14b alone."""
    demand = [{"model": one, "requests_per_s": requests_per_s if one == "phi-4-14b" else 0.0} for one in MODELS]
    allocation.open_run(run_id, {"as_of": "2026-11-29T12:00:00+00:00", "reason": "test", "demand": demand})
    for table in inputs.INPUT_TABLES:
        allocation.ingest(run_id, table)
    for step in BEFORE_SENDING:
        step(run_id)


def _send(run_id: str) -> dict[str, Any]:
    """How the dispatch ended; raises if the fleet is not as planned."""
    for step in (allocation.dispatch, allocation.wait_converged):
        step(run_id)
    return inputs.run_store(Settings()).find(run_id).get_json("dispatch.json")


def _planned_nodes(home: Path, run_id: str) -> list[str]:
    plan = read_plan(home / "runs" / run_id / "plan" / "plan.json")
    return sorted(
        str(name)
        for row in plan.instances
        for name, count in plan.template(row.template).nodes.counts
        for _ in range(count * row.count)
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """A published core library, made once."""
    home = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORAL_HOME", str(home))
        profiled = [nightly.profile(item) for item in nightly.plan_profiling("nightly", {})]
        nightly.publish([nightly.build_templates(item) for item in nightly.plan_templates(profiled)])
    return home / "library"


@pytest.fixture
def home(library, tmp_path, monkeypatch) -> Path:
    """A fresh home with the library and the keys of controller and fleet; no inventory of agents."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    shutil.copytree(library, tmp_path / "library")
    dispatching.make_missing_keys(tmp_path / "keys", ["fleet"])
    return tmp_path


@pytest.fixture
def ec2(home, monkeypatch) -> Iterator[Cloud]:
    """A cloud for that home."""
    with cloud(home, monkeypatch) as made:
        made.write_files(home)
        yield made


def test_machines_come_with_demand_stay_with_it_and_go_with_it(home, ec2) -> None:
    """The plan's nodes are launched and serve; the same demand launches nothing; with less, what is free is ended."""
    _plan("grow", 2.0)
    planned = _planned_nodes(home, "grow")
    assert planned
    assert "provision" in (home / "runs" / "grow" / "report" / "transition.html").read_text(encoding="utf-8")
    assert _send("grow")["num_commands"] > 0
    assert allocation.publish("grow")["in_force"]
    first = ec2.machines()
    assert ec2.configurations() == planned
    fleet = fleet_access.observe(Settings()).fleet
    assert {str(node) for one in fleet.instances for node in one.nodes} == set(first)
    _plan("again", 2.0)
    assert _send("again")["num_commands"] == 0
    assert ec2.machines().keys() == first.keys()
    _plan("shrink", 0.2)
    fewer = _planned_nodes(home, "shrink")
    assert len(fewer) < len(planned)
    assert _send("shrink")["converged"]
    assert ec2.configurations() == fewer


def test_what_the_cloud_has_none_of_is_planned_without(home, ec2) -> None:
    """EC2 has none of what the plan wants: nothing is started, the next run takes another machine and says why."""
    _plan("short", 2.0)
    wanted = _planned_nodes(home, "short")
    types = {"L4x1": "g6.xlarge", "A10Gx1": "g5.xlarge", "L40Sx1": "g6e.xlarge"}
    ec2.exhausted = {types[name] for name in wanted}
    with pytest.raises(Unavailable, match="nodes could not be had, the next run plans without them"):
        allocation.dispatch("short")
    assert ec2.machines() == {}
    missing = allocation.shortage("short")
    assert missing == [f"{wanted.count(name)} aws/us-east-2 {name} on_demand" for name in sorted(set(wanted))]
    _plan("without", 2.0)
    planned = _planned_nodes(home, "without")
    assert set(planned).isdisjoint(wanted)
    assert _send("without")["converged"]
    assert ec2.configurations() == planned
    said = publishing.without_nodes(inputs.run_store(Settings()).find("without"))
    told = [f"No more {name} (on demand) in aws/us-east-2: {wanted.count(name)} could not" for name in set(wanted)]
    assert [one[: one.index(" be had at")] for one in said] == sorted(told)


def test_machines_of_a_killed_dispatch_are_waited_for_and_not_bought_twice(home, ec2) -> None:
    """Machines that a dispatch before launched and that still boot are the ones used: no others are launched."""
    _plan("killed", 2.0)
    planned = _planned_nodes(home, "killed")
    ec2.boot_s = 8.0
    pool = RegionId("aws/us-east-2"), NodeConfigurationId(planned[0]), Market.ON_DEMAND
    request = NodeRequest(region=pool[0], configuration=pool[1], market=pool[2], count=1, token="before")
    (before,) = fleet_access.provisioner_of(Settings()).provision(request)
    assert _send("killed")["converged"]
    assert before.machine in ec2.machines()
    assert ec2.configurations() == planned
    tags = {tag["Key"]: tag["Value"] for tag in ec2.machines()[before.machine]["Tags"]}
    assert tags["coral:fleet"] == FLEET


def test_machines_whose_agents_never_answer_are_ended_and_count_as_not_to_be_had(home, ec2) -> None:
    """They boot for ever: after the limit they are ended, since they cost money, and the next run plans without."""
    ec2.boot_s = float("inf")
    ec2.write_files(home, provision_timeout_s=3.0)
    _plan("silent", 2.0)
    planned = _planned_nodes(home, "silent")
    with pytest.raises(Unavailable, match="no agent answers on new nodes"):
        allocation.dispatch("silent")
    assert ec2.machines() == {}
    assert allocation.shortage("silent") == [
        f"{planned.count(name)} aws/us-east-2 {name} on_demand" for name in sorted(set(planned))
    ]
