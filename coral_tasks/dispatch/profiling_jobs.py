"""One profiling job on one idle node, through its agent: start it once, wait for it, bring back what it wrote.

Owns the conversation with that agent. A job is known by its id: whoever asks again, after a crash too, gets the
result of the job that was started and never starts a second one. Only the agent of the node is fenced, under a new
epoch; a dispatch that had it then looks again. Rows come back as the text that the job wrote.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coral_tasks.dispatch.dispatcher import observe_links
from coral_tasks.dispatch.epochs import Epochs
from coral_tasks.dispatch.transport import AgentLinks
from coral_tasks.domain.errors import EngineFault, Unavailable, UnknownName
from coral_tasks.domain.names import NodeId
from coral_tasks.domain.validation import Checks
from coral_tasks.protocol.messages import (
    Command,
    Fence,
    FetchJob,
    JobResult,
    NodeReport,
    Outcome,
    OutcomeStatus,
    Profile,
    Report,
    SlotState,
    ToController,
)

_ATTEMPTS = 3
_TICK_S = 0.1
_ID_CHARS, _REQUEST_CHARS = 200, 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingJob:
    """What is to run where. ``request``: JSON text for the agent's ``profile_command``.

    ``timeout_s``: the agent ends the job then. ``id``: names this one run of the job for ever.
    """

    id: str
    node: NodeId
    request: str
    timeout_s: float

    def __post_init__(self) -> None:
        checks = Checks("profiling_job", self.id)
        checks.named(id=self.id, node=self.node)
        checks.require(len(self.id) <= _ID_CHARS, f"id must not exceed {_ID_CHARS} characters", str(len(self.id)))
        fits = len(self.request) <= _REQUEST_CHARS
        checks.require(fits, f"request must not exceed {_REQUEST_CHARS} characters", str(len(self.request)))
        checks.positive(timeout_s=self.timeout_s)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPolicy:
    """Limits of the conversation, in seconds.

    ``observe_s``: wait for agents' first answers. ``answer_s``: wait for one answer of the node's agent, the question
    repeated every ``resend_s``. ``silent_s``: how long the agent may stay away while the job runs (it may restart).
    ``grace_s``: what the agent may take beyond the job's own limit to end it.
    """

    observe_s: float = 5.0
    answer_s: float = 10.0
    resend_s: float = 1.0
    poll_s: float = 2.0
    silent_s: float = 120.0
    grace_s: float = 60.0


def run_profiling_job(
    job: ProfilingJob,
    endpoints: Mapping[str, str],
    keys: Path,
    *,
    epochs: Epochs,
    policy: JobPolicy | None = None,
    controller: str = "controller",
) -> str:
    """Rows that the job wrote, as text.

    Raises Unavailable if the node is busy or excluded, its agent does not answer or another controller took over;
    UnknownName if no agent has such a node; EngineFault with the agent's words if the job failed, got lost or outlived
    its limit; StorageFault if no epoch can be taken. After Unavailable or a crash the same job may be asked for again.
    """
    with AgentLinks(endpoints, keys, controller=controller) as links:
        talk = _Talk(links=links, job=job, epochs=epochs, policy=policy or JobPolicy())
        newest_epoch = talk.find()
        result = talk.fetch()
        if result.status == "unknown":
            talk.start(newest_epoch)
            result = talk.fetch()
        return talk.wait(result)


def why_not_idle(node: NodeReport) -> str:
    """Why ``node`` cannot be measured now; "" if it can."""
    if node.state is not SlotState.EMPTY:
        return f"{node.state.value} {node.spec.instance}" if node.spec is not None else f"it is {node.state.value}"
    return f"excluded: {node.excluded}" if node.excluded else ""


@dataclass(slots=True, kw_only=True)
class _Talk:
    """The conversation about one job. ``agent``: of the node, known after ``find``."""

    links: AgentLinks
    job: ProfilingJob
    epochs: Epochs
    policy: JobPolicy
    agent: str = ""

    def find(self) -> int:
        """Look for the node's agent among all; the newest epoch that any agent has seen."""
        node = self.job.node
        seen = observe_links(self.links, None, wait_s=self.policy.observe_s)
        if node not in seen.nodes:
            if seen.unreachable:
                raise Unavailable(f"node {node} is not found: no answer from {', '.join(seen.unreachable)}")
            raise UnknownName(kind="node", name=node, known=[str(one) for one in seen.nodes])
        self.agent = seen.targets[node].agent
        return seen.newest_epoch

    def start(self, newest_epoch: int) -> None:
        """Make the agent start the job, under a fence that no other controller is behind."""
        for _ in range(_ATTEMPTS):
            epoch = self.epochs.next_epoch(f"profiling {self.job.id}", at_least=newest_epoch)
            owner = secrets.token_hex(8)
            fence = Fence(request=f"{owner} fence {epoch}", epoch=epoch, round=1, owner=owner)
            report = self._ask(fence)
            if not isinstance(report, Report):
                raise Unavailable(f"no answer from agent {self.agent} of node {self.job.node}")
            newest_epoch = max(epoch, report.epoch)
            if report.accepted and self._start_under(fence, report):
                return
        told = f"other controllers keep taking agent {self.agent} over"
        raise Unavailable(f"{told}; node {self.job.node} is left to them")

    def _start_under(self, fence: Fence, report: Report) -> bool:
        """Whether the job was started, now or by an earlier try of the same id; False: look again."""
        command = Command(
            id=f"profiling {self.job.id}",  # the agent answers a replay with the first outcome and starts nothing
            epoch=fence.epoch,
            round=fence.round,
            owner=fence.owner,
            incarnation=report.incarnation,
            node=self.job.node,
            action=Profile(job=self.job.id, request=self.job.request, timeout_s=self.job.timeout_s),
        )
        self._require_idle(report)
        outcome = self._ask(command)
        if not isinstance(outcome, Outcome):
            raise Unavailable(f"agent {self.agent} did not say whether it started job {self.job.id}; ask again")
        if outcome.status in (OutcomeStatus.STALE, OutcomeStatus.RESTARTED):
            return False
        if outcome.status is not OutcomeStatus.DONE:
            raise Unavailable(f"node {self.job.node} refused: {outcome.status.value}, {outcome.detail}")
        return True

    def _require_idle(self, report: Report) -> None:
        """Only an empty node is measured: beside an engine neither would show what it can."""
        node = next((one for one in report.nodes if one.node == self.job.node), None)
        reason = "its agent has it no more" if node is None else why_not_idle(node)
        if reason:
            raise Unavailable(f"node {self.job.node} cannot be measured: {reason}")

    def fetch(self) -> JobResult:
        """State of the job as its agent knows it."""
        result = self._fetch()
        if result is None:
            raise Unavailable(f"no answer from agent {self.agent} of node {self.job.node}")
        return result

    def _fetch(self) -> JobResult | None:
        answer = self._ask(FetchJob(request=f"fetch {secrets.token_hex(6)}", job=self.job.id))
        return answer if isinstance(answer, JobResult) else None

    def wait(self, result: JobResult) -> str:
        """Rows of the job once it has ended."""
        answered_at_s = time.monotonic()
        deadline_s = answered_at_s + self.job.timeout_s + self.policy.grace_s
        while result.status == "running":
            if time.monotonic() >= deadline_s:
                raise EngineFault(f"job {self.job.id} on {self.job.node} still runs after {self.job.timeout_s:g} s")
            time.sleep(self.policy.poll_s)
            answer = self._fetch()
            now_s = time.monotonic()
            if answer is not None:
                result, answered_at_s = answer, now_s
            elif now_s - answered_at_s >= self.policy.silent_s:
                told = f"agent {self.agent} is silent for {self.policy.silent_s:g} s while job {self.job.id} runs"
                raise Unavailable(f"{told}; ask for the same job again")
        return self._rows(result)

    def _rows(self, result: JobResult) -> str:
        if result.status == "succeeded":
            return result.rows
        detail = result.detail
        if result.status == "unknown":
            seen = observe_links(self.links, None, wait_s=self.policy.observe_s).nodes.get(self.job.node)
            detail = "its agent has no result of it" + (f": {seen.detail}" if seen is not None and seen.detail else "")
        raise EngineFault(f"job {self.job.id} on {self.job.node} failed: {detail}")

    def _ask(self, message: Fence | Command | FetchJob) -> ToController | None:
        """The answer of the node's agent; None if none came in time."""
        deadline_s = time.monotonic() + self.policy.answer_s
        send_at_s = 0.0
        while (now_s := time.monotonic()) < deadline_s:
            if now_s >= send_at_s:
                sent = self.links.send(self.agent, message)
                send_at_s = now_s + (self.policy.resend_s if sent else _TICK_S)
            for who, one in self.links.receive(_TICK_S):
                if who == self.agent and _answers(one, message):
                    return one
        return None


def _answers(one: ToController, message: Fence | Command | FetchJob) -> bool:
    match one:
        case Outcome():
            return isinstance(message, Command) and one.command == message.id
        case Report():
            return isinstance(message, Fence) and one.request == message.request
        case JobResult():
            return isinstance(message, FetchJob) and one.request == message.request
