"""Between contract tables (Arrow) and domain rows. Owns the mapping of columns to fields, no rule of either.

Every function takes a table that the gate accepted; domain types check themselves once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.market import Demand, NodeAvailability, NodePrice
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import (
    InstanceId,
    Market,
    ModelId,
    NodeConfigurationId,
    NodeId,
    Phase,
    RegionId,
    TemplateId,
)
from data_contracts.registry import contract_of


def demand_rows(table: pa.Table) -> tuple[Demand, ...]:
    """Demand by model, origin and interval, sorted by these."""
    rows = [
        Demand(
            model=ModelId(row["model"]),
            requests_per_s=row["requests_per_s"],
            shape=RequestShape(**{name: row[name] for name in _LENGTHS}),
            interval_start=row["interval_start"],
            interval_s=row["interval_s"],
            origin=None if row["origin"] is None else RegionId(row["origin"]),
        )
        for row in table.to_pylist()
    ]
    return tuple(sorted(rows, key=lambda row: (row.model, row.origin or "", row.interval_start)))


_LENGTHS = ("mean_prompt_tokens", "p95_prompt_tokens", "mean_output_tokens", "p95_output_tokens")


def demand_table(rows: Iterable[Demand]) -> pa.Table:
    """The reverse of ``demand_rows``."""
    return contract_of("demand").table(
        [
            {
                "model": row.model,
                "requests_per_s": row.requests_per_s,
                **{name: getattr(row.shape, name) for name in _LENGTHS},
                "interval_start": row.interval_start,
                "interval_s": row.interval_s,
                "origin": row.origin,
            }
            for row in rows
        ]
    )


def price_rows(table: pa.Table, multipliers: Mapping[str, float] | None = None) -> tuple[NodePrice, ...]:
    """Prices by region, configuration and market, times the provider's multiplier (a discount is below 1)."""
    rows = [
        NodePrice(
            region=RegionId(row["region"]),
            configuration=NodeConfigurationId(row["configuration"]),
            market=Market(row["market"]),
            price_usd_per_hour=row["price_usd_per_hour"] * _multiplier(row["region"], multipliers or {}),
            observed_at=row["observed_at"],
        )
        for row in table.to_pylist()
    ]
    return tuple(sorted(rows, key=lambda row: (row.region, row.configuration, row.market)))


def _multiplier(region: str, multipliers: Mapping[str, float]) -> float:
    return multipliers.get(region.partition("/")[0], 1.0)


def price_table(rows: Iterable[NodePrice], source: str) -> pa.Table:
    """The reverse of ``price_rows``."""
    return contract_of("prices").table([_pool_row(row, source, "price_usd_per_hour") for row in rows])


def availability_rows(table: pa.Table) -> tuple[NodeAvailability, ...]:
    """Availability by region, configuration and market."""
    rows = [
        NodeAvailability(
            region=RegionId(row["region"]),
            configuration=NodeConfigurationId(row["configuration"]),
            market=Market(row["market"]),
            available_nodes=row["available_nodes"],
            observed_at=row["observed_at"],
        )
        for row in table.to_pylist()
    ]
    return tuple(sorted(rows, key=lambda row: (row.region, row.configuration, row.market)))


def availability_table(rows: Iterable[NodeAvailability], source: str) -> pa.Table:
    """The reverse of ``availability_rows``."""
    return contract_of("availability").table([_pool_row(row, source, "available_nodes") for row in rows])


def _pool_row(row: NodePrice | NodeAvailability, source: str, value: str) -> dict[str, Any]:
    return {
        "region": row.region,
        "configuration": row.configuration,
        "market": row.market.value,
        value: getattr(row, value),
        "observed_at": row.observed_at,
        "source": source,
    }


def fleet_of(table: pa.Table) -> Fleet:
    """The observed fleet: nodes, and instances with their nodes by stage."""
    rows = sorted(
        table.to_pylist(), key=lambda row: (row["instance_id"] or "", row["stage_index"] or 0, row["node_id"])
    )
    nodes = [
        Node(
            id=NodeId(row["node_id"]),
            region=RegionId(row["region"]),
            configuration=NodeConfigurationId(row["configuration"]),
            market=Market(row["market"]),
        )
        for row in rows
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["instance_id"] is not None:
            groups.setdefault(row["instance_id"], []).append(row)
    instances = tuple(_instance(name, groups[name]) for name in sorted(groups))
    return Fleet(nodes=tuple(sorted(nodes, key=lambda node: node.id)), instances=instances)


def _instance(name: str, rows: Sequence[Mapping[str, Any]]) -> ServingInstance:
    first = rows[0]
    stages: dict[int, list[NodeId]] = {}
    for row in rows:
        stages.setdefault(row["stage_index"], []).append(NodeId(row["node_id"]))
    return ServingInstance(
        id=InstanceId(name),
        template=TemplateId(first["template_id"]),
        model=ModelId(first["model"]),
        phase=Phase(first["phase"]),
        region=RegionId(first["region"]),
        market=Market(first["market"]),
        state=InstanceState(first["state"]),
        stage_nodes=tuple(tuple(stages[index]) for index in sorted(stages)),
    )


def running_table(fleet: Fleet, observed_at: datetime) -> pa.Table:
    """The reverse of ``fleet_of``."""
    held = {
        node: (instance, index)
        for instance in fleet.instances
        for index, stage in enumerate(instance.stage_nodes)
        for node in stage
    }
    return contract_of("running").table([_node_row(node, held.get(node.id), observed_at) for node in fleet.nodes])


def _node_row(node: Node, held: tuple[ServingInstance, int] | None, observed_at: datetime) -> dict[str, Any]:
    row: dict[str, Any] = {
        "node_id": node.id,
        "region": node.region,
        "configuration": node.configuration,
        "market": node.market.value,
        "observed_at": observed_at,
    }
    if held is None:
        return row
    instance, index = held
    return {
        **row,
        "instance_id": instance.id,
        "template_id": instance.template,
        "model": instance.model,
        "phase": instance.phase.value,
        "state": instance.state.value,
        "stage_index": index,
    }
