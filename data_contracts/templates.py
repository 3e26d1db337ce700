"""Contract of the template library: one row per serving template, for the planner and for other teams.

Files lie under ``versions/<version>/model=<model>/phase=<phase>/``; ``model`` and ``phase`` stand in the folder names
(Hive style) and not in the files. A version never changes. Lists have one entry per node (nodes in order of their
configuration's name) or per stage (pipeline order).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import pandas as pd
import pyarrow as pa

from data_contracts.contract import Broken, Column, Contract, GateContext
from data_contracts.rules import between, derived, one_of

PHASES: Final = ("prefill", "decode", "aggregated")
RUNTIMES: Final = ("vllm", "hybrid")
SPLITS: Final = ("equal", "free")
LIMITS: Final = ("weights", "kv", "latency", "layers")

PARTITION_COLUMNS: Final = ("model", "phase")
"""Columns that stand in the folder names, not in the files."""

COLUMNS: Final = (
    Column(name="template_id", type=pa.string(), meaning="<model>/<phase>/<latency limit>/<nodes>/<runtime>"),
    Column(name="model", type=pa.string(), meaning="served model"),
    Column(name="phase", type=pa.string(), meaning="prefill, decode or aggregated"),
    Column(name="slo_ttft_s", type=pa.float64(), unit="s", meaning="limit on the time to the first token"),
    Column(name="slo_tpot_s", type=pa.float64(), unit="s", meaning="limit on the mean time per later token"),
    Column(name="slo_percentile", type=pa.float64(), unit="%", meaning="share of requests that must keep the limits"),
    Column(
        name="throughput",
        type=pa.float64(),
        unit="by phase",
        meaning="goodput of one instance: prompt tokens/s, output tokens/s or requests/s",
    ),
    Column(name="runtime", type=pa.string(), meaning="vllm: stock vLLM can carry it out; hybrid: it cannot"),
    Column(name="latency_split", type=pa.string(), meaning="how the limit is shared among stages: equal or free"),
    Column(name="limited_by", type=pa.string(), meaning="what limits the slowest stage"),
    Column(name="num_nodes", type=pa.int64(), unit="nodes", meaning="nodes of one instance"),
    Column(name="num_stages", type=pa.int64(), unit="stages", meaning="pipeline stages"),
    Column(name="num_layers", type=pa.int64(), unit="layers", meaning="layers of the model"),
    Column(name="total_quanta", type=pa.int64(), unit="quanta", meaning="quanta that the latency limit is cut in"),
    Column(name="nodes", type=pa.list_(pa.string()), meaning="node configuration of each node"),
    Column(name="node_stage", type=pa.list_(pa.int16()), meaning="stage of each node, from 0"),
    Column(name="node_source", type=pa.list_(pa.string()), meaning="profile source of each node's figures"),
    Column(name="stage_layers", type=pa.list_(pa.int16()), unit="layers", meaning="layers of each stage"),
    Column(name="stage_quanta", type=pa.list_(pa.int16()), unit="quanta", meaning="latency share of each stage"),
    Column(name="profile_version", type=pa.string(), meaning="version of the profile table it rests on"),
)


def _example(_: datetime) -> Sequence[Mapping[str, Any]]:
    shared = {
        "model": "phi-4-14b",
        "phase": "decode",
        "slo_ttft_s": 1.2,
        "slo_tpot_s": 0.06,
        "slo_percentile": 99.0,
        "latency_split": "free",
        "num_layers": 40,
        "total_quanta": 60,
        "profile_version": "0123456789abcdef",
    }
    single = {
        "template_id": "phi-4-14b/decode/60ms/1*L40Sx1/vllm",
        "throughput": 881.394,
        "runtime": "vllm",
        "limited_by": "kv",
        "num_nodes": 1,
        "num_stages": 1,
        "nodes": ["L40Sx1"],
        "node_stage": [0],
        "node_source": ["database"],
        "stage_layers": [40],
        "stage_quanta": [55],
    }
    mixed = {
        "template_id": "phi-4-14b/decode/60ms/1*L40Sx1+2*L4x1/hybrid",
        "throughput": 1172.58,
        "runtime": "hybrid",
        "limited_by": "latency",
        "num_nodes": 3,
        "num_stages": 2,
        "nodes": ["L40Sx1", "L4x1", "L4x1"],
        "node_stage": [1, 0, 0],
        "node_source": ["database", "analytic", "analytic"],
        "stage_layers": [10, 30],
        "stage_quanta": [19, 41],
    }
    return [{**shared, **single}, {**shared, **mixed}]


def _uneven_lists(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """How far the lists' lengths are from the counts beside them."""

    def off(row: Any) -> float:
        per_node = sum(abs(len(row[name]) - row["num_nodes"]) for name in ("nodes", "node_stage", "node_source"))
        per_stage = sum(abs(len(row[name]) - row["num_stages"]) for name in ("stage_layers", "stage_quanta"))
        return float(per_node + per_stage)

    return _by_row(frame, off)


def _missing_layers(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    return _by_row(frame, lambda row: float(abs(sum(row["stage_layers"]) - row["num_layers"])))


def _quanta_beyond(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    return _by_row(frame, lambda row: float(sum(row["stage_quanta"]) - row["total_quanta"]))


def _by_row(frame: pd.DataFrame, value: Any) -> pd.Series:
    return pd.Series([value(row) for _, row in frame.iterrows()], index=frame.index, dtype=float)


RULES: Final = (
    one_of("phase", PHASES),
    one_of("runtime", RUNTIMES),
    one_of("latency_split", SPLITS),
    one_of("limited_by", LIMITS),
    between("throughput", 0.0, 1e12, "throughput must be above zero", strict_minimum=True, broken=0.0),
    between("slo_ttft_s", 0.0, 1e6, "slo_ttft_s must be above zero", strict_minimum=True, broken=0.0),
    between("slo_tpot_s", 0.0, 1e6, "slo_tpot_s must be above zero", strict_minimum=True, broken=0.0),
    between("slo_percentile", 0.0, 100.0, "slo_percentile must be within 0 and 100", broken=101.0),
    derived(
        "lists_even",
        "lists must have one entry per node or per stage",
        ("num_nodes", "num_stages"),
        _uneven_lists,
        maximum=0.0,
        broken=Broken(cells={0: {"num_nodes": 2}}),
    ),
    derived(
        "layers_complete",
        "the stages' layers must add up to num_layers",
        ("num_layers",),
        _missing_layers,
        maximum=0.0,
        broken=Broken(cells={0: {"num_layers": 41}}),
    ),
    derived(
        "quanta_within_budget",
        "the stages' latency shares must not exceed total_quanta",
        ("total_quanta",),
        _quanta_beyond,
        maximum=0.0,
        broken=Broken(cells={0: {"total_quanta": 54}}),
    ),
)

CONTRACT: Final = Contract(
    name="templates",
    version="1.0",
    meaning="Serving templates: node combinations with their best placement, for one model, phase and latency limit.",
    columns=COLUMNS,
    key=("template_id",),
    rules=RULES,
    example=_example,
    empty_ok=True,
)
"""Versioning promise: within version 1 columns are only added, never renamed, retyped or given another meaning; a
change of meaning is version 2, which readers of version 1 refuse. Throughput survives a round trip bit by bit."""
