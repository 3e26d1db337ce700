"""The demo's node agents: a taken port stops the start before anything begins."""

from __future__ import annotations

import socket

import pytest

from coral_tasks.domain.errors import Unavailable
from coral_tasks.domain.fleet import Node
from coral_tasks.domain.market import Market
from coral_tasks.domain.names import NodeConfigurationId, NodeId, RegionId
from coral_tasks.tasks.local_fleet import plan_agents, start_agents


def test_a_taken_port_of_the_last_agent_starts_none_and_names_the_setting(tmp_path) -> None:
    """The first agent's port is free, the second's is not: no agent starts, no key or file is made."""
    nodes = [
        Node(
            id=NodeId(name),
            region=RegionId("aws/us-east-2"),
            configuration=NodeConfigurationId("L4x1"),
            market=Market.ON_DEMAND,
        )
        for name in ("n1", "n2")
    ]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        agents = plan_agents(tmp_path, nodes, num_agents=2, first_port=port - 1)
        told = rf"port {port} on 127.0.0.1, for node agent local-2 \(CORAL_FIRST_AGENT_PORT changes it\), is in use"
        with pytest.raises(Unavailable, match=told):
            start_agents(tmp_path, agents)
    assert not list(tmp_path.iterdir())
