"""``coral metrics`` and ``coral pull``: what they print, and wrong usage."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from coral_tasks.cli import app


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    return tmp_path


def test_broken_state_is_printed_as_a_metric(home) -> None:
    """Printed once, as text for Prometheus; a plan that cannot be read is said and does not stop it."""
    (home / "current").mkdir()
    (home / "current" / "plan.json").write_text("{", encoding="utf-8")
    done = CliRunner().invoke(app, ["metrics"])
    assert done.exit_code == 0
    assert 'coral_unreadable{part="plan"} 1.0' in done.stdout


@pytest.mark.parametrize("address", ["9464", ":9464", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:70000"])
def test_a_wrong_address_is_wrong_usage(address) -> None:
    """Host and port, both; nothing is guessed."""
    done = CliRunner().invoke(app, ["metrics", "--serve", address])
    assert done.exit_code == 2
    assert "HOST:PORT" in done.output


def test_without_a_shared_store_there_is_nothing_to_fetch() -> None:
    """Said, and no fault."""
    done = CliRunner().invoke(app, ["pull"])
    assert (done.exit_code, done.stdout) == (0, "0 runs\n")
