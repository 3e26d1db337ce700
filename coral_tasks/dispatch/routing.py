"""Routing tables for the gateway: which instances of a model take which share. Owns both file forms.

Weight = template throughput; within a model, phase and region shares are weights over their sum. Files are written
anew and renamed, so that a gateway never reads half a table.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coral_tasks.domain.errors import StorageFault
from coral_tasks.domain.names import InstanceId, ModelId, Phase, RegionId
from coral_tasks.domain.validation import Checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One instance that takes requests. ``weight``: template throughput in the phase's unit."""

    model: ModelId
    phase: Phase
    region: RegionId
    instance: InstanceId
    endpoint: str
    weight: float

    def __post_init__(self) -> None:
        checks = Checks("routing", self.instance)
        checks.positive(weight=self.weight)
        checks.named(endpoint=self.endpoint)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """Who takes requests, after one step of a transition. ``step`` grows within an epoch."""

    epoch: int
    step: int
    routes: tuple[Route, ...]

    @classmethod
    def of(cls, *, epoch: int, step: int, routes: Iterable[Route]) -> RoutingTable:
        """Table with its routes in a fixed order."""
        ordered = sorted(routes, key=lambda one: (one.model, one.phase, one.region, one.instance))
        return cls(epoch=epoch, step=step, routes=tuple(ordered))


def routing_json(table: RoutingTable) -> str:
    """The table as JSON: models, then phases, then regions, each with its instances, weights and shares."""
    groups: dict[tuple[str, str, str], list[Route]] = defaultdict(list)
    for route in table.routes:
        groups[route.model, route.phase.value, route.region].append(route)
    rows = [
        {
            "model": model,
            "phase": phase,
            "region": region,
            "instances": [
                {
                    "instance": one.instance,
                    "endpoint": one.endpoint,
                    "weight": one.weight,
                    "share": one.weight / sum(other.weight for other in routes),
                }
                for one in routes
            ],
        }
        for (model, phase, region), routes in groups.items()
    ]
    document = {"version": 1, "epoch": table.epoch, "step": table.step, "groups": rows}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def litellm_config(table: RoutingTable) -> str:
    """Configuration of the LiteLLM proxy with the same shares (``simple-shuffle`` picks by ``weight``).

    LiteLLM sends a request to one server; it does not couple prefill and decode. Aggregated instances are listed
    under the model's name, the others under ``<model>:prefill`` and ``<model>:decode`` for a prefill/decode proxy.
    Its retries alone may pick the same instance again; with the weighted failover a request leaves out every instance
    that failed it until one answers or none is left. Written as JSON, which is YAML.
    """
    models = [
        {
            "model_name": route.model if route.phase is Phase.AGGREGATED else f"{route.model}:{route.phase.value}",
            "litellm_params": {
                "model": f"hosted_vllm/{route.model}",
                "api_base": f"{route.endpoint}/v1",
                "weight": route.weight,
            },
            "model_info": {"id": route.instance, "region": route.region, "phase": route.phase.value},
        }
        for route in table.routes
    ]
    settings = {
        "routing_strategy": "simple-shuffle",
        "enable_weighted_failover": True,
        "max_fallbacks": max(Counter(one["model_name"] for one in models).values(), default=1),
    }
    document = {"model_list": models, "router_settings": settings}
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def write_routing(folder: Path, table: RoutingTable) -> None:
    """Write ``routing.json`` and ``litellm.yaml``. Raises StorageFault."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("routing.json", routing_json(table)), ("litellm.yaml", litellm_config(table))):
            temporary = folder / f".{name}.tmp"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(folder / name)
    except OSError as error:
        raise StorageFault(f"routing table in {folder}: {error}") from error


def read_routing(path: Path) -> RoutingTable:
    """The table in a ``routing.json``. Raises StorageFault if it is missing or malformed."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        routes = [
            Route(
                model=ModelId(group["model"]),
                phase=Phase(group["phase"]),
                region=RegionId(group["region"]),
                instance=InstanceId(one["instance"]),
                endpoint=one["endpoint"],
                weight=one["weight"],
            )
            for group in document["groups"]
            for one in group["instances"]
        ]
        return RoutingTable.of(epoch=document["epoch"], step=document["step"], routes=routes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageFault(f"routing table {path}: {error}") from error
