"""A world without sockets: agents with journals, engines, a lossy network, controllers that come and go.

Everything random comes from one seed. Crashes happen between any two effects: before the journal, after it, between
instructions. Rules that must always hold are checked as it runs and raise Broken.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec
from fleet_builders import REGION

from coral_tasks.agent.journal import durable
from coral_tasks.dispatch.binding import Situation
from coral_tasks.dispatch.check import require_safe
from coral_tasks.dispatch.observation import build_observation
from coral_tasks.dispatch.planner import plan_transition
from coral_tasks.dispatch.specs import start_specs
from coral_tasks.domain.names import Market
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.protocol.agent_machine import (
    AgentMachine,
    AgentPolicy,
    Booted,
    CommandReceived,
    EngineExited,
    FenceReceived,
    FenceState,
    HealthSeen,
    KillEngine,
    SendOutcome,
    SendReport,
    Slot,
    SpawnEngine,
    Ticked,
)
from coral_tasks.protocol.controller_machine import (
    ActDone,
    ControllerMachine,
    ControllerPolicy,
    Mission,
    OutcomeArrived,
    Publish,
    ReportArrived,
    Send,
    TimePassed,
)
from coral_tasks.protocol.messages import (
    Command,
    Fence,
    NodeReport,
    Observe,
    Outcome,
    OutcomeStatus,
    Report,
    decode_for_agent,
    decode_for_controller,
    encode_message,
)

POLICY = AgentPolicy(
    start_timeout_s=30,
    backoff_base_s=1,
    backoff_max_s=4,
    max_restarts=3,
    stable_s=60,
    unhealthy_s=10,
    drain_settle_s=1,
    exclusion_s=20,
)
CONTROLLER = ControllerPolicy(
    poll_s=1,
    resend_s=1,
    resend_max_s=4,
    command_timeout_s=20,
    ready_timeout_s=60,
    drain_timeout_s=20,
    stop_timeout_s=20,
)


class Broken(AssertionError):
    """A rule that must always hold does not."""


class Crash(Exception):
    """The agent process dies here."""


@dataclass
class Disk:
    """What an agent's journal holds; survives crashes."""

    slots: dict[str, Slot] = field(default_factory=dict)
    fence: FenceState = field(default_factory=FenceState)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    full: bool = False


@dataclass
class Agent:
    """One machine with its agent process, which may be down, and its engines."""

    name: str
    nodes: tuple[tuple[str, str], ...]
    disk: Disk = field(default_factory=Disk)
    machine: AgentMachine | None = None
    engines: dict[str, str] = field(default_factory=dict)
    dying: set[str] = field(default_factory=set)
    runs: int = 0


