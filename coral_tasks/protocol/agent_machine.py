"""The node agent as a pure state machine: events in, changes and instructions out; time comes with the event.

``handle`` never changes the machine. The shell writes ``changes`` to the journal, then calls ``commit``, then carries
out the instructions: what is not recorded is not done. Seconds are of the agent's monotonic clock, so a wall clock
that jumps changes nothing. docs/protocol.md holds the table of states.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from msgspec import Struct
from msgspec.structs import replace as with_

from coral_tasks.protocol.messages import (
    Command,
    Drain,
    Fence,
    Outcome,
    OutcomeStatus,
    Profile,
    SlotState,
    Start,
    StartSpec,
    Stop,
)

MAX_RETIRED = 32
MAX_OUTCOMES = 4096

_RUNNING = (SlotState.STARTING, SlotState.READY)
_DOWN = (SlotState.EMPTY, SlotState.FAILED, SlotState.BACKOFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPolicy:
    """Limits of one agent, in seconds where the name says so.

    ``drain_settle_s``: how long an engine must stay idle before it counts as drained, because a gateway reads a new
    routing table with a delay. ``exclusion_s``: how long a node whose engine kept crashing is not offered.
    """

    start_timeout_s: float = 1800.0
    backoff_base_s: float = 2.0
    backoff_max_s: float = 60.0
    max_restarts: int = 5
    stable_s: float = 300.0
    unhealthy_s: float = 30.0
    drain_settle_s: float = 2.0
    exclusion_s: float = 600.0


class Slot(Struct, frozen=True, kw_only=True):
    """One node: its state and the engine launch that belongs to it. Written to the journal as it stands.

    ``launch``: id of the process that exists or is about to, "" if there is none. ``doomed``: it is being killed.
    """

    node: str
    state: SlotState = SlotState.EMPTY
    spec: StartSpec | None = None
    job: str = ""
    request: str = ""
    launch: str = ""
    num_launches: int = 0
    doomed: bool = False
    restarts: int = 0
    deadline_s: float = 0.0
    timeout_s: float = 0.0
    ready_since_s: float = 0.0
    healthy_at_s: float = 0.0
    idle_since_s: float | None = None
    in_flight: int | None = None
    excluded: str = ""
    excluded_until_s: float = 0.0
    detail: str = ""
    retired: tuple[str, ...] = ()


class FenceState(Struct, frozen=True, kw_only=True):
    """Newest (epoch, round) seen and the controller that holds the epoch."""

    epoch: int = 0
    round: int = 0
    owner: str = ""

    def admits(self, epoch: int, round_: int, owner: str) -> bool:
        """Whether a message of that fence may be carried out. One epoch belongs to one controller."""
        if epoch == self.epoch and self.owner and owner != self.owner:
            return False
        return (epoch, round_) >= (self.epoch, self.round)


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceReceived:
    """A Fence message came from ``peer``."""

    peer: bytes
    fence: Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReceived:
    """A Command message came from ``peer``."""

    peer: bytes
    command: Command
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExited:
    """The process of ``launch`` on ``node`` is gone, or could not be started. May be told more than once."""

    node: str
    launch: str
    detail: str
    now_s: float
    succeeded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSeen:
    """A health check of ``launch`` ended. ``in_flight``: requests inside, None if not known."""

    node: str
    launch: str
    healthy: bool
    in_flight: int | None
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time passed."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Booted:
    """The agent process started. ``alive``: launch ids whose processes run, with or without a slot."""

    alive: frozenset[str]
    now_s: float


Event = FenceReceived | CommandReceived | EngineExited | HealthSeen | Ticked | Booted


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnEngine:
    """Start the engine of ``slot`` under ``slot.launch``; report EngineExited if that fails."""

    slot: Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class KillEngine:
    """End the process of ``launch``: TERM, then KILL after a grace."""

    node: str
    launch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOutcome:
    """Answer ``peer``."""

    peer: bytes
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """Answer ``peer`` with everything known."""

    peer: bytes
    request: str
    accepted: bool


Instruction = SpawnEngine | KillEngine | SendOutcome | SendReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What must be in the journal before the instructions are carried out."""

    slots: tuple[Slot, ...] = ()
    fence: FenceState | None = None
    outcome: Outcome | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self.slots and self.fence is None and self.outcome is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """Answer of the machine to one event."""

    changes: Changes = field(default_factory=Changes)
    instructions: tuple[Instruction, ...] = ()


