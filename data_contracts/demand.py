"""Contract of demand: requests/s and lengths of each model in one interval. Zero is a valid rate, missing is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from data_contracts.contract import TIMESTAMP, Broken, Column, Contract, GateContext, Rule, Severity
from data_contracts.rules import advancing, between, derived, fresh, known, no_jump, not_future

LENGTH_COLUMNS: Final = ("mean_prompt_tokens", "p95_prompt_tokens", "mean_output_tokens", "p95_output_tokens")
_SERIES: Final = ("model", "origin")

COLUMNS: Final = (
    Column(name="model", type=pa.string(), meaning="served model"),
    Column(
        name="requests_per_s",
        type=pa.float64(),
        unit="requests/s",
        meaning="arrivals per second, mean of the interval; 0 is valid",
    ),
    Column(name="mean_prompt_tokens", type=pa.float64(), unit="tokens", meaning="mean prompt length"),
    Column(name="p95_prompt_tokens", type=pa.float64(), unit="tokens", meaning="95th percentile of the prompt length"),
    Column(name="mean_output_tokens", type=pa.float64(), unit="tokens", meaning="mean output length"),
    Column(name="p95_output_tokens", type=pa.float64(), unit="tokens", meaning="95th percentile of the output length"),
    Column(name="interval_start", type=TIMESTAMP, unit="UTC", meaning="start of the interval"),
    Column(name="interval_s", type=pa.float64(), unit="s", meaning="length of the interval"),
    Column(
        name="origin",
        type=pa.string(),
        nullable=True,
        meaning="region the requests come from; empty if unknown or irrelevant",
    ),
)


def _example(now: datetime) -> Sequence[Mapping[str, Any]]:
    shared = {"requests_per_s": 10.0, "interval_start": now.replace(microsecond=0), "interval_s": 300.0, "origin": None}
    lengths = {
        "phi-4-14b": (1154.7, 4083.0, 211.1, 451.0),
        "gpt-oss-20b": (2047.8, 7303.0, 27.9, 90.0),
        "qwen3-32b": (621.0, 1860.0, 248.0, 743.0),
    }
    return [
        {**shared, "model": model, **dict(zip(LENGTH_COLUMNS, values, strict=True))}
        for model, values in lengths.items()
    ]


def _tokens(column: str) -> Rule:
    return between(
        column,
        1.0,
        lambda context: context.limits.max_tokens,
        f"{column} must be at least one token and plausible",
        broken=-1.0,
    )


def _context_share(frame: pd.DataFrame, context: GateContext) -> pd.Series:
    limit = frame["model"].map(dict(context.max_context_tokens)).astype(float)
    both_means = frame["mean_prompt_tokens"] + frame["mean_output_tokens"]
    # a prompt of p95 length still needs room for one token of output
    ends = [frame[f"p95_{part}_tokens"] + 1 for part in ("prompt", "output")]
    longest = pd.concat([both_means, *ends], axis=1).max(axis=1)
    return longest / limit


def _p95_over_mean(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """The smaller of the two ratios p95 / mean."""
    ratios = [frame[f"p95_{part}_tokens"] / frame[f"mean_{part}_tokens"] for part in ("prompt", "output")]
    return pd.concat(ratios, axis=1).min(axis=1)


def _total_if_fallen(frame: pd.DataFrame, context: GateContext) -> pd.Series:
    """Rates of the newest interval if all are zero although there was demand before; else null.

    Before: the batch accepted last, or earlier intervals of this one.
    """
    none = pd.Series(np.nan, index=frame.index)
    before = context.before()
    if frame.empty:
        return none
    newest = frame["interval_start"] == frame["interval_start"].max()
    earlier = [frame.loc[~newest, "requests_per_s"], *([] if before is None else [before["requests_per_s"]])]
    busiest = max((one.max() for one in earlier if len(one)), default=0.0)
    if busiest < context.limits.outage_floor_requests_per_s or frame.loc[newest, "requests_per_s"].max() > 0:
        return none
    return frame["requests_per_s"].where(newest)


def _new_series_factor(frame: pd.DataFrame, context: GateContext) -> pd.Series:
    """For rows of a model and origin not seen before: factor between the model's rate of all origins now and before."""
    none = pd.Series(np.nan, index=frame.index)
    before = context.expected()
    if before is None or before.empty or frame.empty:
        return none
    seen = before[list(_SERIES)].drop_duplicates()
    new = frame[list(_SERIES)].merge(seen, how="left", indicator=True)["_merge"].to_numpy() == "left_only"
    last = before.groupby(["model", "interval_start"], sort=True)["requests_per_s"].sum().groupby("model").last()
    lowest = max(context.limits.jump_floor_requests_per_s, 1e-12)
    total = (
        frame.groupby(["model", "interval_start"], dropna=False)["requests_per_s"].transform("sum").clip(lower=lowest)
    )
    old = frame["model"].map(last).astype(float).clip(lower=lowest)
    return pd.Series(np.maximum(total / old, old / total), index=frame.index).where(new)


