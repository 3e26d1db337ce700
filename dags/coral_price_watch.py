"""Every minute: look at the prices that the plan in force uses; a big move updates the price-change asset.

Wiring only; the work is in ``coral_tasks.tasks.price_watching``. A check that does not fire is skipped, so that no
asset event appears; a burst of events gives one allocation run, which reads the newest prices itself.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import CronTriggerTimetable, dag, task
from coral_airflow.policy import DEFAULT_ARGS, PRICE_CHANGE, START, skip_unless


@dag(
    dag_id="coral_price_watch",
    description="Start an allocation run when a used price moves",
    schedule=CronTriggerTimetable("* * * * *", timezone="UTC"),
    start_date=START,
    catchup=False,
    max_active_runs=1,
    # Each check loads the gate's library, a few CPU-seconds a minute: a person turns it on where prices come live.
    is_paused_upon_creation=True,
    # The next check comes in a minute: nothing is gained by retries.
    default_args=DEFAULT_ARGS | {"execution_timeout": timedelta(minutes=5), "retries": 0},
    tags=["coral"],
    doc_md=__doc__,
)
def coral_price_watch() -> None:
    """One task: check, and update the asset only if the watch fires."""

    @task(outlets=[PRICE_CHANGE])
    def check_prices(outlet_events: Any = None) -> dict[str, Any]:
        """Compare used prices with their anchors; what moved. Skipped if nothing did."""
        from coral_tasks.tasks import price_watching

        moved = price_watching.moved_prices()
        skip_unless(moved, "no used price moved beyond the limits")
        outlet_events[PRICE_CHANGE].extra = {"moved": moved}
        return {"moved": moved}

    check_prices()


coral_price_watch()
