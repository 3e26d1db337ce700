"""A person's consent to a change: when it is needed, what he is shown, what he said, and whether that still counts.

Owns ``approval.json`` (the question, with the fleet it was asked on) and ``answer.json`` of a run. A question asked
again is a new one: an older answer does not count for it. How the question reaches a person is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from coral_tasks.domain.errors import ApprovalMissing, StaleInput, ValidationFailed
from coral_tasks.tasks import changes, guard, inputs

if TYPE_CHECKING:
    from coral_tasks.domain.fleet import Fleet
    from coral_tasks.domain.plan import AllocationPlan
    from coral_tasks.domain.transition import Transition
    from coral_tasks.settings import Settings
    from coral_tasks.storage.runs import Run
    from coral_tasks.tasks.changes import Change
    from coral_tasks.tasks.inputs import PlanningInputs

QUESTION: Final = "approval.json"
ANSWER: Final = "answer.json"
MAX_SENTENCES: Final = 8
ONE_AT_A_TIME: Final = (
    "until the answer, or the end of its time, no other allocation run starts: the fleet follows no new demand and no"
    " new price"
)


def reasons(settings: Settings, change: Change) -> list[str]:
    """Why a person must decide on ``change``; empty if it is within the limits, or nothing would change."""
    if change.is_empty:
        return []
    found = []
    cost, fleet = change.cost_change, change.fleet_change
    if cost is None:
        found.append("the cost of what runs is not known" if change.nodes_before else "nothing runs yet")
    elif abs(cost) > settings.approval_cost_change:
        found.append(f"the cost changes by {cost:+.1%}, more than {settings.approval_cost_change:.1%}")
    if fleet is not None and fleet > settings.approval_fleet_change:
        words = f"{change.nodes_started} nodes start and {change.nodes_stopped} stop of {change.nodes_before} in use"
        found.append(f"{words}: {fleet:.1%}, more than {settings.approval_fleet_change:.1%}")
    return found


def no_question(run: Run, why: str) -> None:
    """Note that nobody need be asked, and why."""
    run.put_json(QUESTION, {"needed": False, "why": [why]}, replace=True)


def ask(
    settings: Settings, run: Run, *, change: Change, why: Sequence[str], seen: Fleet, text: str, now: datetime
) -> dict[str, Any]:
    """Write the question; subject, body (Markdown) and time for an answer in seconds.

    Raises StaleInput if no time is left in which the plan could still be sent.
    """
    left = min(settings.approval_timeout_s, settings.plan_max_age_s - guard.age_s(run, now))
    if left <= 0:
        message = (
            f"the run is older than CORAL_PLAN_MAX_AGE_S ({settings.plan_max_age_s:g} s): nobody is asked any more"
        )
        raise StaleInput(message)
    question = {
        "needed": True,
        "why": list(why),
        "asked_at": now.isoformat(),
        "timeout_s": left,
        "subject": f"Coral: {_headline(change)}",
        "body": text,
        "fleet": fingerprint(seen),
    }
    run.put_json(QUESTION, question, replace=True)
    return question


def _headline(change: Change) -> str:
    before = "?" if change.cost_before is None else f"{change.cost_before:,.2f}"
    return f"{before} → {change.cost_after:,.2f} USD/h, {change.nodes_started} nodes start, {change.nodes_stopped} stop"


def fingerprint(fleet: Fleet) -> list[str]:
    """What is held: every instance and every node, as text; two looks at an unchanged fleet give the same."""
    instances = [f"{one.id} {one.template} {' '.join(one.nodes)}" for one in fleet.instances]
    return sorted(instances) + sorted(f"node {one.id}" for one in fleet.nodes)


def record_answer(run: Run, *, approved: bool, by: str, timed_out: bool, now: datetime) -> str:
    """Keep what was said to the question as it stands; in words. Raises ApprovalMissing if there was no question."""
    question = _question(run)
    if not question.get("needed"):
        message = f"run {run.id} has asked nothing, so there is nothing to answer"
        raise ApprovalMissing(message)
    answer = {"asked_at": question["asked_at"], "approved": approved, "by": by, "timed_out": timed_out}
    run.put_json(ANSWER, {**answer, "at": now.isoformat()}, replace=True)
    return _words(answer, question)


def _question(run: Run) -> Mapping[str, Any]:
    if not run.path(QUESTION).exists():
        message = f"mode approve: nobody was asked about the plan of run {run.id}; its task decide must run first"
        raise ApprovalMissing(message)
    found: Mapping[str, Any] = run.get_json(QUESTION)
    return found


def _words(answer: Mapping[str, Any], question: Mapping[str, Any]) -> str:
    if answer["timed_out"]:
        return f"not approved: no answer within {question['timeout_s']:,.0f} s; nothing changes"
    return f"{'approved' if answer['approved'] else 'rejected'} by {answer['by']}"


def refusal(run: Run) -> str:
    """Why the plan may not be sent although the question was answered; "" if it may.

    Raises ApprovalMissing as long as a needed answer is not there, whatever Airflow thinks of the task that asks.
    """
    question = _question(run)
    if not question["needed"]:
        return ""
    answer = run.get_json(ANSWER) if run.path(ANSWER).exists() else {}
    if answer.get("asked_at") != question["asked_at"]:
        message = f"mode approve: nobody has decided on the plan of run {run.id}: {'; '.join(question['why'])}"
        raise ApprovalMissing(message)
    return "" if answer["approved"] else _words(answer, question)


def was_asked(run: Run) -> bool:
    """Whether a person had to decide on this run's plan."""
    return bool(_question(run)["needed"])


