"""Settings hold what every process of an installation must agree on."""

from __future__ import annotations

from coral_tasks.settings import Settings


def test_a_relative_home_is_taken_from_where_the_command_runs(tmp_path, monkeypatch) -> None:
    """Airflow and the agents get an absolute folder, whatever their own is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORAL_HOME", raising=False)
    assert Settings().home == tmp_path / ".coral"
    monkeypatch.setenv("CORAL_HOME", "data")
    assert Settings().home == tmp_path / "data"
