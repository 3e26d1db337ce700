"""Contract of profiles cell by cell: a row per model, phase, SLO, configuration, layer count and latency share.

The table T[c][j][q] as other teams read it. Owns its columns and rules; imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import pandas as pd
import pyarrow as pa

from data_contracts.contract import Broken, Column, Contract, GateContext
from data_contracts.rules import between, derived, known, one_of

PHASES: Final = ("prefill", "decode", "aggregated")
LIMITS: Final = ("weights", "kv", "latency", "layers")
SOURCES: Final = ("measured", "database", "analytic")
_TABLE: Final = ("model", "phase", "slo_ttft_s", "slo_tpot_s", "slo_percentile", "configuration")

COLUMNS: Final = (
    Column(name="model", type=pa.string(), meaning="served model"),
    Column(name="phase", type=pa.string(), meaning="prefill, decode or aggregated"),
    Column(name="slo_ttft_s", type=pa.float64(), unit="s", meaning="limit on the time to the first token"),
    Column(name="slo_tpot_s", type=pa.float64(), unit="s", meaning="limit on the mean time per later token"),
    Column(name="slo_percentile", type=pa.float64(), unit="%", meaning="share of requests that must keep the limits"),
    Column(name="configuration", type=pa.string(), meaning="node configuration, <GPU type>x<count>"),
    Column(name="num_layers", type=pa.int64(), unit="layers", meaning="layers of the model on the node"),
    Column(name="num_quanta", type=pa.int64(), unit="1/60 of the limit", meaning="latency share of the node's stage"),
    Column(
        name="throughput",
        type=pa.float64(),
        unit="by phase",
        meaning="most prompt tokens/s, output tokens/s or requests/s; 0 where it does not fit",
    ),
    Column(name="limited_by", type=pa.string(), meaning="what keeps it from more"),
    Column(name="tp_degree", type=pa.int64(), unit="GPUs", meaning="tensor parallel degree on the node"),
    Column(name="source", type=pa.string(), meaning="measured, database or analytic"),
    Column(name="provenance", type=pa.string(), words=True, meaning="versions and date behind the figure"),
    Column(name="profile_version", type=pa.string(), meaning="hash of everything the table was made from"),
)


def _example(_: datetime) -> Sequence[Mapping[str, Any]]:
    shared = {
        "model": "phi-4-14b",
        "phase": "decode",
        "slo_ttft_s": 1.2,
        "slo_tpot_s": 0.06,
        "slo_percentile": 99.0,
        "configuration": "L40Sx1",
        "limited_by": "kv",
        "tp_degree": 1,
        "source": "database",
        "provenance": "aiconfigurator-core 0.12.0",
        "profile_version": "0123456789abcdef",
    }
    figures = ((10, 30, 900.0), (10, 60, 1000.0), (20, 30, 400.0), (20, 60, 500.0))
    return [{**shared, "num_layers": j, "num_quanta": q, "throughput": rate} for j, q, rate in figures]


def _step(frame: pd.DataFrame, along: str, other: str) -> pd.Series:
    """Relative change of throughput against the row before ``along``, everything else equal; null on the first."""
    ordered = frame.sort_values([*_TABLE, other, along])
    before = ordered.groupby([*_TABLE, other], dropna=False)["throughput"].shift()
    change = (ordered["throughput"] - before) / before.where(before > 0, 1.0)
    return change.reindex(frame.index)


def _rise_with_layers(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    return _step(frame, "num_layers", "num_quanta")


def _rise_with_share(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    return _step(frame, "num_quanta", "num_layers")


SLO_RULES: Final = (
    between("slo_ttft_s", 1e-3, 600.0, "slo_ttft_s must be seconds, from a thousandth to 600", broken=1200.0),
    between("slo_tpot_s", 1e-5, 20.0, "slo_tpot_s must be seconds, from 0.00001 to 20", broken=60.0),
    between("slo_percentile", 1.0, 100.0, "slo_percentile must be within 1 and 100", broken=0.99),
)
"""Rules of the three columns that state a latency limit; milliseconds in place of seconds are beyond them."""

RULES: Final = (
    one_of("phase", PHASES),
    one_of("limited_by", LIMITS),
    one_of("source", SOURCES),
    known("model", "model"),
    known("configuration", "configuration"),
    *SLO_RULES,
    between("num_layers", 1.0, 10_000.0, "num_layers must be at least 1", broken=0),
    between("num_quanta", 1.0, 10_000.0, "num_quanta must be at least 1", broken=0),
    between("tp_degree", 1.0, 1024.0, "tp_degree must be at least 1", broken=0),
    between("throughput", 0.0, 1e12, "throughput must not be negative", broken=-1.0),
    derived(
        "not_rising_in_layers",
        "throughput must not rise with layers",
        ("num_layers", "num_quanta", "throughput"),
        _rise_with_layers,
        maximum=1e-9,
        broken=Broken(cells={3: {"throughput": 1100.0}}),
    ),
    derived(
        "not_falling_in_share",
        "throughput must not fall with the latency share",
        ("num_layers", "num_quanta", "throughput"),
        _rise_with_share,
        minimum=-1e-9,
        broken=Broken(cells={1: {"throughput": 800.0}}),
    ),
)

CONTRACT: Final = Contract(
    name="profiles",
    version="1.0",
    meaning="Throughput of one node by layers held and latency share, for one model, phase and SLO.",
    columns=COLUMNS,
    key=(*_TABLE, "num_layers", "num_quanta"),
    rules=RULES,
    example=_example,
)