def require_still_valid(
    settings: Settings, run: Run, plan: AllocationPlan, seen: Fleet, fetch: Callable[[], PlanningInputs]
) -> None:
    """An approved plan is sent only to what was shown: same holdings, inputs that did not drift. Raises StaleInput.

    ``fetch``: what the sources say now.
    """
    question = _question(run)
    moved = sorted({*question["fleet"]} ^ {*fingerprint(seen)})
    drifted = [f"the fleet is not as it was shown: {_some(moved)}"] if moved else []
    drifted += _drifted_inputs(settings, run, plan, fetch)
    if drifted:
        message = f"the approval of run {run.id} came too late, its plan is not sent: {'; '.join(drifted)}"
        raise StaleInput(message)


def _some(items: Sequence[str], most: int = 3) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _drifted_inputs(
    settings: Settings, run: Run, plan: AllocationPlan, fetch: Callable[[], PlanningInputs]
) -> list[str]:
    """What the sources say now against what the plan rests on, where it matters to the plan."""
    try:
        now = fetch()
    except ValidationFailed as error:
        return [f"newer inputs do not pass their checks: {_some([str(one) for one in error.violations])}"]
    then, limit = inputs.load_inputs(settings, run.id), settings.approval_drift
    used = _used_nodes(plan)
    old, new = changes.prices_by_pool(then.prices), changes.prices_by_pool(now.prices)
    found = [
        f"price of {pool}: {changes.in_words(old.get(pool), new.get(pool), 'USD/h')}"
        for pool in sorted(used)
        if changes.relative(old.get(pool), new.get(pool)) > limit
    ]
    nodes = changes.nodes_by_pool(now.availability)
    found += [
        f"{pool}: the plan uses {count} nodes, {nodes.get(pool, 0):g} can be had"
        for pool, count in sorted(used.items())
        if nodes.get(pool, 0) < count
    ]
    old, new = changes.newest_rates(then.demand), changes.newest_rates(now.demand)
    found += [
        f"demand for {model}: {changes.in_words(old.get(model), new.get(model), 'requests/s')}"
        for model in sorted({*old, *new})
        if changes.relative(old.get(model), new.get(model)) > limit
    ]
    return found


def _used_nodes(plan: AllocationPlan) -> dict[str, int]:
    used: dict[str, int] = {}
    for row in plan.instances:
        for configuration, count in plan.template(row.template).nodes.counts:
            pool = f"{row.region} {configuration} {row.market.value}"
            used[pool] = used.get(pool, 0) + count * row.count
    return used


def body(
    change: Change, why: Sequence[str], sentences: Sequence[str], transition: Transition, links: Mapping[str, str]
) -> str:
    """The question in Markdown: what changes, why it is asked, steps, explanation. ``links``: text → address."""
    kinds: dict[str, int] = {}
    for step in transition.steps:
        kinds[step.kind.value] = kinds.get(step.kind.value, 0) + 1
    steps = ", ".join(f"{count} × {kind.replace('_', ' ')}" for kind, count in kinds.items()) or "none"
    dips = [f"{one.what}: capacity falls to {one.lowest:.3g}, below {one.floor:.3g}" for one in transition.dips]
    parts = [
        f"**{_plain(_headline(change))}**",
        _list("Asked because", why),
        f"Meanwhile: {ONE_AT_A_TIME}.",
        _list("Starts", change.started),
        _list("Stops", change.stopped),
        _list("Dips on the way", dips) or "No model's capacity dips on the way.",
        f"Steps: {steps}.",
        *(_list(f"Changed {name}", found) for name, found in change.moved.items()),
        _list("Why this plan", sentences[:MAX_SENTENCES]),
        " · ".join(f"[{name}]({address})" for name, address in links.items()),
    ]
    return "\n\n".join(part for part in parts if part)


def _list(title: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    shown = [f"- {_plain(item)}" for item in items[: changes.MAX_LISTED]]
    more = len(items) - len(shown)
    return "\n".join([f"**{title}**", "", *shown, *([f"- … and {more} more"] if more else [])])


def _plain(text: str) -> str:
    """Names come from outside: what Markdown or HTML would read as more than text is escaped."""
    return "".join(f"\\{one}" if one in "\\`*_[]<>#|~!&" else " " if one in "\r\n" else one for one in text)


def utc_now() -> datetime:
    """The clock, in UTC."""
    return datetime.now(UTC)
