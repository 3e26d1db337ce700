"""The DAG folder parses fast, holds exactly the DAGs on the list, and keeps to the project's policy."""

from __future__ import annotations

import copy
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

GPU_TYPES = ("A100-40GB", "A100-80GB", "A10G", "B200", "H100", "H200", "L4", "L40S", "T4", "V100", "cpu")

TASKS = {
    "coral_template_library": {
        "plan_measurements",
        *(f"measurements.{prefix}{gpu_type}" for prefix in ("", "due_") for gpu_type in GPU_TYPES),
        "plan_profiling",
        "profile",
        "plan_templates",
        *(f"chunks.{name}" for name in ("plan_large", "keep_smaller", "plan_chunks", "keep_chunk")),
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
        "decide",
        "dispatch",
        "wait_converged",
        "plan_again",
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


@pytest.mark.parametrize("dag_id", sorted(TASKS))
def test_every_task_says_what_it_does_and_mapped_ones_have_readable_names(dag_bag, dag_id: str) -> None:
    """Whoever opens a task in the UI reads what it is for; a mapped instance is shown by its item, not by a number."""
    for task in dag_bag.dags[dag_id].tasks:
        assert task.partial_kwargs.get("doc_md") if task.is_mapped else task.doc_md, task.task_id
        if task.is_mapped:
            assert "item[" in task.map_index_template or task.map_index_template == "{{ table }}", task.task_id


def test_a_run_refused_before_its_dispatch_asks_for_no_other(dag_bag) -> None:
    """plan_again hangs on dispatch alone: a task that failed before hands on no run, and must not fail it too."""
    assert dag_bag.dags["coral_allocation"].get_task("plan_again").upstream_task_ids == {"dispatch"}


def test_measuring_is_pooled_by_gpu_type(dag_bag) -> None:
    """Every GPU type of the catalogue has its own mapped task, pool and, if asked for, queue."""
    from coral_airflow.policy import GPU_TYPES as LISTED

    from coral_tasks.catalog import load_catalog

    assert sorted(LISTED) == sorted(map(str, load_catalog().gpu_types)) == sorted(GPU_TYPES)
    dag = dag_bag.dags["coral_template_library"]
    pools = {one: dag.get_task(f"measurements.{one}").partial_kwargs["pool"] for one in GPU_TYPES}
    assert pools == {one: f"coral_gpu_{one}" for one in GPU_TYPES}
    assert {dag.get_task(f"measurements.{one}").partial_kwargs["queue"] for one in GPU_TYPES} == {"default"}


def test_queues_by_gpu_type_are_an_option(monkeypatch) -> None:
    """With CORAL_GPU_QUEUES each GPU type's measurements go to a queue of their own, for workers near those nodes."""
    from coral_airflow.policy import gpu_queue

    monkeypatch.setenv("CORAL_GPU_QUEUES", "1")
    assert gpu_queue("L40S") == "gpu-L40S"


@pytest.mark.parametrize("dag_id", ["coral_allocation", "coral_template_library"])
def test_parameters_have_a_schema_and_their_defaults_fit_it(dag_bag, dag_id: str) -> None:
    """Airflow checks what a person gives before a run starts, and a run with nothing given is valid."""
    params = dag_bag.dags[dag_id].params
    params.validate()
    for name in params:
        param = params.get_param(name)
        assert param.description, name
        assert param.schema.get("type") or param.schema.get("enum"), name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "automatic"),
        ("dry_run", "yes"),
        ("demand", [{"model": "phi-4-14b"}]),
        ("demand", [{"model": "phi-4-14b", "requests_per_s": -1}]),
        ("demand", [{"model": "phi-4-14b", "requests_per_s": 1, "rps": 2}]),
        ("demand", {"phi-4-14b": 3}),
        ("prices", [{"region": "r", "configuration": "L4x1", "price_usd_per_hour": "cheap"}]),
        ("availability", [{"region": "r", "configuration": "L4x1", "available_nodes": 1.5}]),
        ("availability", [{"region": "r", "configuration": "L4x1", "available_nodes": 1, "market": "free"}]),
        ("models", "phi-4-14b"),
        ("reason", "x" * 201),
    ],
)
def test_wrong_parameters_are_refused_before_a_run_starts(dag_bag, name: str, value: object) -> None:
    """The message names the parameter and what is wrong with it."""
    from airflow.sdk.exceptions import ParamValidationError

    params = copy.deepcopy(dag_bag.dags["coral_allocation"].params)
    with pytest.raises(ParamValidationError, match="Invalid input for param"):
        params[name] = value


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
