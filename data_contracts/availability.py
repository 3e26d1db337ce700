"""Contract of availability: nodes obtainable now, those already held included. Unknown is the absence of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import pyarrow as pa

from data_contracts.contract import TIMESTAMP, Column, Contract, Severity
from data_contracts.prices import MARKETS
from data_contracts.rules import advancing, between, fresh, known, no_jump, not_future, one_of

_POOL: Final = ("region", "configuration", "market")

COLUMNS: Final = (
    Column(name="region", type=pa.string(), meaning="provider and region, for example aws/us-east-2"),
    Column(name="configuration", type=pa.string(), meaning="node configuration, <GPU type>x<count>"),
    Column(name="market", type=pa.string(), meaning="on_demand, spot or reserved"),
    Column(
        name="available_nodes",
        type=pa.int64(),
        unit="nodes",
        meaning="nodes obtainable now, those already held included; 0 means none, no row means unknown",
    ),
    Column(name="observed_at", type=TIMESTAMP, unit="UTC", meaning="when the count was seen to hold"),
    Column(name="source", type=pa.string(), nullable=True, words=True, meaning="where the figure comes from"),
)


def _example(now: datetime) -> Sequence[Mapping[str, Any]]:
    figures = (
        ("aws/us-east-2", "L4x1", "on_demand", 64),
        ("aws/us-east-2", "L40Sx4", "on_demand", 16),
        ("aws/ap-northeast-2", "A10Gx8", "spot", 0),
    )
    rows = [dict(zip((*_POOL, "available_nodes"), row, strict=True)) for row in figures]
    return [{**row, "observed_at": now.replace(microsecond=0), "source": "example"} for row in rows]


RULES: Final = (
    between(
        "available_nodes",
        0.0,
        lambda context: context.limits.max_nodes,
        "available_nodes must not be negative and must be plausible",
        broken=-1,
    ),
    one_of("market", MARKETS),
    known("region", "region"),
    known("configuration", "configuration"),
    not_future("observed_at", lambda context: context.limits.future_tolerance_s),
    fresh("observed_at", lambda context: context.limits.availability_max_age_s),
    advancing("observed_at"),
    no_jump(
        "available_nodes",
        _POOL,
        broken=6400,
        floor=lambda context: context.limits.jump_floor_nodes,
        severity=Severity.WARNING,
    ),
)

CONTRACT: Final = Contract(
    name="availability",
    version="1.0",
    meaning="Nodes that can be had now by region, node configuration and market.",
    columns=COLUMNS,
    key=_POOL,
    rules=RULES,
    example=_example,
)
