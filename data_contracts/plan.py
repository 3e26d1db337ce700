"""Contract of a plan: how many instances of which template run in which region and market."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import pandas as pd
import pyarrow as pa

from data_contracts.contract import Broken, Column, Contract, GateContext
from data_contracts.prices import MARKETS
from data_contracts.rules import between, derived, known, one_of
from data_contracts.running import PHASES

COLUMNS: Final = (
    Column(name="plan_id", type=pa.string(), meaning="plan, a hash of its inputs and content"),
    Column(name="library_version", type=pa.string(), meaning="template library that the plan was made from"),
    Column(name="template_id", type=pa.string(), meaning="serving template"),
    Column(name="model", type=pa.string(), meaning="served model of the template"),
    Column(name="phase", type=pa.string(), meaning="prefill, decode or aggregated"),
    Column(name="region", type=pa.string(), meaning="provider and region"),
    Column(name="market", type=pa.string(), meaning="on_demand, spot or reserved"),
    Column(name="count", type=pa.int64(), unit="instances", meaning="instances to run, at least 1"),
    Column(name="num_kept", type=pa.int64(), unit="instances", meaning="of these, instances that run already"),
    Column(
        name="throughput",
        type=pa.float64(),
        unit="by phase",
        meaning="of one instance: prompt or output tokens/s, or requests/s",
    ),
    Column(name="cost_usd_per_hour", type=pa.float64(), unit="USD/h", meaning="cost of the row's instances"),
)


def _example(_: datetime) -> Sequence[Mapping[str, Any]]:
    shared = {"plan_id": "plan-1", "library_version": "lib-1", "model": "phi-4-14b", "region": "aws/us-east-2"}
    return [
        {
            **shared,
            "template_id": "phi-4-14b/prefill/1200ms/1*L40Sx1/vllm",
            "phase": "prefill",
            "market": "on_demand",
            "count": 2,
            "num_kept": 1,
            "throughput": 9000.0,
            "cost_usd_per_hour": 3.722,
        },
        {
            **shared,
            "template_id": "phi-4-14b/decode/60ms/1*L40Sx1/vllm",
            "phase": "decode",
            "market": "on_demand",
            "count": 3,
            "num_kept": 0,
            "throughput": 1500.0,
            "cost_usd_per_hour": 5.583,
        },
    ]


def _kept_beyond_count(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    return frame["num_kept"] - frame["count"]


def _plans(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """Different plan ids in the table, on every row."""
    return pd.Series(float(frame["plan_id"].nunique()), index=frame.index)


RULES: Final = (
    one_of("phase", PHASES),
    one_of("market", MARKETS),
    known("template_id", "template"),
    known("model", "model"),
    known("region", "region"),
    between("count", 1.0, lambda context: context.limits.max_nodes, "count must be at least 1", broken=0),
    between("num_kept", 0.0, lambda context: context.limits.max_nodes, "num_kept must not be negative", broken=-1),
    between("throughput", 0.0, 1e12, "throughput must be above zero", strict_minimum=True, broken=0.0),
    between("cost_usd_per_hour", 0.0, 1e9, "cost_usd_per_hour must not be negative and must be plausible", broken=-1.0),
    derived(
        "kept_within_count",
        "num_kept must not exceed count",
        ("num_kept", "count"),
        _kept_beyond_count,
        maximum=0.0,
        broken=Broken(cells={0: {"num_kept": 3}}),
    ),
    derived(
        "one_plan",
        "a table holds one plan",
        ("plan_id",),
        _plans,
        maximum=1.0,
        broken=Broken(cells={0: {"plan_id": "plan-2"}}),
    ),
)

CONTRACT: Final = Contract(
    name="plan",
    version="1.0",
    meaning="Rows of one allocation plan; an empty plan (no demand) has no rows.",
    columns=COLUMNS,
    key=("plan_id", "template_id", "region", "market"),
    rules=RULES,
    example=_example,
    empty_ok=True,
)
