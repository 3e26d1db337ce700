"""Contract of the template library: one row per serving template, for the planner and for other teams.

Files lie under ``versions/<version>/model=<model>/phase=<phase>/``, those of an SLO one step tighter in the same way
under ``tighter/<version>/``, never in one folder; ``model`` and ``phase`` stand in the folder names (Hive style) and
not in the files. A version never changes. Lists have one entry per node (nodes in order of their configuration's name)
or per stage (pipeline order).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_contracts.contract import Broken, Column, Contract, Derive, GateContext
from data_contracts.profile_cells import SLO_RULES, SOURCES
from data_contracts.rules import between, derived, known, one_of

PHASES: Final = ("prefill", "decode", "aggregated")
RUNTIMES: Final = ("vllm", "hybrid")
SPLITS: Final = ("equal", "free")
LIMITS: Final = ("weights", "kv", "latency", "layers")
MOST_STAGES: Final = 10_000.0
_PER_NODE: Final = ("nodes", "node_stage", "node_source")
_PER_STAGE: Final = ("stage_layers", "stage_quanta")

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


class _Lists:
    """A column of lists, judged by all items at once; a row without a list is null, which another rule says."""

    def __init__(self, frame: pd.DataFrame, column: str) -> None:
        self._index = frame.index
        found = frame[column].array.__arrow_array__()
        self._arrow = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
        self.row = pc.list_parent_indices(self._arrow).to_numpy()
        self.items = pc.list_flatten(self._arrow)

    def series(self, values: NDArray[np.float64]) -> pd.Series:
        """One value for each row; null where there is no list."""
        absent = self._arrow.is_null().to_numpy(zero_copy_only=False)
        return pd.Series(np.where(absent, math.nan, values), index=self._index)

    def sums(self, weights: NDArray[np.float64]) -> pd.Series:
        """Sum by row of one weight for each item."""
        return self.series(np.bincount(self.row, weights, minlength=len(self._arrow)))

    def numbers(self) -> NDArray[np.float64]:
        """The items."""
        return np.asarray(self.items.to_numpy(zero_copy_only=False), dtype=float)


def _lengths(frame: pd.DataFrame, column: str) -> pd.Series:
    lists = _Lists(frame, column)
    return lists.sums(np.ones(len(lists.row)))


def _totals(frame: pd.DataFrame, column: str) -> pd.Series:
    lists = _Lists(frame, column)
    return lists.sums(lists.numbers())


def _uneven_lists(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """How far the lists' lengths are from the counts beside them."""
    off = [(_lengths(frame, name) - frame["num_nodes"]).abs() for name in _PER_NODE]
    off += [(_lengths(frame, name) - frame["num_stages"]).abs() for name in _PER_STAGE]
    return pd.concat(off, axis=1).sum(axis=1)


