"""What each node does in each group of steps of a transition, and what capacity serves meanwhile. Pure figures.

Owns the replay that the picture shows; draws nothing and judges nothing: whether a transition is safe is dispatch's
matter, which replays it with code of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.names import InstanceId, NodeId
from coral_tasks.domain.transition import Step, StepKind, Transition


class Activity(StrEnum):
    """What a node does. ABSENT: not rented (any more). READY: loaded, but receives no requests."""

    ABSENT = "absent"
    IDLE = "free"
    PROVISIONING = "ordered"
    LOADING = "loading"
    READY = "unrouted"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"
    RELEASING = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One moment of the picture: before (no steps), a group of steps of one kind, or after (no steps)."""

    title: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One activity of a node for one instance, or for none, over columns ``first`` to ``last``, both included."""

    first: int
    last: int
    activity: Activity
    instance: InstanceId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node's bars, in order and without gaps."""

    node: Node
    bars: tuple[Bar, ...]

    @property
    def changes(self) -> bool:
        """Whether anything happens on this node."""
        return len(self.bars) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityLine:
    """Routed throughput of one model and phase in each column, in ``unit``; None where nobody reported it."""

    model: str
    phase: str
    unit: str
    values: tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A transition as a table: columns in time, rows by node, lines by model and phase."""

    columns: tuple[Column, ...]
    rows: tuple[NodeRow, ...]
    lines: tuple[CapacityLine, ...]
    instances: Mapping[InstanceId, ServingInstance]


_BEFORE = {
    InstanceState.STARTING: Activity.LOADING,
    InstanceState.READY: Activity.SERVING,
    InstanceState.DRAINING: Activity.DRAINING,
    InstanceState.FAILED: Activity.FAILED,
}
_DURING = {
    StepKind.PROVISION: Activity.PROVISIONING,
    StepKind.START: Activity.LOADING,
    StepKind.WAIT_READY: Activity.LOADING,
    StepKind.DRAIN: Activity.DRAINING,
    StepKind.STOP: Activity.STOPPING,
    StepKind.RELEASE: Activity.RELEASING,
}
_AFTER = {
    StepKind.PROVISION: Activity.IDLE,
    StepKind.WAIT_READY: Activity.READY,
    StepKind.STOP: Activity.IDLE,
    StepKind.RELEASE: Activity.ABSENT,
}
_Cell = tuple[Activity, InstanceId | None]


@dataclass(slots=True, kw_only=True)
class _Replay:
    """Follows each node through the steps."""

    cells: dict[NodeId, _Cell]
    nodes_of: Mapping[InstanceId, tuple[NodeId, ...]]
    routed: frozenset[InstanceId]
    cells_by_column: list[dict[NodeId, _Cell]] = field(default_factory=list)
    routed_by_column: list[frozenset[InstanceId]] = field(default_factory=list)

    def look(self) -> None:
        """Keep how things stand as the next column."""
        self.cells_by_column.append(dict(self.cells))
        self.routed_by_column.append(self.routed)

    def play(self, steps: Sequence[Step]) -> None:
        """One group of steps of one kind: what goes on meanwhile is a column, then its end holds."""
        for step in steps:
            self._enter(step)
        self.look()
        for step in steps:
            if step.kind in _AFTER:
                self._set(step, _AFTER[step.kind])

    def _enter(self, step: Step) -> None:
        if step.kind is StepKind.ROUTE:
            self._route(frozenset(step.routed))
        else:
            self._set(step, _DURING[step.kind])

    def _set(self, step: Step, activity: Activity) -> None:
        instance = None if activity in (Activity.IDLE, Activity.ABSENT) else step.instance
        for node in step.nodes:
            self.cells[node] = (activity, instance)

    def _route(self, routed: frozenset[InstanceId]) -> None:
        for instance in routed - self.routed:
            self._mark(instance, Activity.SERVING)
        for instance in self.routed - routed:
            self._mark(instance, Activity.READY)
        self.routed = routed

    def _mark(self, instance: InstanceId, activity: Activity) -> None:
        for node in self.nodes_of[instance]:
            self.cells[node] = (activity, instance)


def build_history(transition: Transition, fleet: Fleet) -> History:
    """Replay ``transition`` from ``fleet``, the one it was planned on. KeyError if it names what ``fleet`` lacks."""
    instances = {one.id: one for one in (*fleet.instances, *transition.started)}
    nodes = (*fleet.nodes, *transition.pending)
    cells: dict[NodeId, _Cell] = {node.id: (Activity.IDLE, None) for node in fleet.nodes}
    cells.update((node.id, (Activity.ABSENT, None)) for node in transition.pending)
    cells.update((node, (_BEFORE[one.state], one.id)) for one in fleet.instances for node in one.nodes)
    replay = _Replay(
        cells=cells,
        nodes_of={one.id: one.nodes for one in instances.values()},
        routed=frozenset(one.id for one in fleet.instances if one.state is InstanceState.READY),
    )
    replay.look()
    groups = [tuple(group) for _, group in groupby(transition.steps, key=lambda step: step.kind)]
    for group in groups:
        replay.play(group)
    replay.look()
    titles = [group[0].kind.value.replace("_", " ") for group in groups]
    middle = [Column(title=title, steps=group) for title, group in zip(titles, groups, strict=True)]
    return History(
        columns=(Column(title="now"), *middle, Column(title="then")),
        rows=tuple(_row(node, replay.cells_by_column) for node in sorted(nodes, key=_node_key)),
        lines=_lines(instances.values(), replay.routed_by_column),
        instances=instances,
    )


def _node_key(node: Node) -> tuple[str, ...]:
    return (node.region, node.configuration, node.market, node.id)


def _row(node: Node, cells_by_column: Sequence[Mapping[NodeId, _Cell]]) -> NodeRow:
    bars, first = [], 0
    for (activity, instance), run in groupby(cells[node.id] for cells in cells_by_column):
        last = first + len(list(run)) - 1
        bars.append(Bar(first=first, last=last, activity=activity, instance=instance))
        first = last + 1
    return NodeRow(node=node, bars=tuple(bars))


def _lines(
    instances: Iterable[ServingInstance], routed_by_column: Sequence[frozenset[InstanceId]]
) -> tuple[CapacityLine, ...]:
    kinds = sorted(instances, key=lambda one: (one.model, one.phase, one.id))
    return tuple(
        CapacityLine(model=model, phase=phase.value, unit=phase.throughput_unit, values=_values(some, routed_by_column))
        for (model, phase), some in (
            (key, list(run)) for key, run in groupby(kinds, key=lambda one: (one.model, one.phase))
        )
    )


def _values(
    some: Sequence[ServingInstance], routed_by_column: Sequence[frozenset[InstanceId]]
) -> tuple[float, ...] | None:
    throughput = {one.id: one.throughput for one in some if one.throughput is not None}
    if len(throughput) < len(some):
        return None
    return tuple(sum(throughput[one.id] for one in some if one.id in routed) for routed in routed_by_column)
