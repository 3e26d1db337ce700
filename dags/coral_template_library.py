"""Nightly: measurements → profiles of every node configuration → serving templates → one published library version.

Wiring only; the work is in ``coral_tasks.tasks.nightly``. Paths and ids travel between tasks, never tables.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import CronTriggerTimetable, Param, dag, task
from coral_airflow.policy import DEFAULT_ARGS, LIBRARY, START


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
    params={
        "setup": Param("", type="string", description="Setup of the catalogue; empty: the configured one"),
        "force": Param(default=False, type="boolean", description="Publish even if the regression gate refuses"),
    },
)
def coral_template_library() -> None:
    """Join the nightly tasks."""

    @task(doc_md="Which models to profile on which node configurations. Fails if there is nothing to do.")
    def plan_profiling(params: Any = None, run_id: Any = None) -> list[dict[str, str]]:
        from coral_tasks.tasks import nightly

        return nightly.plan_profiling(run_id, dict(params))

    @task
    def plan_measurements(params: Any = None, run_id: Any = None) -> list[dict[str, Any]]:
        """Which node configurations to measure with real vLLM on which idle node. None is the normal case."""
        from coral_tasks.tasks import nightly

        return nightly.plan_measurements(run_id, dict(params))

    @task(map_index_template="{{ item['configuration'] }}", execution_timeout=timedelta(hours=2))
    def measure(item: dict[str, Any]) -> list[str]:
        """Measure one node configuration through its agent. Skipped if nothing is due."""
        from coral_tasks.tasks import nightly

        return nightly.measure(item)

    # none_failed: a night without measurements skips `measure`, and the library must still be built.
    @task(map_index_template="{{ item['model'] }}", trigger_rule="none_failed")
    def profile(item: dict[str, str]) -> list[dict[str, str]]:
        """Write the profile tables of one model, every node configuration from its best source."""
        from coral_tasks.tasks import nightly

        return nightly.profile(item)

    @task
    def plan_templates(profiled: list[list[dict[str, str]]]) -> list[dict[str, str]]:
        """Spread the build over models and phases."""
        from coral_tasks.tasks import nightly

        return nightly.plan_templates(list(profiled))

    @task(map_index_template="{{ item['model'] }} {{ item['phase'] }}", execution_timeout=timedelta(hours=2))
    def build_templates(item: dict[str, str]) -> dict[str, str]:
        """Find the best placement of every node combination; drop what smaller templates replace."""
        from coral_tasks.tasks import nightly

        return nightly.build_templates(item)

    @task(outlets=[LIBRARY])
    def publish(parts: list[dict[str, str]], params: Any = None, outlet_events: Any = None) -> dict[str, Any]:
        """Validate, compare with the version before, publish, move the pointer."""
        from coral_tasks.tasks import nightly

        result = nightly.publish(list(parts), force=bool(params["force"]))
        outlet_events[LIBRARY].extra = {"version": result["version"], "changed": result["changed"]}
        return result

    profiled = profile.expand(item=plan_profiling())
    measure.expand(item=plan_measurements()) >> profiled
    publish(build_templates.expand(item=plan_templates(profiled)))


coral_template_library()
