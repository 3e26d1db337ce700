"""The whole pipeline on the core setup, with real node agents and engines: what `coral demo` does, without Airflow."""

from __future__ import annotations

import json
import shutil
import socket

import pytest

from coral_tasks.domain.errors import SourceFault, StorageFault, Unavailable, UnknownName, ValidationFailed
from coral_tasks.settings import Settings
from coral_tasks.storage.library import read_version
from coral_tasks.storage.objects import open_store
from coral_tasks.tasks import allocation, demo, dispatching, inputs, local_fleet, nightly
from coral_tasks.tasks.planning import read_plan
from coral_tasks.tasks.profiling import read_profiles
from coral_tasks.templates import pool

pytestmark = pytest.mark.integration

NOON = {"as_of": "2026-11-29T12:00:00+00:00", "reason": "test", "mode": ""}
STEPS = (
    allocation.gate,
    allocation.solve,
    allocation.check,
    allocation.decide,
    allocation.dispatch,
    allocation.wait_converged,
    allocation.publish,
)


def _library(run_id: str) -> dict:
    profiled = [nightly.profile(item) for item in nightly.plan_profiling(run_id, {})]
    return nightly.publish([nightly.build_templates(item) for item in nightly.plan_templates(profiled)])


def _allocate(run_id: str, **params: str) -> dict:
    allocation.open_run(run_id, NOON | params)
    for table in inputs.INPUT_TABLES:
        allocation.ingest(run_id, table)
    result = {}
    for step in STEPS:
        result = step(run_id)
    return result


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A home with a published core library, made once."""
    home = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORAL_HOME", str(home))
        made = _library("nightly")
    return home, made


@pytest.fixture
def home(built, tmp_path, monkeypatch):
    """A fresh home that holds the library and nothing else."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    shutil.copytree(built[0] / "library", tmp_path / "library")
    return tmp_path


def test_the_fleet_is_brought_to_the_plan_and_a_second_run_sends_nothing(home, monkeypatch, ports_in_a_row) -> None:
    """Agents start what was planned; the same inputs again give the same instances and no command."""
    monkeypatch.setenv("CORAL_FIRST_AGENT_PORT", str(ports_in_a_row(1600)))
    demo.ensure_agents(Settings())
    try:
        first = _allocate("first")
        fleet = dispatching.observe(home / "agents.toml", home / "keys").fleet
        plan = read_plan(home / "current" / "plan.json")
        assert first["num_commands"] > 0
        assert len(fleet.instances) == first["num_instances"] == sum(row.count for row in plan.instances)
        second = _allocate("second")
        assert second["num_commands"] == 0
        assert second["cost_usd_per_hour"] == pytest.approx(first["cost_usd_per_hour"])
        again = dispatching.observe(home / "agents.toml", home / "keys").fleet
        assert {one.id for one in again.instances} == {one.id for one in fleet.instances}
        assert _allocate("third")["plan"] == second["plan"]
        assert (home / "runs" / "second" / "manifest.json").is_file()
        drawn = [home / "runs" / run / "report" / "transition.html" for run in ("first", "second")]
        assert ["no step is needed" in one.read_text(encoding="utf-8") for one in drawn] == [False, True]
        assert 'href="transition.html"' in (home / "current" / "plan.html").read_text(encoding="utf-8")
        assert (home / "current" / "transition.html").is_file()
    finally:
        assert local_fleet.stop_agents(home) == 3


def test_the_same_inputs_give_the_same_library(built, monkeypatch) -> None:
    """A second nightly run reuses every template set and publishes nothing new."""
    home, first = built
    monkeypatch.setenv("CORAL_HOME", str(home))
    second = _library("again")
    assert second["version"] == first["version"]
    assert second["changed"] is False
    assert second["num_reused"] == 6


def test_sets_solved_chunk_by_chunk_are_the_same_library(built, tmp_path, monkeypatch) -> None:
    """Where sets are too large for one chunk, several workers solve the chunks, and the version is the same."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    monkeypatch.setattr(pool, "CHUNK_SIZE", 4000)
    profiled = [nightly.profile(item) for item in nightly.plan_profiling("chunks", {})]
    items = nightly.plan_templates(profiled)
    large = nightly.plan_large(items)
    chunks = nightly.plan_chunks([nightly.keep_smaller(item) for item in large])
    assert len(chunks) > len(large) > 0
    for chunk in reversed(chunks):
        nightly.keep_chunk(chunk)
    work = sorted((tmp_path / "library" / "work").rglob("*.npz"))
    assert len(work) >= len(chunks)
    assert nightly.publish([nightly.build_templates(item) for item in items])["version"] == built[1]["version"]
    assert nightly.plan_large(items) == []


def test_the_profiles_shown_are_those_of_the_published_library(built) -> None:
    """After a night ``coral profile show`` reads the tables that the library's sets were built from."""
    home, made = built
    tables = {(table.model, table.phase): table.version for table in read_profiles(home)}
    sets = read_version(open_store(str(home / "library")), made["version"]).sets
    assert len(tables) == 6
    assert {(one.model, one.phase): one.profile_version for one in sets} == tables


