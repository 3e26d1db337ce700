"""Prices and availability from AWS through boto3: price list, spot history, quotas, capacity reservations.

Owns the calls, paging and what each figure means. Time limits and back-off are botocore's (``client_factory``). A page
that fails in the middle fails the whole fetch: half an answer is SourceFault, never a shorter table. Instance types
are told to configurations by ``MachineOffer``, which the caller takes from the catalogue.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from coral_tasks.domain.errors import SourceFault
from coral_tasks.domain.market import NodeAvailability, NodePrice
from coral_tasks.domain.names import Market, NodeConfigurationId, RegionId
from coral_tasks.ingestion.batch import SourceBatch, batch_of
from coral_tasks.ingestion.rows import availability_table, price_table

PRICE_LIST_REGION: Final = "us-east-1"
"""The price list is served from few regions and holds all of them."""

QUOTA_CODES: Final = {
    ("G", Market.ON_DEMAND): "L-DB2E81BA",
    ("G", Market.SPOT): "L-3819A6DF",
    ("P", Market.ON_DEMAND): "L-417A185B",
    ("P", Market.SPOT): "L-7212CCBC",
}
"""Quotas in vCPUs of running instances: "G and VT" and "P" families (AWS documentation of EC2 quotas)."""

ClientFactory = Callable[[str, str], Any]
"""(service, region) → boto3 client."""


class MachineOffer(NamedTuple):
    """One product and the node configuration it is."""

    machine_type: str
    configuration: NodeConfigurationId


def client_factory(*, endpoint_url: str | None = None, connect_s: float = 5.0, read_s: float = 20.0) -> ClientFactory:
    """Clients with time limits and at most four tries with back-off (429 and 5xx are tried again)."""

    def make(service: str, region: str) -> Any:
        import boto3
        from botocore.config import Config

        config = Config(
            connect_timeout=connect_s, read_timeout=read_s, retries={"mode": "standard", "total_max_attempts": 4}
        )
        return boto3.client(service, region_name=region, endpoint_url=endpoint_url, config=config)

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsPrices:
    """On-demand price of each offer and region from the price list, spot price from the newest of its history.

    Spot: the cheapest zone that has a pool. What is not sold in a region has no row, and the notes say so.
    """

    offers: tuple[MachineOffer, ...]
    regions: tuple[str, ...]
    clients: ClientFactory = field(default_factory=client_factory)

    def __call__(self, now: datetime) -> SourceBatch:
        """Fetch all prices. Raises SourceFault if any call fails or any page is not whole."""
        rows: list[NodePrice] = []
        notes: list[str] = []
        for region in self.regions:
            on_demand = self._on_demand(region)
            spot = self._spot(region, now)
            for offer in self.offers:
                for market, found in ((Market.ON_DEMAND, on_demand), (Market.SPOT, spot)):
                    price = found.get(offer.machine_type)
                    if price is None:
                        notes.append(f"no {market.value} price of {offer.machine_type} in {region}")
                    else:
                        rows.append(_price(region, offer.configuration, market, price, now))
        _require(rows, "prices: AWS answered, but with no price at all")
        wanted = 2 * len(self.regions) * len(self.offers)
        return batch_of(
            "prices",
            price_table(_cheapest(rows), "aws price list and spot history"),
            source="aws",
            observed_at=now,
            expected=wanted,
            received=wanted - len(notes),
            notes=tuple(notes),
        )

    def _on_demand(self, region: str) -> dict[str, float]:
        """USD per hour by machine type: Linux, shared tenancy, nothing pre-installed."""
        client = self.clients("pricing", PRICE_LIST_REGION)
        prices: dict[str, float] = {}
        for offer in self.offers:
            for text in _pages(client, "get_products", "PriceList", **_product_filter(region, offer.machine_type)):
                found = _on_demand_price(text)
                if found is not None:
                    prices[offer.machine_type] = found
        return prices

    def _spot(self, region: str, now: datetime) -> dict[str, float]:
        """Cheapest zone's newest spot price by machine type."""
        client = self.clients("ec2", region)
        types = sorted({offer.machine_type for offer in self.offers})
        newest: dict[tuple[str, str], tuple[datetime, float]] = {}
        arguments = {
            "InstanceTypes": types,
            "ProductDescriptions": ["Linux/UNIX"],
            "StartTime": now - timedelta(hours=1),
        }
        for entry in _pages(client, "describe_spot_price_history", "SpotPriceHistory", **arguments):
            _keep_newest(newest, entry)
        best: dict[str, float] = {}
        for (machine_type, _), (_, price) in newest.items():
            best[machine_type] = min(price, best.get(machine_type, math.inf))
        return best


