"""Served capacity of a set of routed instances. Owns the measure that a transition must not let fall.

With request lengths known: requests/s per model, prefill and decode coupled by region, since the KV cache does not
cross regions. Without: each phase's own throughput, key ``model/phase``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import ModelId, Phase, RegionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one instance adds: its model, phase, region and throughput in the phase's unit."""

    model: ModelId
    phase: Phase
    region: RegionId
    throughput: float


def combined(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    """The same capacity in as few offers as possible: one for each model, phase and region."""
    sums: dict[tuple[ModelId, Phase, RegionId], float] = defaultdict(float)
    for offer in offers:
        sums[offer.model, offer.phase, offer.region] += offer.throughput
    return tuple(
        Offer(model=model, phase=phase, region=region, throughput=total)
        for (model, phase, region), total in sorted(sums.items())
    )


def served_capacity(offers: Iterable[Offer], shapes: Mapping[ModelId, RequestShape]) -> dict[str, float]:
    """Capacity by model (requests/s) where ``shapes`` knows it, else by ``model/phase``. Absent keys are zero."""
    rates: dict[tuple[ModelId, RegionId, Phase], float] = defaultdict(float)
    for offer in offers:
        rates[offer.model, offer.region, offer.phase] += offer.throughput
    capacity: dict[str, float] = defaultdict(float)
    for (model, region, phase), rate in rates.items():
        shape = shapes.get(model)
        if shape is None:
            capacity[f"{model}/{phase.value}"] += rate
        elif phase is Phase.AGGREGATED:
            capacity[model] += rate
        elif phase is Phase.PREFILL:
            decode = rates.get((model, region, Phase.DECODE), 0.0)
            capacity[model] += min(rate / shape.mean_prompt_tokens, decode / shape.mean_output_tokens)
    return dict(capacity)


def worst_dip(capacity: Mapping[str, float], floors: Mapping[str, float]) -> float:
    """Largest relative shortfall below the floors, 0 if there is none."""
    return max(((floor - capacity.get(key, 0.0)) / floor for key, floor in floors.items() if floor > 0), default=0.0)
