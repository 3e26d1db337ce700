"""The running agent: joins socket, journal, state machine and engine processes. Owns the event loop, no decisions.

Every event goes the same way: machine -> journal -> commit -> instructions. What the journal refuses is not done:
a command is then answered "not recorded", everything else is seen again at the next look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq.asyncio

from coral_tasks.agent.clock import AwakeClock, awake_gap_s
from coral_tasks.agent.config import AgentConfig
from coral_tasks.agent.engines import build_launch
from coral_tasks.agent.health import check_health
from coral_tasks.agent.journal import Journal
from coral_tasks.agent.profiling_jobs import JobRunner
from coral_tasks.agent.supervisor import Supervisor
from coral_tasks.agent.transport import AgentSocket, RateLimit, ZapHandler
from coral_tasks.domain.errors import CoralFault, EngineFault, ProtocolFault, StorageFault
from coral_tasks.protocol.agent_machine import (
    AgentMachine,
    Booted,
    CommandReceived,
    EngineExited,
    Event,
    FenceReceived,
    HealthSeen,
    Instruction,
    KillEngine,
    SendOutcome,
    SendReport,
    Slot,
    SpawnEngine,
    Ticked,
)
from coral_tasks.protocol.keyfiles import Role, read_key_pair
from coral_tasks.protocol.messages import (
    Command,
    Fence,
    FetchJob,
    NodeReport,
    Observe,
    Outcome,
    OutcomeStatus,
    Report,
    SlotState,
    ToController,
    decode_for_agent,
    encode_message,
)

_LOG = logging.getLogger("coral.agent")
_CHECKED = (SlotState.STARTING, SlotState.READY, SlotState.DRAINING, SlotState.DRAINED)


@dataclass(slots=True, kw_only=True)
class Counters:
    """What was dropped and why, for reports and logs."""

    malformed: int = 0
    over_rate: int = 0
    not_journaled: int = 0

    @property
    def dropped(self) -> int:
        """Messages that had no effect and no answer."""
        return self.malformed + self.over_rate


@dataclass(slots=True, kw_only=True)
class AgentServer:
    """One agent in a running event loop. ``journal`` and ``socket`` are closed by ``close``."""

    config: AgentConfig
    machine: AgentMachine
    journal: Journal
    supervisor: Supervisor
    socket: AgentSocket
    jobs: JobRunner
    rate: RateLimit
    counters: Counters = field(default_factory=Counters)
    clock: AwakeClock = field(default_factory=AwakeClock)
    _checking: set[str] = field(default_factory=set)
    _checked_at_s: dict[str, float] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _unsent: list[tuple[bytes, ToController]] = field(default_factory=list)

    @classmethod
    def open(cls, config: AgentConfig, context: zmq.asyncio.Context, zap: ZapHandler) -> AgentServer:
        """Read the journal, adopt engines, bind. Raises CoralFault or ExpectedOutcome if something is missing."""
        pair = read_key_pair(config.keys, Role.AGENT, config.key or config.name)
        journal = Journal(config.state)
        try:
            slots = _slots_of(config, journal.read_slots())
            machine = AgentMachine(
                incarnation=secrets.token_hex(8),
                slots=slots,
                policy=config.policy,
                fence=journal.read_fence(),
                outcomes=journal.read_outcomes(),
            )
            zap.folders[config.name] = config.keys
            socket = AgentSocket(context, bind=config.bind, pair=pair, domain=config.name)
        except BaseException:
            journal.close()
            raise
        return cls(
            config=config,
            machine=machine,
            journal=journal,
            supervisor=Supervisor(folder=config.state, limits=config.limits, kill_grace_s=config.kill_grace_s),
            socket=socket,
            jobs=JobRunner(config=config),
            rate=RateLimit(rate_per_s=config.messages_per_s, burst=config.message_burst),
            clock=AwakeClock(gap_s=awake_gap_s(config.tick_s)),
        )

    async def run(self) -> None:
        """Serve until cancelled."""
        slots = self.machine.slots.values()
        alive = self.supervisor.adopt() | {slot.launch for slot in slots if self._needs_no_process(slot)}
        self.feed(Booted(alive=alive, now_s=self.clock.now_s()))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive())
            group.create_task(self._watch())

    def close(self) -> None:
        """Close socket and journal; engines keep running unless the configuration says otherwise."""
        for task in self._tasks:
            task.cancel()
        self.socket.close()
        self.journal.close()

    async def stop_engines(self) -> None:
        """End all engine processes of this agent; their slots stay in the journal."""
        for launch in self.supervisor.living():
            self.supervisor.kill(launch)
        deadline_s = time.monotonic() + self.config.kill_grace_s + 5
        while time.monotonic() < deadline_s:
            self.supervisor.enforce()
            if all(self.supervisor.exit_of(launch) is not None for launch in self.supervisor.living()):
                return
            await asyncio.sleep(0.05)

    # --- messages -----------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            peer, data = await self.socket.receive()
            self.on_message(peer, data)
            while self._unsent:
                receiver, message = self._unsent.pop(0)
                await self.socket.send(receiver, encode_message(message))

    def on_message(self, peer: bytes, data: bytes) -> None:
        """Take one message; whatever it holds, the agent goes on."""
        now_s = self.clock.now_s()
        if not self.rate.admits(peer, now_s):
            self.counters.over_rate += 1
            return
        try:
            message = decode_for_agent(data)
        except ProtocolFault as fault:
            self.counters.malformed += 1
            if self.counters.malformed & (self.counters.malformed - 1) == 0:
                # 1st, 2nd, 4th, 8th ...: a flood must not fill the log
                _LOG.warning("malformed message no. %d: %s", self.counters.malformed, fault)
            return
        match message:
            case Fence():
                self.feed(FenceReceived(peer=peer, fence=message))
            case Command():
                self.feed(CommandReceived(peer=peer, command=message, now_s=now_s))
            case Observe():
                self._unsent.append((peer, self.report(message.request, accepted=True)))
            case FetchJob():
                self._unsent.append((peer, self._job_result(message)))

    def _job_result(self, message: FetchJob) -> ToController:
        running = any(slot.job == message.job for slot in self.machine.slots.values())
        return self.jobs.result(self.journal, message.request, message.job, running=running)

    def report(self, request: str, *, accepted: bool) -> Report:
        """Everything this agent knows."""
        return Report(
            request=request,
            agent=self.config.name,
            incarnation=self.machine.incarnation,
            epoch=self.machine.fence.epoch,
            round=self.machine.fence.round,
            accepted=accepted,
            nodes=tuple(self._node_report(self.machine.slots[node.id]) for node in self.config.nodes),
            dropped_messages=self.counters.dropped,
        )

    def _node_report(self, slot: Slot) -> NodeReport:
        node = next(one for one in self.config.nodes if one.id == slot.node)
        port = self.config.engine_port(slot.node)
        return NodeReport(
            node=slot.node,
            region=node.region,
            configuration=node.configuration,
            market=node.market,
            engine=self.config.engine,
            address=self.config.advertise,
            master_port=port + 1,
            state=slot.state,
            spec=slot.spec,
            endpoint=f"http://{self.config.advertise}:{port}",
            in_flight=slot.in_flight,
            restarts=slot.restarts,
            excluded=slot.excluded,
            detail=slot.detail,
            retired=slot.retired,
        )

    # --- events -------------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Machine, journal, commit, instructions: in this order."""
        reaction = self.machine.handle(event)
        try:
            self.journal.write(reaction.changes)
        except StorageFault as fault:
            self._not_recorded(event, fault)
            return
        self.machine.commit(reaction.changes)
        if isinstance(event, CommandReceived):
            _log_command(event.command, reaction.instructions)
        if isinstance(event, EngineExited):
            _log_end(self.machine.slots.get(event.node), event.detail)
        for instruction in reaction.instructions:
            self._carry_out(instruction)

    def _not_recorded(self, event: Event, fault: StorageFault) -> None:
        self.counters.not_journaled += 1
        _LOG.error("not recorded, so not done: %s", fault)
        if isinstance(event, CommandReceived):
            status = OutcomeStatus.NOT_RECORDED
            self._unsent.append((event.peer, Outcome(command=event.command.id, status=status, detail=str(fault))))
        if isinstance(event, FenceReceived):
            self._unsent.append((event.peer, self.report(event.fence.request, accepted=False)))

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case SpawnEngine(slot=slot):
                self._spawn(slot)
            case KillEngine(launch=launch):
                self.supervisor.kill(launch)
            case SendOutcome(peer=peer, outcome=outcome):
                self._unsent.append((peer, outcome))
            case SendReport(peer=peer, request=request, accepted=accepted):
                self._unsent.append((peer, self.report(request, accepted=accepted)))

    def _spawn(self, slot: Slot) -> None:
        try:
            launch = self.jobs.launch(slot) if slot.job else build_launch(self.config, slot)
            if launch.argv:
                self.supervisor.spawn(slot.node, slot.launch, launch)
        except (EngineFault, OSError) as fault:
            _LOG.warning("%s: %s", slot.node, fault)
            self.feed(EngineExited(node=slot.node, launch=slot.launch, detail=str(fault), now_s=self.clock.now_s()))

    # --- watching -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        rotated_at_s = self.clock.now_s()
        while True:
            await asyncio.sleep(self.config.tick_s)
            now_s = self.clock.now_s()
            self.supervisor.enforce()
            for node in self.config.nodes:
                self._look_at(self.machine.slots[node.id], now_s)
            self.feed(Ticked(now_s=now_s))
            if now_s - rotated_at_s > 30:
                rotated_at_s = now_s
                with contextlib.suppress(OSError):
                    self.supervisor.rotate_logs()

    def _look_at(self, slot: Slot, now_s: float) -> None:
        if not slot.launch:
            return
        if self._needs_no_process(slot):
            self._look_at_follower(slot, now_s)
            return
        how = self.supervisor.exit_of(slot.launch)
        if how is not None:
            self._on_exit(slot, how, now_s)
        elif slot.state in _CHECKED and slot.launch not in self._checking:
            self._check(slot, now_s)

    def _needs_no_process(self, slot: Slot) -> bool:
        """Whether the slot is a follower whose head does all the work, see ``engines``."""
        if not slot.launch or slot.job or slot.spec is None or slot.spec.rank == 0:
            return False
        try:
            return not build_launch(self.config, slot).argv
        except EngineFault:
            return False

    def _look_at_follower(self, slot: Slot, now_s: float) -> None:
        """Such a follower is its slot: healthy and idle at once, gone as soon as it is to go."""
        if slot.doomed:
            self.feed(EngineExited(node=slot.node, launch=slot.launch, detail="", now_s=now_s))
        else:
            self.feed(HealthSeen(node=slot.node, launch=slot.launch, healthy=True, in_flight=0, now_s=now_s))

    def _on_exit(self, slot: Slot, how: str, now_s: float) -> None:
        if slot.job:
            try:
                self.jobs.finish(self.journal, slot, how)
            except CoralFault as fault:
                _LOG.warning("job %s: %s", slot.job, fault)
                return
        self.feed(EngineExited(node=slot.node, launch=slot.launch, detail=how, now_s=now_s))

    def _check(self, slot: Slot, now_s: float) -> None:
        if now_s - self._checked_at_s.get(slot.node, 0.0) < self.config.health_s:
            return
        self._checked_at_s[slot.node] = now_s
        endpoint = f"http://{self.config.engine_host}:{self.config.engine_port(slot.node)}"
        if slot.spec is None or slot.spec.rank != 0:
            # a headless part answers nothing: it is as healthy as its process is alive; the head knows the rest
            self.feed(HealthSeen(node=slot.node, launch=slot.launch, healthy=True, in_flight=0, now_s=now_s))
            return
        self._checking.add(slot.launch)
        task = asyncio.get_running_loop().create_task(self._check_over_http(slot.node, slot.launch, endpoint))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check_over_http(self, node: str, launch: str, endpoint: str) -> None:
        try:
            seen = await check_health(endpoint, timeout_s=max(5.0, self.config.health_s))
        finally:
            self._checking.discard(launch)
        now_s = self.clock.now_s()
        in_flight = seen.in_flight
        self.feed(HealthSeen(node=node, launch=launch, healthy=seen.healthy, in_flight=in_flight, now_s=now_s))


