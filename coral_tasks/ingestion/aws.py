"""Prices and availability from AWS through boto3: price list, spot history, quotas, capacity reservations.

Owns the calls, paging and what each figure means. Faults of calls are ``cloud.aws``'s matter: a page that fails in the
middle fails the whole fetch; half an answer is SourceFault, never a shorter table. Instance types
are told to configurations by ``MachineOffer``, which the caller takes from the catalogue.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from coral_tasks.cloud.aws import aws_call, aws_entries, make_client
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
    """Clients with time limits and back-off (``cloud.aws.make_client``). Raise SourceFault."""

    def make(service: str, region: str) -> Any:
        return make_client(service, region, SourceFault, endpoint_url=endpoint_url, connect_s=connect_s, read_s=read_s)

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
            wanted = _product_filter(region, offer.machine_type)
            for text in aws_entries(client, "get_products", "PriceList", SourceFault, **wanted):
                found = _whole("prices: a product of the AWS price list", text, _on_demand_price)
                if found is not None and prices.setdefault(offer.machine_type, found) != found:
                    which = f"{offer.machine_type} in {region}"
                    both = f"{prices[offer.machine_type]:g} and {found:g} USD/h"
                    raise SourceFault(f"prices: the AWS price list has two on-demand prices for {which}: {both}")
        return prices

    def _spot(self, region: str, now: datetime) -> dict[str, float]:
        """Cheapest zone's newest spot price by machine type."""
        client = self.clients("ec2", region)
        types = sorted({offer.machine_type for offer in self.offers})
        newest: dict[tuple[str, str], _SpotPrice] = {}
        arguments = {
            "InstanceTypes": types,
            "ProductDescriptions": ["Linux/UNIX"],
            "StartTime": now - timedelta(hours=1),
        }
        for entry in aws_entries(client, "describe_spot_price_history", "SpotPriceHistory", SourceFault, **arguments):
            found = _whole("prices: a spot price entry of AWS", entry, _spot_price)
            if found is not None and (found.pool not in newest or found.at > newest[found.pool].at):
                newest[found.pool] = found
        best: dict[str, float] = {}
        for (machine_type, _), found in newest.items():
            best[machine_type] = min(found.price, best.get(machine_type, math.inf))
        return best


class _SpotPrice(NamedTuple):
    """``pool``: machine type and zone."""

    pool: tuple[str, str]
    at: datetime
    price: float


def _spot_price(entry: Mapping[str, Any]) -> _SpotPrice | None:
    """One entry of the spot history; None if it is not Linux."""
    if not str(entry.get("ProductDescription", "")).startswith("Linux/UNIX"):
        return None
    pool = (str(entry["InstanceType"]), str(entry["AvailabilityZone"]))
    return _SpotPrice(pool=pool, at=entry["Timestamp"], price=_not_negative(entry["SpotPrice"]))


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
    product = json.loads(text) if isinstance(text, str) else text
    prices = [
        _not_negative(dimension["pricePerUnit"]["USD"])
        for term in product["terms"].get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
        if dimension["unit"] == "Hrs"
    ]
    # products without a price of their own (reserved only) are listed at 0
    above_zero = [price for price in prices if price > 0]
    return min(above_zero) if above_zero else None


def _not_negative(number: Any) -> float:
    """A finite number that is not below zero. Raises ValueError or TypeError."""
    value = float(number)
    if not 0 <= value < math.inf:
        message = f"{number!r} is no finite number at or above zero"
        raise ValueError(message)
    return value


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
        found = aws_entries(client, "describe_instance_types", "InstanceTypes", SourceFault, Filters=filters)
        return dict(
            _whole(
                "availability: an instance type of AWS",
                entry,
                lambda one: (str(one["InstanceType"]), int(one["VCpuInfo"]["DefaultVCpus"])),
            )
            for entry in found
        )

    def _quotas(self, region: str) -> dict[str, float]:
        client = self.clients("service-quotas", region)
        found = aws_entries(client, "list_service_quotas", "Quotas", SourceFault, ServiceCode="ec2")
        return dict(
            _whole(
                "availability: a quota of AWS", entry, lambda one: (str(one["QuotaCode"]), _not_negative(one["Value"]))
            )
            for entry in found
        )

    def _reserved(self, region: str) -> dict[str, int]:
        client = self.clients("ec2", region)
        filters = [{"Name": "state", "Values": ["active"]}]
        found = aws_entries(
            client, "describe_capacity_reservations", "CapacityReservations", SourceFault, Filters=filters
        )
        counts: dict[str, int] = {}
        for entry in found:
            name, count = _whole(
                "availability: a reservation of AWS",
                entry,
                lambda one: (str(one["InstanceType"]), int(_not_negative(one["TotalInstanceCount"]))),
            )
            counts[name] = counts.get(name, 0) + count
        return counts


def _whole[Entry, Read](kind: str, entry: Entry, read: Callable[[Entry], Read]) -> Read:
    """What ``read`` takes from an entry of an answer. Raises SourceFault if a field is absent or of another kind."""
    with aws_call(kind, SourceFault):
        return read(entry)


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


def _require(rows: Sequence[object], message: str) -> None:
    if not rows:
        raise SourceFault(message)
