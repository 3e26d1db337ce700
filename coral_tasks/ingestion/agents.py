"""Availability from the agents' inventory: every node that an agent answers for is a node that can be had.

The listing is passed in (the dispatcher observes it). Only pools of listed nodes have rows: what other nodes a cloud
would rent is not known here, and unknown is not zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from coral_tasks.domain.errors import SourceFault
from coral_tasks.domain.fleet import Node
from coral_tasks.domain.market import NodeAvailability
from coral_tasks.ingestion.batch import SourceBatch, batch_of
from coral_tasks.ingestion.rows import availability_table


@dataclass(frozen=True, slots=True, kw_only=True)
class InventorySource:
    """``nodes``: as agents reported them. ``num_agents``, ``num_answered``: agents on the list, and that answered."""

    nodes: tuple[Node, ...]
    observed_at: datetime
    num_agents: int
    num_answered: int

    def __call__(self, now: datetime) -> SourceBatch:
        """Count nodes by pool. Raises SourceFault if no agent answered."""
        del now
        if self.num_answered == 0:
            message = "availability: none of the agents answered; unknown is not zero"
            raise SourceFault(message)
        return batch_of(
            "availability",
            availability_table(count_nodes(self.nodes, self.observed_at), "agents' inventory"),
            source="node agents",
            observed_at=self.observed_at,
            expected=self.num_agents,
            received=self.num_answered,
        )


def count_nodes(nodes: Iterable[Node], observed_at: datetime) -> list[NodeAvailability]:
    """Nodes by region, configuration and market, sorted."""
    counts = Counter((node.region, node.configuration, node.market) for node in nodes)
    return [
        NodeAvailability(
            region=region,
            configuration=configuration,
            market=market,
            available_nodes=counts[region, configuration, market],
            observed_at=observed_at,
        )
        for region, configuration, market in sorted(counts)
    ]


def merge_availability(*sources: Iterable[NodeAvailability]) -> list[NodeAvailability]:
    """Largest figure of each pool: what one source does not see another may; held nodes count as available."""
    best: dict[tuple[str, str, str], NodeAvailability] = {}
    for rows in sources:
        for row in rows:
            key = (row.region, row.configuration, row.market.value)
            if key not in best or row.available_nodes > best[key].available_nodes:
                best[key] = row
    return [best[key] for key in sorted(best)]
