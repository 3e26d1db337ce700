"""Arrows between packages point one way only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from layers import OURS, violations
from layers import module_name as name_of

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for folder in ("coral_tasks", "data_contracts", "plugins", "dags") for path in (ROOT / folder).rglob("*.py")
)


def _layer_name(path: Path) -> str:
    name = name_of(path, ROOT)
    return name.replace("plugins.coral_airflow", "plugins.coral_airflow", 1)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_keeps_to_its_layer(path: Path) -> None:
    """No file imports against the table."""
    assert violations(path.read_text(encoding="utf-8"), _layer_name(path)) == []


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("coral_tasks.domain.x", "from coral_tasks.catalog import a", "must not import coral_tasks.catalog"),
        ("coral_tasks.domain.x", "from coral_tasks import catalog", "must not import coral_tasks.catalog"),
        ("coral_tasks.domain.x", "import pandas", "domain may import numpy only"),
        ("coral_tasks.simulation.x", "from coral_tasks.allocation import solve", "must not import"),
        ("coral_tasks.templates.x", "import airflow.sdk", "airflow may be imported only by"),
        ("coral_tasks.allocation.x", "def f():\n    import highspy", "highspy may be imported only by"),
        ("coral_tasks.tasks.x", "import pandas", "heavy"),
        ("dags.x", "from coral_tasks.allocation import a", "must not import"),
        ("coral_tasks.agent.x", "from . import y", "relative imports are banned"),
        ("coral_tasks.invented.x", "import os", "belongs to no layer"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, message: str) -> None:
    """The checker itself fails on each kind of forbidden import."""
    found = violations(source, module)
    assert any(message in line for line in found), found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("coral_tasks.domain.x", "import numpy\nimport json\nfrom coral_tasks.domain.names import ModelId"),
        ("coral_tasks.baselines.x", "from coral_tasks.allocation.problem import AllocationProblem"),
        ("coral_tasks.tasks.x", "def f():\n    import pandas\n    from coral_tasks.allocation import solve"),
        ("plugins.coral_airflow.x", "from coral_airflow.y import z\nimport airflow"),
    ],
)
def test_a_permitted_import_passes(module: str, source: str) -> None:
    """The checker lets through what the table allows."""
    assert violations(source, module) == []


def test_the_table_names_no_missing_arrow() -> None:
    """Every package a row refers to is a row itself, a part of one, or the umbrella."""
    known = {*OURS, "coral_tasks", "coral_airflow", "coral_tasks.allocation.problem", "coral_tasks.allocation.plan"}
    assert {name for allowed in OURS.values() for name in allowed} <= known
