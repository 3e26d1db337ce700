"""Every five minutes, on a price change, a new library or nodes that could not be had: inputs → gate → plan → check →
decide → dispatch → report.

Wiring only; the work is in ``coral_tasks.tasks.allocation``. Asset events can be lost or merged, so every run reads
the newest state itself; commands are idempotent and fenced by an epoch, so a retry never starts an engine twice.

**Modes** (parameter ``mode``, else ``CORAL_MODE``): *advisory* plans and explains and touches nothing; *approve* asks a
person in "Required Actions" when cost or fleet change beyond the limits, and changes nothing without a yes; *auto* goes
on alone.

**To stop it**: pause the DAG; what runs stays as it is. **If a run is red**: its tasks' button "Coral" shows what was
refused and why; the plan in force is unchanged. Start a new run rather than clear an old one: an old plan is refused.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import AssetOrTimeSchedule, CronTriggerTimetable, chain, dag, task
from coral_airflow.approval import PlanApproval
from coral_airflow.parameters import params_of
from coral_airflow.policy import DEFAULT_ARGS, LIBRARY, PRICE_CHANGE, SHORTAGE, START, described_events, skip_unless

from coral_tasks.tasks.run_parameters import ALLOCATION_SCHEMA

INPUTS = ("demand", "prices", "availability", "running")


@dag(
    dag_id="coral_allocation",
    description="Plan the fleet for the next interval and bring the node agents to the plan",
    schedule=AssetOrTimeSchedule(
        timetable=CronTriggerTimetable("*/5 * * * *", timezone="UTC"), assets=(LIBRARY | PRICE_CHANGE | SHORTAGE)
    ),
    start_date=START,
    catchup=False,
    max_active_runs=1,
    default_args=DEFAULT_ARGS | {"execution_timeout": timedelta(minutes=10)},
    tags=["coral"],
    doc_md=__doc__,
    params=params_of(ALLOCATION_SCHEMA),
)
def coral_allocation() -> None:
    """Join the tasks of one allocation run."""

    @task
    def open_run(params: Any = None, run_id: Any = None, triggering_asset_events: Any = None) -> str:
        """Make the run's folder; pin moment, mode, reason and library version that everything below refers to."""
        from coral_tasks.tasks import allocation

        return allocation.open_run(run_id, dict(params), described_events(triggering_asset_events))

    @task(
        map_index_template="{{ table }}",
        doc_md="Copy one input from its source into the run's folder, with the values that this run was given.",
    )
    def ingest(table: str, run: str) -> str:
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

    decide = PlanApproval(
        task_id="decide",
        doc_md="Compares the plan with what runs. In mode approve, beyond the limits, waits for a person's answer "
        "in Required Actions; no answer in time is a no. After a no nothing is sent and the plan in force stays.",
    )

    # New machines are waited for (``provision_timeout_s``), and the engines on them load their weights.
    @task(execution_timeout=timedelta(minutes=40))
    def dispatch(run: str) -> str:
        """Obtain nodes, send the transition's commands to the agents, unless mode, answer or a stale plan forbid it."""
        from coral_tasks.tasks import allocation

        return allocation.dispatch(run)

    @task(retries=0)
    def wait_converged(run: str) -> str:
        """Look once more, from outside: the observed fleet is the plan."""
        from coral_tasks.tasks import allocation

        return allocation.wait_converged(run)

    # The run's id from the context: where an earlier task failed, nobody hands one on, and there is nothing to ask for.
    @task(trigger_rule="one_failed", outlets=[SHORTAGE])
    def plan_again(run_id: Any = None, outlet_events: Any = None) -> list[str]:
        """After a dispatch that could not get its nodes: ask for one more run, which plans without them."""
        from coral_tasks.tasks import allocation

        missing = allocation.shortage(run_id)
        skip_unless(missing, "the dispatch did not fail for want of nodes")
        outlet_events[SHORTAGE].extra = {"missing": missing}
        return missing

    # none_failed: after a person's no, dispatch is skipped, and the run still tells what was planned and why not sent.
    @task(trigger_rule="none_failed")
    def publish(run: str) -> dict[str, Any]:
        """Explain, write the report; make the plan the current one if it was sent."""
        from coral_tasks.tasks import allocation

        return allocation.publish(run)

    run = open_run()
    gated = gate(run)
    chain(ingest.partial(run=run).expand(table=list(INPUTS)), gated)
    checked = check(solve(gated))
    sent = dispatch(checked)
    chain(checked, decide, sent, wait_converged(checked), publish(checked))
    chain(sent, plan_again())


coral_allocation()
