"""The ``coral`` command as a whole: what becomes of wrong settings."""

from __future__ import annotations

import pytest

from coral_tasks import cli


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CORAL_HEADROOM", "2", "setting CORAL_HEADROOM=2: Input should be less than or equal to 1"),
        ("CORAL_MODE", "x", "setting CORAL_MODE=x: Input should be 'advisory', 'approve' or 'auto'"),
        ("CORAL_RUNTIMES", "vllm", 'error parsing value for field "runtimes"'),
        ("CORAL_RUNTIMES", '["triton"]', "setting CORAL_RUNTIMES.0=triton: Input should be 'vllm' or 'hybrid'"),
    ],
)
def test_a_wrong_setting_is_wrong_usage_and_named(monkeypatch, capsys, tmp_path, name, value, told) -> None:
    """The message names variable, value and rule; nothing runs, nothing is written."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["coral", "demo"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_an_unknown_setup_is_refused_before_anything_is_written(monkeypatch, capsys, tmp_path) -> None:
    """A wrong setup's name gives the right ones and leaves no data folder behind."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CORAL_SETUP", "nonsense")
    monkeypatch.setattr("sys.argv", ["coral", "demo"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert "'nonsense'" in told
    assert "core, extended" in told
    assert not (tmp_path / "home").exists()
