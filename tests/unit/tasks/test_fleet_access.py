"""``provisioning.json`` is checked as a whole; what a cloud could not give lately is remembered for a while."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from coral_tasks.cli import agent
from coral_tasks.dispatch.dispatcher import DispatchOptions
from coral_tasks.dispatch.observation import Observation, build_observation
from coral_tasks.domain.errors import StorageFault, Unavailable, ValidationFailed
from coral_tasks.domain.names import Market, NodeConfigurationId, RegionId
from coral_tasks.domain.transition import NodeRequest
from coral_tasks.provisioning.ec2 import Ec2Provisioner
from coral_tasks.provisioning.static import StaticProvisioner
from coral_tasks.settings import Settings
from coral_tasks.tasks import allocation, fleet_access, inputs, observing

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
POOL: dict[str, Any] = {
    "region": "aws/us-east-2",
    "configuration": "L4x1",
    "market": "spot",
    "launch_template": "coral-l4",
    "max_nodes": 5,
}
FILE: dict[str, Any] = {"kind": "ec2", "fleet": "f", "agent_key": "k", "agent_port": 7400, "pools": [POOL]}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch) -> Settings:
    """A home of its own."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    return Settings()


def write(settings: Settings, document: object) -> None:
    (settings.home / "provisioning.json").write_text(json.dumps(document), encoding="utf-8")


def request(count: int, configuration: str = "L4x1") -> NodeRequest:
    return NodeRequest(
        region=RegionId("aws/us-east-2"),
        configuration=NodeConfigurationId(configuration),
        market=Market.SPOT,
        count=count,
        token="t",
    )


def test_without_the_file_nothing_can_be_had(settings) -> None:
    """No file: the fleet is what its agents own, and no pool has anything to give."""
    assert isinstance(fleet_access.provisioner_of(settings), StaticProvisioner)
    assert fleet_access.has_fleet(settings) is False
    assert fleet_access.obtainable(settings, NOW) == {"pools": []}


def test_a_file_that_was_named_must_be_there(settings, tmp_path) -> None:
    """``--provisioning`` with a mistyped path is an error, not a fleet without a cloud; a folder is one too."""
    with pytest.raises(StorageFault, match="no-such"):
        fleet_access.provisioner_of(settings, tmp_path / "no-such.json")
    with pytest.raises(StorageFault, match="cannot be read"):
        fleet_access.provisioner_of(settings, tmp_path)


def test_the_machine_type_comes_from_the_catalogue(settings) -> None:
    """L4x1 on AWS is a g6.xlarge; a type that is given wins; limits of the file reach the provisioner."""
    other = {**POOL, "market": "on_demand", "machine_type": "g6.2xlarge", "max_nodes": 7}
    write(settings, {**FILE, "pools": [POOL, other], "provision_timeout_s": 90})
    made = fleet_access.provisioner_of(settings)
    found = {market.value: (one.machine_type, one.max_nodes) for (_, _, market), one in made.settings.targets.items()}
    assert found == {"spot": ("g6.xlarge", 5), "on_demand": ("g6.2xlarge", 7)}
    assert made.settings.boot_s == 90.0
    assert fleet_access.has_fleet(settings) is True


def test_a_scrape_does_not_wait_for_a_cloud_that_hangs(settings, monkeypatch) -> None:
    """A scraper gives up after 10 s, on all metrics: EC2 gets one try of 1 + 3 s there, four of 25 s elsewhere."""
    write(settings, FILE)
    made = []

    def observe(*_: object, provisioner: Ec2Provisioner, **__: object) -> Observation:
        made.append(provisioner.client_of(RegionId("aws/us-east-2")).meta.config)
        return build_observation({}, [])

    monkeypatch.setattr("coral_tasks.tasks.dispatching.observe", observe)
    observing.collect(settings)
    fleet_access.observe(settings)
    found = [(one.connect_timeout, one.read_timeout, one.retries["total_max_attempts"]) for one in made]
    assert found == [(1.0, 3.0, 1), (5.0, 20.0, 4)]


def test_machines_get_the_time_of_the_file_from_every_dispatch(settings, monkeypatch, tmp_path) -> None:
    """``coral dispatch`` too: with the default of 600 s it would end machines that may take 1200."""
    assert fleet_access.dispatch_options(settings).provision_timeout_s == 600.0
    path = tmp_path / "cloud.json"
    path.write_text(json.dumps({**FILE, "provision_timeout_s": 1200}), encoding="utf-8")
    given: list[float] = []

    def dispatch(*_: object, options: DispatchOptions, **__: object) -> None:
        given.append(options.provision_timeout_s)
        raise Unavailable("seen enough")

    monkeypatch.setattr("coral_tasks.tasks.dispatching.read_plan", lambda _: None)
    monkeypatch.setattr("coral_tasks.tasks.dispatching.dispatch", dispatch)
    with pytest.raises(Unavailable, match="seen enough"):
        agent.dispatch(plan=tmp_path, provisioning=path)
    assert given == [1200.0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "gce"}, "Invalid value 'gce'"),
        ({"pool": []}, "unknown field `pool`"),
        ({"pools": []}, "length >= 1"),
        ({"fleet": ""}, "length >= 1"),
        ({"agent_port": 0}, ">= 1"),
        ({"shortage_s": -1}, ">= 60"),
        ({"shortage_s": 0}, ">= 60"),
        ({"provision_timeout_s": 3000}, "<= 1200"),
        ({"pools": [{**POOL, "max_nodes": -1}]}, ">= 0"),
        ({"pools": [{**POOL, "max_nodes": 2.5}]}, "Expected `int`"),
        ({"pools": [{**POOL, "market": "free"}]}, "Invalid enum value 'free'"),
        ({"pools": [{**POOL, "maximum": 3}]}, "unknown field `maximum`"),
        ({"pools": [POOL, POOL]}, "must be there once"),
        ({"pools": [{**POOL, "region": "gcp/us-central1"}]}, "region must be one of AWS's in setup core"),
        ({"pools": [{**POOL, "region": "us-east-2"}]}, "region must be one of AWS's in setup core"),
        ({"pools": [{**POOL, "configuration": "H100x8"}]}, "configuration must be one of setup core"),
        ({"pools": [{**POOL, "configuration": "L4x2"}]}, "machine_type must be given: the catalogue names none of AWS"),
    ],
)
def test_a_mistake_in_the_file_is_named(settings, change: dict[str, Any], text: str) -> None:
    """A wrong name, number or duplicate refuses the file, with its path."""
    write(settings, FILE | change)
    with pytest.raises(ValidationFailed) as error:
        fleet_access.provisioner_of(settings)
    assert text in str(error.value)
    assert "provisioning.json" in str(error.value)


