"""The nightly DAG's work, as far as it needs neither profiles nor a library."""

from __future__ import annotations

import pytest

from coral_tasks.domain.errors import Unavailable, UnknownName, ValidationFailed
from coral_tasks.tasks import nightly


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty data folder."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    return tmp_path


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
