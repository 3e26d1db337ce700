"""Provisioner of fleets whose agents are already there: gives nothing, takes nothing back."""

from __future__ import annotations

from collections.abc import Mapping

from coral_tasks.domain.errors import Unavailable
from coral_tasks.domain.names import Market, NodeConfigurationId, NodeId, RegionId
from coral_tasks.domain.transition import NodeRequest, ProvisionedNode


class StaticProvisioner:
    """Every node is known from the inventory of agents."""

    agent_key = ""

    def obtainable(self) -> Mapping[tuple[RegionId, NodeConfigurationId, Market], int]:
        """None."""
        return {}

    def provision(self, request: NodeRequest) -> tuple[ProvisionedNode, ...]:
        """Always raises Unavailable."""
        raise Unavailable(f"no {request.configuration} can be added in {request.region}: the fleet is static")

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        """Nothing to give back: the machines are not ours."""

    def releasable(self) -> frozenset[NodeId]:
        """None."""
        return frozenset()

    def booting(self) -> frozenset[NodeId]:
        """None."""
        return frozenset()

    def interrupted(self) -> frozenset[NodeId]:
        """None."""
        return frozenset()

    def endpoints(self) -> Mapping[str, str]:
        """None besides the inventory."""
        return {}
