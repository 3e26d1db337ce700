"""From a plan and the observed fleet to ordered steps (design 3.4). Owns the transition; checks nothing itself.

Steps: provision what is missing, then waves of start, wait ready, route, and of route, drain, stop, and at the end
release. No step needs more nodes than exist; served capacity keeps above min(old, new) where any order can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from coral_tasks.dispatch.binding import (
    FreeNodes,
    Situation,
    Split,
    fresh_ids,
    offer_of,
    place_instance,
    pool_of,
    pools_of_row,
    split_fleet,
    template_offer,
    warm_stages,
)
from coral_tasks.dispatch.capacity import combined
from coral_tasks.dispatch.ordering import Group, Order, OrderProblem, Pool, best_order
from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import InstanceId, ModelId, NodeId
from coral_tasks.domain.plan import AllocationPlan, PlannedInstances
from coral_tasks.domain.transition import CapacityDip, Step, StepKind, Transition, Unplaced

_SERVING = (InstanceState.READY,)
_SERVING_OR_GOING = (InstanceState.READY, InstanceState.STARTING, InstanceState.DRAINING)


def plan_transition(
    plan: AllocationPlan,
    fleet: Fleet,
    *,
    shapes: Mapping[ModelId, RequestShape] | None = None,
    situation: Situation | None = None,
) -> Transition:
    """Ordered steps that bring ``fleet`` to ``plan``; empty steps if it is there already.

    ``shapes``: request lengths, with which capacity is measured in requests/s of coupled phases. What cannot be
    placed is listed in ``unplaced``; dips that no order avoids are listed in ``dips``. Same input, same transition.
    Raises ValidationFailed if the throughput of a running instance is unknown.
    """
    situation = situation or Situation()
    split = split_fleet(plan, fleet, situation)
    lean = _plan_with(plan, fleet, shapes or {}, situation, _Supply.of(plan, fleet, split, situation, surge=False))
    if not lean.dips or not situation.obtainable:
        return lean
    wide = _plan_with(plan, fleet, shapes or {}, situation, _Supply.of(plan, fleet, split, situation, surge=True))
    return wide if _depth(wide) < _depth(lean) else lean


def _depth(transition: Transition) -> float:
    return max(((dip.floor - dip.lowest) / dip.floor for dip in transition.dips), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Supply:
    """Nodes to work with: ``pending`` are to be provisioned; ``wanted``: rows cut to what fits, ``unplaced`` the rest.

    With ``surge`` new nodes are taken even where stopping instances would free some later.
    """

    split: Split
    wanted: tuple[tuple[PlannedInstances, int], ...]
    unplaced: tuple[Unplaced, ...]
    pending: tuple[Node, ...]

    @classmethod
    def of(cls, plan: AllocationPlan, fleet: Fleet, split: Split, situation: Situation, *, surge: bool) -> _Supply:
        held = _usable_after(fleet, split, situation, stopped=True)
        total = held + Counter(situation.obtainable)
        wanted, unplaced, need = _cut_to_supply(plan, split, total)
        base = _usable_after(fleet, split, situation, stopped=False) if surge else held
        pending = [
            Node(id=NodeId(f"pending/{'/'.join(pool)}/{number}"), region=pool[0], configuration=pool[1], market=pool[2])
            for pool in sorted(need)
            for number in range(min(max(0, need[pool] - base[pool]), situation.obtainable.get(pool, 0)))
        ]
        return cls(split=split, wanted=wanted, unplaced=unplaced, pending=tuple(pending))


def _usable_after(fleet: Fleet, split: Split, situation: Situation, *, stopped: bool) -> Counter[Pool]:
    """Nodes by pool that new instances may take, before or after everything that leaves has ``stopped``."""
    busy = {node for one in (split.kept if stopped else fleet.instances) for node in one.nodes}
    free = (node for node in fleet.nodes if node.id not in busy and node.id not in situation.excluded)
    return Counter(pool_of(node) for node in free)


def _cut_to_supply(
    plan: AllocationPlan, split: Split, total: Counter[Pool]
) -> tuple[tuple[tuple[PlannedInstances, int], ...], tuple[Unplaced, ...], Counter[Pool]]:
    """Rows in order, each as far as nodes reach; what is short is named."""
    need: Counter[Pool] = Counter()
    fitting, unplaced = [], []
    for row, count in split.wanted:
        one = pools_of_row(plan.template(row.template), row)
        possible = min((max(0, total[pool] - need[pool]) // number for pool, number in one.items()), default=0)
        placed = min(count, possible)
        if placed:
            fitting.append((row, placed))
            need += Counter({pool: number * placed for pool, number in one.items()})
        if placed < count:
            unplaced.append(_unplaced(row, count - placed, one, total - need))
    return tuple(fitting), tuple(unplaced), need


def _unplaced(row: PlannedInstances, count: int, one: Counter[Pool], left: Counter[Pool]) -> Unplaced:
    short = [
        f"{pool[1]} in {pool[0]} ({pool[2]}): {left[pool]} free, one instance needs {number}"
        for pool, number in sorted(one.items())
        if left[pool] < number
    ]
    return Unplaced(template=row.template, region=row.region, market=row.market, count=count, reason="; ".join(short))


@dataclass(slots=True, kw_only=True)
class _Writer:
    """Writes steps while it follows who runs, who is routed and which nodes are free."""

    plan: AllocationPlan
    free: FreeNodes
    routed: set[InstanceId]
    used_ids: set[str]
    pools: Mapping[NodeId, Pool]
    unusable: frozenset[NodeId]
    steps: list[Step] = field(default_factory=list)
    started: list[ServingInstance] = field(default_factory=list)
    ids: dict[PlannedInstances, Iterator[InstanceId]] = field(default_factory=dict)

    def add(
        self, kind: StepKind, instance: InstanceId | None = None, nodes: tuple[NodeId, ...] = (), *, route: bool = False
    ) -> None:
        routed = tuple(sorted(self.routed)) if route else ()
        self.steps.append(Step(number=len(self.steps), kind=kind, instance=instance, nodes=nodes, routed=routed))

    def start_wave(self, rows: list[PlannedInstances], waiting: list[ServingInstance]) -> None:
        """Start one instance per entry of ``rows``, wait for them and for ``waiting``, then route them."""
        new = [self._place(row) for row in rows]
        for instance in new:
            self.add(StepKind.START, instance.id, instance.nodes)
        for instance in (*waiting, *new):
            self.add(StepKind.WAIT_READY, instance.id, instance.nodes)
        self.routed.update(one.id for one in (*waiting, *new))
        self.add(StepKind.ROUTE, route=True)

    def _place(self, row: PlannedInstances) -> ServingInstance:
        template = self.plan.template(row.template)
        instance = ServingInstance(
            id=next(self.ids.setdefault(row, fresh_ids(row, template, self.used_ids))),
            template=template.id,
            model=template.model,
            phase=template.phase,
            region=row.region,
            market=row.market,
            state=InstanceState.STARTING,
            stage_nodes=place_instance(template, row, self.free),
            throughput=template.throughput,
        )
        self.used_ids.add(instance.id)
        self.started.append(instance)
        return instance

    def stop_wave(self, leaving: list[ServingInstance]) -> None:
        """Stop routing to ``leaving``, drain those that may hold requests, stop all, free their nodes."""
        if self.routed.intersection(one.id for one in leaving):
            self.routed.difference_update(one.id for one in leaving)
            self.add(StepKind.ROUTE, route=True)
        for instance in leaving:
            if instance.state is not InstanceState.FAILED:
                self.add(StepKind.DRAIN, instance.id, instance.nodes)
        for instance in leaving:
            self.add(StepKind.STOP, instance.id, instance.nodes)
        for node in (node for instance in leaving for node in instance.nodes):
            if node not in self.unusable:
                self.free.add(self.pools[node], node)


def _plan_with(
    plan: AllocationPlan,
    fleet: Fleet,
    shapes: Mapping[ModelId, RequestShape],
    situation: Situation,
    supply: _Supply,
) -> Transition:
    split = supply.split
    writer = _writer(plan, fleet, situation, supply)
    failed = [one for one in split.leaving if one.state is InstanceState.FAILED]
    if failed:
        writer.stop_wave(failed)
    if supply.pending:
        writer.add(StepKind.PROVISION, nodes=tuple(node.id for node in supply.pending))
        for node in supply.pending:
            writer.free.add(pool_of(node), node.id)
    groups = _groups(writer, supply, situation)
    problem = _order_problem(groups, writer, shapes, situation)
    order, _ = best_order(problem)
    _write_waves(writer, groups, order)
    gone = tuple(node for node in writer.free.idle() if node in situation.releasable or node.startswith("pending/"))
    # empty by now, and in the way of its successor as long as it counts against the most that may be held
    gone += tuple(node.id for node in fleet.nodes if node.id in situation.releasable & situation.interrupted)
    if gone:
        writer.add(StepKind.RELEASE, nodes=gone)
    return Transition(
        plan=plan.id,
        steps=tuple(writer.steps),
        kept=tuple(one.id for one in split.kept),
        started=tuple(writer.started),
        stopped=tuple(one.id for one in split.leaving),
        pending=supply.pending,
        dips=_dips(problem, order),
        unplaced=supply.unplaced,
    )


def _writer(plan: AllocationPlan, fleet: Fleet, situation: Situation, supply: _Supply) -> _Writer:
    nodes = (*fleet.nodes, *supply.pending)
    busy = {node for instance in fleet.instances for node in instance.nodes}
    free = FreeNodes(warm=warm_stages(fleet, plan))
    for node in fleet.nodes:
        if node.id not in busy and node.id not in situation.excluded:
            free.add(pool_of(node), node.id)
    return _Writer(
        plan=plan,
        free=free,
        routed={one.id for one in fleet.instances if one.state in _SERVING},
        used_ids={*situation.used_ids, *(one.id for one in fleet.instances)},
        pools={node.id: pool_of(node) for node in nodes},
        unusable=frozenset(situation.excluded),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """What starts, what is only waited for (it starts already) and what leaves, in groups of equals."""

    wanted: tuple[tuple[PlannedInstances, int], ...]
    waiting: tuple[tuple[ServingInstance, ...], ...]
    leaving: tuple[tuple[ServingInstance, ...], ...]
    ready: tuple[ServingInstance, ...]


def _groups(writer: _Writer, supply: _Supply, situation: Situation) -> _Groups:
    """The least loaded of each leaving group comes first."""

    def key(one: ServingInstance) -> tuple[object, ...]:
        freed = Counter(writer.pools[node] for node in one.nodes if node not in situation.excluded)
        return (one.template, one.region, one.market, one.state, sorted(freed.items()))

    def equals(instances: list[ServingInstance]) -> tuple[tuple[ServingInstance, ...], ...]:
        ordered = sorted(instances, key=lambda one: (key(one), situation.load.get(one.id, 0.0), one.id))
        return tuple(tuple(group) for _, group in groupby(ordered, key=key))

    kept = supply.split.kept
    return _Groups(
        wanted=supply.wanted,
        waiting=equals([one for one in kept if one.state is InstanceState.STARTING]),
        leaving=equals([one for one in supply.split.leaving if one.state in _SERVING_OR_GOING]),
        ready=tuple(one for one in kept if one.state in _SERVING),
    )


def _order_problem(
    groups: _Groups, writer: _Writer, shapes: Mapping[ModelId, RequestShape], situation: Situation
) -> OrderProblem:
    """Starts are the wanted rows, then the groups waited for, which need no more nodes."""
    plan, starts, stops = writer.plan, [], []
    for row, count in groups.wanted:
        template = plan.template(row.template)
        needs = pools_of_row(template, row)
        starts.append(Group(count=count, nodes=needs, offer=template_offer(template, row)))
    starts += [Group(count=len(some), nodes={}, offer=offer_of(some[0], plan)) for some in groups.waiting]
    for some in groups.leaving:
        frees = Counter(writer.pools[node] for node in some[0].nodes if node not in situation.excluded)
        offer = offer_of(some[0], plan) if some[0].state in _SERVING else None
        stops.append(Group(count=len(some), nodes=frees, offer=offer))
    return OrderProblem(
        starts=tuple(starts),
        stops=tuple(stops),
        free=writer.free.counts(),
        steady=combined(offer_of(one, plan) for one in groups.ready),
        shapes=shapes,
    )


def _write_waves(writer: _Writer, groups: _Groups, order: Order) -> None:
    """Runs of starts and runs of stops become one wave each."""
    leaving = [list(some) for some in groups.leaving]
    waiting = [list(some) for some in groups.waiting]
    num_rows = len(groups.wanted)
    for is_start, run in groupby(order, key=lambda move: move[0]):
        indices = [index for _, index in run]
        if is_start:
            rows = [groups.wanted[index][0] for index in indices if index < num_rows]
            writer.start_wave(rows, [waiting[index - num_rows].pop(0) for index in indices if index >= num_rows])
        else:
            writer.stop_wave([leaving[index].pop(0) for index in indices])


def _dips(problem: OrderProblem, order: Order) -> tuple[CapacityDip, ...]:
    """Keys whose capacity falls below their floor somewhere in ``order``, with the lowest value."""
    floors = problem.floors()
    state = [0] * (len(problem.starts) + len(problem.stops))
    lowest = dict(floors)
    for is_start, group in order:
        state[group if is_start else len(problem.starts) + group] += 1
        capacity = problem.capacity(state)
        lowest = {key: min(value, capacity.get(key, 0.0)) for key, value in lowest.items()}
    return tuple(
        CapacityDip(what=key, floor=floors[key], lowest=lowest[key])
        for key in sorted(floors)
        if lowest[key] < floors[key] * (1 - 1e-9)
    )
