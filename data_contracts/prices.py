"""Contract of prices: USD per node-hour by region, configuration and market. Unknown is the absence of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from data_contracts.contract import TIMESTAMP, Broken, Column, Contract, GateContext, Severity
from data_contracts.rules import advancing, between, derived, fresh, known, no_jump, not_future, one_of

MARKETS: Final = ("on_demand", "spot", "reserved")
_POOL: Final = ("region", "configuration", "market")

COLUMNS: Final = (
    Column(name="region", type=pa.string(), meaning="provider and region, for example aws/us-east-2"),
    Column(name="configuration", type=pa.string(), meaning="node configuration, <GPU type>x<count>"),
    Column(name="market", type=pa.string(), meaning="on_demand, spot or reserved"),
    Column(
        name="price_usd_per_hour",
        type=pa.float64(),
        unit="USD/h",
        meaning="price of one node for an hour; 0 only for reserved nodes, which are paid for already",
    ),
    Column(name="observed_at", type=TIMESTAMP, unit="UTC", meaning="when the price was seen to hold"),
    Column(name="source", type=pa.string(), nullable=True, words=True, meaning="where the figure comes from"),
)


def _example(now: datetime) -> Sequence[Mapping[str, Any]]:
    figures = (
        ("aws/us-east-2", "L4x1", "on_demand", 0.8048),
        ("aws/us-east-2", "L4x1", "spot", 0.2756),
        ("aws/us-east-2", "L40Sx4", "on_demand", 10.49264),
        ("aws/ap-northeast-2", "A10Gx8", "on_demand", 20.02809),
        ("aws/ap-northeast-2", "L4x8", "reserved", 0.0),
    )
    rows = [dict(zip((*_POOL, "price_usd_per_hour"), row, strict=True)) for row in figures]
    return [{**row, "observed_at": now.replace(microsecond=0), "source": "example"} for row in rows]


def _unreserved_price(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    return frame["price_usd_per_hour"].where(frame["market"] != "reserved")


def _spot_ratio(frame: pd.DataFrame, context: GateContext) -> pd.Series:
    """Spot price over the on-demand price of the same region and configuration; null elsewhere.

    That of the batch, else the price known before: a batch of spot prices alone is held against something too.
    """
    pool = ["region", "configuration"]
    before = context.expected()
    full_prices = [one[one["market"] == "on_demand"] for one in (before, frame) if one is not None]
    lasts = [
        one.groupby(pool)["price_usd_per_hour"].agg(way)
        for one, way in zip(full_prices[::-1], ("max", "last"), strict=False)
    ]
    on_demand = lasts[0] if len(lasts) == 1 else lasts[0].combine_first(lasts[1])
    partner = frame[pool].merge(on_demand.rename("_full").reset_index(), on=pool, how="left")["_full"]
    full = pd.Series(partner.to_numpy(dtype=float), index=frame.index)
    return (frame["price_usd_per_hour"] / full.where(full > 0)).where(frame["market"] == "spot")


def _lost_since(frame: pd.DataFrame, context: GateContext) -> pd.Series:
    """On the first row: how many pools priced before have no price now."""
    lost = pd.Series(np.nan, index=frame.index)
    if context.previous is None or frame.empty:
        return lost
    before = context.previous.select(list(_POOL)).to_pandas().drop_duplicates()
    missing = before.merge(frame[list(_POOL)].drop_duplicates(), how="left", indicator=True)["_merge"] == "left_only"
    lost.iloc[0] = float(missing.sum())
    return lost


def _previous_with_more(context: GateContext, table: pa.Table) -> GateContext:
    frame = table.to_pandas()
    more = pd.concat([frame, frame.iloc[:1].assign(configuration="L4x4")], ignore_index=True)
    return replace(context, previous=pa.Table.from_pandas(more, schema=table.schema, preserve_index=False))


RULES: Final = (
    between(
        "price_usd_per_hour",
        0.0,
        lambda context: context.limits.max_price_usd_per_hour,
        "price_usd_per_hour must not be negative and must be plausible",
        broken=-0.5,
    ),
    one_of("market", MARKETS),
    known("region", "region"),
    known("configuration", "configuration"),
    derived(
        "zero_only_reserved",
        "price 0 is allowed only for reserved nodes",
        ("market", "price_usd_per_hour"),
        _unreserved_price,
        minimum=1e-300,
        broken=Broken(cells={2: {"price_usd_per_hour": 0.0}}),
    ),
    derived(
        "spot_not_above_on_demand",
        "spot price is above the on-demand price of the same region and configuration",
        ("market", "price_usd_per_hour"),
        _spot_ratio,
        maximum=lambda context: 1.0 + context.limits.spot_tolerance,
        releasable=True,
        broken=Broken(cells={1: {"price_usd_per_hour": 0.9}}),
    ),
    not_future("observed_at", lambda context: context.limits.future_tolerance_s),
    fresh("observed_at", lambda context: context.limits.prices_max_age_s),
    advancing("observed_at"),
    no_jump("price_usd_per_hour", _POOL, broken=80.48),
    derived(
        "prices_lost",
        "prices that were there before are missing now: half a page?",
        (),
        _lost_since,
        maximum=0.0,
        severity=Severity.WARNING,
        broken=Broken(context=_previous_with_more),
    ),
)

CONTRACT: Final = Contract(
    name="prices",
    version="1.0",
    meaning="Price of one node for an hour by region, node configuration and market.",
    columns=COLUMNS,
    key=_POOL,
    rules=RULES,
    example=_example,
)
