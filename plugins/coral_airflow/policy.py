"""Defaults that every Coral DAG shares: retries for faults only, time limits, owner. Owns no task."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import Asset, ExceptionRetryPolicy, RetryAction, RetryRule

LIBRARY = Asset(name="coral_template_library", uri="coral://template-library/current")
PRICE_CHANGE = Asset(name="coral_price_change", uri="coral://prices/current")

# A fixed date: anything that moves would make a new DAG version at every parse.
START = datetime(2026, 1, 1, tzinfo=UTC)

RETRY_FAULTS_ONLY = ExceptionRetryPolicy(
    rules=[
        RetryRule(
            exception="coral_tasks.domain.errors.ExpectedOutcome",
            action=RetryAction.FAIL,
            reason="an expected outcome: the same input would give the same answer",
        ),
        RetryRule(
            exception="coral_tasks.domain.errors.PlanRejected",
            action=RetryAction.FAIL,
            reason="the independent check refused the plan: a bug, not a passing fault",
        ),
    ]
)


def record_failure(context: Any) -> None:
    """Keep the message of a failed task beside what its run wrote. Never raises."""
    from coral_tasks.tasks.failures import record_failure as record

    task = context["task_instance"]
    suffix = f"-{task.map_index}" if task.map_index >= 0 else ""
    record(context["run_id"], f"{task.task_id}{suffix}", context.get("exception"))


DEFAULT_ARGS: dict[str, Any] = {
    "owner": "coral",
    "retries": 2,
    "retry_delay": timedelta(seconds=10),
    "retry_policy": RETRY_FAULTS_ONLY,
    "execution_timeout": timedelta(minutes=30),
    "on_failure_callback": record_failure,
}
