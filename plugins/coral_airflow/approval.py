"""The operator that asks a person in Airflow's UI. What is asked and what the answer means is ``tasks.allocation``'s.

While it waits the task is in the state ``awaiting_input``: no worker and no trigger, so nothing can be sent twice by a
restart. The scheduler ends the wait at the time limit with the answer "Reject".
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator

from coral_airflow.page_link import airflow_root, run_address, transition_address


class PlanApproval(ApprovalOperator):
    """Ask whether the run's plan may be sent, if it must be asked; after a no, what comes next is skipped."""

    def __init__(self, **kwargs: Any) -> None:
        # The real subject, body and time limit are known when the task runs.
        super().__init__(
            subject="Coral: a change of the fleet needs approval",
            body="",
            defaults=self.REJECT,
            response_timeout=timedelta(hours=1),
            **kwargs,
        )

    def execute(self, context: Any) -> Any:
        """Return at once if nobody need be asked; else park the task until the answer or the time limit."""
        from coral_tasks.tasks import allocation

        question = allocation.decide(context["run_id"], links(context["run_id"]))
        if question is None:
            return None
        self.subject, self.body = question["subject"], question["body"]
        self.response_timeout = timedelta(seconds=question["timeout_s"])
        return super().execute(context)

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Keep the answer with the run before anything acts on it."""
        from coral_tasks.tasks import allocation

        if "error" not in event:
            allocation.record_answer(
                context["run_id"],
                approved=event["chosen_options"] == [self.APPROVE],
                by=_name(event.get("responded_by_user")),
                timed_out=bool(event.get("timedout")),
            )
        return super().execute_complete(context, event)


def links(run_id: str) -> dict[str, str]:
    """Where the question's reader finds more."""
    return {
        "This run in Coral": run_address(run_id),
        "The transition, step by step": transition_address(run_id),
        "All of Coral": f"{airflow_root()}/plugin/coral",
    }


def _name(user: Mapping[str, Any] | None) -> str:
    return str((user or {}).get("name") or (user or {}).get("id") or "someone unknown")