def _keep_newest(newest: dict[tuple[str, str], tuple[datetime, float]], entry: Mapping[str, Any]) -> None:
    if not str(entry.get("ProductDescription", "")).startswith("Linux/UNIX"):
        return
    try:
        key = (str(entry["InstanceType"]), str(entry["AvailabilityZone"]))
        found = (entry["Timestamp"], float(entry["SpotPrice"]))
    except (KeyError, ValueError, TypeError) as error:
        message = f"prices: a spot price entry of AWS is not whole: {error!r}"
        raise SourceFault(message) from error
    if key not in newest or found[0] > newest[key][0]:
        newest[key] = found


def _price(region: str, configuration: NodeConfigurationId, market: Market, price: float, now: datetime) -> NodePrice:
    if not (math.isfinite(price) and price > 0):
        message = f"prices: AWS gives {price!r} USD/h for {configuration} {market.value} in {region}"
        raise SourceFault(message)
    return NodePrice(
        region=RegionId(f"aws/{region}"),
        configuration=configuration,
        market=market,
        price_usd_per_hour=price,
        observed_at=now,
    )


def _cheapest(rows: Iterable[NodePrice]) -> list[NodePrice]:
    """One row for each pool: two products can be the same configuration."""
    best: dict[tuple[str, str, str], NodePrice] = {}
    for row in rows:
        key = (row.region, row.configuration, row.market.value)
        if key not in best or row.price_usd_per_hour < best[key].price_usd_per_hour:
            best[key] = row
    return [best[key] for key in sorted(best)]


