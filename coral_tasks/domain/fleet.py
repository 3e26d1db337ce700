"""The observed fleet: nodes and serving instances as agents report them, not as last planned."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coral_tasks.domain.names import (
    InstanceId,
    Market,
    ModelId,
    NodeConfigurationId,
    NodeId,
    Phase,
    RegionId,
    TemplateId,
)
from coral_tasks.domain.validation import Checks


class InstanceState(StrEnum):
    """Life of a serving instance as a whole, as seen from its engines."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One rented machine, known by its agent."""

    id: NodeId
    region: RegionId
    configuration: NodeConfigurationId
    market: Market


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingInstance:
    """One running copy of a template in a region. ``stage_nodes``: nodes of each stage, in pipeline order.

    ``throughput``: what its template promised when it started, in the phase's unit; None if nobody reported it.
    """

    id: InstanceId
    template: TemplateId
    model: ModelId
    phase: Phase
    region: RegionId
    market: Market
    state: InstanceState
    stage_nodes: tuple[tuple[NodeId, ...], ...]
    throughput: float | None = None

    def __post_init__(self) -> None:
        checks = Checks("fleet", self.id)
        if self.throughput is not None:
            checks.positive(throughput=self.throughput)
        checks.require(all(self.stage_nodes) and len(self.stage_nodes) > 0, "every stage needs a node")
        checks.unique("node", [node for stage in self.stage_nodes for node in stage])
        checks.raise_if_any()

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """All nodes of the instance, in pipeline order."""
        return tuple(node for stage in self.stage_nodes for node in stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Everything observed at one moment."""

    nodes: tuple[Node, ...]
    instances: tuple[ServingInstance, ...]

    def __post_init__(self) -> None:
        checks = Checks("fleet")
        known = {node.id for node in self.nodes}
        checks.unique("node", [node.id for node in self.nodes])
        checks.unique("instance", [instance.id for instance in self.instances])
        checks.unique("node in use", [node for instance in self.instances for node in instance.nodes])
        for instance in self.instances:
            for node in instance.nodes:
                checks.require(node in known, f"instance {instance.id} names an unknown node", node)
        checks.raise_if_any()
