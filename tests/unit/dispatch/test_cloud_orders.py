"""Dispatch onto machines of a cloud in unlucky orders of events: cloud and agents are played, the loop is real."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coral_tasks.agent.keys import make_key_pair
from coral_tasks.dispatch import dispatcher
from coral_tasks.dispatch.dispatcher import DispatchOptions, DispatchResult, dispatch_plan
from coral_tasks.dispatch.observation import build_observation
from coral_tasks.dispatch.transport import AgentLinks
from coral_tasks.domain.errors import SourceFault, UnknownName
from coral_tasks.domain.fleet import Node
from coral_tasks.domain.names import Market, NodeConfigurationId, NodeId
from coral_tasks.domain.transition import NodeRequest, ProvisionedNode
from coral_tasks.protocol.controller_machine import ControllerPolicy
from coral_tasks.protocol.keyfiles import Role
from coral_tasks.protocol.messages import Fence, NodeReport, Observe, Report, SlotState

sys.path.insert(0, str(Path(__file__).parents[2] / "protocol"))
from fleet_builders import REGION, plan, template

ONE = template("one")
NOTHING = plan({}, ONE)
POOL = (REGION, NodeConfigurationId("L4x1"), Market.ON_DEMAND)


def machine(name: str) -> dict[str, Node]:
    """One machine by its name."""
    return {name: Node(id=NodeId(name), region=POOL[0], configuration=POOL[1], market=POOL[2])}


def said(agent: str, request: str, *, node: str = "", market: Market = Market.ON_DEMAND, newer: bool = False) -> Report:
    """What an agent with one empty L4x1 node answers."""
    one = NodeReport(
        node=node or agent,
        region=REGION,
        configuration="L4x1",
        market=market,
        engine="simulated",
        address="127.0.0.1",
        master_port=7500,
        state=SlotState.EMPTY,
    )
    epoch = 99 if newer else 1
    return Report(request=request, agent=agent, incarnation="a", epoch=epoch, round=1, accepted=not newer, nodes=(one,))


@dataclass
class World:
    """A cloud and its agents. ``silent``: machines without an answer. ``faults``: what each call does, in order."""

    limit: int = 4
    held: dict[str, Node] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    launched: dict[str, list[Node]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    silent: set[str] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)
    young: set[str] = field(default_factory=set)
    lost_answers: int = 0
    on_look: Callable[[World, int], None] = lambda *_: None
    answer: Callable[[str, str], Report] = said
    agent_key: str = "fleet"

    def obtainable(self) -> Mapping[tuple, int]:
        return {POOL: max(0, self.limit - len(self.held))}

    def provision(self, request: NodeRequest) -> tuple[ProvisionedNode, ...]:
        first = len(self.held) + len(self.ended)
        names = [f"i-{first + number:04d}" for number in range(request.count)]
        made = [node for name in names for node in machine(name).values()]
        made = self.launched.setdefault(request.token, made)
        self.tokens.append(request.token)
        if self.tokens.count(request.token) == 1:
            self.held.update({str(one.id): one for one in made})
            self.young.update(names)
        if self.lost_answers:
            self.lost_answers -= 1
            raise SourceFault("EC2 run_instances: read timeout")
        return tuple(ProvisionedNode(node=one, machine=one.id, address="127.0.0.1") for one in made)

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        self.ended += [node for node in nodes if self.held.pop(str(node), None) is not None]

    def releasable(self) -> frozenset[NodeId]:
        return frozenset(map(NodeId, self.held))

    def booting(self) -> frozenset[NodeId]:
        return frozenset(NodeId(name) for name in self.young & self.held.keys())

    def interrupted(self) -> frozenset[NodeId]:
        return frozenset()

    def endpoints(self) -> Mapping[str, str]:
        self.calls["endpoints"] += 1
        self.on_look(self, self.calls["endpoints"])
        return {name: "tcp://127.0.0.1:1" for name in self.held if name not in self.unlisted}


@pytest.fixture
def send(monkeypatch, tmp_path):
    """``send(world)``: a dispatch in that world, with short limits."""
    for role, name in ((Role.CONTROLLER, "controller"), (Role.AGENT, "fleet")):
        make_key_pair(tmp_path, role, name)

    def run(world: World, wanted=NOTHING, **options) -> DispatchResult:
        def observe_links(links: AgentLinks, fence: Fence | Observe, *, wait_s: float):
            del wait_s
            answering = [one for one in links.agents if one in world.held and one not in world.silent]
            answers = {one: world.answer(one, fence.request) for one in answering}
            return build_observation(answers, links.agents)

        monkeypatch.setattr(dispatcher, "observe_links", observe_links)
        newest = options.pop("newest_epoch", None)
        short = {"observe_s": 0.05, "provision_timeout_s": 0.2, "policy": ControllerPolicy(command_timeout_s=0.1)}
        limits = DispatchOptions(**{**short, **options})
        return dispatch_plan(wanted, {}, tmp_path, epoch=1, options=limits, provisioner=world, newest_epoch=newest)

    return run


def test_without_the_shared_key_nothing_is_launched(monkeypatch, tmp_path) -> None:
    """Agents of new machines could not be talked to: the dispatch ends before it buys any."""
    make_key_pair(tmp_path, Role.CONTROLLER, "controller")
    world = World()
    with pytest.raises(UnknownName, match="fleet"):
        dispatch_plan(plan({"one": 1}, ONE), {}, tmp_path, epoch=1, provisioner=world)
    assert world.held == {}


def test_two_dispatches_never_share_a_token(send) -> None:
    """A home that lost its counter begins at epoch 1 again: EC2 must not answer with machines of the day before."""
    tokens = []
    for _ in range(2):
        world = World(silent={"i-0000"})
        send(world, plan({"one": 1}, ONE))
        tokens.append(world.tokens[0])
    assert len(set(tokens)) == 2


def test_machines_whose_launch_was_not_answered_are_not_bought_again(send) -> None:
    """EC2 launched two, its answer was lost: the next round finds them by themselves; two run in all, not four."""

    def boot(world: World, number: int) -> None:
        world.silent = set(world.held) if number < 4 else set()

    world = World(lost_answers=1, on_look=boot)
    send(world, plan({"one": 2}, ONE), max_rounds=2)
    assert sorted(world.held) == ["i-0000", "i-0001"]
    assert len(world.tokens) == 1


def test_a_request_without_an_answer_is_repeated_under_its_token(send) -> None:
    """Launched, not answered, and not listed yet: the same token makes the second request harmless."""

    def hide(world: World, _: int) -> None:
        world.unlisted, world.young = set(world.held), set()

    world = World(lost_answers=1, on_look=hide)
    send(world, plan({"one": 2}, ONE), max_rounds=2)
    assert len(world.tokens) == 2
    assert [len(one) for one in world.launched.values()] == [2]


def test_a_machine_that_is_gone_is_not_waited_for(send) -> None:
    """Taken back while it booted: it counts as not to be had at once, not after a wait of an hour."""

    def take_back(world: World, number: int) -> None:
        if number >= 3:
            world.held.clear()

    world = World(silent={"i-0000"}, on_look=take_back)
    result = send(world, plan({"one": 1}, ONE), provision_timeout_s=3600.0)
    assert [one.count for one in result.shortage] == [1]
    assert any("gone before an agent answered: i-0000" in one for one in result.problems)


def test_a_machine_of_before_is_waited_for_until_it_is_no_longer_young(send) -> None:
    """Launched by an earlier dispatch, silent since: the wait ends with its youth, not an hour from now."""

    def grow_old(world: World, number: int) -> None:
        world.young = {"i-0000"} if number < 3 else set()

    world = World(held=machine("i-0000"), silent={"i-0000"}, on_look=grow_old)
    result = send(world, provision_timeout_s=3600.0)
    assert world.calls["endpoints"] == 3
    assert (result.unreachable, world.ended) == (("i-0000",), [])


def test_the_cloud_is_asked_with_a_pause_while_a_machine_boots(send) -> None:
    """A machine without an address yet: in 0.2 s at a pause of 0.05 s there is room for a handful of looks."""
    world = World(unlisted={"i-0000"})
    send(world, plan({"one": 1}, ONE))
    assert world.calls["endpoints"] <= 8


def test_a_look_that_fails_leaves_no_machines_behind(send) -> None:
    """EC2 fails once while a silent machine is waited for: the wait goes on, and the machine is ended at its end."""

    def fail(_: World, number: int) -> None:
        if number == 3:
            raise SourceFault("EC2 describe_instances: 503")

    world = World(silent={"i-0000"}, on_look=fail)
    result = send(world, plan({"one": 1}, ONE))
    assert world.ended == ["i-0000"]
    assert any("503" in one for one in result.problems)


def test_a_machine_that_is_not_what_was_launched_is_ended(send) -> None:
    """Its agent says spot, it was bought on demand: one is bought and ended, not one in each round."""
    world = World(answer=lambda agent, request: said(agent, request, market=Market.SPOT))
    result = send(world, plan({"one": 1}, ONE))
    assert len(world.tokens) == 1
    assert world.ended == ["i-0000"]
    assert [one.count for one in result.shortage] == [1]
    text = "i-0000 was launched as aws/us-east-2 L4x1 on_demand, its agent says aws/us-east-2 L4x1 spot"
    assert any(text in one for one in result.problems)


def test_an_ended_machine_is_not_reported_as_silent(send) -> None:
    """What the dispatch itself ended is gone: nobody waits for it or is sent to look for it."""
    world = World(held=machine("i-0000"))
    result = send(world)
    assert world.ended == ["i-0000"]
    assert result.converged
    assert result.unreachable == ()


def test_a_newer_dispatch_decides_on_machines(send) -> None:
    """Another epoch was given out meanwhile: nothing is launched and nothing ended, also not what is silent here."""
    world = World(held=machine("i-0000"))
    result = send(world, newest_epoch=lambda: 2)
    assert result.superseded
    assert world.ended == []
    empty = World()
    assert send(empty, plan({"one": 1}, ONE), newest_epoch=lambda: 2).superseded
    assert empty.tokens == []
    numbers = iter([1, 2, 2, 2])
    silent = World(silent={"i-0000"})
    result = send(silent, plan({"one": 1}, ONE), newest_epoch=lambda: next(numbers))
    assert result.superseded
    assert (silent.ended, result.shortage) == ([], ())


def test_a_dispatch_that_agents_turned_away_ends_no_machine(send) -> None:
    """One agent serves a newer controller, which may count on the machine that is silent here."""
    newer = World(held=machine("i-0000"), answer=lambda agent, request: said(agent, request, newer="0001" in agent))
    newer.silent = {"i-0002"}
    result = send(newer, plan({"one": 3}, ONE), provision_timeout_s=3600.0)
    assert result.superseded
    assert newer.ended == []


def test_what_one_machine_says_of_another_ends_nothing(send) -> None:
    """An image that carries another machine's name: that machine's own agent knows best, and is asked alone."""
    both = {one: said(one, "r", node="i-0001") for one in ("i-0000", "i-0001")}
    seen = build_observation(both, both)
    assert seen.targets["i-0001"].agent == "i-0001"
    assert seen.trouble == ("node i-0001 is reported by i-0001 and by i-0000; the latter ignored",)
    world = World(held=machine("i-0001") | machine("i-0000"), silent={"i-0001"})
    world.answer = lambda agent, request: said(agent, request, node="i-0001")
    send(world)
    assert world.ended == []
