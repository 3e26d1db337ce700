"""Which running instances stay, which go, and which nodes new ones take. Owns the matching of plan rows to a fleet.

As many instances as possible are kept, ready ones and loaded ones first: an instance that stays keeps all of its
stages running. A new stage prefers a node that held the same layers of the same model (its weights are still in
that machine's page cache or on its disk).
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from coral_tasks.dispatch.capacity import Offer
from coral_tasks.dispatch.ordering import Pool
from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.names import InstanceId, NodeId
from coral_tasks.domain.plan import AllocationPlan, PlannedInstances
from coral_tasks.domain.templates import ServingTemplate

_KEEPABLE = (InstanceState.READY, InstanceState.STARTING)
StageKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known besides plan and fleet.

    ``excluded``: nodes that must not take new instances. ``load``: requests in flight by instance.
    ``used_ids``: instance ids that must not be used again. ``obtainable``: nodes that could be provisioned, by pool.
    ``releasable``: nodes that a provisioner can give back. ``interrupted``: those that it is about to
    lose, excluded too.
    """

    excluded: AbstractSet[NodeId] = frozenset()
    load: Mapping[InstanceId, float] = field(default_factory=dict)
    used_ids: AbstractSet[str] = frozenset()
    obtainable: Mapping[Pool, int] = field(default_factory=dict)
    releasable: AbstractSet[NodeId] = frozenset()
    interrupted: AbstractSet[NodeId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Plan rows against the fleet. ``wanted``: rows with the number of instances still to start."""

    kept: tuple[ServingInstance, ...]
    leaving: tuple[ServingInstance, ...]
    wanted: tuple[tuple[PlannedInstances, int], ...]


def pool_of(node: Node) -> Pool:
    """Nodes of one pool are interchangeable."""
    return (node.region, node.configuration, node.market)


def split_fleet(plan: AllocationPlan, fleet: Fleet, situation: Situation) -> Split:
    """Decide what stays and what goes; ties go to ready, then loaded, then smaller ids."""
    by_row: dict[tuple[str, str, str], list[ServingInstance]] = defaultdict(list)
    for instance in fleet.instances:
        if instance.state in _KEEPABLE and situation.excluded.isdisjoint(instance.nodes):
            by_row[instance.template, instance.region, instance.market].append(instance)
    kept: list[ServingInstance] = []
    wanted: list[tuple[PlannedInstances, int]] = []
    for row in sorted(plan.instances, key=lambda one: (one.template, one.region, one.market)):
        fitting = sorted(
            (one for one in by_row[row.template, row.region, row.market] if fits_template(one, plan, fleet)),
            key=lambda one: (one.state is not InstanceState.READY, -situation.load.get(one.id, 0.0), one.id),
        )
        kept += fitting[: row.count]
        if row.count > len(fitting):
            wanted.append((row, row.count - len(fitting)))
    kept_ids = {one.id for one in kept}
    leaving = sorted((one for one in fleet.instances if one.id not in kept_ids), key=lambda one: one.id)
    return Split(kept=tuple(kept), leaving=tuple(leaving), wanted=tuple(wanted))


def fits_template(instance: ServingInstance, plan: AllocationPlan, fleet: Fleet) -> bool:
    """Whether the instance's stages sit on the configurations that the plan's template asks for."""
    template = plan.template(instance.template)
    configuration = {node.id: node.configuration for node in fleet.nodes}
    wanted = [sorted(stage.nodes) for stage in template.placement.stages]
    have = [sorted(configuration[node] for node in stage) for stage in instance.stage_nodes]
    return wanted == have


def offer_of(instance: ServingInstance, plan: AllocationPlan) -> Offer:
    """What a running instance serves: its template's figure in the plan, else what its agent reported.

    Raises ValidationFailed if neither is known.
    """
    known = {template.id: template.throughput for template in plan.templates}
    throughput = known.get(instance.template, instance.throughput)
    if throughput is None:
        rule = "the throughput of a running instance must be known from the plan or its agent"
        raise ValidationFailed([Violation(table="fleet", row=instance.id, value=instance.template, rule=rule)])
    return Offer(model=instance.model, phase=instance.phase, region=instance.region, throughput=throughput)


def template_offer(template: ServingTemplate, row: PlannedInstances) -> Offer:
    """What a new instance of ``template`` will serve."""
    return Offer(model=template.model, phase=template.phase, region=row.region, throughput=template.throughput)


def pools_of_row(template: ServingTemplate, row: PlannedInstances) -> Counter[Pool]:
    """Nodes that one instance of the row needs, by pool."""
    return Counter((row.region, configuration, row.market) for configuration in template.nodes)


def stage_keys(model: str, layers: Iterable[int]) -> list[StageKey]:
    """(model, first layer, number of layers) of each stage."""
    keys, first = [], 0
    for count in layers:
        keys.append((model, first, count))
        first += count
    return keys


def warm_stages(fleet: Fleet, plan: AllocationPlan) -> dict[NodeId, StageKey]:
    """Which layers each occupied node holds, as far as the instance's template is carried by the plan."""
    known = {template.id: template for template in plan.templates}
    warm: dict[NodeId, StageKey] = {}
    for instance in fleet.instances:
        template = known.get(instance.template)
        if template is None or len(template.placement.stages) != len(instance.stage_nodes):
            continue
        keys = stage_keys(instance.model, [stage.num_layers for stage in template.placement.stages])
        warm.update({node: key for key, nodes in zip(keys, instance.stage_nodes, strict=True) for node in nodes})
    return warm


@dataclass(slots=True, kw_only=True)
class FreeNodes:
    """Free nodes by pool. ``warm``: which layers a node's machine has at hand."""

    warm: Mapping[NodeId, StageKey]
    _pools: dict[Pool, list[tuple[bool, NodeId]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, pool: Pool, node: NodeId) -> None:
        """Put a node back; nodes that hold nothing of use come first."""
        bisect.insort(self._pools[pool], (node in self.warm, node))

    def take(self, pool: Pool, key: StageKey) -> NodeId:
        """Take a node that has ``key`` at hand, else one that has nothing of use elsewhere, else the first.

        IndexError if the pool is empty.
        """
        nodes = self._pools[pool]
        first_warm = bisect.bisect_left(nodes, (True, NodeId("")))
        fitting = (index for index in range(first_warm, len(nodes)) if self.warm[nodes[index][1]] == key)
        return nodes.pop(next(fitting, 0))[1]

    def counts(self) -> dict[Pool, int]:
        """How many are free, by pool."""
        return {pool: len(nodes) for pool, nodes in self._pools.items()}

    def idle(self) -> tuple[NodeId, ...]:
        """All free nodes, in a fixed order."""
        return tuple(node for pool in sorted(self._pools) for node in sorted(one for _, one in self._pools[pool]))


def place_instance(template: ServingTemplate, row: PlannedInstances, free: FreeNodes) -> tuple[tuple[NodeId, ...], ...]:
    """Take nodes for one instance out of ``free``, stage by stage."""
    keys = stage_keys(template.model, [stage.num_layers for stage in template.placement.stages])
    return tuple(
        tuple(free.take((row.region, configuration, row.market), key) for configuration in stage.nodes)
        for key, stage in zip(keys, template.placement.stages, strict=True)
    )


def fresh_ids(row: PlannedInstances, template: ServingTemplate, used: AbstractSet[str]) -> Iterator[InstanceId]:
    """Readable ids, unique against ``used``: ``<model>-<phase>-<hash of template, region, market>-<n>``."""
    text = f"{row.template}\0{row.region}\0{row.market}"
    stem = f"{template.model}-{template.phase.value}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    number = 0
    while True:
        number += 1
        if f"{stem}-{number}" not in used:
            yield InstanceId(f"{stem}-{number}")
