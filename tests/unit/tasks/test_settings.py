"""Settings hold what every process of an installation must agree on."""

from __future__ import annotations

import pytest

from coral_tasks.settings import Settings, gpu_queues, unknown_settings


def test_a_relative_home_is_taken_from_where_the_command_runs(tmp_path, monkeypatch) -> None:
    """Airflow and the agents get an absolute folder, whatever their own is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORAL_HOME", raising=False)
    assert Settings().home == tmp_path / ".coral"
    monkeypatch.setenv("CORAL_HOME", "data")
    assert Settings().home == tmp_path / "data"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("CORAL_HEADROM", "did you mean CORAL_HEADROOM?"),
        ("coral_mod", "did you mean CORAL_MODE?"),
        ("CORAL_APPROVAL_COST", "did you mean CORAL_APPROVAL_COST_CHANGE?"),
        ("CORAL_ZZZZ", "CORAL_ZZZZ is no setting of Coral and has no effect"),
    ],
)
def test_a_mistyped_setting_is_named_with_the_nearest_one(name, told) -> None:
    """A name with the prefix that is no setting is told, with the setting that was probably meant."""
    (sentence,) = unknown_settings([name, "CORAL_HOME", "coral_home", "PATH", "CORAL_LAUNCH"])
    assert told in sentence


def test_nothing_is_guessed_for_a_name_far_from_all() -> None:
    """A wrong hint would be worse than none."""
    (sentence,) = unknown_settings(["CORAL_ZZZZ"])
    assert "did you mean" not in sentence


def test_the_warning_is_given_when_settings_are_read(monkeypatch, caplog) -> None:
    """Whoever mistypes a setting hears of it, and the run goes on with the defaults."""
    monkeypatch.setenv("CORAL_SETUPS", "extended")
    assert Settings().setup == "core"
    assert "did you mean CORAL_SETUP?" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODE", "automatic"),
        ("APPROVAL_COST_CHANGE", "-0.1"),
        ("APPROVAL_FLEET_CHANGE", "lots"),
        ("APPROVAL_TIMEOUT_S", "0"),
        ("PLAN_MAX_AGE_S", "-1"),
        ("KEEP_RUNS", "0"),
        ("MEASUREMENT_SLOTS", "0"),
        ("SLO_STEP", "1"),
        ("SLO_STEP", "-0.1"),
        ("SLO_STEP", "nan"),
    ],
)
def test_bad_values_are_refused_by_name(monkeypatch, name, value) -> None:
    """A setting out of its range stops the command and is named."""
    monkeypatch.setenv(f"CORAL_{name}", value)
    with pytest.raises(ValueError, match=name.lower()):
        Settings()


def test_queues_by_gpu_type_are_read_alone(monkeypatch) -> None:
    """DAG files ask for one setting only, so a mistake in another does not hide every DAG; its own is an error."""
    monkeypatch.setenv("CORAL_HEADROOM", "nonsense")
    assert gpu_queues() is False
    monkeypatch.setenv("CORAL_GPU_QUEUES", "true")
    assert gpu_queues() is True
    monkeypatch.setenv("CORAL_GPU_QUEUES", "perhaps")
    with pytest.raises(ValueError, match="boolean"):
        gpu_queues()
