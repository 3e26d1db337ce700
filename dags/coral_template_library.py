"""Nightly: measurements → profiles of every node configuration → serving templates → one published library version.

Wiring only; the work is in ``coral_tasks.tasks.nightly``. Paths and ids travel between tasks, never tables. Real
measurements run in one pool for each GPU type, so that they never take more nodes of a type than its pool has slots.
A version that the regression gate refuses is not published: the one in force stays, and the run is red.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import CronTriggerTimetable, TaskGroup, dag, task
from airflow.sdk.exceptions import AirflowSkipException
from coral_airflow.parameters import params_of
from coral_airflow.policy import DEFAULT_ARGS, GPU_TYPES, LIBRARY, START, gpu_pool, gpu_queue

from coral_tasks.tasks.run_parameters import LIBRARY_SCHEMA


@task
def due(gpu_type: str, planned: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Pick what is due on nodes of one GPU type."""
    return planned[gpu_type]


@task(
    map_index_template="{{ item['configuration'] }}",
    execution_timeout=timedelta(hours=2),
    doc_md="Measure one node configuration through its agent, in the pool of its GPU type. Skipped if nothing is due.",
)
def measure(item: dict[str, Any]) -> list[str]:
    """Measure one node configuration through its agent."""
    from coral_tasks.tasks import nightly

    return nightly.measure(item)


def measured(planned: Any) -> list[Any]:
    """One mapped task for each GPU type, each with a pool of its own: a mapped task's instances share one."""
    tasks = []
    for gpu_type in GPU_TYPES:
        items = due.override(task_id=f"due_{gpu_type}")(gpu_type, planned)
        named = measure.override(task_id=gpu_type, pool=gpu_pool(gpu_type), queue=gpu_queue(gpu_type))
        tasks.append(named.expand(item=items))
    return tasks


@task
def plan_large(items: list[dict[str, str]]) -> list[dict[str, str]]:
    """Pick the sets worth spreading over workers. Skipped, with all of its group, if there is none."""
    from coral_tasks.tasks import nightly

    large = nightly.plan_large(list(items))
    if not large:
        raise AirflowSkipException("every set is solved by the one worker that builds it")
    return large


@task(
    map_index_template="{{ item['model'] }} {{ item['phase'] }}",
    execution_timeout=timedelta(hours=2),
    doc_md="Solve the smaller combinations of a large set, on which those of most nodes rest.",
)
def keep_smaller(item: dict[str, str]) -> list[dict[str, Any]]:
    """Solve the smaller combinations of a large set, on which those of most nodes rest."""
    from coral_tasks.tasks import nightly

    return nightly.keep_smaller(item)


@task
def plan_chunks(prepared: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Spread the combinations of most nodes over workers."""
    from coral_tasks.tasks import nightly

    return nightly.plan_chunks(list(prepared))


@task(
    map_index_template="{{ item['model'] }} {{ item['phase'] }} {{ item['first'] }}-{{ item['last'] }}",
    execution_timeout=timedelta(hours=2),
    doc_md="Solve one chunk of combinations and keep it for the task that builds the set.",
)
def keep_chunk(item: dict[str, Any]) -> None:
    """Solve one chunk of combinations and keep it for the task that builds the set."""
    from coral_tasks.tasks import nightly

    nightly.keep_chunk(item)


@dag(
    dag_id="coral_template_library",
    description="Profile GPU types, rebuild serving templates, publish the library",
    schedule=CronTriggerTimetable("0 3 * * *", timezone="UTC"),
    start_date=START,
    catchup=False,
    max_active_runs=1,
    default_args=DEFAULT_ARGS,
    tags=["coral"],
    doc_md=__doc__,
    params=params_of(LIBRARY_SCHEMA),
)
def coral_template_library() -> None:
    """Join the nightly tasks."""

    @task(doc_md="Which models to profile on which node configurations. Fails if there is nothing to do.")
    def plan_profiling(params: Any = None, run_id: Any = None) -> list[dict[str, str]]:
        from coral_tasks.tasks import nightly

        return nightly.plan_profiling(run_id, dict(params))

    @task(multiple_outputs=False)
    def plan_measurements(params: Any = None, run_id: Any = None) -> dict[str, list[dict[str, Any]]]:
        """By GPU type, which node configurations to measure on which idle node. Skipped if none is due, as often."""
        from coral_tasks.tasks import nightly

        due = nightly.measurements_by_gpu_type(run_id, dict(params))
        if not any(due.values()):
            raise AirflowSkipException("no node configuration is due, or no idle node has real vLLM")
        return due

    # none_failed: a night without measurements skips `measure`, and the library must still be built.
    @task(
        map_index_template="{{ item['model'] }}",
        trigger_rule="none_failed",
        doc_md="Write the profile tables of one model, every node configuration from its best source.",
    )
    def profile(item: dict[str, str]) -> list[dict[str, str]]:
        from coral_tasks.tasks import nightly

        return nightly.profile(item)

    @task
    def plan_templates(profiled: list[list[dict[str, str]]]) -> list[dict[str, str]]:
        """Spread the build over models and phases."""
        from coral_tasks.tasks import nightly

        return nightly.plan_templates(list(profiled))

    # none_failed: where no set is large, the chunks before it are skipped.
    @task(
        map_index_template="{{ item['model'] }} {{ item['phase'] }}",
        execution_timeout=timedelta(hours=2),
        trigger_rule="none_failed",
        doc_md="Find the best placement of every node combination; drop what smaller templates replace.",
    )
    def build_templates(item: dict[str, str]) -> dict[str, str]:
        from coral_tasks.tasks import nightly

        return nightly.build_templates(item)

    @task(outlets=[LIBRARY])
    def publish(
        parts: list[dict[str, str]], params: Any = None, run_id: Any = None, outlet_events: Any = None
    ) -> dict[str, Any]:
        """Validate, compare with the version before, publish, move the pointer. Skipped at the end of a dry run."""
        from coral_tasks.tasks import nightly

        result = nightly.publish(list(parts), dict(params))
        nightly.note_result(run_id, result)
        if not result["published"]:
            raise AirflowSkipException(f"dry run: version {result['version']} was built and is not published")
        outlet_events[LIBRARY].extra = {"version": result["version"], "changed": result["changed"]}
        return result

    profiled = profile.expand(item=plan_profiling())
    planned = plan_measurements()
    with TaskGroup("measurements", tooltip="Real vLLM on idle nodes, one pool for each GPU type"):
        measured(planned) >> profiled
    items = plan_templates(profiled)
    built = build_templates.expand(item=items)
    with TaskGroup("chunks", tooltip="Sets with very many combinations, solved by several workers"):
        keep_chunk.expand(item=plan_chunks(keep_smaller.expand(item=plan_large(items)))) >> built
    publish(built)


coral_template_library()
