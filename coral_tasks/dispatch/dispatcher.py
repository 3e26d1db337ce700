"""Carries a plan out: fence, observe, plan the transition, check it, run it, and again until the fleet is as planned.

Owns the loop and the rounds. Each round takes the agents over under a higher fence before it looks, so nothing of an
earlier round or an older controller can change what it saw. A plan that already holds sends no command.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from coral_tasks.dispatch.binding import Situation
from coral_tasks.dispatch.check import require_safe
from coral_tasks.dispatch.observation import Observation, build_observation
from coral_tasks.dispatch.ordering import Pool
from coral_tasks.dispatch.planner import plan_transition
from coral_tasks.dispatch.routing import Route, RoutingTable, read_routing, write_routing
from coral_tasks.dispatch.specs import start_specs
from coral_tasks.dispatch.transport import AgentLinks
from coral_tasks.domain.errors import CoralError, Unavailable
from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import InstanceId, ModelId, NodeId
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.domain.transition import CapacityDip, NodeRequest, ProvisionedNode, Step, Transition, Unplaced
from coral_tasks.protocol.controller_machine import (
    ActDone,
    ControllerInstruction,
    ControllerMachine,
    ControllerPolicy,
    Mission,
    OutcomeArrived,
    Problem,
    Provision,
    Publish,
    Release,
    ReportArrived,
    Send,
    StepsDone,
    TimePassed,
)
from coral_tasks.protocol.messages import Command, Fence, Observe, Outcome, Report, ToAgent

_LOG = logging.getLogger("coral.dispatch")

_TICK_S = 0.1
_ASK_AGAIN_S = 1.0
_TRY_AGAIN_S = 0.1


class Provisioner(Protocol):
    """Obtains and gives back nodes (``coral_tasks.provisioning``)."""

    @property
    def agent_key(self) -> str:
        """Key name that all agents of its machines share, "" if each has its own."""

    def obtainable(self) -> Mapping[Pool, int]:
        """Nodes that could be had besides those held, by region, configuration and market."""

    def provision(self, request: NodeRequest) -> tuple[ProvisionedNode, ...]:
        """Obtain nodes whose agents will answer. Raises Unavailable if there is no capacity."""

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        """Give drained nodes back."""

    def releasable(self) -> frozenset[NodeId]:
        """Nodes that this provisioner launched."""

    def booting(self) -> frozenset[NodeId]:
        """Nodes launched lately, by this dispatch or one before it, whose agents may be about to answer."""

    def interrupted(self) -> frozenset[NodeId]:
        """Nodes about to be taken back (spot): their instances are replaced, then drained."""

    def endpoints(self) -> Mapping[str, str]:
        """Agents of the nodes it launched: name, which is the node's, to address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """How a dispatch behaves. ``model_names``: what the engine loads for a model, else the model's own id.

    ``observe_s``: how long to wait for agents' first answers. ``routing_folder``: None publishes nothing.
    ``provision_timeout_s``: how long new machines may take until their agents answer. ``stop_on_shortage``: end as
    soon as nodes cannot be had, so that the caller solves once more with that knowledge; else place what fits.
    """

    routing_folder: Path | None = None
    shapes: Mapping[ModelId, RequestShape] = field(default_factory=dict)
    model_names: Mapping[ModelId, str] = field(default_factory=dict)
    policy: ControllerPolicy = field(default_factory=ControllerPolicy)
    observe_s: float = 5.0
    max_rounds: int = 5
    controller: str = "controller"
    provision_timeout_s: float = 600.0
    stop_on_shortage: bool = True
    excluded: frozenset[NodeId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchResult:
    """How a dispatch ended. ``converged``: the fleet is as planned and routed.

    ``superseded``: a newer controller took over, which is no fault. ``shortage``: nodes that a provisioner could not
    get, to be fed back as availability.
    """

    converged: bool
    superseded: bool
    epoch: int
    rounds: int
    num_commands: int
    steps_done: tuple[Step, ...]
    dips: tuple[CapacityDip, ...]
    unplaced: tuple[Unplaced, ...]
    unreachable: tuple[str, ...]
    excluded: Mapping[NodeId, str]
    problems: tuple[str, ...]
    shortage: tuple[NodeRequest, ...]
    fleet: Fleet
    routing: RoutingTable


Progress = Callable[[Transition, Step | None], None]


def observe(
    endpoints: Mapping[str, str],
    keys: Path,
    *,
    controller: str = "controller",
    wait_s: float = 5.0,
    provisioner: Provisioner | None = None,
) -> Observation:
    """Ask all agents what they know; changes nothing. Returns as soon as all answered, after ``wait_s`` at most."""
    with AgentLinks(endpoints, keys, controller=controller) as links:
        if provisioner is not None:
            links.connect(provisioner.endpoints(), key=provisioner.agent_key)
        return observe_links(links, None, wait_s=wait_s)


def observe_fleet(
    endpoints: Mapping[str, str], keys: Path, *, controller: str = "controller", wait_s: float = 5.0
) -> Fleet:
    """The fleet as its agents report it. Nodes of agents that do not answer are absent: see ``observe``."""
    return observe(endpoints, keys, controller=controller, wait_s=wait_s).fleet


def observe_links(links: AgentLinks, fence: Fence | None, *, wait_s: float) -> Observation:
    """Observe through open links; with ``fence`` the agents are taken over at the same time."""
    request = fence.request if fence is not None else f"observe {secrets.token_hex(6)}"
    message = fence if fence is not None else Observe(request=request)
    reports: dict[str, Report] = {}
    ask_at_s = dict.fromkeys(links.agents, 0.0)
    deadline_s = time.monotonic() + wait_s
    while len(reports) < len(links.agents) and time.monotonic() < deadline_s:
        now_s = time.monotonic()
        for agent in [agent for agent, at_s in ask_at_s.items() if agent not in reports and now_s >= at_s]:
            ask_at_s[agent] = now_s + (_ASK_AGAIN_S if links.send(agent, message) else _TRY_AGAIN_S)
        arrived = links.receive(0.05)
        reports.update({who: one for who, one in arrived if isinstance(one, Report) and one.request == request})
    return build_observation(reports, links.agents)


def preview(
    plan: AllocationPlan, observation: Observation, options: DispatchOptions, provisioner: Provisioner | None = None
) -> Transition:
    """The checked transition that a dispatch would begin with. Raises PlanRejected if the check refuses it."""
    interrupted = provisioner.interrupted() if provisioner is not None else frozenset()
    excluded = frozenset(observation.excluded) | options.excluded | interrupted
    situation = Situation(
        excluded=excluded,
        load=observation.load,
        used_ids=observation.used_ids,
        obtainable=provisioner.obtainable() if provisioner is not None else {},
        releasable=_releasable(observation, provisioner),
        interrupted=interrupted,
    )
    transition = plan_transition(plan, observation.fleet, shapes=options.shapes, situation=situation)
    require_safe(transition, plan, observation.fleet, shapes=options.shapes, excluded=excluded)
    return transition


def _releasable(observation: Observation, provisioner: Provisioner | None) -> frozenset[NodeId]:
    """Machines whose own agents answer: what another agent says of a machine is no reason to end it."""
    if provisioner is None:
        return frozenset()
    spoken = {node for node, target in observation.targets.items() if target.agent == node}
    return frozenset(node for node in provisioner.releasable() if node in spoken)


def dispatch_plan(
    plan: AllocationPlan,
    endpoints: Mapping[str, str],
    keys: Path,
    *,
    epoch: int,
    options: DispatchOptions | None = None,
    provisioner: Provisioner | None = None,
    progress: Progress | None = None,
    newest_epoch: Callable[[], int] | None = None,
) -> DispatchResult:
    """Bring the fleet to ``plan``. ``epoch``: from an EpochStore, new for each call.

    ``newest_epoch``: of that store; once it is another one, no machine is launched or ended any more.

    Returns how it ended; a fleet that cannot be brought there is a result, not an exception. Raises PlanRejected if
    the planner made an unsafe transition, UnknownName or StorageFault for keys.
    """
    run = _Dispatch(
        plan=plan,
        endpoints=dict(endpoints),
        keys=keys,
        epoch=epoch,
        options=options or DispatchOptions(),
        provisioner=provisioner,
        progress=progress,
        newest_epoch=newest_epoch,
    )
    return run.converge()


@dataclass(slots=True, kw_only=True)
class _Dispatch:
    """One dispatch while it runs."""

    plan: AllocationPlan
    endpoints: dict[str, str]
    keys: Path
    epoch: int
    options: DispatchOptions
    provisioner: Provisioner | None
    progress: Progress | None
    newest_epoch: Callable[[], int] | None
    owner: str = field(default_factory=lambda: secrets.token_hex(8))
    round: int = 0
    num_commands: int = 0
    num_tables: int = 0
    steps_done: list[Step] = field(default_factory=list)
    dips: list[CapacityDip] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    shortage: list[NodeRequest] = field(default_factory=list)
    superseded: bool = False
    awaited: set[NodeId] = field(default_factory=set)
    settled: set[NodeId] = field(default_factory=set)
    listed: frozenset[str] = frozenset()
    launched: list[ProvisionedNode] = field(default_factory=list)
    judged: set[NodeId] = field(default_factory=set)
    num_answered: Counter[Pool] = field(default_factory=Counter)
    _table: RoutingTable | None = None

    def converge(self) -> DispatchResult:
        """Rounds until there is nothing left to do, a newer controller takes over, or rounds run out."""
        with AgentLinks(self.endpoints, self.keys, controller=self.options.controller) as links:
            while True:
                self.round += 1
                observation = self._fence_all(links)
                result = self._one_round(links, observation)
                if result is not None:
                    return result

    def _fence_all(self, links: AgentLinks) -> Observation:
        """Take agents over; wait for the agents of machines that were just launched.

        Those of which this dispatch knows nothing count too: a dispatch before this one launched them, or EC2 did and
        its answer was lost. Asking for others in their place would buy them twice.
        """
        deadline_s = time.monotonic() + self.options.provision_timeout_s
        self._connect(links)
        observation = self._look(links, deadline_s)
        while self.awaited and not observation.superseded and time.monotonic() < deadline_s:
            self._connect_again(links)
            observation = self._look(links, deadline_s)
        if observation.superseded or not self._give_back(self._failed(observation)):
            return observation
        self._connect_again(links)
        return self._fence(links)

    def _connect(self, links: AgentLinks) -> None:
        """To the machines that there are now, and no more to those that are gone: nobody waits for them."""
        if self.provisioner is None:
            return
        endpoints = self.provisioner.endpoints()
        gone = self.listed - endpoints.keys()
        self.listed = frozenset({*self.listed, *endpoints})
        links.disconnect(gone - self.endpoints.keys())
        links.connect(endpoints, key=self.provisioner.agent_key)
        lost = {node for node in self.awaited if node in gone}
        if lost:
            self.problems.append(f"round {self.round}: gone before an agent answered: {', '.join(sorted(lost))}")
            self.awaited -= lost
            self.shortage += [_not_had(one) for one in self.launched if one.node.id in lost]
        own = {one.node.id for one in self.launched}
        self.awaited = (self.awaited & own) | (self.provisioner.booting() - self.settled)

    def _connect_again(self, links: AgentLinks) -> None:
        """A cloud that does not answer once is no reason to leave machines behind that were just launched."""
        try:
            self._connect(links)
        except CoralError as error:
            text = f"round {self.round}: {error}"
            self.problems += [] if text in self.problems else [text]

    def _look(self, links: AgentLinks, deadline_s: float) -> Observation:
        """One fence; takes ``observe_s`` if it leaves somebody to wait for, so that nobody is asked without a pause."""
        until_s = min(deadline_s, time.monotonic() + self.options.observe_s)
        observation = self._fence(links)
        self.awaited -= observation.nodes.keys()
        self.settled |= observation.nodes.keys()
        if self.awaited and not observation.superseded:
            time.sleep(max(0.0, until_s - time.monotonic()))
        return observation

    def _failed(self, observation: Observation) -> list[ProvisionedNode]:
        """Machines launched here that are of no use: silent ones, and those whose agent says to be something else.

        Silent ones that an earlier dispatch launched may have answered it: a person has to look.
        """
        silent = sorted(self.awaited)
        if silent:
            self.problems.append(f"round {self.round}: no agent answers on new nodes {', '.join(silent)}")
            self.settled |= self.awaited
            self.awaited.clear()
        said = {node.id: node for node in observation.fleet.nodes}
        new = [one for one in self.launched if one.node.id not in self.judged]
        self.judged.update(one.node.id for one in new)
        other = [one for one in new if said.get(one.node.id, one.node) != one.node]
        for one in other:
            text = f"{one.node.id} was launched as {_words(one.node)}, its agent says {_words(said[one.node.id])}"
            self.problems.append(f"round {self.round}: {text}")
        return [one for one in new if one.node.id in silent] + other

    def _give_back(self, failed: list[ProvisionedNode]) -> bool:
        """End these machines, to which no command ever went; they count as not to be had. Whether there are any."""
        if not failed or self.provisioner is None:
            return False
        try:
            if self.is_superseded():
                return False
            self.provisioner.release(tuple(one.node.id for one in failed))
        except CoralError as error:
            self.problems.append(f"round {self.round}: {error}")
        self.shortage += [_not_had(one) for one in failed]
        return True

    def is_superseded(self) -> bool:
        """Whether a newer dispatch began: machines are its matter now."""
        newest = self.epoch if self.newest_epoch is None else self.newest_epoch()
        if newest > self.epoch and not self.superseded:
            self.superseded = True
            self.problems.append(f"round {self.round}: epoch {newest} was given out; ours is {self.epoch}")
        return self.superseded

    def _one_round(self, links: AgentLinks, observation: Observation) -> DispatchResult | None:
        """None if another round is to follow."""
        if observation.superseded:
            self.superseded = True
            self.problems.append(f"a newer epoch is in force on {', '.join(observation.superseded)}")
        if self.superseded:
            return self._result(observation, None)
        transition = preview(self.plan, observation, self.options, self._provisioner())
        if self.shortage and transition.unplaced and self.options.stop_on_shortage:
            return self._result(observation, transition)
        serving = sorted(one.id for one in observation.fleet.instances if one.state is InstanceState.READY)
        self._publish(observation, {}, tuple(serving))
        if transition.is_empty or self.round > self.options.max_rounds:
            return self._result(observation, transition)
        self._run(links, observation, transition)
        return self._result(observation, None) if self.superseded else None

    def _provisioner(self) -> Provisioner | None:
        """None once it had nothing to give: the rest of the dispatch works with what there is."""
        return None if self.shortage else self.provisioner

    def _fence(self, links: AgentLinks) -> Observation:
        request = f"{self.owner} fence {self.epoch}.{self.round}"
        fence = Fence(request=request, epoch=self.epoch, round=self.round, owner=self.owner)
        return observe_links(links, fence, wait_s=self.options.observe_s)

    def _run(self, links: AgentLinks, observation: Observation, transition: Transition) -> None:
        """Carry one transition out as far as it goes."""
        if self.progress is not None:
            self.progress(transition, None)
        self.dips += transition.dips
        specs = start_specs(transition, self.plan, observation, self.options.model_names)
        mission = Mission(
            transition=transition,
            epoch=self.epoch,
            round=self.round,
            owner=self.owner,
            targets=observation.targets,
            specs=specs,
        )
        machine = ControllerMachine(mission=mission, policy=self.options.policy)
        work = _Work(dispatch=self, links=links, observation=observation, machine=machine, transition=transition)
        work.drive()
        self.num_commands += machine.num_commands
        for problem in machine.problems:
            self._note(problem)

    def obtain(self, pool: Pool, count: int) -> None:
        """Ask for nodes; what does not come is shortage.

        The token changes only once a request was answered, so that asking again after a fault launches nothing twice;
        no other dispatch has it, even where the counter of epochs was lost.
        """
        token = f"{self.owner}.{self.epoch}.{'/'.join(pool)}.{count}.{self.num_answered[pool]}"
        request = NodeRequest(region=pool[0], configuration=pool[1], market=pool[2], count=count, token=token)
        try:
            came = self.provisioner.provision(request) if self.provisioner is not None else ()
        except Unavailable as error:
            self.problems.append(f"round {self.round}: {error}")
            came = ()
        self.num_answered[pool] += 1
        self.launched += came
        self.awaited.update(one.node.id for one in came)
        if len(came) < request.count:
            self.shortage.append(replace(request, count=request.count - len(came)))

    def _note(self, problem: Problem) -> None:
        self.problems.append(f"round {self.round}: {problem.text}")
        self.superseded = self.superseded or problem.superseded

    def _publish(
        self, observation: Observation, started: Mapping[str, ServingInstance], routed: tuple[str, ...]
    ) -> None:
        known = {**{str(one.id): one for one in observation.fleet.instances}, **started}
        routes = [_route(known[name], observation) for name in routed]
        routes += self._routes_out_of_sight(observation)
        self.num_tables += 1
        table = RoutingTable.of(epoch=self.epoch, step=self.num_tables, routes=routes)
        if self._table is not None and self._table.routes == table.routes:
            return
        self._table = table
        if self.options.routing_folder is not None:
            write_routing(self.options.routing_folder, table)

    def _routes_out_of_sight(self, observation: Observation) -> list[Route]:
        """Earlier routes of which nothing is known while agents do not answer: unknown is not gone, so they stay."""
        if not observation.unreachable:
            return []
        seen = {str(one.id) for one in observation.fleet.instances} | observation.used_ids
        taken = {one.endpoint for one in observation.nodes.values()}
        earlier = self._earlier_routes()
        return [one for one in earlier if one.instance not in seen and one.endpoint not in taken]

    def _earlier_routes(self) -> tuple[Route, ...]:
        folder = self.options.routing_folder
        if self._table is not None or folder is None or not (folder / "routing.json").exists():
            return self._table.routes if self._table is not None else ()
        return read_routing(folder / "routing.json").routes

    def _result(self, observation: Observation, transition: Transition | None) -> DispatchResult:
        unplaced = transition.unplaced if transition is not None else ()
        done = transition is not None and transition.is_empty and not unplaced and not self.superseded
        return DispatchResult(
            converged=done,
            superseded=self.superseded,
            epoch=self.epoch,
            rounds=self.round,
            num_commands=self.num_commands,
            steps_done=tuple(self.steps_done),
            dips=tuple(self.dips),
            unplaced=unplaced,
            unreachable=observation.unreachable,
            excluded=observation.excluded,
            problems=(*self.problems, *observation.trouble),
            shortage=tuple(self.shortage),
            fleet=observation.fleet,
            routing=self._table or RoutingTable(epoch=self.epoch, step=0, routes=()),
        )


@dataclass(slots=True, kw_only=True)
class _Work:
    """One transition on its way: feeds the machine and carries its instructions out."""

    dispatch: _Dispatch
    links: AgentLinks
    observation: Observation
    machine: ControllerMachine
    transition: Transition

    def drive(self) -> None:
        self._carry_out(self.machine.begin(time.monotonic()))
        ticked_at_s = time.monotonic()
        while not self.machine.finished:
            for _, message in self.links.receive(_TICK_S):
                now_s = time.monotonic()
                if isinstance(message, Outcome):
                    self._log_outcome(message)
                    self._carry_out(self.machine.handle(OutcomeArrived(outcome=message, now_s=now_s)))
                elif isinstance(message, Report):
                    self._carry_out(self.machine.handle(ReportArrived(report=message, now_s=now_s)))
            now_s = time.monotonic()
            if now_s - ticked_at_s >= _TICK_S:
                ticked_at_s = now_s
                self._carry_out(self.machine.handle(TimePassed(now_s=now_s)))

    def _carry_out(self, instructions: list[ControllerInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Send(agent=agent, message=message):
                    self._log_sent(agent, message)
                    self.links.send(agent, message)
                case StepsDone(steps=steps):
                    self._steps_done(steps)
                case _:
                    problem = self._act(instruction)
                    self._carry_out(self.machine.handle(ActDone(problem=problem, now_s=time.monotonic())))

    def _log_sent(self, agent: str, message: ToAgent) -> None:
        if isinstance(message, Command):
            kind = type(message.action).__name__.lower()
            ids = {"command": message.id, "kind": kind, "agent": agent, "node": message.node, **self._ids()}
            _LOG.info("command goes out", extra=ids)

    def _log_outcome(self, outcome: Outcome) -> None:
        ids = {"command": outcome.command, "status": outcome.status.value, **self._ids()}
        _LOG.info("command answered%s", f": {outcome.detail}" if outcome.detail else "", extra=ids)

    def _ids(self) -> dict[str, object]:
        return {"plan": self.dispatch.plan.id, "epoch": self.dispatch.epoch, "round": self.dispatch.round}

    def _steps_done(self, steps: tuple[Step, ...]) -> None:
        self.dispatch.steps_done += steps
        if self.dispatch.progress is not None:
            for step in steps:
                self.dispatch.progress(self.transition, step)

    def _act(self, instruction: ControllerInstruction) -> str:
        """Do what is not a message; returns what went wrong, "" if nothing did."""
        try:
            match instruction:
                case Publish(routed=routed):
                    started = {str(one.id): one for one in self.transition.started}
                    self.dispatch._publish(self.observation, started, routed)  # noqa: SLF001 - one unit in two classes
                case Provision() | Release() if self.dispatch.is_superseded():
                    return "a newer dispatch began"
                case Provision(nodes=nodes):
                    self._provision(nodes)
                case Release(nodes=nodes) if self.dispatch.provisioner is not None:
                    self.dispatch.provisioner.release(tuple(NodeId(node) for node in nodes))
        except CoralError as error:
            return str(error)
        return ""

    def _provision(self, nodes: tuple[str, ...]) -> None:
        """Ask for all pools; what cannot be had is noted as shortage, the rest goes on in the next round."""
        dispatch = self.dispatch
        pending = [node for node in self.transition.pending if node.id in nodes]
        pools = sorted({(node.region, node.configuration, node.market) for node in pending})
        for pool in pools:
            dispatch.obtain(pool, sum((node.region, node.configuration, node.market) == pool for node in pending))


def _words(node: Node) -> str:
    return f"{node.region} {node.configuration} {node.market}"


def _not_had(machine: ProvisionedNode) -> NodeRequest:
    """A machine that is of no use counts as one that could not be had."""
    node = machine.node
    return NodeRequest(
        region=node.region, configuration=node.configuration, market=node.market, count=1, token=machine.machine
    )


def _route(instance: ServingInstance, observation: Observation) -> Route:
    head = instance.nodes[0]
    report = observation.nodes[head]
    return Route(
        model=instance.model,
        phase=instance.phase,
        region=instance.region,
        instance=InstanceId(instance.id),
        endpoint=report.endpoint,
        weight=instance.throughput or 1.0,
    )
