"""Both state machines under random loss, duplication, reordering, delay and crashes of either side."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from fleet_builders import plan, template
from world import Agent, Controller, World

ONE = template("one", throughput=10.0)
TWO = template("two", stages=(("L4x1",), ("L4x1",)), throughput=25.0)
AGENTS = {
    "a": (("a1", "L4x1"), ("a2", "L4x1")),
    "b": (("b1", "L4x1"),),
    "c": (("c1", "L4x1"), ("c2", "L4x1")),
}


def make_world(seed: int) -> World:
    world = World(rng=random.Random(seed), agents={name: Agent(name=name, nodes=some) for name, some in AGENTS.items()})
    for agent in world.agents.values():
        world.boot(agent)
    return world


def random_plan(rng: random.Random):
    return plan({"one": rng.randrange(4), "two": rng.randrange(2)}, ONE, TWO)


def storm(world: World, chaos: float, seconds: int) -> int:
    """Controllers come and go, two at a time at times, while faults strike. Returns the last epoch."""
    world.chaos = chaos
    rng, epoch, controllers = world.rng, 0, {}
    for _ in range(seconds):
        if not controllers or rng.random() < 0.06:
            if controllers and rng.random() < 0.7:
                controllers.pop(rng.choice(sorted(controllers)))
            epoch += 1
            controllers[f"k{epoch}"] = Controller(name=f"k{epoch}", world=world, plan=random_plan(rng), epoch=epoch)
        for controller in list(controllers.values()):
            controller.second()
        for _ in range(rng.randrange(8)):
            world.deliver(controllers)
        world.second()
    return epoch


def calm(world: World, controller: Controller, seconds: int = 400) -> None:
    """No more faults: what is on the wire arrives, and one controller works until it is done."""
    world.chaos = 0.0
    controllers = {controller.name: controller}
    for _ in range(seconds):
        controller.second()
        while world.wire:
            world.deliver(controllers)
        world.second()
        if controller.converged:
            return


def engines_by_instance(world: World) -> Counter[tuple[str, str]]:
    """(template, instance) of every live engine, as the slots say."""
    found: Counter[tuple[str, str]] = Counter()
    for agent in world.agents.values():
        for launch, node in agent.engines.items():
            slot = agent.machine.slots[node]
            assert slot.launch == launch, f"{launch} on {node} belongs to no slot"
            found[slot.spec.template, slot.spec.instance] += 1
    return found


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), chaos=st.sampled_from([0.0, 0.1, 0.3, 0.6]))
def test_the_fleet_converges_to_the_newest_plan(seed: int, chaos: float) -> None:
    """After any storm the newest plan is reached: each instance's engines run once, nothing else runs. On the way no
    node ran two engines, no launch started twice, no epoch went back, and no command had two outcomes (the world
    raises otherwise).
    """
    world = make_world(seed)
    epoch = storm(world, chaos, 60)
    newest = random_plan(world.rng)
    last = Controller(name="last", world=world, plan=newest, epoch=epoch + 1)
    calm(world, last)
    assert last.converged
    wanted = {str(row.template): row.count for row in newest.instances}
    running = engines_by_instance(world)
    assert Counter(name for name, _ in running) == wanted
    assert all(count == (2 if name == "two" else 1) for (name, _), count in running.items())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_an_old_controller_changes_nothing_after_a_newer_one(seed: int) -> None:
    """A controller that wakes up with an old plan is refused everywhere and leaves the fleet as it is."""
    world = make_world(seed)
    newest = Controller(name="new", world=world, plan=plan({"one": 2}, ONE, TWO), epoch=9)
    calm(world, newest)
    before = engines_by_instance(world)
    old = Controller(name="old", world=world, plan=plan({"two": 2}, ONE, TWO), epoch=8)
    calm(world, old, seconds=60)
    assert old.superseded
    assert not old.converged
    assert engines_by_instance(world) == before


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), at=st.integers(1, 30))
def test_two_controllers_of_one_epoch_cannot_both_work(seed: int, at: int) -> None:
    """An epoch belongs to one controller: the second owner is refused, whichever came first wins on each agent."""
    world = make_world(seed)
    first = Controller(name="first", world=world, plan=plan({"one": 3}, ONE, TWO), epoch=4)
    second = Controller(name="second", world=world, plan=plan({"two": 2}, ONE, TWO), epoch=4)
    controllers = {"first": first, "second": second}
    for moment in range(120):
        first.second()
        if moment >= at:
            second.second()
        while world.wire:
            world.deliver(controllers)
        world.second()
    assert second.superseded
    assert first.converged


@pytest.mark.parametrize("seed", range(20))
def test_a_controller_killed_at_any_moment_is_continued_by_the_next(seed: int) -> None:
    """Kill the controller in the middle, run again with a new epoch: what was started stays, nothing doubles."""
    world = make_world(seed)
    wanted = plan({"one": 3, "two": 1}, ONE, TWO)
    first = Controller(name="first", world=world, plan=wanted, epoch=1)
    for _ in range(seed % 10):
        first.second()
        for _ in range(world.rng.randrange(6)):
            world.deliver({"first": first})
        world.second()
    started = set(world.spawned)
    second = Controller(name="second", world=world, plan=wanted, epoch=2)
    calm(world, second)
    assert second.converged
    assert started <= set(world.spawned)
    assert len(world.spawned) == 5
