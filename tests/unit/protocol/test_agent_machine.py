"""The agent's state machine, transition by transition, and under arbitrary commands."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_

from coral_tasks.domain.names import Market, Phase
from coral_tasks.protocol.agent_machine import (
    MAX_OUTCOMES,
    AgentMachine,
    AgentPolicy,
    Booted,
    Changes,
    CommandReceived,
    EngineExited,
    FenceReceived,
    HealthSeen,
    KillEngine,
    SendOutcome,
    SendReport,
    Slot,
    SpawnEngine,
    Ticked,
)
from coral_tasks.protocol.messages import (
    Command,
    Drain,
    Fence,
    Outcome,
    OutcomeStatus,
    Profile,
    SlotState,
    StageSpec,
    Start,
    StartSpec,
    Stop,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "protocol"))
from world import Agent, Broken, World

POLICY = AgentPolicy(
    start_timeout_s=100,
    backoff_base_s=2,
    backoff_max_s=5,
    max_restarts=3,
    stable_s=50,
    unhealthy_s=10,
    drain_settle_s=2,
    exclusion_s=60,
)


def spec(instance: str = "x", *, node: str = "n", rank: int = 0) -> StartSpec:
    nodes = (node, "other") if rank == 0 else ("other", node)
    return StartSpec(
        instance=instance,
        template="t",
        model="m",
        model_name="m",
        phase=Phase.AGGREGATED,
        region="r",
        market=Market.SPOT,
        throughput=1.0,
        latency_s=0.1,
        stages=tuple(StageSpec(num_layers=1, nodes=(one,)) for one in nodes),
        rank=rank,
        tp_degree=1,
    )


class Bench:
    """One machine with one node, driven by hand; commits at once."""

    def __init__(self) -> None:
        self.machine = AgentMachine(incarnation="i1", slots={"n": Slot(node="n")}, policy=POLICY)
        self.now_s = 0.0
        self.number = 0

    def feed(self, event):
        reaction = self.machine.handle(event)
        self.machine.commit(reaction.changes)
        return reaction.instructions

    def command(self, action, *, epoch: int = 1, name: str | None = None, **fields):
        self.number += 1
        made = {"id": name or f"c{self.number}", "epoch": epoch, "round": 0, "owner": "k", "incarnation": "i1"}
        made |= {"node": "n", "action": action, **fields}
        return self.feed(CommandReceived(peer=b"p", command=Command(**made), now_s=self.now_s))

    @property
    def slot(self) -> Slot:
        return self.machine.slots["n"]

    def ready(self) -> Slot:
        self.command(Start(spec=spec()))
        self.healthy()
        return self.slot

    def healthy(self, in_flight: int | None = 0):
        launch = self.slot.launch
        return self.feed(HealthSeen(node="n", launch=launch, healthy=True, in_flight=in_flight, now_s=self.now_s))

    def exits(self, detail: str = "boom"):
        return self.feed(EngineExited(node="n", launch=self.slot.launch, detail=detail, now_s=self.now_s))

    def wait(self, seconds: float):
        self.now_s += seconds
        return self.feed(Ticked(now_s=self.now_s))


def outcome(instructions) -> Outcome:
    return next(one.outcome for one in instructions if isinstance(one, SendOutcome))


def test_start_spawns_once_and_a_replay_returns_the_first_outcome() -> None:
    """The same command id is answered from memory, whatever has happened since."""
    bench = Bench()
    first = bench.command(Start(spec=spec()), name="c")
    assert [type(one) for one in first] == [SpawnEngine, SendOutcome]
    bench.command(Stop(instance="x"))
    bench.exits()
    again = bench.command(Start(spec=spec()), name="c")
    assert [type(one) for one in again] == [SendOutcome]
    assert outcome(again) == outcome(first)
    assert bench.slot.state is SlotState.EMPTY


def test_start_of_what_runs_already_is_done_without_a_second_engine() -> None:
    """Another command for the same instance finds it running and says so."""
    bench = Bench()
    bench.ready()
    again = bench.command(Start(spec=spec()))
    assert outcome(again).status is OutcomeStatus.DONE
    assert not any(isinstance(one, SpawnEngine) for one in again)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (spec("y"), "node is ready with x"),
        (with_(spec(), throughput=2.0), "node is ready with x"),
        (spec(node="elsewhere"), "rank does not belong to this node"),
        (with_(spec(), rank=7), "rank does not belong to this node"),
    ],
)
def test_start_on_a_busy_or_wrong_node_is_refused(wanted: StartSpec, message: str) -> None:
    """A node runs one instance; a command whose rank points elsewhere is not for it."""
    bench = Bench()
    bench.ready()
    refused = bench.command(Start(spec=wanted))
    assert outcome(refused).status is OutcomeStatus.BUSY
    assert message in outcome(refused).detail
    assert len(refused) == 1


def test_an_instance_that_ran_here_is_never_run_again() -> None:
    """A late start of an instance that was stopped in between must not bring it back."""
    bench = Bench()
    bench.ready()
    bench.command(Stop(instance="x"))
    bench.exits()
    late = bench.command(Start(spec=spec()))
    assert "ran here before" in outcome(late).detail
    assert bench.slot.state is SlotState.EMPTY


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"epoch": 4}, OutcomeStatus.STALE),
        ({"epoch": 5, "round": 1}, OutcomeStatus.STALE),
        ({"epoch": 5, "round": 2, "owner": "thief"}, OutcomeStatus.STALE),
        ({"epoch": 5, "round": 2, "incarnation": "i0"}, OutcomeStatus.RESTARTED),
        ({"epoch": 5, "round": 2, "node": "unknown"}, OutcomeStatus.UNKNOWN_NODE),
    ],
)
def test_fenced_and_misplaced_commands_change_nothing(fields: dict, status: OutcomeStatus) -> None:
    """Older epoch or round, a second owner of the epoch, an earlier agent run, an unknown node: refused each time."""
    bench = Bench()
    bench.feed(FenceReceived(peer=b"p", fence=Fence(request="f", epoch=5, round=2, owner="k")))
    before = dict(bench.machine.slots), bench.machine.fence
    for _ in range(2):
        refused = bench.command(Start(spec=spec()), name="c", **fields)
        assert outcome(refused).status is status
    assert (dict(bench.machine.slots), bench.machine.fence) == before


def test_a_fence_is_raised_and_never_lowered() -> None:
    """An older fence is answered with accepted=False and changes nothing."""
    bench = Bench()
    new = bench.feed(FenceReceived(peer=b"p", fence=Fence(request="f", epoch=5, round=2, owner="k")))
    old = bench.feed(FenceReceived(peer=b"p", fence=Fence(request="g", epoch=5, round=1, owner="k")))
    assert new == (SendReport(peer=b"p", request="f", accepted=True),)
    assert old == (SendReport(peer=b"p", request="g", accepted=False),)
    assert (bench.machine.fence.epoch, bench.machine.fence.round) == (5, 2)


def test_crashes_back_off_then_fail_and_exclude_the_node() -> None:
    """2, 4, 5 (capped) seconds, then FAILED: the reason is kept, the node stays excluded for a while after STOP."""
    bench = Bench()
    bench.ready()
    for wait_s in (2, 4, 5):
        bench.exits()
        assert bench.slot.state is SlotState.BACKOFF
        assert not bench.wait(wait_s - 0.5)
        assert [type(one) for one in bench.wait(0.5)] == [SpawnEngine]
    bench.exits("out of memory")
    assert bench.slot.state is SlotState.FAILED
    assert "ended 4 times: out of memory" in bench.slot.excluded
    bench.command(Stop(instance="x"))
    assert (bench.slot.state, bool(bench.slot.excluded)) == (SlotState.EMPTY, True)
    bench.wait(60)
    assert bench.slot.excluded == ""


def test_a_long_stable_engine_forgets_its_crashes() -> None:
    """Crashes count only when they follow each other closely."""
    bench = Bench()
    bench.ready()
    bench.exits()
    bench.wait(2)
    bench.healthy()
    for _ in range(10):
        bench.now_s += 5
        bench.healthy()
    bench.wait(0)
    assert bench.slot.restarts == 0


def test_an_engine_that_stops_answering_or_never_answers_is_killed() -> None:
    """READY without an answer for 10 s and STARTING for 100 s both end in a kill, once."""
    for setup in ("ready", "starting"):
        bench = Bench()
        bench.command(Start(spec=spec()))
        if setup == "ready":
            bench.healthy()
        killed = bench.wait(100)
        assert killed == (KillEngine(node="n", launch=bench.slot.launch),)
        assert bench.wait(1) == ()
        bench.exits()
        assert bench.slot.state is SlotState.BACKOFF


def test_a_drain_waits_until_idle_for_the_settling_time() -> None:
    """In flight, idle for one second, busy again, idle for two: only then drained."""
    bench = Bench()
    bench.ready()
    bench.command(Drain(instance="x", timeout_s=100))
    for in_flight, seconds in ((3, 1), (0, 1), (1, 1), (0, 1), (0, 1)):
        bench.healthy(in_flight)
        assert bench.slot.state is SlotState.DRAINING
        bench.now_s += seconds
    bench.healthy(0)
    assert bench.slot.state is SlotState.DRAINED


def test_unknown_load_is_not_idle() -> None:
    """An engine that does not tell its requests in flight, or does not answer, is drained by the time limit only."""
    bench = Bench()
    bench.ready()
    bench.command(Drain(instance="x", timeout_s=30))
    for _ in range(20):
        bench.now_s += 1
        bench.healthy(None)
    assert bench.slot.state is SlotState.DRAINING
    bench.wait(10)
    assert bench.slot.state is SlotState.DRAINED
    assert "timed out" in bench.slot.detail


def test_stop_ends_the_engine_and_waits_for_its_exit() -> None:
    """The node is free only once the process is gone; a second stop and a stop of a stranger do nothing."""
    bench = Bench()
    bench.ready()
    assert not any(isinstance(one, KillEngine) for one in bench.command(Stop(instance="stranger")))
    launch = bench.slot.launch
    assert bench.command(Stop(instance="x"))[0] == KillEngine(node="n", launch=launch)
    assert bench.slot.state is SlotState.STOPPING
    assert outcome(bench.command(Start(spec=spec("y")))).status is OutcomeStatus.BUSY
    bench.exits()
    assert bench.slot.state is SlotState.EMPTY


def test_an_exit_told_twice_or_of_an_older_launch_counts_once() -> None:
    """Late news of an earlier process do not touch the present one."""
    bench = Bench()
    old = bench.ready().launch
    bench.exits()
    bench.feed(EngineExited(node="n", launch=old, detail="", now_s=bench.now_s))
    bench.wait(2)
    bench.feed(EngineExited(node="n", launch=old, detail="", now_s=bench.now_s))
    assert (bench.slot.state, bench.slot.restarts) == (SlotState.STARTING, 1)


def reboot(bench: Bench, alive: set[str]):
    machine = bench.machine
    bench.machine = AgentMachine(incarnation="i2", slots=dict(machine.slots), policy=POLICY, fence=machine.fence)
    bench.now_s = 0.0
    return bench.feed(Booted(alive=frozenset(alive), now_s=0.0))


def test_a_restarted_agent_adopts_what_lives() -> None:
    """A live engine of the journal is kept as it is, neither killed nor started again."""
    bench = Bench()
    bench.now_s = 1e6
    slot = bench.ready()
    assert reboot(bench, {slot.launch}) == ()
    assert (bench.slot.state, bench.slot.launch) == (SlotState.READY, slot.launch)
    assert bench.wait(5) == ()


def test_a_restarted_agent_starts_what_died_and_kills_strays() -> None:
    """An engine that is gone is started anew under a new launch; a process that no slot knows is ended."""
    bench = Bench()
    slot = bench.ready()
    assert reboot(bench, {"stray"}) == (KillEngine(node="", launch="stray"),)
    assert bench.slot.state is SlotState.BACKOFF
    spawned = bench.wait(0)
    assert isinstance(spawned[0], SpawnEngine)
    assert bench.slot.launch != slot.launch


@pytest.mark.parametrize(
    ("state", "alive", "after"),
    [
        (SlotState.DRAINING, True, SlotState.DRAINING),
        (SlotState.DRAINING, False, SlotState.DRAINED),
        (SlotState.DRAINED, False, SlotState.DRAINED),
        (SlotState.STOPPING, True, SlotState.STOPPING),
        (SlotState.STOPPING, False, SlotState.EMPTY),
        (SlotState.PROFILING, False, SlotState.EMPTY),
        (SlotState.STARTING, False, SlotState.BACKOFF),
    ],
)
def test_every_state_survives_a_restart(state: SlotState, alive: bool, after: SlotState) -> None:
    """What each state becomes when the agent comes back, with and without its process."""
    bench = Bench()
    bench.ready()
    bench.machine.commit(Changes(slots=(with_(bench.slot, state=state, doomed=state is SlotState.STOPPING),)))
    launch = bench.slot.launch
    told = reboot(bench, {launch} if alive else set())
    assert bench.slot.state is after
    assert told == ((KillEngine(node="n", launch=launch),) if state is SlotState.STOPPING and alive else ())


def test_profiling_needs_an_empty_node_and_frees_it_at_the_end() -> None:
    """A job runs as a process of its own; the node is busy meanwhile, and too long a job is killed."""
    bench = Bench()
    bench.ready()
    job = Profile(job="j", request="{}", timeout_s=50)
    assert outcome(bench.command(job)).status is OutcomeStatus.BUSY
    bench.command(Stop(instance="x"))
    bench.exits()
    assert isinstance(bench.command(job)[0], SpawnEngine)
    assert bench.slot.state is SlotState.PROFILING
    assert outcome(bench.command(Start(spec=spec("y")))).detail == "node is profiling with j"
    assert isinstance(bench.wait(50)[0], KillEngine)
    bench.exits()
    assert bench.slot.state is SlotState.EMPTY


def test_memory_of_outcomes_is_bounded() -> None:
    """Only the newest outcomes are kept."""
    bench = Bench()
    for number in range(MAX_OUTCOMES + 10):
        bench.machine.commit(Changes(outcome=Outcome(command=f"o{number}", status=OutcomeStatus.DONE)))
    assert len(bench.machine.outcomes) == MAX_OUTCOMES
    assert "o0" not in bench.machine.outcomes


def random_command(rng: random.Random, agent: Agent, number: int) -> Command:
    """A command that no honest controller would send: any epoch, owner, run, node and order."""
    node, instance = rng.choice(["n1", "n2", "n3"]), f"x{rng.randrange(4)}"
    nodes = rng.choice([(node,), (node, "n2"), ("n1", node)])
    wanted = with_(
        spec(instance), stages=tuple(StageSpec(num_layers=1, nodes=(one,)) for one in nodes), rank=rng.randrange(2)
    )
    actions = [Start(spec=wanted)] * 3 + [Drain(instance=instance, timeout_s=5.0), Stop(instance=instance)]
    return Command(
        id=f"c{number}",
        epoch=rng.randrange(4),
        round=rng.randrange(3),
        owner=rng.choice("kl"),
        incarnation=f"a.{agent.runs - (rng.random() < 0.1)}",
        node=node,
        action=rng.choice([*actions, Profile(job="j", request="{}", timeout_s=9.0)]),
    )


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), chaos=st.sampled_from([0.0, 0.2, 0.6]))
def test_no_order_of_commands_makes_a_node_run_two_engines(seed: int, chaos: float) -> None:
    """Any commands, replayed and reordered, with crashes and a full disk at every point: at most one engine a node,
    each launch once, one outcome a command, no epoch back, and at the end each engine belongs to its slot.
    """
    rng = random.Random(seed)
    agent = Agent(name="a", nodes=(("n1", "L4x1"), ("n2", "L4x1")))
    world = World(rng=rng, agents={"a": agent}, chaos=chaos)
    world.boot(agent)
    sent: list[Command] = []
    for number in range(80):
        sent.append(random_command(rng, agent, number))
        for command in (sent[-1], rng.choice(sent)):
            world.feed(agent, CommandReceived(peer=b"k", command=command, now_s=world.now_s))
        if rng.random() < 0.5:
            world.second()
    world.chaos = 0.0
    for _ in range(40):
        world.second()
    per_node = Counter(agent.engines.values())
    assert all(count == 1 for count in per_node.values())
    for launch, node in agent.engines.items():
        assert agent.machine.slots[node].launch == launch


def test_the_world_notices_a_second_engine() -> None:
    """The check behind the property above is itself able to fail."""
    agent = Agent(name="a", nodes=(("n1", "L4x1"),))
    world = World(rng=random.Random(0), agents={"a": agent})
    world.boot(agent)
    agent.engines["planted"] = "n1"
    wanted = with_(spec(), stages=(StageSpec(num_layers=1, nodes=("n1",)),))
    command = Command(id="c", epoch=1, round=0, owner="k", incarnation="a.1", node="n1", action=Start(spec=wanted))
    with pytest.raises(Broken, match="n1 would run two engines"):
        world.feed(agent, CommandReceived(peer=b"k", command=command, now_s=0.0))
