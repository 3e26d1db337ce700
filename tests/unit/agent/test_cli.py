"""``coral keys`` and ``coral agent`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from coral_tasks.agent.keys import KeyExists
from coral_tasks.cli import app
from coral_tasks.dispatch.observation import build_observation
from coral_tasks.domain.errors import UnknownName, ValidationFailed
from coral_tasks.domain.market import Market
from coral_tasks.protocol.messages import NodeReport, Report, SlotState
from coral_tasks.tasks import dispatching


def run(*words: str) -> str:
    """Output of a command that succeeds; its exception, if it fails, for ``main`` to turn into an exit code."""
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_picture_without_a_dry_run_is_a_usage_error(tmp_path: Path) -> None:
    """--picture shows what would be done; with a real dispatch it is refused before anything is read."""
    result = CliRunner().invoke(app, ["dispatch", "--plan", str(tmp_path / "p"), "--picture", str(tmp_path / "x.html")])
    assert result.exit_code == 2
    assert "dry-run" in result.output


def test_keys_are_made_rotated_and_listed(tmp_path: Path) -> None:
    """make prints the public key, rotate a new one with the old one listed, --finish drops it."""
    folder = ("--keys", str(tmp_path))
    first = run("keys", "make", "n1", *folder).strip()
    second = run("keys", "rotate", "n1", *folder).strip()
    listed = json.loads(run("keys", "list", "--json", *folder))
    assert listed == {"controller": {}, "agent": {"n1": second, "n1@1": first}}
    assert "1 older keys dropped" in run("keys", "rotate", "n1", "--finish", *folder)
    assert second in run("keys", "list", *folder)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("keys", "make", "n1"), KeyExists, "use rotate"),
        (("keys", "rotate", "n2"), UnknownName, "unknown agent key; known: n1"),
        (("keys", "make", "n2", "--role", "king"), ValidationFailed, "role must be agent or controller"),
        (("agent", "--node", "n1", "--bind", "tcp://127.0.0.1:1"), ValidationFailed, "region"),
        (("dispatch", "--plan", "none.json"), ValidationFailed, "No such file"),
    ],
)
def test_mistakes_are_expected_outcomes(tmp_path: Path, words: tuple[str, ...], error: type, message: str) -> None:
    """Each mistake is an expected "no" with its reason, exit code 1."""
    run("keys", "make", "n1", "--keys", str(tmp_path))
    with pytest.raises(error, match=message):
        run(*words, "--keys", str(tmp_path))


def test_status_lists_what_runs_and_counts_what_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two empty nodes of three are a number, with --all rows; an excluded one is shown with its reason."""
    idle = NodeReport(
        node="n1",
        region="aws/us-east-2",
        configuration="L4x1",
        market=Market.ON_DEMAND,
        engine="simulated",
        address="127.0.0.1",
        master_port=1,
        state=SlotState.EMPTY,
    )
    nodes = (idle, replace(idle, node="n2"), replace(idle, node="n3", excluded="disk full"))
    report = Report(request="r", agent="a", incarnation="i", epoch=1, round=1, accepted=True, nodes=nodes)
    monkeypatch.setattr(dispatching, "observe", lambda *_, **__: build_observation({"a": report}, ["a"]))
    short = run("status")
    assert "disk full" in short
    assert "n1" not in short
    assert "2 of 3 nodes are empty" in short
    assert "n1" in run("status", "--all")