def test_advisory_mode_touches_nothing(home) -> None:
    """The plan is made and explained, no agent is asked, the plan in force stays."""
    result = _allocate("advisory", mode="advisory")
    assert result["num_commands"] == 0
    assert "advisory" in (home / "runs" / "advisory" / "dispatch.json").read_text(encoding="utf-8")
    assert not (home / "current" / "plan.json").exists()


def test_without_a_library_nothing_is_planned(tmp_path, monkeypatch) -> None:
    """An empty library is an expected "no" that names where it looked and what to run."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match="holds no published template library; run coral_template_library"):
        allocation.open_run("r", NOON)


def test_an_unknown_setup_lists_the_known_ones(tmp_path, monkeypatch) -> None:
    """A wrong name is refused with the right ones."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    with pytest.raises(UnknownName, match="core"):
        nightly.plan_profiling("r", {"setup": "cores"})


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"as_of": "yesterday"}, "must be an ISO date and time with a zone"),
        ({"as_of": "2026-11-29T12:00:00"}, "must be an ISO date and time with a zone"),
        ({"budget": "5"}, "unknown parameter"),
    ],
)
def test_bad_parameters_are_refused(home, params, rule) -> None:
    """Airflow lets unknown keys through; the run does not."""
    with pytest.raises(ValidationFailed, match=rule):
        allocation.open_run("r", NOON | params)


BAD = {
    "unknown model": (
        "demand.csv",
        (
            "model,requests_per_s,mean_prompt_tokens,p95_prompt_tokens,mean_output_tokens,p95_output_tokens,"
            "interval_start,interval_s\nqwen-33b,1,100,200,10,20,2026-11-29T12:00:00Z,300\n"
        ),
        "qwen-33b",
    ),
    "price of an unknown configuration": (
        "prices.csv",
        (
            "region,configuration,market,price_usd_per_hour,observed_at\n"
            "aws/us-east-2,L40Sx3,on_demand,5.0,2026-11-29T11:00:00Z\n"
        ),
        "L40Sx3",
    ),
    "no rows": ("prices.csv", "region,configuration,market,price_usd_per_hour,observed_at\n", "prices"),
    "not a table": ("availability.csv", "\x00\x01\x02", "availability"),
}


@pytest.mark.parametrize("kind", sorted(BAD))
def test_bad_input_stops_the_run_before_anything_is_planned(home, kind) -> None:
    """The message names table and value; nothing is planned, nothing becomes current."""
    name, text, told = BAD[kind]
    (home / "inputs").mkdir()
    (home / "inputs" / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValidationFailed, match=told):
        _allocate("bad")
    assert not (home / "runs" / "bad" / "plan").exists()
    assert not (home / "current" / "plan.json").exists()


@pytest.mark.parametrize("kind", ["folder", "broken link"])
def test_an_unreadable_input_file_is_named(home, kind) -> None:
    """A file that cannot be read stops the run; the message names it."""
    (home / "inputs").mkdir()
    path = home / "inputs" / "demand.csv"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(home / "nowhere.csv")
    with pytest.raises(SourceFault, match=r"demand: .*inputs/demand\.csv cannot be read"):
        _allocate("unreadable")
    assert not (home / "runs" / "unreadable" / "plan").exists()


def test_a_run_killed_between_tasks_is_taken_up_again(home) -> None:
    """Every task may run twice: after a kill the rest runs on, with the inputs the run had pinned."""
    allocation.open_run("killed", NOON | {"mode": "advisory"})
    for table in inputs.INPUT_TABLES:
        allocation.ingest("killed", table)
    allocation.gate("killed")
    allocation.solve("killed")
    before = (home / "runs" / "killed" / "plan" / "plan.json").read_bytes()
    assert _allocate("killed", mode="advisory")["num_commands"] == 0
    assert (home / "runs" / "killed" / "plan" / "plan.json").read_bytes() == before


def test_a_plan_that_was_tampered_with_is_refused(home) -> None:
    """The check recomputes the plan from its inputs; a changed count never reaches dispatch."""
    from coral_tasks.domain.errors import PlanRejected

    allocation.open_run("t", NOON)
    for table in inputs.INPUT_TABLES:
        allocation.ingest("t", table)
    allocation.gate("t")
    allocation.solve("t")
    path = home / "runs" / "t" / "plan" / "plan.json"
    plan = json.loads(path.read_bytes())
    plan["instances"][0]["count"] += 1
    path.write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(PlanRejected):
        allocation.check("t")


def test_a_data_folder_without_permission_is_named(tmp_path) -> None:
    """A home that cannot be made is said plainly, before anything starts."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StorageFault, match=r"data folder .*file/home cannot be written"):
        demo.require_writable(tmp_path / "file" / "home")


def test_a_taken_agent_port_is_named(home, monkeypatch, ports_in_a_row) -> None:
    """The message names the port and whose it was to be."""
    first = ports_in_a_row(1600)
    monkeypatch.setenv("CORAL_FIRST_AGENT_PORT", str(first))
    told = rf"port {first} on 127.0.0.1, for node agent local-1 \(CORAL_FIRST_AGENT_PORT changes it\), is in use"
    with socket.create_server(("127.0.0.1", first)), pytest.raises(Unavailable, match=told):
        demo.ensure_agents(Settings())
    assert local_fleet.stop_agents(home) == 0
