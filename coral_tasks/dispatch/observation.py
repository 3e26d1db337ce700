"""From agents' reports to the observed fleet. Pure. Owns how parts on several nodes add up to one instance.

An instance is READY if every part is; DRAINING if a part drains; FAILED if a part is missing, failed or contradicts
another one; else STARTING. A failed instance is listed with the nodes that still hold a part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.names import (
    InstanceId,
    Market,
    ModelId,
    NodeConfigurationId,
    NodeId,
    RegionId,
    TemplateId,
)
from coral_tasks.protocol.controller_machine import Target
from coral_tasks.protocol.messages import NodeReport, Report, SlotState, StartSpec

_BROKEN = (SlotState.FAILED, SlotState.STOPPING)
_LEAVING = (SlotState.DRAINING, SlotState.DRAINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What agents said at one moment.

    ``unreachable``: agents that did not answer, so that nothing is known of their nodes. ``excluded``: nodes that
    must not take new instances, with the reason. ``newest_epoch``: of all agents; ``superseded``: agents that a newer
    controller holds.
    """

    fleet: Fleet
    nodes: Mapping[NodeId, NodeReport]
    targets: Mapping[str, Target]
    unreachable: tuple[str, ...]
    excluded: Mapping[NodeId, str]
    used_ids: frozenset[str]
    load: Mapping[InstanceId, float]
    endpoints: Mapping[InstanceId, str]
    newest_epoch: int
    superseded: tuple[str, ...]
    trouble: tuple[str, ...] = ()


def build_observation(reports: Mapping[str, Report], agents: Iterable[str]) -> Observation:
    """Join ``reports`` (by agent); ``agents`` are all that were asked."""
    owners: dict[str, str] = {}
    nodes: dict[NodeId, NodeReport] = {}
    trouble: list[str] = []
    said = [(agent, one) for agent in sorted(reports) for one in reports[agent].nodes]
    # a machine's own agent, which has its name, knows best
    for agent, one in sorted(said, key=lambda pair: pair[0] != pair[1].node):
        if one.node in owners:
            trouble.append(f"node {one.node} is reported by {owners[one.node]} and by {agent}; the latter ignored")
            continue
        owners[one.node] = agent
        nodes[NodeId(one.node)] = one
    parts = _parts(nodes)
    instances = tuple(_instance(name, parts[name]) for name in sorted(parts))
    return Observation(
        fleet=Fleet(nodes=tuple(_node(one) for _, one in sorted(nodes.items())), instances=instances),
        nodes=nodes,
        targets={node: Target(agent=agent, incarnation=reports[agent].incarnation) for node, agent in owners.items()},
        unreachable=tuple(sorted(set(agents) - reports.keys())),
        excluded={node: one.excluded for node, one in nodes.items() if _is_excluded(one)},
        used_ids=frozenset(name for one in nodes.values() for name in one.retired) | parts.keys(),
        load={InstanceId(name): float(sum(one.in_flight or 0 for one in some)) for name, some in parts.items()},
        endpoints={
            InstanceId(name): one.endpoint
            for name, some in parts.items()
            for one in some
            if one.spec is not None and one.spec.rank == 0
        },
        newest_epoch=max((report.epoch for report in reports.values()), default=0),
        superseded=tuple(sorted(agent for agent, report in reports.items() if not report.accepted)),
        trouble=tuple(trouble),
    )


def _node(one: NodeReport) -> Node:
    return Node(
        id=NodeId(one.node),
        region=RegionId(one.region),
        configuration=NodeConfigurationId(one.configuration),
        market=one.market,
    )


def _is_excluded(one: NodeReport) -> bool:
    return bool(one.excluded) or one.state is SlotState.PROFILING


def _parts(nodes: Mapping[NodeId, NodeReport]) -> dict[str, list[NodeReport]]:
    parts: dict[str, list[NodeReport]] = defaultdict(list)
    for _, one in sorted(nodes.items()):
        if one.spec is not None:
            parts[one.spec.instance].append(one)
    return dict(parts)


def _instance(name: str, parts: list[NodeReport]) -> ServingInstance:
    """The instance ``name`` out of its parts; the part of the lowest rank says what it is."""
    spec = min((one.spec for one in parts if one.spec is not None), key=lambda one: (one.rank, one.instance))
    present = {one.node for one in parts}
    stages = [tuple(NodeId(node) for node in stage.nodes if node in present) for stage in spec.stages]
    held = tuple(stage for stage in stages if stage) or (tuple(NodeId(node) for node in sorted(present)),)
    strays = tuple(NodeId(node) for node in sorted(present - set(spec.nodes)))
    if strays and held[0] != tuple(sorted(present)):
        held = (*held, strays)
    return ServingInstance(
        id=InstanceId(name),
        template=TemplateId(spec.template),
        model=ModelId(spec.model),
        phase=spec.phase,
        region=RegionId(spec.region),
        market=Market(spec.market),
        state=_state(spec, parts),
        stage_nodes=held,
        throughput=spec.throughput,
    )


def _state(spec: StartSpec, parts: list[NodeReport]) -> InstanceState:
    states = {one.state for one in parts}
    whole = {one.node for one in parts} == set(spec.nodes)
    agree = all(one.spec is not None and one.spec.same_run(spec) for one in parts)
    in_place = (
        all(one.spec is not None and spec.nodes.index(one.node) == one.spec.rank for one in parts) if whole else False
    )
    if not (whole and agree and in_place) or states.intersection(_BROKEN):
        return InstanceState.FAILED
    if states.intersection(_LEAVING):
        return InstanceState.DRAINING
    return InstanceState.READY if states == {SlotState.READY} else InstanceState.STARTING
