"""Alert rules: Prometheus's own tool accepts and tries them, and they speak of metrics that exist."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import yaml

from coral_tasks.observability.metrics import HELP, names_in
from coral_tasks.tasks.local_airflow import PROJECT

RULES = PROJECT / "docker" / "alerts.yaml"
CASES = PROJECT / "tests" / "unit" / "docker" / "alerts_test.yaml"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: .ci/install-servers brings it"
)


def _rules() -> list[dict]:
    return [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def test_rules_speak_of_metrics_that_exist() -> None:
    """A renamed metric would leave its alert silent for ever."""
    named = names_in(rule["expr"] for rule in _rules())
    assert named <= set(HELP)
    assert {"coral_agent_up", "coral_gate_outcome", "coral_shortage_requests_per_second"} <= named


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    """Severity, a summary and a first step for who is on call."""
    for rule in _rules():
        assert rule["labels"]["severity"] in {"page", "ticket"}, rule["alert"]
        assert len(rule["annotations"]["summary"]) > 20
        assert len(rule["annotations"]["description"]) > 30


def test_every_alert_has_a_case() -> None:
    """An alert that was never seen to fire, or to stay quiet, is not tested."""
    text = CASES.read_text(encoding="utf-8")
    assert all(text.count(rule["alert"]) >= 2 for rule in _rules())


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    """Syntax, names and templates."""
    done = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    """Prometheus's own evaluation of made-up histories."""
    done = subprocess.run(["promtool", "test", "rules", CASES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
