"""``coral replay``: a run's plan comes out again to the byte, whatever made it; what was changed since is named."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coral_tasks.domain.errors import StorageFault, Unavailable, UnknownName, ValidationFailed
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import LatencySplit, Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.domain.template_set import TemplateSet
from coral_tasks.settings import Settings
from coral_tasks.storage.library import publish_version, read_part, write_part, write_version
from coral_tasks.storage.objects import open_store
from coral_tasks.storage.quarantine import Quarantine
from coral_tasks.tasks import allocation, inputs
from coral_tasks.tasks.gate import example_csv
from coral_tasks.tasks.replay import replay

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
MODELS = ("gpt-oss-20b", "phi-4-14b", "qwen3-32b")


def templates(model: str) -> TemplateSet:
    """Aggregated: 5 requests/s on one L4x1, 60 on one L40Sx4."""
    one = np.ones((2, 1), dtype=np.int16)
    return TemplateSet(
        model=model,
        phase=Phase.AGGREGATED,
        slo=LatencySlo(ttft_s=1.0, tpot_s=0.1),
        latency_split=LatencySplit.FREE,
        num_layers=8,
        total_quanta=60,
        configurations=("L40Sx4", "L4x1"),
        sources=(ProfileSource.ANALYTIC,) * 2,
        provenance=("by hand",) * 2,
        profile_version="p",
        node_counts=np.array([[1, 0], [0, 1]], dtype=np.int16),
        throughput=np.array([60.0, 5.0]),
        runtime=np.zeros(2, dtype=np.uint8),
        limited_by=np.full(2, 3, dtype=np.uint8),
        num_stages=np.ones(2, dtype=np.uint8),
        slot_stage=np.zeros((2, 1), dtype=np.int8),
        stage_layers=one * 8,
        stage_quanta=one * 60,
    )


def with_library(folder: Path) -> Path:
    """The folder as a home with a published library and no agents."""
    store = open_store(str(folder / "library"))
    for model in MODELS:
        write_part(store, model, templates(model), {})
    publish_version(store, write_version(store, [read_part(store, model) for model in MODELS], {}), now=NOW)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    return with_library(tmp_path)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with one sealed run of the shipped data, r1; only read."""
    folder = with_library(tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORAL_HOME", str(folder))
        planned("r1")
    return folder


@pytest.fixture
def moved(sealed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run r1 in another home."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    shutil.copytree(sealed / "runs", tmp_path / "runs")
    return tmp_path


def planned(run_id: str, **params: Any) -> None:
    """One run to its plan and its seal, without dispatch."""
    allocation.open_run(run_id, {"as_of": NOW.isoformat(), "mode": "advisory", **params})
    for table in inputs.INPUT_TABLES:
        allocation.ingest(run_id, table)
    allocation.gate(run_id)
    allocation.solve(run_id)
    allocation.check(run_id)
    inputs.run_store(Settings()).find(run_id).seal()


def is_same(run_id: str) -> bool:
    """Whether the replay is equal to the byte, and the run is sealed."""
    verdict = replay(Settings(), run_id)
    return verdict.same and verdict.sealed and not verdict.first_difference


def test_a_run_is_recomputed_to_the_byte_wherever_it_lies(moved: Path) -> None:
    """From its folder alone: no source, limit or accepted batch of the home is read again."""
    (moved / "inputs").mkdir()
    (moved / "inputs" / "demand.csv").write_text("broken")
    (moved / "gate_limits.json").write_text("broken")
    assert is_same("r1")


def test_a_run_with_values_given_by_hand_is_recomputed_to_the_byte(home: Path) -> None:
    """Overrides of all three tables and a choice of models are in the run's folder as they were planned on."""
    pool = {"region": "aws/us-east-2", "configuration": "L4x1"}
    planned(
        "r1",
        demand=[{"model": "phi-4-14b", "requests_per_s": 12.5}],
        prices=[{**pool, "price_usd_per_hour": 0.5}],
        availability=[{**pool, "available_nodes": 3}],
        models=["phi-4-14b"],
    )
    run = inputs.run_store(Settings()).find("r1")
    assert run.path("inputs/demand/fetched.parquet").exists()
    assert is_same("r1")
    plan = json.loads(run.get("plan/plan.json"))
    assert {row["template"].split("/")[0] for row in plan["instances"]} == {"phi-4-14b"}


def test_a_run_on_merged_sources_a_forecast_and_a_released_batch_is_recomputed_to_the_byte(home: Path) -> None:
    """What was merged, foreseen and let in lies in the run; none of it is asked again."""
    for name, count in (("a", "30"), ("b", "40")):
        text = example_csv("availability", NOW).replace(",64,", f",{count},")
        (home / f"{name}.csv").write_text(text)
    parts = [{"kind": "file", "path": str(home / f"{name}.csv")} for name in "ab"]
    (home / "sources.json").write_text(json.dumps({"availability": {"kind": "merged", "sources": parts}}))
    (home / "forecast.json").write_text('{"method": "last_value"}')
    (home / "inputs").mkdir()
    before = datetime(2026, 11, 29, 11, 55, tzinfo=UTC)
    (home / "inputs" / "demand.csv").write_text(example_csv("demand", before).replace("10.0", "150.0"))
    with pytest.raises(ValidationFailed, match="jumped"):
        planned("r1")
    quarantine = Quarantine(root=home / "quarantine")
    quarantine.release(quarantine.ids()[0], by="ann", reason="launch", at=NOW)
    planned("r2")
    run = inputs.run_store(Settings()).find("r2")
    assert run.get_json("inputs/demand/release.json")["by"] == "ann"
    assert "planned.parquet" in json.loads(run.get("plan/request.json"))["demand"]
    for name in ("a.csv", "b.csv", "forecast.json", "sources.json"):
        (home / name).unlink()
    assert is_same("r2")


def test_every_file_that_was_read_is_in_the_manifest_and_dotfiles_are_none(moved: Path) -> None:
    """The manifest covers what the plan was made from; a writer's temporary beside it is not the run's."""
    run = inputs.run_store(Settings()).find("r1")
    (run.folder / ".tmp").write_text("half")
    (run.folder / "inputs" / ".batch.csv.12.tmp").write_text("half")
    assert is_same("r1")
    files = set(run.get_json("manifest.json")["files"])
    request = json.loads(run.get("plan/request.json"))
    read = [request[name] for name in ("demand", "prices", "availability", "running", "options", "previous")]
    assert {path.partition("/runs/r1/")[2] for path in read if path} <= files
    for table in inputs.INPUT_TABLES:
        names = {
            f"inputs/{table}/{name}" for name in ("batch.parquet", "source.json", "accepted.parquet", "previous.json")
        }
        assert names | {f"gate/{table}.json"} <= files
    assert "run.json" in files


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("inputs/demand/accepted.parquet", b"x", r"inputs/demand/accepted\.parquet has changed"),
        ("inputs/demand/batch.parquet", None, r"inputs/demand/batch\.parquet is missing"),
        ("inputs/demand/extra.csv", b"x", r"inputs/demand/extra\.csv was added"),
        ("manifest.json", b"{", "is not JSON"),
    ],
)
def test_a_run_that_was_changed_after_it_was_sealed_is_not_replayed(
    moved: Path, name: str, data: bytes | None, message: str
) -> None:
    """A byte more, less or other in the folder is named; nothing is recomputed from it."""
    path = inputs.run_store(Settings()).find("r1").folder / name
    path.unlink() if data is None else path.write_bytes(data)
    with pytest.raises(StorageFault, match=message):
        replay(Settings(), "r1")


def test_runs_without_plan_and_unknown_ones_say_so(home: Path) -> None:
    """A run that stopped at the gate made no plan; a name that is no run lists the known ones."""
    allocation.open_run("r1", {"as_of": NOW.isoformat()})
    with pytest.raises(Unavailable, match="made no plan"):
        replay(Settings(), "r1")
    with pytest.raises(UnknownName, match="r1"):
        replay(Settings(), "r2")


def test_a_plan_that_does_not_follow_from_its_inputs_is_shown_by_its_first_difference(moved: Path) -> None:
    """Another count in a run that was never sealed: the line, as kept and as recomputed."""
    folder = inputs.run_store(Settings()).find("r1").folder
    (folder / "manifest.json").unlink()
    plan = folder / "plan" / "plan.json"
    plan.write_text(plan.read_text().replace('"count": ', '"count": 1', 1))
    verdict = replay(Settings(), "r1")
    assert not verdict.same
    assert not verdict.sealed
    assert '"count": 1' in verdict.first_difference
