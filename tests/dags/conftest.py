"""Airflow for tests: its own home in a temporary folder, set before anything imports Airflow."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from coral_tasks.tasks.local_airflow import PROJECT, airflow_environment

_HOME = Path(tempfile.mkdtemp(prefix="coral-airflow-test-"))
os.environ.update(airflow_environment(_HOME))
os.environ["AIRFLOW__CORE__UNIT_TEST_MODE"] = "False"


@pytest.fixture(scope="session")
def dag_bag():
    """Every DAG of the project, as Airflow parses it."""
    from airflow.dag_processing.dagbag import DagBag

    return DagBag(PROJECT / "dags", bundle_path=PROJECT / "dags", bundle_name="dags-folder")
