"""Independent judge of a transition: replays its steps and recomputes everything it claims.

Shares no code with the planner. A transition that does not pass is never carried out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coral_tasks.domain.errors import PlanRejected
from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import ModelId, NodeId, Phase
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.domain.templates import ServingTemplate
from coral_tasks.domain.transition import Step, StepKind, Transition

_RELATIVE_TOLERANCE = 1e-6


@dataclass(slots=True, kw_only=True)
class _World:
    """The fleet while steps are replayed. ``phase_of``: starting, ready, drained by instance that exists."""

    plan: AllocationPlan
    transition: Transition
    shapes: Mapping[ModelId, RequestShape]
    nodes: dict[NodeId, Node]
    excluded: frozenset[NodeId]
    holder: dict[NodeId, str]
    instances: dict[str, ServingInstance]
    state: dict[str, str]
    routed: set[str]
    new: dict[str, ServingInstance]
    templates: dict[str, ServingTemplate]
    trouble: list[str] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)

    def must(self, condition: bool, step: Step, text: str) -> None:
        if not condition:
            self.trouble.append(f"step {step.number} ({step.kind.value} {step.instance or ''}): {text}")


def check_transition(
    transition: Transition,
    plan: AllocationPlan,
    fleet: Fleet,
    *,
    shapes: Mapping[ModelId, RequestShape] | None = None,
    excluded: frozenset[NodeId] = frozenset(),
) -> list[str]:
    """Every rule that ``transition`` breaks, in words; empty if it is safe and ends at the plan."""
    world = _World(
        plan=plan,
        transition=transition,
        shapes=shapes or {},
        nodes={node.id: node for node in fleet.nodes},
        excluded=excluded,
        holder={node: one.id for one in fleet.instances for node in one.nodes},
        instances={one.id: one for one in fleet.instances},
        state={one.id: one.state.value for one in fleet.instances},
        new={str(one.id): one for one in transition.started},
        templates={str(one.id): one for one in plan.templates},
        routed={one.id for one in fleet.instances if one.state is InstanceState.READY},
    )
    world.history.append(_capacity(world))
    for step in transition.steps:
        _REPLAY[step.kind](world, step)
    _judge_end(world)
    _judge_dips(world)
    return world.trouble


def require_safe(
    transition: Transition,
    plan: AllocationPlan,
    fleet: Fleet,
    *,
    shapes: Mapping[ModelId, RequestShape] | None = None,
    excluded: frozenset[NodeId] = frozenset(),
) -> None:
    """Raise PlanRejected with every broken rule, if there is one."""
    trouble = check_transition(transition, plan, fleet, shapes=shapes, excluded=excluded)
    if trouble:
        raise PlanRejected("the transition is not safe:\n  " + "\n  ".join(trouble))


def _provision(world: _World, step: Step) -> None:
    pending = {node.id: node for node in world.transition.pending}
    for node in step.nodes:
        world.must(node in pending and node not in world.nodes, step, f"{node} is not a pending node")
        if node in pending:
            world.nodes[node] = pending[node]


def _start(world: _World, step: Step) -> None:
    instance = world.new.get(str(step.instance))
    world.must(instance is not None and step.instance not in world.state, step, "is not a new instance")
    if instance is None:
        return
    world.must(step.nodes == instance.nodes, step, "step and instance name different nodes")
    for node in instance.nodes:
        world.must(node in world.nodes, step, f"{node} does not exist")
        world.must(node not in world.holder, step, f"{node} is held by {world.holder.get(node)}")
        world.must(node not in world.excluded, step, f"{node} is excluded")
        world.holder[node] = instance.id
    _judge_placement(world, step, instance)
    world.instances[instance.id] = instance
    world.state[instance.id] = "starting"


def _judge_placement(world: _World, step: Step, instance: ServingInstance) -> None:
    """Stages sit on the configurations of the template, in the row's region and market."""
    stages = world.templates[instance.template].placement.stages
    world.must(len(stages) == len(instance.stage_nodes), step, "number of stages differs from the template")
    for stage, nodes in zip(stages, instance.stage_nodes, strict=False):
        found = [world.nodes[node] for node in nodes if node in world.nodes]
        same = Counter(node.configuration for node in found) == Counter(stage.nodes)
        world.must(same, step, f"nodes {', '.join(nodes)} do not fit the stage {stage.nodes}")
        places = {(node.region, node.market) for node in found}
        world.must(places <= {(instance.region, instance.market)}, step, "a node lies in another region or market")


