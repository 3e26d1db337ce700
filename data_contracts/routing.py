"""Contract of routing: where the gateway sends requests, with which weight. Published with each transition step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from data_contracts.contract import TIMESTAMP, Broken, Column, Contract, GateContext
from data_contracts.rules import between, derived, form, known, not_future, one_of
from data_contracts.running import PHASES

COLUMNS: Final = (
    Column(name="plan_id", type=pa.string(), meaning="plan in force"),
    Column(name="epoch", type=pa.int64(), meaning="fencing number of the plan"),
    Column(name="model", type=pa.string(), meaning="served model"),
    Column(name="phase", type=pa.string(), meaning="prefill, decode or aggregated"),
    Column(name="region", type=pa.string(), meaning="provider and region; a request's phases share it"),
    Column(name="instance_id", type=pa.string(), meaning="serving instance"),
    Column(name="endpoint", type=pa.string(), meaning="address of its first stage's engine"),
    Column(name="weight", type=pa.float64(), unit="by phase", meaning="throughput of its template; 0 while draining"),
    Column(name="published_at", type=TIMESTAMP, unit="UTC", meaning="when the table was published"),
)


def _example(now: datetime) -> Sequence[Mapping[str, Any]]:
    shared = {"plan_id": "plan-1", "epoch": 7, "model": "phi-4-14b", "region": "aws/us-east-2"}
    at = {"published_at": now.replace(microsecond=0)}
    return [
        {**shared, "phase": "prefill", "instance_id": "i-1", "endpoint": "127.0.0.1:8001", "weight": 9000.0, **at},
        {**shared, "phase": "decode", "instance_id": "i-2", "endpoint": "127.0.0.1:8002", "weight": 1500.0, **at},
    ]


def _half_pair(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """Phases among prefill and decode that have weight in the row's model and region; null where aggregated."""
    parts = frame[frame["phase"].isin(["prefill", "decode"]) & (frame["weight"] > 0)]
    if parts.empty:
        return pd.Series(np.nan, index=frame.index)
    return parts.groupby(["model", "region"])["phase"].transform("nunique").astype(float).reindex(frame.index)


def _plans(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """Different pairs of plan and epoch in the table, on every row."""
    return pd.Series(float(len(frame[["plan_id", "epoch"]].drop_duplicates())), index=frame.index)


RULES: Final = (
    one_of("phase", PHASES),
    between("epoch", 0.0, 2.0**62, "epoch must not be negative", broken=-1),
    between("weight", 0.0, 1e12, "weight must not be negative and must be plausible", broken=-1.0),
    form(
        "endpoint",
        r"(?:https?://)?(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}/?",
        "endpoint must be host:port or an http address with a port",
        broken="i-1",
    ),
    known("model", "model"),
    known("region", "region"),
    known("instance_id", "instance"),
    derived(
        "phases_paired",
        "prefill without decode in the same region, or the reverse: the KV cache does not cross regions",
        ("model", "region", "phase"),
        _half_pair,
        minimum=2.0,
        broken=Broken(cells={1: {"region": "aws/ap-northeast-2"}}),
    ),
    derived(
        "one_plan",
        "a table holds one plan of one epoch",
        ("plan_id", "epoch"),
        _plans,
        maximum=1.0,
        broken=Broken(cells={0: {"epoch": 6}}),
    ),
    not_future("published_at", lambda context: context.limits.future_tolerance_s),
)

CONTRACT: Final = Contract(
    name="routing",
    version="1.0",
    meaning="Routing table for the gateway; no rows means that nothing is routed.",
    columns=COLUMNS,
    key=("instance_id", "endpoint"),
    rules=RULES,
    example=_example,
    empty_ok=True,
)
