"""The nightly DAG's work, as far as it needs neither profiles nor a library."""

from __future__ import annotations

import pytest

from coral_tasks.domain.errors import Unavailable, UnknownName, ValidationFailed
from coral_tasks.domain.models import LatencySlo
from coral_tasks.storage.library import current_manifest, read_current, read_manifest, read_tighter
from coral_tasks.storage.objects import open_store
from coral_tasks.tasks import nightly
from coral_tasks.templates import pool


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty data folder."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    monkeypatch.delenv("CORAL_SLO_STEP", raising=False)
    return tmp_path


def built_for(model: str) -> list[dict]:
    """The steps of a night for one model, up to its template sets."""
    profiled = nightly.profile({"run": "r", "setup": "core", "model": model})
    return [nightly.build_templates(item) for item in nightly.plan_templates([profiled])]


def test_a_run_for_some_models_profiles_these_only(home) -> None:
    """What was given is kept with the run."""
    items = nightly.plan_profiling("r", {"models": ["phi-4-14b"], "reason": "new kernel"})
    assert [item["model"] for item in items] == ["phi-4-14b"]
    assert "new kernel" in (home / "runs" / "r" / "nightly.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("params", "error", "told"),
    [
        ({"models": ["phi-4"]}, UnknownName, "gpt-oss-20b, phi-4-14b, qwen3-32b"),
        ({"setup": "cores"}, UnknownName, "core"),
        ({"mode": "auto"}, ValidationFailed, "unknown parameter"),
        ({"force": "yes"}, ValidationFailed, "force"),
    ],
)
def test_wrong_parameters_stop_the_night_before_it_begins(params, error, told) -> None:
    """Both first tasks refuse what the other refuses."""
    for first in (nightly.plan_profiling, nightly.plan_measurements):
        with pytest.raises(error, match=told):
            first("r", params)


def test_without_agents_nothing_is_due_on_any_gpu_type() -> None:
    """Every GPU type of the catalogue has its list, so that each mapped task finds one."""
    found = nightly.measurements_by_gpu_type("r", {})
    assert len(found) >= 11
    assert set(map(tuple, found.values())) == {()}


def test_a_step_never_spreads_into_more_tasks_than_its_limit() -> None:
    """201 sets are refused with their number, before Airflow's scheduler meets them; 200 are not; none is an error."""
    items = [{"model": f"m{number}", "phase": "decode"} for number in range(nightly.MAX_MAPPED + 1)]
    assert len(nightly.plan_templates([items[:-1]])) == nightly.MAX_MAPPED
    with pytest.raises(ValidationFailed, match="201"):
        nightly.plan_templates([items])
    with pytest.raises(Unavailable):
        nightly.plan_templates([[], []])


def test_a_run_for_some_models_needs_a_version_to_keep_the_others_from() -> None:
    """Published alone, they would be a library without the rest."""
    with pytest.raises(Unavailable, match="run for all models"):
        nightly.publish([], {"models": ["phi-4-14b"]})


def test_a_night_builds_both_slos_in_the_same_tasks(home) -> None:
    """GPT-OSS 20B keeps 0.9 s and 30 ms (paper, 6.1); beside it lie sets for 0.72 s and 24 ms, one item for both."""
    parts = built_for("gpt-oss-20b")
    assert [part["phase"] for part in parts] == ["prefill", "decode"]
    made = nightly.publish(parts)
    store = open_store(str(home / "library"))
    assert {one.slo for one in read_current(store).sets} == {LatencySlo(ttft_s=0.9, tpot_s=0.03)}
    tighter = read_tighter(store, made["version"])
    assert {one.slo for one in tighter} == {LatencySlo(ttft_s=0.72, tpot_s=0.024)}
    assert [one.phase.value for one in tighter] == ["decode", "prefill"]
    assert made["num_tighter"] == sum(len(one) for one in tighter)
    assert made["num_templates"] == sum(len(one) for one in read_current(store).sets)
    assert current_manifest(store).parameters["slo_step"] == "0.8"
    again = nightly.publish(built_for("gpt-oss-20b"))
    assert (again["version"], again["num_reused"]) == (made["version"], 2)


def test_a_night_for_some_models_keeps_the_tighter_sets_of_the_others(home) -> None:
    """Phi-4 alone joins GPT-OSS's sets of both SLOs; with the step switched off it brings none of its own."""
    first = nightly.publish(built_for("gpt-oss-20b"))
    only = {"models": ["phi-4-14b"]}
    second = nightly.publish(built_for("phi-4-14b"), only)
    store = open_store(str(home / "library"))
    assert [one.model for one in read_tighter(store, second["version"])] == ["gpt-oss-20b"] * 2 + ["phi-4-14b"] * 2
    kept = [entry.key for entry in current_manifest(store).tighter if entry.model == "gpt-oss-20b"]
    assert kept == [entry.key for entry in read_manifest(store, first["version"]).tighter]


def test_a_night_without_the_step_builds_one_slo(home, monkeypatch) -> None:
    """CORAL_SLO_STEP=0: no second table is written and nothing is published beside the sets."""
    monkeypatch.setenv("CORAL_SLO_STEP", "0")
    parts = built_for("gpt-oss-20b")
    assert [(part["tighter"], part["tighter_key"]) for part in parts] == [("", "")] * 2
    made = nightly.publish(parts)
    assert read_tighter(open_store(str(home / "library")), made["version"]) == ()
    assert current_manifest(open_store(str(home / "library"))).parameters["slo_step"] == "none"


def test_a_large_set_is_spread_only_for_the_slo_that_is_missing(home, monkeypatch) -> None:
    """After an upgrade the own sets are there and the tighter ones are not: their chunks alone are solved and kept."""
    monkeypatch.setattr(pool, "CHUNK_SIZE", 400)
    monkeypatch.setenv("CORAL_SLO_STEP", "0")
    built_for("phi-4-14b")
    monkeypatch.setenv("CORAL_SLO_STEP", "0.8")
    items = nightly.profile({"run": "r", "setup": "core", "model": "phi-4-14b"})
    large = nightly.plan_large(items)
    chunks = [chunk for item in large for chunk in nightly.keep_smaller(item)]
    assert large
    for chunk in chunks:
        nightly.keep_chunk(chunk)
    assert len({path.parent.name for path in (home / "library" / "work").rglob("*.npz")}) == len(large)
    parts = [nightly.build_templates(item) for item in items]
    assert {part["reused"] for part in parts} == {"False"}
    assert {path.name for path in (home / "library" / "work").rglob("*.npz")} == set()
    assert nightly.plan_large(items) == []