def _missing_layers(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    return (_totals(frame, "stage_layers") - frame["num_layers"]).abs()


def _quanta_beyond(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    return _totals(frame, "stage_quanta") - frame["total_quanta"]


def _least(column: str) -> Derive:
    """Smallest item of a list; null where it is empty, which the counts say."""

    def derive(frame: pd.DataFrame, _: GateContext) -> pd.Series:
        lists = _Lists(frame, column)
        least = np.full(len(frame), math.inf)
        np.minimum.at(least, lists.row, lists.numbers())
        return lists.series(np.where(np.isinf(least), math.nan, least))

    return derive


def _stages_off(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """Stages that hold no node, and stage numbers beyond the last: 0 if nodes and stages fit."""
    lists = _Lists(frame, "node_stage")
    number = frame["num_stages"].clip(upper=MOST_STAGES).to_numpy(dtype=float)
    row, stage = np.unique(np.stack([lists.row, lists.numbers()]), axis=1)
    row = row.astype(np.int64)
    wanted = (stage >= 0) & (stage < np.floor(number)[row])
    held = np.bincount(row, wanted, minlength=len(frame))
    strange = np.bincount(row, ~wanted, minlength=len(frame))
    return lists.series(np.maximum(np.floor(number), 0) - held + strange)


def _strange(column: str, known: Callable[[GateContext], frozenset[str] | None]) -> Derive:
    """Items of a list that are not among the known ones."""

    def derive(frame: pd.DataFrame, context: GateContext) -> pd.Series:
        names = known(context)
        if names is None:
            return pd.Series(math.nan, index=frame.index)
        lists = _Lists(frame, column)
        strange = pc.invert(pc.is_in(lists.items, pa.array(sorted(names), pa.string())))
        return lists.sums(strange.to_numpy(zero_copy_only=False).astype(float))

    return derive


def _id_off(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """1 where the id does not begin with the row's own model and phase."""
    names = ["template_id", "model", "phase"]
    rows = zip(*(frame[name].tolist() for name in names), strict=True)
    off = [float(isinstance(one, str) and not one.startswith(f"{model}/{phase}/")) for one, model, phase in rows]
    return pd.Series(off, index=frame.index).mask(frame[names].isna().any(axis=1))


RULES: Final = (
    one_of("phase", PHASES),
    one_of("runtime", RUNTIMES),
    one_of("latency_split", SPLITS),
    one_of("limited_by", LIMITS),
    known("model", "model"),
    *(
        between(name, 1.0, MOST_STAGES, f"{name} must be at least 1 and plausible", broken=0)
        for name in ("num_nodes", "num_stages", "num_layers", "total_quanta")
    ),
    between("throughput", 0.0, 1e12, "throughput must be above zero", strict_minimum=True, broken=0.0),
    *SLO_RULES,
    derived(
        "id_names_row",
        "template_id must begin with the row's model and phase",
        ("template_id", "model", "phase"),
        _id_off,
        maximum=0.0,
        broken=Broken(cells={0: {"template_id": "phi-4-14b/prefill/60ms/1*L40Sx1/vllm"}}),
    ),
    derived(
        "nodes_configured",
        "nodes name an unknown configuration",
        ("nodes",),
        _strange("nodes", lambda context: context.known.get("configuration")),
        maximum=0.0,
        broken=Broken(
            cells={0: {"nodes": ["L40Sx3"]}},
            context=lambda context, _: replace(context, known={"configuration": frozenset({"L40Sx1", "L4x1"})}),
        ),
    ),
    derived(
        "node_source_choice",
        f"node_source must be of {', '.join(SOURCES)}",
        ("node_source",),
        _strange("node_source", lambda _: frozenset(SOURCES)),
        maximum=0.0,
        broken=Broken(cells={0: {"node_source": ["guessed"]}}),
    ),
    derived(
        "layers_in_each_stage",
        "each stage must hold at least one layer",
        ("stage_layers",),
        _least("stage_layers"),
        minimum=1.0,
        broken=Broken(cells={1: {"stage_layers": [0, 40]}}),
    ),
    derived(
        "share_of_each_stage",
        "each stage needs a latency share of at least one quantum",
        ("stage_quanta",),
        _least("stage_quanta"),
        minimum=1.0,
        broken=Broken(cells={1: {"stage_quanta": [-1, 41]}}),
    ),
    derived(
        "nodes_in_stages",
        "every stage from 0 to num_stages - 1 must have a node, and every node such a stage",
        ("node_stage", "num_stages"),
        _stages_off,
        maximum=0.0,
        broken=Broken(cells={1: {"node_stage": [2, 0, 0]}}),
    ),
    derived(
        "lists_even",
        "lists must have one entry per node or per stage",
        ("num_nodes", "num_stages", *_PER_NODE, *_PER_STAGE),
        _uneven_lists,
        maximum=0.0,
        broken=Broken(cells={0: {"num_nodes": 2}}),
    ),
    derived(
        "layers_complete",
        "the stages' layers must add up to num_layers",
        ("num_layers", "stage_layers"),
        _missing_layers,
        maximum=0.0,
        broken=Broken(cells={0: {"num_layers": 41}}),
    ),
    derived(
        "quanta_within_budget",
        "the stages' latency shares must not exceed total_quanta",
        ("total_quanta", "stage_quanta"),
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
