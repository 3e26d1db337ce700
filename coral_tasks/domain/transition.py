"""Transitions: the ordered steps from the running fleet to a plan (design 3.4).

Owns the structure of a transition; which order is safe is dispatch's matter. A transition is shown before it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coral_tasks.domain.fleet import Node, ServingInstance
from coral_tasks.domain.names import InstanceId, Market, NodeConfigurationId, NodeId, PlanId, RegionId, TemplateId
from coral_tasks.domain.validation import Checks


class StepKind(StrEnum):
    """What one step does. Steps of one kind that follow each other run at the same time."""

    PROVISION = "provision"
    START = "start"
    WAIT_READY = "wait_ready"
    ROUTE = "route"
    DRAIN = "drain"
    STOP = "stop"
    RELEASE = "release"


_WITH_INSTANCE = (StepKind.START, StepKind.WAIT_READY, StepKind.DRAIN, StepKind.STOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step. ``instance``: of START, WAIT_READY, DRAIN and STOP. ``nodes``: those the step touches.

    ``routed``: of ROUTE only, every instance that receives requests after the step, sorted.
    """

    number: int
    kind: StepKind
    instance: InstanceId | None = None
    nodes: tuple[NodeId, ...] = ()
    routed: tuple[InstanceId, ...] = ()

    def __post_init__(self) -> None:
        checks = Checks("transition", f"step {self.number}")
        checks.require((self.instance is not None) == (self.kind in _WITH_INSTANCE), "instance does not fit the kind")
        checks.require(self.kind is StepKind.ROUTE or not self.routed, "only ROUTE carries routed instances")
        checks.require(list(self.routed) == sorted(set(self.routed)), "routed must be sorted and unique")
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityDip:
    """Served capacity of ``what`` falls below min(old, new) while the transition runs, and this was said before.

    ``what``: a model (requests/s, prefill and decode coupled by region) or ``model/phase`` (the phase's unit).
    """

    what: str
    floor: float
    lowest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaced:
    """``count`` planned instances for which the nodes do not exist, with the reason."""

    template: TemplateId
    region: RegionId
    market: Market
    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """``count`` nodes of one kind, asked of a provisioner. ``token``: makes the request idempotent."""

    region: RegionId
    configuration: NodeConfigurationId
    market: Market
    count: int
    token: str

    def __post_init__(self) -> None:
        checks = Checks("node_request", f"{self.region} {self.configuration} {self.market}")
        checks.positive(count=self.count)
        checks.named(token=self.token)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionedNode:
    """A node that a provisioner launched; ``machine`` is the cloud's own id, ``address`` its private address."""

    node: Node
    machine: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Ordered steps from a fleet to a plan. ``pending``: nodes that do not exist yet, under placeholder ids.

    ``kept``: running instances that stay. ``started``: new ones with their nodes. ``stopped``: those that go.
    """

    plan: PlanId
    steps: tuple[Step, ...]
    kept: tuple[InstanceId, ...]
    started: tuple[ServingInstance, ...]
    stopped: tuple[InstanceId, ...]
    pending: tuple[Node, ...]
    dips: tuple[CapacityDip, ...]
    unplaced: tuple[Unplaced, ...]

    def __post_init__(self) -> None:
        checks = Checks("transition", self.plan)
        numbers = [step.number for step in self.steps]
        checks.require(numbers == list(range(len(numbers))), "steps must be numbered from 0")
        checks.unique("instance", [*self.kept, *(one.id for one in self.started), *self.stopped])
        checks.unique("pending node", [node.id for node in self.pending])
        checks.raise_if_any()

    @property
    def is_empty(self) -> bool:
        """Whether the fleet is already as planned."""
        return not self.steps
