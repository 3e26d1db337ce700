"""Run store and quarantine: whole files or none, write once, sealed and verified, released by name and reason."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from coral_tasks.domain.errors import StorageFault, UnknownName, ValidationFailed
from coral_tasks.storage.quarantine import Quarantine
from coral_tasks.storage.runs import RunStore, write_whole

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def test_the_same_bytes_may_be_written_twice_and_others_not(tmp_path: Path) -> None:
    """A task that runs twice changes nothing; other content under a kept name is refused unless asked for."""
    run = RunStore(root=tmp_path).open("r1")
    path = run.put("inputs/demand/batch.csv", b"a")
    assert run.put("inputs/demand/batch.csv", b"a") == path
    with pytest.raises(StorageFault, match="there already with other content"):
        run.put("inputs/demand/batch.csv", b"b")
    assert run.get("inputs/demand/batch.csv") == b"a"
    run.put("inputs/demand/batch.csv", b"b", replace=True)
    assert run.get("inputs/demand/batch.csv") == b"b"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../b", ".hidden", "a//b", "", "a b", "a/.b"])
def test_names_stay_inside_the_run(tmp_path: Path, name: str) -> None:
    """No name leaves the run's folder or hides in it."""
    with pytest.raises(ValidationFailed, match="do not start with a point"):
        RunStore(root=tmp_path).open("r1").put(name, b"")


@pytest.mark.parametrize("run_id", ["", "..", ".x", "a/b", "a b", "x" * 201])
def test_run_ids_are_airflows(tmp_path: Path, run_id: str) -> None:
    """What Airflow would not allow as a run id, or would leave the folder, is refused."""
    with pytest.raises(ValidationFailed, match="a run id has"):
        RunStore(root=tmp_path).open(run_id)


def test_airflows_own_run_ids_are_taken(tmp_path: Path) -> None:
    """The ids that Airflow makes itself are valid."""
    run_id = "scheduled__2026-11-29T12:00:00+00:00"
    store = RunStore(root=tmp_path)
    assert store.open(run_id).id == run_id
    assert store.ids() == [run_id]
    with pytest.raises(UnknownName, match="unknown run"):
        store.find("other")


def test_a_sealed_run_shows_every_change(tmp_path: Path) -> None:
    """A changed, a missing and an added file are each named; an untouched run verifies."""
    run = RunStore(root=tmp_path).open("r1")
    for name in ("a", "b", "c"):
        run.put(name, name.encode())
    run.seal()
    run.verify()
    run.put("a", b"other", replace=True)
    run.path("b").unlink()
    run.put("d", b"d")
    with pytest.raises(StorageFault, match=r"a has changed; b is missing; d was added"):
        run.verify()


@pytest.mark.parametrize(
    "text", ["[]", "{}", "null", '{"files": []}', '{"files": {"a": 1}}', '{"files": {"a": {}}}', "{"]
)
def test_a_damaged_manifest_is_a_fault_with_a_message(tmp_path: Path, text: str) -> None:
    """A manifest that is no manifest is said to be none; it neither passes nor raises anything else."""
    run = RunStore(root=tmp_path).open("r1")
    run.put("a", b"1")
    run.seal()
    run.path("manifest.json").write_text(text)
    with pytest.raises(StorageFault, match=r"manifest\.json is not"):
        run.verify()


def test_json_is_sorted_and_refuses_nan(tmp_path: Path) -> None:
    """Same value, same bytes; NaN is no JSON."""
    run = RunStore(root=tmp_path).open("r1")
    run.put_json("x.json", {"b": 1, "a": 2})
    assert run.put_json("x.json", {"a": 2, "b": 1}) == run.path("x.json")
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.put_json("y.json", float("nan"))
    run.put("z.json", b"{")
    with pytest.raises(StorageFault, match="not JSON"):
        run.get_json("z.json")
    with pytest.raises(StorageFault, match="cannot be read"):
        run.get("absent")


def test_a_failing_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk refuses in the middle, the old bytes stay and no temporary file does."""
    path = tmp_path / "f"
    write_whole(path, b"old")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["f"]


def test_a_folder_that_cannot_be_written_is_a_storage_fault(tmp_path: Path) -> None:
    """A file in the place of the folder gives a message with the path."""
    (tmp_path / "runs").write_bytes(b"")
    with pytest.raises(StorageFault, match="runs"):
        RunStore(root=tmp_path / "runs").open("r1")


def report(*, releasable: bool) -> dict[str, Any]:
    """A report with one critical finding."""
    finding = {
        "table": "demand",
        "row": "row 1",
        "value": "600.0",
        "text": "jumped" if releasable else "is not a number",
        "severity": "critical",
        "releasable": releasable,
    }
    return {"table": "demand", "releasable": releasable, "findings": [finding]}


def keep(quarantine: Quarantine, data: bytes, *, releasable: bool = True) -> str:
    """Keep a batch."""
    return quarantine.keep(
        table="demand", data=data, suffix=".csv", report=report(releasable=releasable), page="<p>", origin={"run": "r1"}
    )


def test_a_refused_batch_is_kept_once_with_report_and_origin(tmp_path: Path) -> None:
    """Bytes, report, page and origin are there; the same bytes again are the same batch."""
    quarantine = Quarantine(root=tmp_path)
    batch = keep(quarantine, b"bad")
    assert keep(quarantine, b"bad") == batch
    assert quarantine.ids() == [batch]
    assert (quarantine.folder(batch) / "batch.csv").read_bytes() == b"bad"
    assert quarantine.report(batch)["findings"][0]["value"] == "600.0"
    assert quarantine.origin(batch) == {"run": "r1"}
    with pytest.raises(UnknownName, match=batch):
        quarantine.report("demand-0")


def test_a_release_is_for_these_bytes_and_needs_a_name_and_a_reason(tmp_path: Path) -> None:
    """Other bytes are not released; a release without name or reason is refused with both said."""
    quarantine = Quarantine(root=tmp_path)
    batch = keep(quarantine, b"bad")
    with pytest.raises(ValidationFailed, match=r"needs a name[\s\S]*needs a reason"):
        quarantine.release(batch, by=" ", reason="", at=NOW)
    assert quarantine.release_of(b"bad") is None
    quarantine.release(batch, by="ann", reason="campaign", at=NOW)
    assert quarantine.release_of(b"bad") == {
        "at": NOW.isoformat(),
        "batch": batch,
        "by": "ann",
        "reason": "campaign",
        "used_by": "",
    }
    assert quarantine.release_of(b"other") is None


def test_what_no_judgement_can_overrule_is_not_released(tmp_path: Path) -> None:
    """A batch that cannot be read as numbers cannot be let in by anybody; the finding is named."""
    quarantine = Quarantine(root=tmp_path)
    batch = keep(quarantine, b"bad", releasable=False)
    with pytest.raises(ValidationFailed, match="no release can overrule this"):
        quarantine.release(batch, by="ann", reason="because", at=NOW)
