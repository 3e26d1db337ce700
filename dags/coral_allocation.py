"""Every five minutes, on a price change or a new library: inputs → gate → plan → check → dispatch → report.

Wiring only; the work is in ``coral_tasks.tasks.allocation``. Asset events can be lost or merged, so every run reads
the newest state itself; commands are idempotent and fenced by an epoch, so a retry never starts an engine twice.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import AssetOrTimeSchedule, CronTriggerTimetable, Param, chain, dag, task
from coral_airflow.policy import DEFAULT_ARGS, LIBRARY, PRICE_CHANGE, START

INPUTS = ("demand", "prices", "availability", "running")


@dag(
    dag_id="coral_allocation",
    description="Plan the fleet for the next interval and bring the node agents to the plan",
    schedule=AssetOrTimeSchedule(
        timetable=CronTriggerTimetable("*/5 * * * *", timezone="UTC"), assets=(LIBRARY | PRICE_CHANGE)
    ),
    start_date=START,
    catchup=False,
    max_active_runs=1,
    default_args=DEFAULT_ARGS | {"execution_timeout": timedelta(minutes=10)},
    tags=["coral"],
    doc_md=__doc__,
    params={
        "reason": Param("schedule", type="string", maxLength=200, description="Why this run, for the record"),
        "mode": Param("", enum=["", "advisory", "auto"], description="Empty: the configured mode"),
        "as_of": Param("", type="string", description="Plan for this moment (ISO, with zone); empty: now"),
    },
)
def coral_allocation() -> None:
    """Join the tasks of one allocation run."""

    @task
    def open_run(params: Any = None, run_id: Any = None) -> str:
        """Make the run's folder; pin the moment and the library version everything below refers to."""
        from coral_tasks.tasks import allocation

        return allocation.open_run(run_id, dict(params))

    @task(map_index_template="{{ table }}")
    def ingest(table: str, run: str) -> str:
        """Copy one input from its source into the run's folder."""
        from coral_tasks.tasks import allocation

        return allocation.ingest(run, table)

    @task
    def gate(run: str) -> str:
        """Check all inputs against their contracts and each other. One task: the check library loads slowly."""
        from coral_tasks.tasks import allocation

        return allocation.gate(run)

    @task
    def solve(run: str) -> str:
        """Solve the allocation program."""
        from coral_tasks.tasks import allocation

        return allocation.solve(run)

    @task
    def check(run: str) -> str:
        """Recompute the plan from the inputs without the solver; refuse it on any difference."""
        from coral_tasks.tasks import allocation

        return allocation.check(run)

    @task
    def dispatch(run: str) -> str:
        """Send the transition's commands to the node agents, unless the mode forbids it."""
        from coral_tasks.tasks import allocation

        return allocation.dispatch(run)

    @task(retries=0)
    def wait_converged(run: str) -> str:
        """Wait until the observed fleet is the plan."""
        from coral_tasks.tasks import allocation

        return allocation.wait_converged(run)

    @task
    def publish(run: str) -> dict[str, Any]:
        """Write routing table and report; make them the current ones."""
        from coral_tasks.tasks import allocation

        return allocation.publish(run)

    run = open_run()
    gated = gate(run)
    chain(ingest.partial(run=run).expand(table=list(INPUTS)), gated)
    publish(wait_converged(dispatch(check(solve(gated)))))


coral_allocation()
