"""What a failed request for nodes teaches about availability. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from coral_tasks.domain.market import NodeAvailability
from coral_tasks.domain.transition import NodeRequest


def reduce_availability(
    rows: Iterable[NodeAvailability], shortage: Iterable[NodeRequest]
) -> tuple[NodeAvailability, ...]:
    """Availability for one more solve: each pool less the nodes that could not be had, never below zero."""
    missing: Counter[tuple[str, str, str]] = Counter()
    for request in shortage:
        missing[request.region, request.configuration, request.market] += request.count
    return tuple(
        replace(row, available_nodes=max(0, row.available_nodes - missing[row.region, row.configuration, row.market]))
        for row in rows
    )
