"""Node prices of the catalogue: list and spot prices of the configurations a cloud sells, and rules for the rest.

Owns the price rows and the meaning of each rule; ``carry`` applies the rules. Every price that is not on a
provider's list says so in ``rule``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from coral_tasks.catalog.rows import Table
from coral_tasks.domain.hardware import NodeConfiguration
from coral_tasks.domain.market import NodePrice
from coral_tasks.domain.names import Market, NodeConfigurationId, RegionId

PRICE_COLUMNS = ["region", "configuration", "market", "usd_per_hour", "machine_type", "rule", "source"]


class PriceRule(StrEnum):
    """Where a price comes from.

    LISTED: the provider sells this machine in this region. INTERPOLATED: no such size; USD per GPU between the
    next smaller and next larger size, linear in log2 of the count. NEAREST_SIZE: no such size and only larger or only
    smaller ones; their USD per GPU. NEIGHBOUR_REGION: the collected figure of this region is unusable (SOURCES.md);
    that of the provider's nearest region with a usable one. NOMINAL: a machine that nobody rents out; an arbitrary
    figure, so that a plan over it has a cost.
    """

    LISTED = "listed"
    INTERPOLATED = "interpolated_per_gpu"
    NEAREST_SIZE = "nearest_size_per_gpu"
    NEIGHBOUR_REGION = "neighbour_region"
    NOMINAL = "nominal"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogPrice:
    """USD per hour of one node. ``machine_type``: product the figure was read or derived from."""

    region: RegionId
    configuration: NodeConfigurationId
    market: Market
    price_usd_per_hour: float
    machine_type: str
    rule: PriceRule
    source: str

    def as_node_price(self, observed_at: datetime) -> NodePrice:
        """The price as planning input; ``observed_at`` (with time zone) is the caller's, the file has no date."""
        return NodePrice(
            region=self.region,
            configuration=self.configuration,
            market=self.market,
            price_usd_per_hour=self.price_usd_per_hour,
            observed_at=observed_at,
        )


def read_prices(
    folder: Path, configurations: Mapping[NodeConfigurationId, NodeConfiguration]
) -> tuple[CatalogPrice, ...]:
    """All rows of ``node_prices.csv``, sorted by region, configuration and market."""
    table = Table(folder / "node_prices.csv", PRICE_COLUMNS)
    prices = [
        CatalogPrice(
            region=RegionId(row.text("region")),
            configuration=NodeConfigurationId(row.choice("configuration", tuple(configurations))),
            market=Market(row.choice("market", (Market.ON_DEMAND, Market.SPOT))),
            price_usd_per_hour=row.number("usd_per_hour"),
            machine_type=row.text("machine_type"),
            rule=PriceRule(row.choice("rule", tuple(PriceRule))),
            source=row.text("source"),
        )
        for row in table.rows
    ]
    table.unique([(price.region, price.configuration, price.market) for price in prices])
    table.raise_if_any()
    return tuple(sorted(prices, key=lambda price: (price.region, price.configuration, price.market)))
