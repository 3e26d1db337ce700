"""Transitions: safe, stable and as good as the best order (design 3.4)."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coral_tasks.dispatch.binding import Situation
from coral_tasks.dispatch.capacity import Offer, served_capacity, worst_dip
from coral_tasks.dispatch.check import check_transition, require_safe
from coral_tasks.dispatch.ordering import Group, OrderProblem, _exact, _greedy, best_order
from coral_tasks.dispatch.planner import plan_transition
from coral_tasks.domain.errors import PlanRejected, ValidationFailed
from coral_tasks.domain.fleet import Fleet, InstanceState
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import InstanceId, Market, ModelId, NodeConfigurationId, NodeId, Phase
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.domain.transition import StepKind

sys.path.insert(0, str(Path(__file__).parents[2] / "protocol"))
from fleet_builders import REGION, fleet, instance, node, plan, template

ONE = template("one", throughput=10.0)
TWO = template("two", stages=(("L4x1",), ("L4x1",)), throughput=25.0)
BIG = template("big", model="n", stages=(("A100x1",),), throughput=40.0)
PRE = template("pre", model="k", phase=Phase.PREFILL, throughput=1000.0)
DEC = template("dec", model="k", phase=Phase.DECODE, throughput=100.0)
WIDE = template("wide", stages=(("A100x1", "L4x1"),), throughput=50.0)
ALL = (ONE, TWO, BIG, PRE, DEC, WIDE)
SHAPE = RequestShape(mean_prompt_tokens=100.0, p95_prompt_tokens=200.0, mean_output_tokens=20.0, p95_output_tokens=40.0)
POOL = (REGION, NodeConfigurationId("L4x1"), Market.ON_DEMAND)


def kinds(transition) -> list[str]:
    return [step.kind.value for step in transition.steps]


def test_an_empty_fleet_starts_waits_and_routes() -> None:
    """The plainest transition: start all, wait for all, route all."""
    wanted = plan({"one": 2}, ONE)
    seen = fleet([node("a"), node("b"), node("c")])
    made = plan_transition(wanted, seen)
    assert kinds(made) == ["start", "start", "wait_ready", "wait_ready", "route"]
    assert [one.nodes for one in made.started] == [("a",), ("b",)]
    assert check_transition(made, wanted, seen) == []


def test_a_fleet_as_planned_needs_nothing() -> None:
    """An unchanged plan gives no step, so a second dispatch sends no command."""
    seen = fleet([node("a"), node("b")], instance("x", ONE, (("a",),)))
    assert plan_transition(plan({"one": 1}, ONE), seen).is_empty


def test_a_machine_about_to_be_taken_back_makes_room_for_the_next() -> None:
    """The most allowed are held: the doomed one is drained, stopped and ended, so that another can be had; b stays."""
    wanted = plan({"one": 1}, ONE)
    seen = fleet([node("a"), node("b")], instance("x", ONE, (("a",),)))
    doomed = frozenset({NodeId("a")})
    situation = Situation(excluded=doomed | {NodeId("b")}, releasable={NodeId("a"), NodeId("b")}, interrupted=doomed)
    made = plan_transition(wanted, seen, situation=situation)
    assert kinds(made) == ["route", "drain", "stop", "release"]
    assert made.steps[-1].nodes == ("a",)
    assert [one.count for one in made.unplaced] == [1]
    require_safe(made, wanted, seen, excluded=situation.excluded)


def test_without_spare_nodes_the_dip_is_stated() -> None:
    """Two nodes, both in use, to become one pipeline: capacity must fall to zero in between, and that is said."""
    wanted = plan({"two": 1}, ONE, TWO)
    seen = fleet([node("a"), node("b")], instance("x", ONE, (("a",),)), instance("y", ONE, (("b",),)))
    made = plan_transition(wanted, seen)
    assert [(dip.what, dip.floor, dip.lowest) for dip in made.dips] == [("m/aggregated", 20.0, 0.0)]
    assert kinds(made) == ["route", "drain", "drain", "stop", "stop", "start", "wait_ready", "route"]
    assert check_transition(made, wanted, seen) == []


def test_with_spare_nodes_new_instances_come_first() -> None:
    """When nodes are free, the new instance serves before the old ones drain, and nothing dips."""
    wanted = plan({"two": 1}, ONE, TWO)
    nodes = [node(name) for name in "abcd"]
    seen = fleet(nodes, instance("x", ONE, (("a",),)), instance("y", ONE, (("b",),)))
    made = plan_transition(wanted, seen)
    assert made.dips == ()
    assert kinds(made)[:3] == ["start", "wait_ready", "route"]


def test_the_least_loaded_instance_drains() -> None:
    """Of equal instances the one with the fewest requests in flight goes; ready ones stay before starting ones."""
    nodes = [node(name) for name in "abc"]
    some = [instance(name, ONE, ((on,),)) for name, on in (("x", "a"), ("y", "b"))]
    starting = instance("z", ONE, (("c",),), state=InstanceState.STARTING)
    situation = Situation(load={InstanceId("x"): 3.0, InstanceId("y"): 1.0})
    made = plan_transition(plan({"one": 1}, ONE), fleet(nodes, *some, starting), situation=situation)
    assert made.kept == ("x",)
    drained = [step.instance for step in made.steps if step.kind is StepKind.DRAIN]
    assert set(drained) == {"y", "z"}
    many = [instance(name, BIG, ((name,),)) for name in "pqr"]
    loads = Situation(load={InstanceId("p"): 2.0, InstanceId("q"): 0.0, InstanceId("r"): 1.0})
    gone = plan_transition(plan({}, BIG), fleet([node(name, "A100x1") for name in "pqr"], *many), situation=loads)
    assert [step.instance for step in gone.steps if step.kind is StepKind.DRAIN] == ["q", "r", "p"]


def test_new_stages_take_nodes_that_hold_the_same_layers() -> None:
    """A node whose disk has the same layers of the same model is preferred to another freed one."""
    old = template("old", stages=(("L4x1",), ("L4x1",)), layers=(3, 5), throughput=20.0)
    new = template("new", stages=(("L4x1",), ("L4x1",)), layers=(3, 5), throughput=21.0)
    seen = fleet([node("a"), node("b")], instance("x", old, (("b",), ("a",))))
    made = plan_transition(plan({"new": 1}, old, new), seen)
    assert made.started[0].stage_nodes == (("b",), ("a",))


def test_failed_instances_are_removed_first_and_not_drained() -> None:
    """What failed serves nothing: it is stopped at once and its nodes serve the new instance."""
    wanted = plan({"one": 1}, ONE)
    seen = fleet([node("a")], instance("x", ONE, (("a",),), state=InstanceState.FAILED))
    made = plan_transition(wanted, seen)
    assert kinds(made) == ["stop", "start", "wait_ready", "route"]
    assert check_transition(made, wanted, seen) == []


def test_excluded_nodes_take_nothing_and_what_cannot_be_placed_is_named() -> None:
    """A node whose engine kept crashing is not used; the missing instance is listed with the shortage."""
    wanted = plan({"one": 2}, ONE)
    seen = fleet([node("a"), node("b")])
    made = plan_transition(wanted, seen, situation=Situation(excluded=frozenset({NodeId("a")})))
    assert [one.nodes for one in made.started] == [("b",)]
    assert [one.count for one in made.unplaced] == [1]
    assert "L4x1 in aws/us-east-2 (on_demand): 0 free, one instance needs 1" in made.unplaced[0].reason
    assert check_transition(made, wanted, seen, excluded=frozenset({NodeId("a")})) == []


def test_a_node_about_to_be_taken_back_is_evacuated() -> None:
    """A ready instance on an excluded node (spot interruption) is replaced first, then drained; nothing dips."""
    wanted = plan({"one": 1}, ONE)
    seen = fleet([node("a"), node("b")], instance("x", ONE, (("a",),)))
    made = plan_transition(wanted, seen, situation=Situation(excluded=frozenset({NodeId("a")})))
    assert [one.nodes for one in made.started] == [("b",)]
    assert kinds(made) == ["start", "wait_ready", "route", "route", "drain", "stop"]
    assert (made.dips, made.stopped) == ((), ("x",))


def test_missing_nodes_are_provisioned_and_unused_ones_released() -> None:
    """Nodes that can be had are asked for before the start; those that a provisioner launched go when idle."""
    wanted = plan({"one": 2}, ONE)
    situation = Situation(obtainable={POOL: 5}, releasable=frozenset({NodeId("z")}))
    made = plan_transition(wanted, fleet([node("a")]), situation=situation)
    assert kinds(made) == ["provision", "start", "start", "wait_ready", "wait_ready", "route"]
    assert len(made.pending) == 1
    seen = fleet([node("y"), node("z")], instance("x", ONE, (("z",),)))
    gone = plan_transition(plan({}, ONE), seen, situation=situation)
    assert kinds(gone) == ["route", "drain", "stop", "release"]
    assert gone.steps[-1].nodes == ("z",)


def test_extra_nodes_are_used_only_where_they_avoid_a_dip() -> None:
    """With nodes to be had, the pipeline starts beside the old instances, which go afterwards: no dip, no idle node."""
    wanted = plan({"two": 1}, ONE, TWO)
    seen = fleet([node("a"), node("b")], instance("x", ONE, (("a",),)), instance("y", ONE, (("b",),)))
    situation = Situation(obtainable={POOL: 2}, releasable=frozenset({NodeId("a"), NodeId("b")}))
    made = plan_transition(wanted, seen, situation=situation)
    assert made.dips == ()
    assert len(made.pending) == 2
    assert made.steps[-1].kind is StepKind.RELEASE
    assert made.steps[-1].nodes == ("a", "b")
    assert check_transition(made, wanted, seen) == []


def test_ids_that_ran_before_are_not_used_again() -> None:
    """An agent never runs the same instance id twice, so neither does the planner ask for it."""
    first = plan_transition(plan({"one": 1}, ONE), fleet([node("a")])).started[0].id
    again = plan_transition(plan({"one": 1}, ONE), fleet([node("a")]), situation=Situation(used_ids={first}))
    assert again.started[0].id != first


def test_an_instance_of_unknown_throughput_is_an_error() -> None:
    """No silent guess: a running instance whose throughput nobody knows cannot be weighed."""
    stranger = replace(instance("x", template("gone"), (("a",),)), throughput=None)
    with pytest.raises(ValidationFailed, match="throughput of a running instance must be known"):
        plan_transition(plan({}, ONE), fleet([node("a")], stranger))


# --- properties ---------------------------------------------------------------------------------------------------


@st.composite
def situations(draw: st.DrawFn) -> tuple[AllocationPlan, Fleet, dict[ModelId, RequestShape], Situation]:
    """Random fleets with running instances in all states, and random plans."""
    numbers = {"L4x1": draw(st.integers(0, 6)), "A100x1": draw(st.integers(0, 3))}
    nodes = [node(f"{name}-{number}", name) for name, count in numbers.items() for number in range(count)]
    free = {name: [one.id for one in nodes if one.configuration == name] for name in numbers}
    running = []
    for number in range(draw(st.integers(0, 5))):
        of = draw(st.sampled_from(ALL))
        need = Counter(of.nodes)
        if all(len(free[name]) >= count for name, count in need.items()):
            stages = tuple(tuple(free[name].pop() for name in stage.nodes) for stage in of.placement.stages)
            state = draw(st.sampled_from([InstanceState.READY, InstanceState.READY, *InstanceState]))
            running.append(instance(f"i{number}", of, stages, state=state))
    rows = {one.id: draw(st.integers(0, 3)) for one in ALL}
    shapes = {ModelId("k"): SHAPE} if draw(st.booleans()) else {}
    excluded = (
        frozenset(draw(st.sets(st.sampled_from([one.id for one in nodes]), max_size=2))) if nodes else frozenset()
    )
    load = {one.id: float(draw(st.integers(0, 3))) for one in running}
    obtainable = {POOL: draw(st.integers(0, 2))}
    releasable = frozenset(one.id for one in nodes if draw(st.booleans()))
    situation = Situation(excluded=excluded, load=load, obtainable=obtainable, releasable=releasable)
    return plan(rows, *ALL), fleet(nodes, *running), shapes, situation


@settings(max_examples=300)
@given(situations())
def test_every_transition_passes_the_independent_check(case) -> None:
    """Whatever the fleet and the plan: no node used twice, nothing routed that is not ready, dips as stated, and the
    end is the plan less what is declared unplaced.
    """
    wanted, seen, shapes, situation = case
    made = plan_transition(wanted, seen, shapes=shapes, situation=situation)
    assert check_transition(made, wanted, seen, shapes=shapes, excluded=frozenset(situation.excluded)) == []


@settings(max_examples=100)
@given(situations())
def test_same_input_same_transition(case) -> None:
    """The order of nodes, instances and rows does not matter."""
    wanted, seen, shapes, situation = case
    turned = Fleet(nodes=seen.nodes[::-1], instances=seen.instances[::-1])
    other = replace(wanted, instances=wanted.instances[::-1])
    made = plan_transition(wanted, seen, shapes=shapes, situation=situation)
    again = plan_transition(other, turned, shapes=shapes, situation=situation)
    assert (made.steps, made.started, made.dips) == (again.steps, again.started, again.dips)


@settings(max_examples=100)
@given(situations())
def test_as_many_instances_as_possible_are_kept(case) -> None:
    """For each row min(planned, running and healthy) instances stay: counted here by hand."""
    wanted, seen, shapes, situation = case
    made = plan_transition(wanted, seen, shapes=shapes, situation=situation)
    alive = Counter(
        one.template
        for one in seen.instances
        if one.state in (InstanceState.READY, InstanceState.STARTING) and not set(one.nodes) & situation.excluded
    )
    assert len(made.kept) == sum(min(row.count, alive[row.template]) for row in wanted.instances)


def brute_force(problem: OrderProblem) -> float:
    """Least worst dip over all orders, by trying every one of them."""
    items = [(True, i) for i, g in enumerate(problem.starts) for _ in range(g.count)]
    items += [(False, i) for i, g in enumerate(problem.stops) for _ in range(g.count)]
    floors = problem.floors()
    best = float("inf")
    for order in set(itertools.permutations(items)):
        free, offers, worst, possible = Counter(problem.free), Counter(problem.steady), 0.0, True
        for group in problem.stops:
            if group.offer is not None:
                offers[group.offer] += group.count
        for is_start, index in order:
            group = (problem.starts if is_start else problem.stops)[index]
            for pool, count in group.nodes.items():
                free[pool] += -count if is_start else count
            if min(free.values(), default=0) < 0:
                possible = False
                break
            if group.offer is not None:
                offers[group.offer] += 1 if is_start else -1
            worst = max(worst, worst_dip(served_capacity(offers.elements(), problem.shapes), floors))
        if possible:
            best = min(best, worst)
    return best


@st.composite
def order_problems(draw: st.DrawFn) -> OrderProblem:
    """Small problems with two pools, two models and up to six moves."""
    pools = [POOL, (REGION, NodeConfigurationId("A100x1"), Market.ON_DEMAND)]

    def group(*, start: bool) -> Group:
        needs = {pool: draw(st.integers(0, 2)) for pool in pools}
        offer = Offer(
            model=ModelId(draw(st.sampled_from(["k", "m"]))),
            phase=draw(st.sampled_from(list(Phase))),
            region=REGION,
            throughput=float(draw(st.integers(1, 5))),
        )
        return Group(count=draw(st.integers(1, 2)), nodes=needs, offer=offer if start or draw(st.booleans()) else None)

    starts = tuple(group(start=True) for _ in range(draw(st.integers(0, 2))))
    stops = tuple(group(start=False) for _ in range(draw(st.integers(0, 2))))
    free = {pool: draw(st.integers(0, 2)) for pool in pools}
    shapes = {ModelId("k"): SHAPE} if draw(st.booleans()) else {}
    return OrderProblem(starts=starts, stops=stops, free=free, steady=(), shapes=shapes)


@settings(max_examples=150)
@given(order_problems())
def test_no_order_dips_less_than_the_one_found(problem: OrderProblem) -> None:
    """The exact search agrees with trying every order; the greedy one is never better and always possible."""
    goal = tuple(group.count for group in (*problem.starts, *problem.stops))
    if any(count < 0 for count in problem.free_after(goal).values()):
        with pytest.raises(ValueError, match="more nodes than there are"):
            best_order(problem)
        return
    order, worst = _exact(problem, goal)
    assert worst == pytest.approx(brute_force(problem), abs=1e-9)
    assert len(order) == sum(goal)
    hasty, deeper = _greedy(problem, goal)
    assert len(hasty) == sum(goal)
    assert deeper >= worst - 1e-9


# --- the checker itself -------------------------------------------------------------------------------------------


def _broken(kind: str):
    nodes = [node(name) for name in "abc"]
    seen = fleet(nodes, instance("x", ONE, (("a",),)))
    wanted = plan({"two": 1}, ONE, TWO)
    made = plan_transition(wanted, seen)
    steps = list(made.steps)
    if kind == "drop the drain":
        steps = [step for step in steps if step.kind is not StepKind.DRAIN]
    if kind == "start on a held node":
        new = replace(made.started[0], stage_nodes=((NodeId("a"),), (NodeId("b"),)))
        steps[0] = replace(steps[0], nodes=new.nodes)
        made = replace(made, started=(new,))
    if kind == "route before ready":
        steps = [step for step in steps if step.kind is not StepKind.WAIT_READY]
    if kind == "never stop":
        steps = [step for step in steps if step.kind is not StepKind.STOP]
    if kind == "hide the dip":
        seen = fleet(nodes[:2], instance("x", ONE, (("a",),)))
        made = replace(plan_transition(wanted, seen), dips=())
        steps = list(made.steps)
    renumbered = tuple(replace(step, number=number) for number, step in enumerate(steps))
    return replace(made, steps=renumbered), wanted, seen


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("drop the drain", "is stopped without a drain"),
        ("start on a held node", "a is held by x"),
        ("route before ready", "is routed but not ready"),
        ("never stop", "at the end 1 instances of one"),
        ("hide the dip", "capacity of m/aggregated falls to 0"),
    ],
)
def test_the_checker_finds_a_planted_fault(kind: str, message: str) -> None:
    """Each kind of unsafe transition is refused with its own message."""
    transition, wanted, seen = _broken(kind)
    with pytest.raises(PlanRejected, match=message):
        require_safe(transition, wanted, seen)