def _product_filter(region: str, machine_type: str) -> dict[str, Any]:
    wanted = {
        "instanceType": machine_type,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
    return {"ServiceCode": "AmazonEC2", "Filters": filters}


def _on_demand_price(text: str | Mapping[str, Any]) -> float | None:
    """USD per hour in one product of the price list; None if it is not sold on demand."""
    try:
        product = json.loads(text) if isinstance(text, str) else text
        terms = product["terms"].get("OnDemand", {})
        prices = [
            float(dimension["pricePerUnit"]["USD"])
            for term in terms.values()
            for dimension in term["priceDimensions"].values()
            if dimension["unit"] == "Hrs"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"prices: a product of the AWS price list is not whole: {error!r}"
        raise SourceFault(message) from error
    # products without a price of their own (reserved only) are listed at 0
    above_zero = [price for price in prices if price > 0]
    return min(above_zero) if above_zero else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsAvailability:
    """Nodes that quotas and capacity reservations allow, by region, configuration and market.

    A quota counts the vCPUs of a whole instance family, those we hold included, so the figure of each configuration is
    what it could have if it took the whole quota; the notes say so. Reservations: instances reserved, in the
    "reserved" market. Markets whose quota cannot be read have no row: unknown is not zero.
    """

    offers: tuple[MachineOffer, ...]
    regions: tuple[str, ...]
    clients: ClientFactory = field(default_factory=client_factory)

    def __call__(self, now: datetime) -> SourceBatch:
        """Fetch quotas and reservations. Raises SourceFault if any call fails."""
        rows: list[NodeAvailability] = []
        notes = ["a quota is shared by all sizes of a family: each figure assumes the whole of it"]
        for region in self.regions:
            vcpus = self._vcpus(region)
            quotas = self._quotas(region)
            reserved = self._reserved(region)
            missing = [offer for offer in self.offers if offer.machine_type not in vcpus]
            notes += [f"{offer.machine_type} is not offered in {region}" for offer in missing]
            for offer in self.offers:
                if offer.machine_type in vcpus:
                    found = _from_quotas(offer.machine_type, vcpus[offer.machine_type], quotas)
                    rows += [_available(region, offer.configuration, market, n, now) for market, n in found.items()]
                if reserved.get(offer.machine_type):
                    count = reserved[offer.machine_type]
                    rows.append(_available(region, offer.configuration, Market.RESERVED, count, now))
        _require(rows, "availability: AWS answered, but with no quota or reservation of these machines")
        wanted = len(self.regions) * len(self.offers)
        return batch_of(
            "availability",
            availability_table(_summed(rows), "aws quotas and capacity reservations"),
            source="aws",
            observed_at=now,
            expected=wanted,
            received=wanted - (len(notes) - 1),
            notes=tuple(notes),
        )

    def _vcpus(self, region: str) -> dict[str, int]:
        types = sorted({offer.machine_type for offer in self.offers})
        client = self.clients("ec2", region)
        filters = [{"Name": "instance-type", "Values": types}]
        found = _pages(client, "describe_instance_types", "InstanceTypes", Filters=filters)
        return dict(
            _whole(
                "an instance type", entry, lambda one: (str(one["InstanceType"]), int(one["VCpuInfo"]["DefaultVCpus"]))
            )
            for entry in found
        )

    def _quotas(self, region: str) -> dict[str, float]:
        client = self.clients("service-quotas", region)
        found = _pages(client, "list_service_quotas", "Quotas", ServiceCode="ec2")
        read = [_whole("a quota", entry, lambda one: (str(one["QuotaCode"]), float(one["Value"]))) for entry in found]
        odd = [code for code, value in read if not 0 <= value < math.inf]
        if odd:
            message = f"availability: AWS gives no number of vCPUs for quota {', '.join(odd)}"
            raise SourceFault(message)
        return dict(read)

    def _reserved(self, region: str) -> dict[str, int]:
        client = self.clients("ec2", region)
        filters = [{"Name": "state", "Values": ["active"]}]
        counts: dict[str, int] = {}
        for entry in _pages(client, "describe_capacity_reservations", "CapacityReservations", Filters=filters):
            name, count = _whole(
                "a reservation", entry, lambda one: (str(one["InstanceType"]), int(one["TotalInstanceCount"]))
            )
            counts[name] = counts.get(name, 0) + count
        return counts


def _whole[Read](kind: str, entry: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Read]) -> Read:
    """What ``read`` takes from an entry of an answer. Raises SourceFault if a field is absent or no number."""
    try:
        return read(entry)
    except (KeyError, ValueError, TypeError) as error:
        message = f"availability: {kind} in AWS's answer is not whole: {error!r}"
        raise SourceFault(message) from error


def _from_quotas(machine_type: str, vcpus: int, quotas: Mapping[str, float]) -> dict[Market, int]:
    family = machine_type[:1].upper()
    codes = {market: code for (name, market), code in QUOTA_CODES.items() if name == family}
    return {market: int(quotas[code] // max(vcpus, 1)) for market, code in codes.items() if code in quotas}


def _available(
    region: str, configuration: NodeConfigurationId, market: Market, count: int, now: datetime
) -> NodeAvailability:
    return NodeAvailability(
        region=RegionId(f"aws/{region}"),
        configuration=configuration,
        market=market,
        available_nodes=count,
        observed_at=now,
    )


def _summed(rows: Sequence[NodeAvailability]) -> list[NodeAvailability]:
    """One row for each pool; of two products with one configuration the larger figure (they share the quota)."""
    best: dict[tuple[str, str, str], NodeAvailability] = {}
    for row in rows:
        key = (row.region, row.configuration, row.market.value)
        if key not in best or row.available_nodes > best[key].available_nodes:
            best[key] = row
    return [best[key] for key in sorted(best)]


def _pages(client: Any, operation: str, key: str, **arguments: Any) -> list[Any]:
    """Entries of all pages. Raises SourceFault if a call fails, hangs or a page lacks its list."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        pages = list(client.get_paginator(operation).paginate(**arguments))
    except (BotoCoreError, ClientError, ResponseParserError, OSError, ValueError) as error:
        # the parser's message holds the whole answer
        message = f"aws {operation}: {str(error)[:500]}"
        raise SourceFault(message) from error
    lost = [number for number, page in enumerate(pages, start=1) if key not in page]
    if lost:
        message = f"aws {operation}: page {lost[0]} of {len(pages)} came without {key}"
        raise SourceFault(message)
    return [entry for page in pages for entry in page[key]]


def _require(rows: Sequence[object], message: str) -> None:
    if not rows:
        raise SourceFault(message)