def test_all_mistakes_of_the_pools_are_told_at_once(settings) -> None:
    """Two pools with one mistake each: two violations."""
    write(settings, {**FILE, "pools": [{**POOL, "region": "aws/mars-1"}, {**POOL, "configuration": "L5x1"}]})
    with pytest.raises(ValidationFailed, match="2 violations"):
        fleet_access.provisioner_of(settings)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("http://user:secret@127.0.0.1:5000", "must not hold a user or a password"),
        ("user:secret@127.0.0.1:5000", "must not hold a user or a password"),
        ("http:\\\\user:secret@127.0.0.1", "must not hold a user or a password"),
        ("http://127.0.0.1:5000/?key=secret", "must be an address such as"),
        ("http://[secret", "must be an address such as"),
        ("http://127.0.0.1:secret", "must be an address such as"),
        ("http://127.0.0.1:99999", "must be an address such as"),
        ("secret", "must be an address such as"),
        ("", "must be an address such as"),
    ],
)
def test_an_address_that_cannot_be_used_or_holds_a_secret_is_refused(settings, address: str, text: str) -> None:
    """It is named as a mistake, and not repeated: it would end up in logs."""
    write(settings, {**FILE, "endpoint_url": address})
    with pytest.raises(ValidationFailed, match=text) as error:
        fleet_access.provisioner_of(settings)
    assert "secret" not in str(error.value)


def test_a_shortage_noted_by_a_clock_that_ran_ahead_does_not_last(settings, monkeypatch) -> None:
    """Noted for next year, before the clock was set right: the pool gives its 5 again."""
    write(settings, FILE)
    monkeypatch.setattr("coral_tasks.provisioning.ec2.Ec2Provisioner._held", lambda _: [])
    fleet_access.note_shortage(settings, [request(1)], NOW + timedelta(days=365))
    assert [one["nodes"] for one in fleet_access.obtainable(settings, NOW)["pools"]] == [5]


def test_a_pool_that_came_short_gives_nothing_for_a_while(settings, monkeypatch) -> None:
    """2 and 1 missing make 3; for 900 s the pool gives none and says why, then its 5 again; others are as before."""
    write(settings, {**FILE, "pools": [POOL, {**POOL, "configuration": "L40Sx1"}]})
    monkeypatch.setattr("coral_tasks.provisioning.ec2.Ec2Provisioner._held", lambda _: [])
    said = fleet_access.note_shortage(settings, [request(2), request(1)], NOW)
    assert said == ["3 aws/us-east-2 L4x1 spot"]

    def seen(seconds: float) -> dict[str, tuple[int, str]]:
        found = fleet_access.obtainable(settings, NOW + timedelta(seconds=seconds))["pools"]
        return {one["configuration"]: (one["nodes"], one["short"]) for one in found}

    told = "3 could not be had at 2026-11-30 12:00 UTC"
    assert seen(900) == {"L4x1": (0, told), "L40Sx1": (5, "")}
    assert seen(901) == {"L4x1": (5, ""), "L40Sx1": (5, "")}
    fleet_access.note_shortage(settings, [request(4, "L40Sx1")], NOW + timedelta(seconds=600))
    assert {name: nodes for name, (nodes, _) in seen(900).items()} == {"L4x1": 0, "L40Sx1": 0}
    assert {name: nodes for name, (nodes, _) in seen(1000).items()} == {"L4x1": 5, "L40Sx1": 0}


def test_a_damaged_memory_of_shortage_is_a_fault(settings) -> None:
    """What was short is unknown then: nothing is planned on a guess."""
    write(settings, FILE)
    path = settings.home / "dispatch" / "shortage.json"
    path.parent.mkdir()
    path.write_bytes(b"[{")
    with pytest.raises(StorageFault, match=r"shortage\.json"):
        fleet_access.obtainable(settings, NOW)


def test_a_run_that_came_to_no_dispatch_misses_no_nodes(settings) -> None:
    """Refused by the gate, or not even opened: there is no shortage to start another run for, and no error."""
    assert allocation.shortage("never-opened") == []
    inputs.run_store(settings).open("refused")
    assert allocation.shortage("refused") == []