def _wait_ready(world: _World, step: Step) -> None:
    name = str(step.instance)
    world.must(world.state.get(name) in ("starting", "ready"), step, "does not start")
    world.state[name] = "ready"


def _route(world: _World, step: Step) -> None:
    for name in step.routed:
        world.must(world.state.get(name) == "ready", step, f"{name} is routed but not ready")
    world.routed = set(step.routed)
    world.history.append(_capacity(world))


def _drain(world: _World, step: Step) -> None:
    name = str(step.instance)
    world.must(name in world.state, step, "does not exist")
    world.must(name not in world.routed, step, "still receives requests")
    world.state[name] = "drained"


def _stop(world: _World, step: Step) -> None:
    name = str(step.instance)
    may_stop = world.state.get(name) in ("drained", InstanceState.FAILED.value)
    world.must(may_stop, step, "is stopped without a drain")
    world.must(name not in world.routed, step, "still receives requests")
    instance = world.instances.get(name)
    world.must(instance is not None and instance.nodes == step.nodes, step, "the step names other nodes")
    for node in instance.nodes if instance is not None else ():
        world.holder.pop(node, None)
    world.state.pop(name, None)


def _release(world: _World, step: Step) -> None:
    for node in step.nodes:
        world.must(node in world.nodes, step, f"{node} does not exist")
        world.must(node not in world.holder, step, f"{node} still holds {world.holder.get(node)}")
        world.nodes.pop(node, None)


_REPLAY: dict[StepKind, Callable[[_World, Step], None]] = {
    StepKind.PROVISION: _provision,
    StepKind.START: _start,
    StepKind.WAIT_READY: _wait_ready,
    StepKind.ROUTE: _route,
    StepKind.DRAIN: _drain,
    StepKind.STOP: _stop,
    StepKind.RELEASE: _release,
}


def _capacity(world: _World) -> dict[str, float]:
    """Requests/s by model where lengths are known, else throughput by model and phase. Written anew on purpose."""
    promised = {template.id: template.throughput for template in world.plan.templates}
    sums: dict[tuple[ModelId, str, str], float] = defaultdict(float)
    for name in world.routed & world.instances.keys():
        one = world.instances[name]
        rate = promised.get(one.template, one.throughput)
        sums[one.model, one.region, one.phase.value] += rate or 0.0
    result: dict[str, float] = defaultdict(float)
    for model, region in {(model, region) for model, region, _ in sums}:
        by_phase = {phase.value: sums.get((model, region, phase.value), 0.0) for phase in Phase}
        shape = world.shapes.get(model)
        if shape is None:
            for phase, rate in by_phase.items():
                result[f"{model}/{phase}"] += rate
        else:
            prompts = by_phase["prefill"] / shape.mean_prompt_tokens
            outputs = by_phase["decode"] / shape.mean_output_tokens
            result[model] += by_phase["aggregated"] + min(prompts, outputs)
    return result


def _judge_end(world: _World) -> None:
    """What runs at the end is what the plan says, less what is declared unplaced; nothing else is left."""
    end = Counter((one.template, one.region, one.market) for one in world.instances.values() if one.id in world.state)
    wanted = Counter({(row.template, row.region, row.market): row.count for row in world.plan.instances})
    wanted.subtract({(one.template, one.region, one.market): one.count for one in world.transition.unplaced})
    for row in sorted(end.keys() | wanted.keys()):
        if end[row] != wanted[row]:
            world.trouble.append(f"at the end {end[row]} instances of {' '.join(row)}, not {wanted[row]}")
    world.trouble += [f"{name} runs at the end but is not routed" for name in sorted(world.state.keys() - world.routed)]
    world.trouble += [f"{name} is routed at the end but gone" for name in sorted(world.routed - world.state.keys())]


def _judge_dips(world: _World) -> None:
    """Every fall below min(old, new) was stated, at its full depth, and nothing is stated that does not happen."""
    stated = {dip.what: dip.lowest for dip in world.transition.dips}
    old, new = world.history[0], _capacity(world)
    for what in sorted(old.keys() | new.keys()):
        floor = min(old.get(what, 0.0), new.get(what, 0.0))
        lowest = min(capacity.get(what, 0.0) for capacity in world.history)
        told = stated.pop(what, floor)
        if abs(min(lowest, floor) - told) > _RELATIVE_TOLERANCE * max(1.0, floor):
            world.trouble.append(f"capacity of {what} falls to {lowest:g}, stated was {told:g}, floor {floor:g}")
    world.trouble += [f"a dip of {what} is stated but does not happen" for what in sorted(stated)]