@dataclass
class World:
    """Agents, network and time. ``chaos``: chance of a fault at each point, 0 for none."""

    rng: random.Random
    agents: dict[str, Agent]
    chaos: float = 0.0
    now_s: float = 0.0
    wire: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    answered: dict[str, set[bytes]] = field(default_factory=dict)
    highest: dict[str, tuple[int, int]] = field(default_factory=dict)
    spawned: Counter[str] = field(default_factory=Counter)

    def fault(self, weight: float = 1.0) -> bool:
        return self.rng.random() < self.chaos * weight

    # --- agents ---------------------------------------------------------------------------------------------------

    def boot(self, agent: Agent) -> None:
        agent.runs += 1
        slots = {node: agent.disk.slots.get(node, Slot(node=node)) for node, _ in agent.nodes}
        agent.machine = AgentMachine(
            incarnation=f"{agent.name}.{agent.runs}",
            slots=slots,
            policy=POLICY,
            fence=agent.disk.fence,
            outcomes=dict(agent.disk.outcomes),
        )
        self.feed(agent, Booted(alive=frozenset(agent.engines), now_s=self.now_s))

    def crash(self, agent: Agent, *, power: bool) -> None:
        agent.machine = None
        if power:
            agent.engines.clear()
            agent.dying.clear()

    def feed(self, agent: Agent, event: object) -> None:
        if agent.machine is None:
            return
        try:
            self._feed(agent, event)
        except Crash:
            self.crash(agent, power=self.rng.random() < 0.3)

    def _point(self) -> None:
        if self.fault(0.05):
            raise Crash

    def _feed(self, agent: Agent, event: object) -> None:
        reaction = agent.machine.handle(event)
        self._point()
        changes = reaction.changes
        if agent.disk.full and not changes.is_empty:
            if isinstance(event, CommandReceived):
                refusal = Outcome(command=event.command.id, status=OutcomeStatus.NOT_RECORDED)
                self.reply(agent, event.peer, refusal)
            return
        for slot in changes.slots:
            agent.disk.slots[slot.node] = durable(slot)
        if changes.fence is not None:
            self._check_fence(agent, changes.fence)
            agent.disk.fence = changes.fence
        if changes.outcome is not None:
            agent.disk.outcomes[changes.outcome.command] = changes.outcome
        self._point()
        agent.machine.commit(changes)
        for instruction in reaction.instructions:
            self._carry_out(agent, instruction)
            self._point()

    def _check_fence(self, agent: Agent, fence: FenceState) -> None:
        if (fence.epoch, fence.round) < self.highest.get(agent.name, (0, 0)):
            raise Broken(f"the epoch of {agent.name} went back to {fence}")
        self.highest[agent.name] = (fence.epoch, fence.round)

    def _carry_out(self, agent: Agent, instruction: object) -> None:
        match instruction:
            case SpawnEngine(slot=slot):
                if any(node == slot.node for node in agent.engines.values()):
                    raise Broken(f"{slot.node} would run two engines")
                if slot.launch in self.spawned:
                    raise Broken(f"{slot.launch} started twice")
                self.spawned[slot.launch] += 1
                agent.engines[slot.launch] = slot.node
            case KillEngine(launch=launch):
                agent.dying.add(launch)
            case SendOutcome(peer=peer, outcome=outcome):
                self.reply(agent, peer, outcome)
            case SendReport(peer=peer, request=request, accepted=accepted):
                self.reply(agent, peer, self.report(agent, request, accepted=accepted))

    def report(self, agent: Agent, request: str, *, accepted: bool) -> Report:
        machine = agent.machine
        return Report(
            request=request,
            agent=agent.name,
            incarnation=machine.incarnation,
            epoch=machine.fence.epoch,
            round=machine.fence.round,
            accepted=accepted,
            nodes=tuple(
                NodeReport(
                    node=node,
                    region=REGION,
                    configuration=configuration,
                    market=Market.ON_DEMAND,
                    engine="simulated",
                    address="h",
                    master_port=1,
                    state=machine.slots[node].state,
                    spec=machine.slots[node].spec,
                    in_flight=machine.slots[node].in_flight,
                    excluded=machine.slots[node].excluded,
                    retired=machine.slots[node].retired,
                )
                for node, configuration in agent.nodes
            ),
        )

    # --- network --------------------------------------------------------------------------------------------------

    def reply(self, agent: Agent, peer: bytes, message: object) -> None:
        if isinstance(message, Outcome) and message.status in (OutcomeStatus.DONE, OutcomeStatus.BUSY):
            seen = self.answered.setdefault(message.command, set())
            seen.add(msgspec.msgpack.encode(message))
            if len(seen) > 1:
                raise Broken(f"{message.command} has two outcomes")
        self.post(peer.decode(), agent.name.encode(), encode_message(message))

    def post(self, to: str, sender: bytes, data: bytes) -> None:
        if self.fault(0.5):
            return
        self.wire.append((to, sender, data))
        while self.fault(0.5):
            self.wire.append((to, sender, data))

    def deliver(self, controllers: dict[str, Controller]) -> None:
        """Hand over one message, in any order while there is chaos."""
        if not self.wire:
            return
        index = self.rng.randrange(len(self.wire)) if self.chaos else 0
        to, sender, data = self.wire.pop(index)
        if to in self.agents:
            self._to_agent(self.agents[to], sender, data)
        elif to in controllers:
            controllers[to].receive(sender.decode(), decode_for_controller(data))

    def _to_agent(self, agent: Agent, sender: bytes, data: bytes) -> None:
        if agent.machine is None:
            return
        message = decode_for_agent(data)
        match message:
            case Fence():
                self.feed(agent, FenceReceived(peer=sender, fence=message))
            case Command():
                self.feed(agent, CommandReceived(peer=sender, command=message, now_s=self.now_s))
            case Observe():
                self.reply(agent, sender, self.report(agent, message.request, accepted=True))

    # --- time -----------------------------------------------------------------------------------------------------

    def second(self) -> None:
        """One second passes: engines live, die, answer; agents look; faults strike."""
        self.now_s += 1.0
        for agent in self.agents.values():
            self._engines(agent)
            if agent.machine is None:
                if self.chaos == 0 or self.rng.random() < 0.3:
                    self.boot(agent)
                continue
            if self.fault(0.1):
                self.crash(agent, power=self.rng.random() < 0.3)
                continue
            agent.disk.full = self.fault(0.5)
            self._look(agent)

    def _engines(self, agent: Agent) -> None:
        for launch in list(agent.engines):
            if launch in agent.dying and self.rng.random() < 0.7:
                agent.dying.discard(launch)
                del agent.engines[launch]
            elif self.fault(0.1):
                del agent.engines[launch]

    def _look(self, agent: Agent) -> None:
        for node, _ in agent.nodes:
            if agent.machine is None:
                return
            slot = agent.machine.slots[node]
            if slot.launch and slot.launch not in agent.engines:
                gone = EngineExited(node=node, launch=slot.launch, detail="gone", now_s=self.now_s)
                self.feed(agent, gone)
            elif slot.launch and not self.fault(0.3):
                busy = self.rng.choice([0, 0, 1])
                seen = HealthSeen(node=node, launch=slot.launch, healthy=True, in_flight=busy, now_s=self.now_s)
                self.feed(agent, seen)
        self.feed(agent, Ticked(now_s=self.now_s))