def _slots_of(config: AgentConfig, journaled: Mapping[str, Slot]) -> dict[str, Slot]:
    """A slot per configured node. Raises StorageFault if the journal holds an engine of a node no longer configured."""
    names = {node.id for node in config.nodes}
    for node, slot in journaled.items():
        if node not in names and slot.launch:
            raise StorageFault(f"the journal holds an engine of node {node}, which is not configured any more")
    return {node.id: journaled.get(node.id, Slot(node=node.id)) for node in config.nodes}


def _log_command(command: Command, instructions: Iterable[Instruction]) -> None:
    """One line for each command that arrives, repeats too, with what became of it."""
    answers = [one.outcome for one in instructions if isinstance(one, SendOutcome)]
    ids = {
        "command": command.id,
        "kind": type(command.action).__name__.lower(),
        "epoch": command.epoch,
        "round": command.round,
        "node": command.node,
        "status": answers[0].status.value if answers else "",
    }
    _LOG.info("command arrived%s", f": {answers[0].detail}" if answers and answers[0].detail else "", extra=ids)


def _log_end(slot: Slot | None, how: str) -> None:
    """One line for an engine that ended although nobody asked it to, with what is done about it."""
    if slot is None or slot.state not in (SlotState.BACKOFF, SlotState.FAILED) or slot.spec is None:
        return
    what = "will be started again" if slot.state is SlotState.BACKOFF else "given up"
    ids = {"node": slot.node, "instance": slot.spec.instance, "restarts": slot.restarts}
    _LOG.warning("%s: engine of %s ended, %s: %s", slot.node, slot.spec.instance, what, how, extra=ids)


async def serve(config: AgentConfig) -> None:
    """Serve one agent until TERM or INT."""
    context = zmq.asyncio.Context()
    zap = ZapHandler(context=context)
    guard = asyncio.create_task(zap.run())
    await asyncio.sleep(0)
    server = AgentServer.open(config, context, zap)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    work = asyncio.create_task(server.run())
    stopped = asyncio.create_task(stop.wait())
    _LOG.info("agent %s serves %d nodes on %s", config.name, len(config.nodes), config.bind)
    try:
        await asyncio.wait({work, stopped, guard}, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, guard):
            if task.done():
                # a fault inside must be seen, not swallowed
                task.result()
    finally:
        await _shut_down(server, [work, stopped, guard])
        context.destroy(linger=0)


async def _shut_down(server: AgentServer, tasks: list[asyncio.Task[None] | asyncio.Task[bool]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if server.config.stop_engines_on_exit:
        await server.stop_engines()
    server.close()


def run_agent(config: AgentConfig) -> None:
    """Serve one agent in this process until TERM or INT. Raises CoralFault if it cannot start."""
    Path(config.state).mkdir(parents=True, exist_ok=True, mode=0o700)
    asyncio.run(serve(config))