def _origin_mixed(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """1 on rows of a model and interval that has rows with an origin and one without; else 0."""
    if frame.empty:
        return pd.Series(np.nan, index=frame.index)
    kinds = frame["origin"].isna().groupby([frame["model"], frame["interval_start"]], dropna=False)
    return (kinds.transform("nunique") > 1).astype(float)


def _single_zero(frame: pd.DataFrame, context: GateContext) -> pd.Series:
    """Rate before, for rows that are zero now while other models have demand."""
    before = context.before()
    if before is None or frame.empty or not frame["requests_per_s"].max() > 0:
        return pd.Series(np.nan, index=frame.index)
    last = before.groupby("model")["requests_per_s"].last()
    return frame["model"].map(last).astype(float).where(frame["requests_per_s"] == 0)


RULES: Final = (
    between(
        "requests_per_s",
        0.0,
        lambda context: context.limits.max_requests_per_s,
        "requests_per_s must not be negative and must be plausible",
        broken=-1.0,
    ),
    *(_tokens(column) for column in LENGTH_COLUMNS),
    between(
        "interval_s",
        lambda context: context.limits.min_interval_s,
        lambda context: context.limits.max_interval_s,
        "interval_s must be between a second and a day",
        broken=0.0,
    ),
    known("model", "model"),
    known("origin", "region"),
    derived(
        "origin_all_or_none",
        "the model has rows with an origin and one without in the same interval: part and whole would both count",
        ("model", "origin"),
        _origin_mixed,
        maximum=0.0,
        broken=Broken(cells={0: {"model": "gpt-oss-20b", "origin": "aws/us-east-2"}}),
    ),
    derived(
        "fits_context",
        "requests are longer than the model's context",
        ("model", *LENGTH_COLUMNS),
        _context_share,
        maximum=1.0,
        broken=Broken(
            cells={0: {"mean_prompt_tokens": 5000.0}},
            context=lambda context, _: replace(context, max_context_tokens={"phi-4-14b": 5100}),
        ),
    ),
    derived(
        "p95_not_below_mean",
        "a p95 length is below the mean length",
        LENGTH_COLUMNS,
        _p95_over_mean,
        minimum=1.0,
        severity=Severity.WARNING,
        broken=Broken(cells={0: {"p95_output_tokens": 100.0}}),
    ),
    not_future(
        "interval_start",
        lambda context: context.limits.demand_horizon_s,
        text="interval_start lies beyond the planning horizon",
    ),
    fresh("interval_start", lambda context: context.limits.demand_max_age_s, by=("model",)),
    advancing("interval_start"),
    no_jump("requests_per_s", _SERIES, broken=600.0, floor=lambda context: context.limits.jump_floor_requests_per_s),
    derived(
        "new_series_jump",
        "requests_per_s of all origins of this model jumped against the batch before: wrong unit?",
        ("model", "origin", "requests_per_s"),
        _new_series_factor,
        maximum=lambda context: context.limits.max_jump,
        releasable=True,
        broken=Broken(
            cells={0: {"origin": "aws/us-east-2", "requests_per_s": 600.0}},
            context=lambda context, table: replace(context, previous=table),
        ),
    ),
    *(no_jump(column, _SERIES, broken=100_000.0) for column in LENGTH_COLUMNS),
    no_jump("interval_s", _SERIES, broken=5.0, severity=Severity.WARNING),
    derived(
        "not_all_zero",
        "all demand is zero at once although there was some before: a metrics outage looks like this",
        ("requests_per_s",),
        _total_if_fallen,
        minimum=1e-300,
        releasable=True,
        broken=Broken(
            cells={row: {"requests_per_s": 0.0} for row in range(3)},
            context=lambda context, table: replace(
                context, previous=table, limits=replace(context.limits, jump_floor_requests_per_s=1000.0)
            ),
        ),
    ),
    derived(
        "fell_to_zero",
        "demand of this model fell to zero",
        ("model", "requests_per_s"),
        _single_zero,
        maximum=lambda context: context.limits.outage_floor_requests_per_s,
        severity=Severity.WARNING,
        broken=Broken(
            cells={0: {"requests_per_s": 0.0}},
            context=lambda context, table: replace(
                context, previous=table, limits=replace(context.limits, jump_floor_requests_per_s=1000.0)
            ),
        ),
    ),
)

CONTRACT: Final = Contract(
    name="demand",
    version="1.0",
    meaning="Requests per second and request lengths of each served model, by interval and (if known) origin region.",
    columns=COLUMNS,
    key=("model", "origin", "interval_start"),
    rules=RULES,
    example=_example,
)