@dataclass
class Controller:
    """The dispatcher's loop without sockets: fence, observe, plan, check, carry out, again."""

    name: str
    world: World
    plan: AllocationPlan
    epoch: int
    round: int = 0
    machine: ControllerMachine | None = None
    reports: dict[str, Report] = field(default_factory=dict)
    observed_until_s: float = 0.0
    superseded: bool = False
    converged: bool = False
    routed: tuple[str, ...] = ()

    def begin_round(self) -> None:
        self.round += 1
        self.machine = None
        self.reports = {}
        self.observed_until_s = self.world.now_s + 5
        self.ask()

    def ask(self) -> None:
        fence = Fence(request=self.fence_request, epoch=self.epoch, round=self.round, owner=self.name)
        for agent in self.world.agents:
            if agent not in self.reports:
                self.world.post(agent, self.name.encode(), encode_message(fence))

    @property
    def fence_request(self) -> str:
        return f"{self.name} fence {self.epoch}.{self.round}"

    def receive(self, sender: str, message: object) -> None:
        now_s = self.world.now_s
        if isinstance(message, Report) and message.request == self.fence_request and self.machine is None:
            self.reports[sender] = message
        elif self.machine is not None and isinstance(message, Report):
            self.carry_out(self.machine.handle(ReportArrived(report=message, now_s=now_s)))
        elif self.machine is not None and isinstance(message, Outcome):
            self.carry_out(self.machine.handle(OutcomeArrived(outcome=message, now_s=now_s)))

    def second(self) -> None:
        if self.superseded or self.converged:
            return
        if self.round == 0:
            self.begin_round()
        elif self.machine is None:
            self.ask()
            if len(self.reports) == len(self.world.agents) or self.world.now_s >= self.observed_until_s:
                self.plan_round()
        else:
            self.carry_out(self.machine.handle(TimePassed(now_s=self.world.now_s)))
            if self.machine is not None and self.machine.finished:
                self.superseded = any(problem.superseded for problem in self.machine.problems)
                self.begin_round()

    def plan_round(self) -> None:
        seen = build_observation(self.reports, self.world.agents)
        if seen.superseded:
            self.superseded = True
            return
        excluded = frozenset(seen.excluded)
        situation = Situation(excluded=excluded, load=seen.load, used_ids=seen.used_ids)
        transition = plan_transition(self.plan, seen.fleet, situation=situation)
        require_safe(transition, self.plan, seen.fleet, excluded=excluded)
        if transition.is_empty and not transition.unplaced and not seen.unreachable:
            self.converged = True
            return
        mission = Mission(
            transition=transition,
            epoch=self.epoch,
            round=self.round,
            owner=self.name,
            targets=seen.targets,
            specs=start_specs(transition, self.plan, seen, {}),
        )
        self.machine = ControllerMachine(mission=mission, policy=CONTROLLER)
        self.carry_out(self.machine.begin(self.world.now_s))

    def carry_out(self, instructions: list[object]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(agent=agent, message=message):
                    self.world.post(agent, self.name.encode(), encode_message(message))
                case Publish(routed=routed):
                    self.routed = routed
                    self.carry_out(self.machine.handle(ActDone(problem="", now_s=self.world.now_s)))
