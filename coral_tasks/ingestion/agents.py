"""Availability from the agents' inventory: every node that an agent answers for, and that takes work, can be had.

The listing is passed in (the dispatcher observes it). Only pools of listed nodes have rows: what other nodes a cloud
would rent is not known here, and unknown is not zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from coral_tasks.domain.errors import SourceFault
from coral_tasks.domain.fleet import Node
from coral_tasks.domain.market import NodeAvailability
from coral_tasks.domain.names import Market, NodeConfigurationId, NodeId, RegionId
from coral_tasks.ingestion.batch import SourceBatch, batch_of
from coral_tasks.ingestion.rows import availability_rows, availability_table
from data_contracts.contract import GateContext
from data_contracts.gate import check_table
from data_contracts.registry import contract_of


@dataclass(frozen=True, slots=True, kw_only=True)
class InventorySource:
    """``nodes``: as agents reported them. ``num_agents``, ``num_answered``: agents on the list, and that answered.

    ``unusable``: nodes that take no new instance, with the reason: none of them can be had, though their pools are
    known. ``trouble``: what else is odd about the answers.
    """

    nodes: tuple[Node, ...]
    observed_at: datetime
    num_agents: int
    num_answered: int
    unusable: Mapping[NodeId, str] = field(default_factory=dict)
    trouble: tuple[str, ...] = ()

    def __call__(self, now: datetime) -> SourceBatch:
        """Count nodes by pool; none where there is no agent to ask, as before a cloud's first machine.

        Raises SourceFault if there are agents and none answered.
        """
        del now
        if self.num_agents and self.num_answered == 0:
            message = "availability: none of the agents answered; unknown is not zero"
            raise SourceFault(message)
        return batch_of(
            "availability",
            availability_table(count_nodes(self.nodes, self.observed_at, self.unusable), "agents' inventory"),
            source="node agents",
            observed_at=self.observed_at,
            expected=self.num_agents,
            received=self.num_answered,
            notes=(*(f"node {name} is left out: {why}" for name, why in sorted(self.unusable.items())), *self.trouble),
        )


def count_nodes(
    nodes: Iterable[Node], observed_at: datetime, unusable: Container[NodeId] = ()
) -> list[NodeAvailability]:
    """Nodes by region, configuration and market, sorted; a pool of nothing but ``unusable`` ones has none."""
    counts: Counter[tuple[RegionId, NodeConfigurationId, Market]] = Counter()
    for node in nodes:
        counts[node.region, node.configuration, node.market] += node.id not in unusable
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
    return _merge(sources, lambda new, old: new.available_nodes > old.available_nodes)


def _merge(
    sources: Iterable[Iterable[NodeAvailability]], better: Callable[[NodeAvailability, NodeAvailability], bool]
) -> list[NodeAvailability]:
    best: dict[tuple[str, str, str], NodeAvailability] = {}
    for row in (row for rows in sources for row in rows):
        key = (row.region, row.configuration, row.market.value)
        if key not in best or better(row, best[key]):
            best[key] = row
    return [best[key] for key in sorted(best)]


def merged_batch(stated: Sequence[SourceBatch], held: Sequence[SourceBatch], context: GateContext) -> SourceBatch:
    """One availability batch of several. Each pool: the lowest of the ``stated`` figures, at least what is ``held``.

    A quota and a stock list are both ceilings, so the lower one holds. Where no agent is to be asked, nothing is held.
    A part that the gate would refuse is passed on as it came, so that its own violations are reported and none is
    merged away.
    """
    tables: list[list[tuple[NodeAvailability, ...]]] = [[], []]
    for place, batch in [*((0, one) for one in stated), *((1, one) for one in held if one.expected != 0)]:
        # what was accepted last came from the merge, so a part is not held against it
        outcome = check_table(contract_of("availability"), batch.raw(), replace(context, previous=None))
        if outcome.table is None:
            return batch
        tables[place].append(availability_rows(outcome.table))
    lowest = _merge(tables[0], lambda new, old: new.available_nodes < old.available_nodes)
    parts = [*stated, *held]
    return batch_of(
        "availability",
        availability_table(merge_availability(lowest, *tables[1]), "merged"),
        source=" + ".join(one.source for one in parts),
        observed_at=min(one.observed_at for one in parts),
        expected=sum(1 if one.expected is None else one.expected for one in parts),
        received=sum(1 if one.received is None else one.received for one in parts),
        notes=tuple(f"{one.source}: {note}" for one in parts for note in one.notes),
    )
