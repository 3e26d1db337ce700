"""Contract of the running fleet: one row per node, with the stage of the serving instance it holds, if any.

An empty table is valid (nothing runs); a missing one is not the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from data_contracts.contract import TIMESTAMP, Broken, Column, Contract, GateContext, Severity
from data_contracts.prices import MARKETS
from data_contracts.rules import advancing, between, derived, fresh, known, not_future, one_of

PHASES: Final = ("prefill", "decode", "aggregated")
STATES: Final = ("starting", "ready", "draining", "failed")
INSTANCE_COLUMNS: Final = ("instance_id", "template_id", "model", "phase", "state", "stage_index")

COLUMNS: Final = (
    Column(name="node_id", type=pa.string(), meaning="machine, as its agent names itself"),
    Column(name="region", type=pa.string(), meaning="provider and region of the node"),
    Column(name="configuration", type=pa.string(), meaning="node configuration, <GPU type>x<count>"),
    Column(name="market", type=pa.string(), meaning="on_demand, spot or reserved"),
    Column(name="instance_id", type=pa.string(), nullable=True, meaning="serving instance on it; empty: idle node"),
    Column(name="template_id", type=pa.string(), nullable=True, meaning="template of that instance"),
    Column(name="model", type=pa.string(), nullable=True, meaning="served model of that instance"),
    Column(name="phase", type=pa.string(), nullable=True, meaning="prefill, decode or aggregated"),
    Column(name="state", type=pa.string(), nullable=True, meaning="starting, ready, draining or failed"),
    Column(name="stage_index", type=pa.int64(), nullable=True, meaning="stage that the node holds, from 0"),
    Column(name="observed_at", type=TIMESTAMP, unit="UTC", meaning="when the agent reported it"),
)


def _example(now: datetime) -> Sequence[Mapping[str, Any]]:
    template = "phi-4-14b/decode/60ms/1*L4x1+1*L40Sx4/vllm"
    instance = {"instance_id": "i-1", "template_id": template, "model": "phi-4-14b", "phase": "decode"}
    place = {"region": "aws/us-east-2", "market": "on_demand", "observed_at": now.replace(microsecond=0)}
    return [
        {**place, "node_id": "n-1", "configuration": "L4x1", **instance, "state": "ready", "stage_index": 0},
        {**place, "node_id": "n-2", "configuration": "L40Sx4", **instance, "state": "ready", "stage_index": 1},
        {**place, "node_id": "n-3", "configuration": "L4x8"},
    ]


def _half_filled(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """Instance columns that are filled on a row: none or all is right."""
    filled = frame[list(INSTANCE_COLUMNS)].notna().sum(axis=1)
    return filled.where((filled > 0) & (filled < len(INSTANCE_COLUMNS)))


def _disagreeing(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """Different values, per instance, of the columns that an instance has once."""
    once = ["template_id", "model", "phase", "state", "region", "market"]
    used = frame[frame["instance_id"].notna()]
    if used.empty:
        return pd.Series(np.nan, index=frame.index)
    kinds = used.groupby("instance_id")[once].transform("nunique").max(axis=1)
    return kinds.reindex(frame.index)


def _missing_stages(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """Per instance, highest stage index + 1 minus the number of different stages: 0 if none is missing."""
    used = frame[frame["instance_id"].notna() & frame["stage_index"].notna()]
    if used.empty:
        return pd.Series(np.nan, index=frame.index)
    stages = used.groupby("instance_id")["stage_index"]
    return (stages.transform("max") + 1 - stages.transform("nunique")).reindex(frame.index)


def _all_gone(frame: pd.DataFrame, context: GateContext) -> pd.Series:
    """On the first row: share of the nodes seen before that are still there."""
    share = pd.Series(np.nan, index=frame.index)
    if context.previous is None or frame.empty or context.previous.num_rows == 0:
        return share
    before = set(context.previous.column("node_id").to_pylist())
    share.iloc[0] = len(before & set(frame["node_id"])) / len(before)
    return share


def _with_many_before(context: GateContext, table: pa.Table) -> GateContext:
    frame = table.to_pandas()
    many = pd.concat([frame.assign(node_id=[f"old-{k}-{i}" for i in range(3)]) for k in range(4)], ignore_index=True)
    return replace(context, previous=pa.Table.from_pandas(many, schema=table.schema, preserve_index=False))


RULES: Final = (
    one_of("market", MARKETS),
    one_of("phase", PHASES),
    one_of("state", STATES),
    between("stage_index", 0.0, 1000.0, "stage_index must not be negative", broken=-1),
    known("region", "region"),
    known("configuration", "configuration"),
    known("model", "model"),
    known("template_id", "template", severity=Severity.WARNING),
    derived(
        "instance_whole",
        "a node with an instance needs all of " + ", ".join(INSTANCE_COLUMNS),
        INSTANCE_COLUMNS,
        _half_filled,
        maximum=0.0,
        broken=Broken(cells={2: {"instance_id": "i-9"}}),
    ),
    derived(
        "instance_agrees",
        "rows of one instance disagree on template, model, phase, state, region or market",
        ("instance_id", "template_id", "model", "phase", "state", "region", "market"),
        _disagreeing,
        maximum=1.0,
        broken=Broken(cells={1: {"state": "draining"}}),
    ),
    derived(
        "stages_contiguous",
        "stages of an instance must be numbered from 0 without gaps",
        ("instance_id", "stage_index"),
        _missing_stages,
        maximum=0.0,
        broken=Broken(cells={1: {"stage_index": 2}}),
    ),
    not_future("observed_at", lambda context: context.limits.future_tolerance_s),
    fresh("observed_at", lambda context: context.limits.running_max_age_s, by=("node_id",)),
    advancing("observed_at"),
    derived(
        "fleet_kept",
        "most nodes that were there before are gone: a lost network looks like this",
        (),
        _all_gone,
        minimum=0.5,
        severity=Severity.WARNING,
        broken=Broken(context=_with_many_before),
    ),
)

CONTRACT: Final = Contract(
    name="running",
    version="1.0",
    meaning="Nodes and the serving instances on them, as agents report them.",
    columns=COLUMNS,
    key=("node_id",),
    rules=RULES,
    example=_example,
    empty_ok=True,
)