@dataclass(slots=True, kw_only=True)
class AgentMachine:
    """State of one agent. ``incarnation``: unique per agent run."""

    incarnation: str
    slots: dict[str, Slot]
    policy: AgentPolicy = field(default_factory=AgentPolicy)
    fence: FenceState = field(default_factory=FenceState)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def commit(self, changes: Changes) -> None:
        """Take over what has been written to the journal."""
        for slot in changes.slots:
            self.slots[slot.node] = slot
        if changes.fence is not None:
            self.fence = changes.fence
        if changes.outcome is not None:
            self.outcomes[changes.outcome.command] = changes.outcome
            while len(self.outcomes) > MAX_OUTCOMES:
                del self.outcomes[next(iter(self.outcomes))]

    def handle(self, event: Event) -> Reaction:
        """What ``event`` changes and asks for. Does not change the machine."""
        match event:
            case FenceReceived():
                return self._on_fence(event)
            case CommandReceived():
                return self._on_command(event)
            case EngineExited():
                return self._on_exit(event)
            case HealthSeen():
                return self._on_health(event)
            case Ticked():
                return _merge([self._tick(slot, event.now_s) for slot in self._sorted()])
            case Booted():
                return self._on_boot(event)

    def _sorted(self) -> list[Slot]:
        return [self.slots[node] for node in sorted(self.slots)]

    # --- messages -----------------------------------------------------------------------------------------------

    def _on_fence(self, event: FenceReceived) -> Reaction:
        fence = event.fence
        accepted = self.fence.admits(fence.epoch, fence.round, fence.owner)
        reply = SendReport(peer=event.peer, request=fence.request, accepted=accepted)
        raised = FenceState(epoch=fence.epoch, round=fence.round, owner=fence.owner)
        if not accepted or raised == self.fence:
            return Reaction(instructions=(reply,))
        return Reaction(changes=Changes(fence=raised), instructions=(reply,))

    def _on_command(self, event: CommandReceived) -> Reaction:
        command = event.command
        refusal = self.outcomes.get(command.id) or self._refusal(command)
        if refusal is not None:
            return Reaction(instructions=(SendOutcome(peer=event.peer, outcome=refusal),))
        reaction, busy = self._carry_out(self.slots[command.node], command, event.now_s)
        status = OutcomeStatus.BUSY if busy else OutcomeStatus.DONE
        outcome = Outcome(command=command.id, status=status, detail=busy)
        raised = FenceState(epoch=command.epoch, round=command.round, owner=command.owner)
        changes = replace(reaction.changes, outcome=outcome, fence=raised if raised != self.fence else None)
        answer = SendOutcome(peer=event.peer, outcome=outcome)
        return Reaction(changes=changes, instructions=(*reaction.instructions, answer))

    def _refusal(self, command: Command) -> Outcome | None:
        """Refusals that need no record, because they hold for ever once they hold."""
        if not self.fence.admits(command.epoch, command.round, command.owner):
            detail = f"epoch {self.fence.epoch} round {self.fence.round} of {self.fence.owner} is in force"
            return Outcome(command=command.id, status=OutcomeStatus.STALE, detail=detail[:4000])
        if command.incarnation != self.incarnation:
            detail = f"this agent run is {self.incarnation}"
            return Outcome(command=command.id, status=OutcomeStatus.RESTARTED, detail=detail)
        if command.node not in self.slots:
            return Outcome(command=command.id, status=OutcomeStatus.UNKNOWN_NODE, detail="no such node here")
        return None

    def _carry_out(self, slot: Slot, command: Command, now_s: float) -> tuple[Reaction, str]:
        """The reaction, and why the node is busy ("" if it is not)."""
        match command.action:
            case Start(spec=spec):
                return self._start(slot, spec, now_s)
            case Drain():
                return self._drain(slot, command.action, now_s), ""
            case Stop(instance=instance):
                return self._stop(slot, instance), ""
            case Profile():
                return self._profile(slot, command.action, now_s)

    def _start(self, slot: Slot, spec: StartSpec, now_s: float) -> tuple[Reaction, str]:
        if slot.spec == spec and slot.state in (*_RUNNING, SlotState.BACKOFF):
            return Reaction(), ""
        if not spec.rank < len(spec.nodes) or spec.nodes[spec.rank] != slot.node:
            return Reaction(), "the command's rank does not belong to this node"
        if slot.state is not SlotState.EMPTY:
            occupant = slot.spec.instance if slot.spec is not None else slot.job
            return Reaction(), f"node is {slot.state.value} with {occupant}"
        if spec.instance in slot.retired:
            return Reaction(), f"instance {spec.instance} ran here before"
        return self._launch(with_(slot, spec=spec, detail=""), now_s), ""

    def _launch(self, slot: Slot, now_s: float) -> Reaction:
        number = slot.num_launches + 1
        started = with_(
            slot,
            state=SlotState.STARTING,
            launch=f"{self.incarnation}/{slot.node}/{number}",
            num_launches=number,
            doomed=False,
            deadline_s=now_s + self.policy.start_timeout_s,
            healthy_at_s=now_s,
            idle_since_s=None,
            in_flight=None,
        )
        return Reaction(changes=Changes(slots=(started,)), instructions=(SpawnEngine(slot=started),))

    def _drain(self, slot: Slot, action: Drain, now_s: float) -> Reaction:
        if slot.spec is None or slot.spec.instance != action.instance:
            return Reaction()
        if slot.state is SlotState.READY:
            deadline_s = now_s + action.timeout_s
            draining = with_(slot, state=SlotState.DRAINING, deadline_s=deadline_s, timeout_s=action.timeout_s)
            return _only(with_(draining, idle_since_s=None))
        if slot.state in (SlotState.STARTING, SlotState.BACKOFF):
            return _only(with_(slot, state=SlotState.DRAINED))
        return Reaction()

    def _stop(self, slot: Slot, instance: str) -> Reaction:
        if slot.spec is None or slot.spec.instance != instance:
            return Reaction()
        if not slot.launch:
            return _only(_emptied(slot))
        kill = KillEngine(node=slot.node, launch=slot.launch)
        return Reaction(
            changes=Changes(slots=(with_(slot, state=SlotState.STOPPING, doomed=True),)), instructions=(kill,)
        )

    def _profile(self, slot: Slot, action: Profile, now_s: float) -> tuple[Reaction, str]:
        if slot.state is not SlotState.EMPTY:
            return Reaction(), f"node is {slot.state.value}"
        reaction = self._launch(
            with_(slot, job=action.job, request=action.request, detail="", timeout_s=action.timeout_s), now_s
        )
        running = with_(reaction.changes.slots[0], state=SlotState.PROFILING, deadline_s=now_s + action.timeout_s)
        changes = replace(reaction.changes, slots=(running,))
        return Reaction(changes=changes, instructions=(SpawnEngine(slot=running),)), ""

    # --- engines ------------------------------------------------------------------------------------------------

    def _on_exit(self, event: EngineExited) -> Reaction:
        slot = self.slots.get(event.node)
        if slot is None or not slot.launch or slot.launch != event.launch:
            return Reaction()
        gone = with_(slot, launch="", doomed=False, in_flight=None, detail=event.detail[:1000])
        if slot.state in (SlotState.STOPPING, SlotState.PROFILING):
            return _only(_emptied(gone))
        if slot.state in (SlotState.DRAINING, SlotState.DRAINED):
            return _only(with_(gone, state=SlotState.DRAINED))
        return _only(self._crashed(gone, event.now_s))

    def _crashed(self, slot: Slot, now_s: float) -> Slot:
        restarts = slot.restarts + 1
        if restarts > self.policy.max_restarts:
            reason = f"engine ended {restarts} times: {slot.detail}"
            until_s = now_s + self.policy.exclusion_s
            failed = with_(slot, state=SlotState.FAILED, restarts=restarts, detail=reason[:1000])
            return with_(failed, excluded=reason[:1000], excluded_until_s=until_s)
        wait_s = min(self.policy.backoff_base_s * 2 ** (restarts - 1), self.policy.backoff_max_s)
        return with_(slot, state=SlotState.BACKOFF, restarts=restarts, deadline_s=now_s + wait_s)

    def _on_health(self, event: HealthSeen) -> Reaction:
        slot = self.slots.get(event.node)
        if slot is None or slot.launch != event.launch or slot.doomed:
            return Reaction()
        seen = slot
        if event.healthy:
            seen = with_(slot, healthy_at_s=event.now_s, in_flight=event.in_flight)
            if slot.state is SlotState.STARTING:
                seen = with_(seen, state=SlotState.READY, ready_since_s=event.now_s)
        if slot.state is SlotState.DRAINING:
            seen = self._drain_progress(seen, event)
        return _only(seen) if seen != slot else Reaction()

    def _drain_progress(self, slot: Slot, event: HealthSeen) -> Slot:
        """Idle for the settling time means drained; an engine that does not answer is not known to be idle."""
        if not event.healthy or event.in_flight != 0:
            return with_(slot, idle_since_s=None)
        since_s = event.now_s if slot.idle_since_s is None else slot.idle_since_s
        settled = event.now_s - since_s >= self.policy.drain_settle_s
        return with_(slot, idle_since_s=since_s, state=SlotState.DRAINED if settled else SlotState.DRAINING)

    # --- time ---------------------------------------------------------------------------------------------------

    def _tick(self, slot: Slot, now_s: float) -> Reaction:
        if slot.excluded and slot.state is not SlotState.FAILED and now_s >= slot.excluded_until_s:
            return _only(with_(slot, excluded="", excluded_until_s=0.0))
        match slot.state:
            case SlotState.BACKOFF if now_s >= slot.deadline_s:
                return self._launch(slot, now_s)
            case SlotState.DRAINING if now_s >= slot.deadline_s:
                return _only(with_(slot, state=SlotState.DRAINED, detail="drain timed out with requests in flight"))
            case SlotState.STARTING | SlotState.PROFILING if now_s >= slot.deadline_s and not slot.doomed:
                return _doom(slot, "not ready in time" if slot.job == "" else "profiling took too long")
            case SlotState.READY:
                return self._tick_ready(slot, now_s)
        return Reaction()

    def _tick_ready(self, slot: Slot, now_s: float) -> Reaction:
        if not slot.doomed and now_s - slot.healthy_at_s >= self.policy.unhealthy_s:
            return _doom(slot, "engine stopped answering")
        if slot.restarts and now_s - slot.ready_since_s >= self.policy.stable_s:
            return _only(with_(slot, restarts=0))
        return Reaction()

    # --- restart of the agent itself ----------------------------------------------------------------------------

    def _on_boot(self, event: Booted) -> Reaction:
        known = {slot.launch for slot in self.slots.values() if slot.launch}
        strays = tuple(KillEngine(node="", launch=launch) for launch in sorted(event.alive - known))
        reactions = [self._wake(slot, event) for slot in self._sorted()]
        return _merge([*reactions, Reaction(instructions=strays)])

    def _wake(self, slot: Slot, event: Booted) -> Reaction:
        """Deadlines of the last run mean nothing on this run's clock: they are set anew."""
        now_s = event.now_s
        excluded_until_s = now_s + self.policy.exclusion_s if slot.excluded else 0.0
        woken = with_(
            slot, healthy_at_s=now_s, ready_since_s=now_s, idle_since_s=None, excluded_until_s=excluded_until_s
        )
        if slot.launch and slot.launch in event.alive:
            limit_s = self.policy.start_timeout_s if slot.state is SlotState.STARTING else slot.timeout_s
            woken = with_(woken, deadline_s=now_s + limit_s)
            kill = (KillEngine(node=slot.node, launch=slot.launch),) if slot.doomed else ()
            return Reaction(changes=Changes(slots=(woken,)), instructions=kill)
        return _only(_without_process(woken, now_s))


