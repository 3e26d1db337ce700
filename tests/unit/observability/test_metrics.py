"""Metrics as text: what Prometheus accepts, nothing unknown as zero, names and labels as declared."""

from __future__ import annotations

import math
import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coral_tasks.observability.metrics import HELP, Metrics, exposition, names_in


def _parsed(metrics: Metrics) -> dict[str, list]:
    return {one.name: one.samples for one in text_string_to_metric_families(exposition(metrics).decode())}


def test_values_come_back_as_they_were_put() -> None:
    """Labels with quotes, line breaks and backslashes survive; truth becomes 1 and 0."""
    metrics = Metrics()
    odd = 'a"b\\c\nd é'
    metrics.put("coral_agent_up", True, odd)
    metrics.put("coral_agent_up", False, "plain")
    metrics.put("coral_plan_cost_usd_per_hour", 43.1)
    metrics.add("coral_nodes", 2, "r", "c", "spot", "vllm", "ready")
    metrics.add("coral_nodes", 3, "r", "c", "spot", "vllm", "ready")
    found = _parsed(metrics)
    assert {one.labels["agent"]: one.value for one in found["coral_agent_up"]} == {odd: 1.0, "plain": 0.0}
    assert found["coral_plan_cost_usd_per_hour"][0].value == 43.1
    assert found["coral_nodes"][0].value == 5.0


def test_unknown_is_absent() -> None:
    """None leaves a value out; a metric without values does not appear, not even as a header."""
    metrics = Metrics()
    metrics.put("coral_plan_gap_ratio", None)
    assert exposition(metrics) == b""


def test_infinity_is_said() -> None:
    """A plan without a proof has an infinite gap, which Prometheus can hold."""
    metrics = Metrics()
    metrics.put("coral_plan_gap_ratio", math.inf)
    assert _parsed(metrics)["coral_plan_gap_ratio"][0].value == math.inf


@pytest.mark.parametrize(
    ("name", "labels"), [("coral_nothing", ()), ("coral_agent_up", ()), ("coral_agent_up", ("a", "b"))]
)
def test_undeclared_names_and_labels_are_refused(name, labels) -> None:
    """What is not documented cannot be exported."""
    with pytest.raises(KeyError):
        Metrics().put(name, 1, *labels)


def test_names_follow_prometheus_rules() -> None:
    """Prefix, unit in the name, labels in small letters."""
    for name, (text, labels) in HELP.items():
        assert re.fullmatch(r"coral_[a-z]+(_[a-z]+)*", name)
        assert text[0].isupper() or text[0].isdigit()
        assert all(re.fullmatch(r"[a-z]+", label) for label in labels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: .ci/install-servers brings it")
def test_promtool_finds_no_fault() -> None:
    """Prometheus's own linter accepts every metric."""
    metrics = Metrics()
    for name, (_, labels) in HELP.items():
        metrics.put(name, 1, *labels)
    done = subprocess.run(["promtool", "check", "metrics"], input=exposition(metrics), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_names_in_expressions() -> None:
    """Names are found whole, inside functions and beside others."""
    assert names_in(["sum(coral_nodes{state='x'}) > coral_agent_up", "up == 0"]) == {"coral_nodes", "coral_agent_up"}


def test_the_documentation_lists_every_metric() -> None:
    """docs/observability.md has each metric with its labels, and no other."""
    from coral_tasks.tasks.local_airflow import PROJECT

    text = (PROJECT / "docs" / "observability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(coral_\w+)`: (.+) \| (.*) \|$", text, re.MULTILINE)
    listed = {name: (told, tuple(re.findall(r"`(\w+)`", labels))) for name, told, labels in rows}
    assert listed == dict(HELP)
