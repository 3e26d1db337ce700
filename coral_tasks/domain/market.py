"""Demand, prices and availability: what the world asks for and offers in the next interval.

Owns single rows and their own rules; rules between tables belong to the gate. Unknown is the absence of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import Market, ModelId, NodeConfigurationId, RegionId
from coral_tasks.domain.validation import Checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests/s of one model for the interval that starts at ``interval_start`` (UTC). Zero is valid.

    ``origin``: region the requests come from, None if unknown or irrelevant.
    """

    model: ModelId
    requests_per_s: float
    shape: RequestShape
    interval_start: datetime
    interval_s: float
    origin: RegionId | None = None

    def __post_init__(self) -> None:
        checks = Checks("demand", self.model)
        checks.not_negative(requests_per_s=self.requests_per_s)
        checks.positive(interval_s=self.interval_s)
        checks.require(self.interval_start.tzinfo is not None, "interval_start needs a time zone")
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePrice:
    """USD per hour of one node. Zero only in the RESERVED market, where the node is paid for already."""

    region: RegionId
    configuration: NodeConfigurationId
    market: Market
    price_usd_per_hour: float
    observed_at: datetime

    def __post_init__(self) -> None:
        checks = Checks("prices", f"{self.region} {self.configuration} {self.market}")
        checks.not_negative(price_usd_per_hour=self.price_usd_per_hour)
        zero_ok = self.price_usd_per_hour > 0 or self.market is Market.RESERVED
        checks.require(zero_ok, "price 0 is allowed only for reserved nodes", self.price_usd_per_hour)
        checks.require(self.observed_at.tzinfo is not None, "observed_at needs a time zone")
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAvailability:
    """Nodes obtainable now, those already held included."""

    region: RegionId
    configuration: NodeConfigurationId
    market: Market
    available_nodes: int
    observed_at: datetime

    def __post_init__(self) -> None:
        checks = Checks("availability", f"{self.region} {self.configuration} {self.market}")
        checks.not_negative(available_nodes=self.available_nodes)
        checks.require(self.observed_at.tzinfo is not None, "observed_at needs a time zone")
        checks.raise_if_any()
