"""The DAG folder parses fast, holds exactly the DAGs on the list, and keeps to the project's policy."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest

from coral_tasks.tasks.local_airflow import PROJECT

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]

TASKS = {
    "coral_template_library": {
        "plan_measurements",
        "measure",
        "plan_profiling",
        "profile",
        "plan_templates",
        "build_templates",
        "publish",
    },
    "coral_price_watch": {"check_prices"},
    "coral_allocation": {
        "open_run",
        "ingest",
        "gate",
        "solve",
        "check",
        "dispatch",
        "wait_converged",
        "publish",
    },
}


def test_the_folder_holds_exactly_the_listed_dags(dag_bag) -> None:
    """No DAG appears, disappears or fails to import unnoticed."""
    assert dag_bag.import_errors == {}
    assert {dag_id: set(dag.task_ids) for dag_id, dag in dag_bag.dags.items()} == TASKS


@pytest.mark.parametrize("dag_id", sorted(TASKS))
def test_runs_never_overlap_and_never_catch_up(dag_bag, dag_id: str) -> None:
    """One active run, no catch-up, a fixed start date with a time zone."""
    dag = dag_bag.dags[dag_id]
    assert dag.max_active_runs == 1
    assert dag.catchup is False
    assert dag.start_date.tzinfo is not None
    assert dag.tags == {"coral"}
    assert dag.doc_md


@pytest.mark.parametrize("dag_id", sorted(TASKS))
def test_every_task_has_a_time_limit_and_the_retry_policy(dag_bag, dag_id: str) -> None:
    """No task may run for ever, and none retries an expected outcome."""
    for task in dag_bag.dags[dag_id].tasks:
        limit = task.partial_kwargs["execution_timeout"] if task.is_mapped else task.execution_timeout
        assert timedelta(0) < limit <= timedelta(hours=2), task.task_id
        assert task.owner == "coral"


def test_expected_outcomes_are_not_retried() -> None:
    """A refusal fails at once; a fault keeps the task's own retries."""
    from airflow.sdk import RetryAction
    from coral_airflow.policy import RETRY_FAULTS_ONLY

    from coral_tasks.domain.errors import PlanRejected, SourceFault, StaleInput

    def action(error: Exception) -> RetryAction:
        return RETRY_FAULTS_ONLY.evaluate(error, try_number=1, max_tries=3).action

    assert action(StaleInput("old")) is RetryAction.FAIL
    assert action(PlanRejected("no")) is RetryAction.FAIL
    assert action(SourceFault("hung")) is RetryAction.DEFAULT
    assert action(ValueError("bug")) is RetryAction.DEFAULT


def test_two_parses_serialize_equal(dag_bag) -> None:
    """Nothing in a DAG file moves between parses, so no new DAG version appears."""
    from airflow.dag_processing.dagbag import DagBag
    from airflow.serialization.serialized_objects import DagSerialization

    again = DagBag(PROJECT / "dags", bundle_path=PROJECT / "dags", bundle_name="dags-folder")
    for dag_id, dag in dag_bag.dags.items():
        assert DagSerialization.to_dict(dag) == DagSerialization.to_dict(again.dags[dag_id])


def test_parsing_imports_nothing_heavy() -> None:
    """A DAG file pulls in none of the libraries that cost seconds (checked in a fresh process)."""
    heavy = ["great_expectations", "pulp", "highspy", "numba", "plotly", "scipy", "vllm", "coral_tasks.allocation"]
    code = f"""
import sys
sys.path[:0] = [{str(PROJECT / "plugins")!r}, {str(PROJECT / "dags")!r}]
import airflow.sdk
before = set(sys.modules)
import coral_template_library, coral_allocation, coral_price_watch
print(sorted(set({heavy!r}) & (set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
