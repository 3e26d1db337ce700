"""The controller of one transition as a pure state machine: events in, instructions out; time comes with the event.

Steps of one kind that follow each other run together; the next group begins when every step of this one is seen to
be true in agents' reports. Commands are sent again until answered; the first answer counts. Anything that does not
go as planned ends the run with reasons: the caller observes anew, under a higher round, and plans again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from msgspec.structs import replace as with_

from coral_tasks.domain.transition import Step, StepKind, Transition
from coral_tasks.protocol.messages import (
    Action,
    Command,
    Drain,
    NodeReport,
    Observe,
    Outcome,
    OutcomeStatus,
    Report,
    SlotState,
    Start,
    StartSpec,
    Stop,
    ToAgent,
)

# Large fleets are asked less often, so that answers never pile up.
_POLL_S_PER_AGENT = 0.004
_GONE = (SlotState.FAILED, SlotState.STOPPING, SlotState.DRAINING, SlotState.DRAINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerPolicy:
    """Limits of one dispatch, in seconds.

    ``resend_s``: first wait before a command is sent again, doubled each time up to ``resend_max_s``.
    ``command_timeout_s``: how long a command may stay unanswered. ``drain_timeout_s``: bound of a drain.
    """

    poll_s: float = 0.5
    resend_s: float = 0.5
    resend_max_s: float = 5.0
    command_timeout_s: float = 30.0
    ready_timeout_s: float = 1800.0
    drain_timeout_s: float = 300.0
    stop_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a node is found: its agent and the agent run that was observed."""

    agent: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mission:
    """A transition with all that is needed to carry it out. ``specs``: by instance, for rank 0."""

    transition: Transition
    epoch: int
    round: int
    owner: str
    targets: Mapping[str, Target]
    specs: Mapping[str, StartSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeArrived:
    """An agent answered a command."""

    outcome: Outcome
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportArrived:
    """An agent reported."""

    report: Report
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Time passed."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActDone:
    """What Publish, Provision or Release asked for is done; ``problem`` is "" or says why it is not."""

    problem: str
    now_s: float


ControllerEvent = OutcomeArrived | ReportArrived | TimePassed | ActDone


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send ``message`` to ``agent``; loss is allowed."""

    agent: str
    message: ToAgent


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Publish the routing table of ``routed`` and answer with ActDone."""

    routed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provision:
    """Obtain ``nodes`` (placeholder ids) and answer with ActDone."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Give ``nodes`` back and answer with ActDone."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsDone:
    """Progress: these steps are complete."""

    steps: tuple[Step, ...]


ControllerInstruction = Send | Publish | Provision | Release | StepsDone


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that did not go as planned. ``superseded``: a newer controller is at work."""

    node: str
    text: str
    superseded: bool = False


@dataclass(slots=True, kw_only=True)
class _Pending:
    agent: str
    command: Command
    sent_at_s: float
    wait_s: float
    first_at_s: float


@dataclass(slots=True, kw_only=True)
class ControllerMachine:
    """Carries out one Mission. ``finished`` turns True at the end; ``problems`` is empty if all went well."""

    mission: Mission
    policy: ControllerPolicy = field(default_factory=ControllerPolicy)
    finished: bool = False
    problems: list[Problem] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    num_commands: int = 0
    _groups: list[tuple[Step, ...]] = field(default_factory=list)
    _pending: dict[str, _Pending] = field(default_factory=dict)
    _seen: dict[str, NodeReport] = field(default_factory=dict)
    _acting: bool = False
    _begun_at_s: float = 0.0
    _polled_at_s: float = 0.0
    _polls: int = 0
    _first_poll: int = 0
    _polled_agents: int = 0

    def begin(self, now_s: float) -> list[ControllerInstruction]:
        """First instructions."""
        steps = self.mission.transition.steps
        self._groups = [tuple(group) for _, group in groupby(steps, key=lambda step: step.kind)]
        return self._enter_group(now_s)

    def handle(self, event: ControllerEvent) -> list[ControllerInstruction]:
        """Instructions that follow from ``event``; none once finished."""
        if self.finished:
            return []
        match event:
            case OutcomeArrived():
                self._on_outcome(event.outcome)
            case ReportArrived():
                # looked at with the next tick: a thousand agents' reports are then one look, not a thousand
                self._on_report(event.report)
                return self._advance(event.now_s) if self.problems else []
            case ActDone():
                self._acting = False
                if event.problem:
                    self.problems.append(Problem(node="", text=event.problem))
            case TimePassed():
                return [*self._on_time(event.now_s), *self._advance(event.now_s)]
        return self._advance(event.now_s)

    # --- groups -------------------------------------------------------------------------------------------------

    def _enter_group(self, now_s: float) -> list[ControllerInstruction]:
        """Begin the first group that is not complete at once."""
        if not self._groups:
            self.finished = True
            return []
        self._begun_at_s = now_s
        self._seen.clear()
        self._first_poll = self._polls + 1
        group = self._groups[0]
        nodes = tuple(node for step in group for node in step.nodes)
        match group[0].kind:
            case StepKind.ROUTE:
                self._acting = True
                return [Publish(routed=group[-1].routed)]
            case StepKind.PROVISION:
                self._acting = True
                return [Provision(nodes=nodes)]
            case StepKind.RELEASE:
                self._acting = True
                return [Release(nodes=nodes)]
            case StepKind.WAIT_READY:
                return self._poll(now_s)
        return [self._issue(step, node, now_s) for step in group for node in step.nodes]

    def _issue(self, step: Step, node: str, now_s: float) -> Send:
        mission = self.mission
        target = mission.targets[node]
        command = Command(
            id=f"{mission.epoch}.{mission.round}.{step.number}.{node}",
            epoch=mission.epoch,
            round=mission.round,
            owner=mission.owner,
            incarnation=target.incarnation,
            node=node,
            action=self._action(step, node),
        )
        pending = _Pending(
            agent=target.agent, command=command, sent_at_s=now_s, wait_s=self.policy.resend_s, first_at_s=now_s
        )
        self._pending[command.id] = pending
        self.num_commands += 1
        return Send(agent=target.agent, message=command)

    def _action(self, step: Step, node: str) -> Action:
        instance = str(step.instance)
        if step.kind is StepKind.START:
            spec = self.mission.specs[instance]
            return Start(spec=spec_for(spec, node))
        if step.kind is StepKind.DRAIN:
            return Drain(instance=instance, timeout_s=self.policy.drain_timeout_s)
        return Stop(instance=instance)

    def _advance(self, now_s: float) -> list[ControllerInstruction]:
        """Go on if the group is complete, end if something went wrong and nothing is open any more."""
        if self.problems:
            self.finished = not self._acting
            return []
        if not self._groups or self._pending or self._acting:
            return []
        group = self._groups[0]
        if not all(self._complete(step) for step in group):
            return []
        self._groups.pop(0)
        if group[0].kind is StepKind.PROVISION:
            # the nodes have other names and places than the placeholders: observe and plan again
            self.finished = True
            return [StepsDone(steps=group)]
        return [StepsDone(steps=group), *self._enter_group(now_s)]

    def _complete(self, step: Step) -> bool:
        match step.kind:
            case StepKind.WAIT_READY:
                # every node is looked at, so that each one's trouble is noted
                verdicts = [self._is_ready(step, node) for node in step.nodes]
                return all(verdicts)
            case StepKind.DRAIN:
                return all(self._holds(step, node, absent=(SlotState.DRAINED, SlotState.FAILED)) for node in step.nodes)
            case StepKind.STOP:
                return all(self._holds(step, node, absent=()) for node in step.nodes)
        return True

    def _is_ready(self, step: Step, node: str) -> bool:
        """Whether the node's part of the instance is ready; notes a problem if it can no longer become so."""
        seen = self._seen.get(node)
        if seen is None:
            return False
        if seen.spec is None or seen.spec.instance != step.instance:
            self.problems.append(Problem(node=node, text=f"{step.instance} is not on {node} any more"))
            return False
        if seen.state in _GONE:
            text = f"{step.instance} on {node} is {seen.state.value}: {seen.detail}"
            self.problems.append(Problem(node=node, text=text))
            return False
        return seen.state is SlotState.READY

    def _holds(self, step: Step, node: str, *, absent: tuple[SlotState, ...]) -> bool:
        """Whether the node has let go of the instance, or is in one of the states ``absent``."""
        seen = self._seen.get(node)
        if seen is None:
            return False
        return seen.spec is None or seen.spec.instance != step.instance or seen.state in absent

    # --- answers and time ---------------------------------------------------------------------------------------

    def _on_outcome(self, outcome: Outcome) -> None:
        pending = self._pending.pop(outcome.command, None)
        if pending is None:
            return
        self.outcomes[outcome.command] = outcome
        if outcome.status is not OutcomeStatus.DONE:
            node = pending.command.node
            text = f"{node} refused {outcome.command}: {outcome.status.value}, {outcome.detail}"
            superseded = outcome.status is OutcomeStatus.STALE
            self.problems.append(Problem(node=node, text=text, superseded=superseded))

    def _on_report(self, report: Report) -> None:
        """Only answers to polls of this group count: an older report may show the time before the commands."""
        prefix, _, number = report.request.rpartition("#")
        if prefix == self._poll_prefix() and number.isdigit() and int(number) >= self._first_poll:
            self._seen.update({one.node: one for one in report.nodes})
        if report.epoch > self.mission.epoch:
            text = f"epoch {report.epoch} is in force on agent {report.agent}; ours is {self.mission.epoch}"
            self.problems.append(Problem(node="", text=text, superseded=True))

    def _poll_prefix(self) -> str:
        return f"{self.mission.owner} {self.mission.epoch}.{self.mission.round}"

    def _on_time(self, now_s: float) -> list[ControllerInstruction]:
        if self.problems:
            return []
        sends: list[ControllerInstruction] = []
        for pending in list(self._pending.values()):
            sends += self._resend(pending, now_s)
        interval_s = max(self.policy.poll_s, _POLL_S_PER_AGENT * self._polled_agents)
        if not self._pending and now_s - self._polled_at_s >= interval_s:
            sends += self._poll(now_s)
        self._check_group_deadline(now_s)
        return sends

    def _resend(self, pending: _Pending, now_s: float) -> list[ControllerInstruction]:
        if now_s - pending.first_at_s >= self.policy.command_timeout_s:
            node = pending.command.node
            text = f"agent {pending.agent} did not answer {pending.command.id} in {self.policy.command_timeout_s:g} s"
            self._pending.pop(pending.command.id)
            self.problems.append(Problem(node=node, text=text))
            return []
        if now_s - pending.sent_at_s < pending.wait_s:
            return []
        pending.sent_at_s = now_s
        pending.wait_s = min(2 * pending.wait_s, self.policy.resend_max_s)
        return [Send(agent=pending.agent, message=pending.command)]

    def _poll(self, now_s: float) -> list[ControllerInstruction]:
        if not self._groups or self._groups[0][0].kind in (StepKind.ROUTE, StepKind.PROVISION, StepKind.RELEASE):
            return []
        self._polled_at_s = now_s
        self._polls += 1
        nodes = [node for step in self._groups[0] for node in step.nodes]
        agents = sorted({self.mission.targets[node].agent for node in nodes})
        self._polled_agents = len(agents)
        return [Send(agent=agent, message=Observe(request=f"{self._poll_prefix()}#{self._polls}")) for agent in agents]

    def _check_group_deadline(self, now_s: float) -> None:
        if not self._groups or self._acting:
            return
        kind = self._groups[0][0].kind
        limits = {
            StepKind.WAIT_READY: self.policy.ready_timeout_s,
            StepKind.DRAIN: self.policy.drain_timeout_s + self.policy.stop_timeout_s,
        }
        limit_s = limits.get(kind, self.policy.stop_timeout_s + self.policy.command_timeout_s)
        if now_s - self._begun_at_s < limit_s:
            return
        late = [step for step in self._groups[0] if not self._complete(step)]
        for step in late:
            text = f"{kind.value} of {step.instance} did not end in {limit_s:g} s"
            self.problems.append(Problem(node=step.nodes[0] if step.nodes else "", text=text))


def spec_for(spec: StartSpec, node: str) -> StartSpec:
    """The same instance as seen from ``node``: its rank set. ValueError if the node holds no part of it."""
    return with_(spec, rank=spec.nodes.index(node))
