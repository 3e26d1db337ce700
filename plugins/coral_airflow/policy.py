"""Defaults that every Coral DAG shares: retries for faults only, time limits, owner. Owns no task."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import Asset, ExceptionRetryPolicy, RetryAction, RetryRule

from coral_tasks.settings import gpu_queues

LIBRARY = Asset(name="coral_template_library", uri="coral://template-library/current")
SHORTAGE = Asset(name="coral_shortage", uri="coral://fleet/shortage")
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


GPU_TYPES = ("A100-40GB", "A100-80GB", "A10G", "B200", "H100", "H200", "L4", "L40S", "T4", "V100", "cpu")
"""Of the catalogue, which is not read at every parse; a test compares the two."""


def gpu_pool(gpu_type: str) -> str:
    """Pool that bounds how many nodes of a GPU type are measured at once; made by ``prepare.py``."""
    return f"coral_gpu_{gpu_type}"


def gpu_queue(gpu_type: str) -> str:
    """Queue of measuring tasks: the default one, or with CORAL_GPU_QUEUES one for each GPU type."""
    return f"gpu-{gpu_type}" if gpu_queues() else "default"


MAX_EVENTS = 20
"""Asset events that a run tells of; it reads the newest state itself, whatever they say."""


def described_events(events: Any) -> list[dict[str, Any]]:
    """Asset events that started a run, as plain values; none for other runs."""
    found = [
        {"asset": str(getattr(asset, "name", asset)), "extra": dict(event.extra or {})}
        for asset, some in (events or {}).items()
        for event in some
    ]
    return found[-MAX_EVENTS:]


def skip_unless(found: Any, reason: str) -> None:
    """End a task as skipped, so that its asset gets no event, unless something was found."""
    from airflow.sdk.exceptions import AirflowSkipException

    if not found:
        raise AirflowSkipException(reason)


DEFAULT_ARGS: dict[str, Any] = {
    "owner": "coral",
    "retries": 2,
    "retry_delay": timedelta(seconds=10),
    "retry_policy": RETRY_FAULTS_ONLY,
    "execution_timeout": timedelta(minutes=30),
    "on_failure_callback": record_failure,
}