def _without_process(slot: Slot, now_s: float) -> Slot:
    """The slot after a restart that found no engine of it: started again at once unless it was on its way out."""
    gone = with_(slot, launch="", doomed=False, in_flight=None, deadline_s=now_s)
    if slot.state in (*_RUNNING, SlotState.BACKOFF):
        return with_(gone, state=SlotState.BACKOFF, detail="engine was gone when the agent came back")
    if slot.state in (SlotState.STOPPING, SlotState.PROFILING):
        return _emptied(gone)
    if slot.state is SlotState.DRAINING:
        return with_(gone, state=SlotState.DRAINED)
    return gone


def _emptied(slot: Slot) -> Slot:
    retired = slot.retired
    if slot.spec is not None:
        retired = (*(one for one in retired if one != slot.spec.instance), slot.spec.instance)[-MAX_RETIRED:]
    return Slot(
        node=slot.node,
        num_launches=slot.num_launches,
        retired=retired,
        excluded=slot.excluded,
        excluded_until_s=slot.excluded_until_s,
        detail=slot.detail,
    )


def _doom(slot: Slot, detail: str) -> Reaction:
    doomed = with_(slot, doomed=True, detail=detail)
    kill = KillEngine(node=slot.node, launch=slot.launch)
    return Reaction(changes=Changes(slots=(doomed,)), instructions=(kill,))


def _only(slot: Slot) -> Reaction:
    return Reaction(changes=Changes(slots=(slot,)))


def _merge(reactions: list[Reaction]) -> Reaction:
    """Reactions of several slots to one event."""
    slots = tuple(slot for one in reactions for slot in one.changes.slots)
    instructions = tuple(instruction for one in reactions for instruction in one.instructions)
    return Reaction(changes=Changes(slots=slots), instructions=instructions)
