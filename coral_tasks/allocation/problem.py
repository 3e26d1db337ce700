"""The allocation problem as validated arrays (design 3.3). Owns data and its rules; builds no program, solves nothing.

Index sets: models m < M, regions r < R, zones z < Z (a region and a market: where an instance lives), node
configurations c < C, templates t < T, phases 0 prefill, 1 decode, 2 aggregated.

Decisions: an instance lives in one region and one market. Reserved nodes are a zone of price 0 with their own number,
so they are used first; one instance never mixes reserved and on-demand nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.options import AllocationOptions, PhaseCoupling
from coral_tasks.domain.names import (
    LibraryVersion,
    Market,
    ModelId,
    NodeConfigurationId,
    Phase,
    RegionId,
    TemplateId,
)
from coral_tasks.domain.template_set import RUNTIME_CODES
from coral_tasks.domain.templates import ServingTemplate
from coral_tasks.domain.validation import Checks

PHASES: Final = (Phase.PREFILL, Phase.DECODE, Phase.AGGREGATED)
RUNTIMES: Final = RUNTIME_CODES
SERVED_TOLERANCE: Final = 1e-6
"""Unserved load up to this share of max(1, required) counts as none."""

LARGEST: Final = 1e15
"""Beyond it a double no longer tells whole numbers apart, and sums of such numbers say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """Where an instance lives: a region (index) and the market its nodes are paid in."""

    region: int
    market: Market


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TemplateArrays:
    """Templates by column. ``model``, ``phase``, ``runtime`` (index into RUNTIMES): int [T]; ``nodes``: int [T, C];
    ``throughput``: float [T], prompt tokens/s, output tokens/s or requests/s by phase.

    ``template_id`` and ``serving_template`` look a row up; only the rows of a plan are ever looked up.
    """

    model: NDArray[np.int32]
    phase: NDArray[np.int8]
    runtime: NDArray[np.int8]
    nodes: NDArray[np.int16]
    throughput: NDArray[np.float64]
    template_id: Callable[[int], TemplateId]
    serving_template: Callable[[int], ServingTemplate]

    def __len__(self) -> int:
        return len(self.throughput)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Running:
    """Instances that run now: ``count[k]`` of ``template[k]`` in ``zone[k]``; each pair once."""

    template: NDArray[np.int64]
    zone: NDArray[np.int64]
    count: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllocationProblem:
    """All data of one allocation. Shapes in the module text.

    ``required_requests_per_s``: demand over headroom. ``price_usd_per_hour``: [Z, C], 0 where nothing is offered.
    ``available_nodes``: [Z, C], held ones included. ``shortfall_weight``: USD/h per unserved request/s and model,
    infinite where unserved load is forbidden; None: shortage is lexicographic (product). ``most_unserved``: requests/s
    of each model that may be left unserved at most, [M]; None: all of them. ``num_gpus``: [C].
    ``startable``: [T], False for templates that left the library and may only be kept; None: all may start.
    ``excluded``: (configuration, where, reason) of everything that cannot be planned on. ``notes``: what the build
    decided that a reader should know.
    """

    library_version: LibraryVersion
    models: tuple[ModelId, ...]
    regions: tuple[RegionId, ...]
    configurations: tuple[NodeConfigurationId, ...]
    zones: tuple[Zone, ...]
    num_gpus: NDArray[np.int64]
    demand_requests_per_s: NDArray[np.float64]
    required_requests_per_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.float64]
    output_tokens: NDArray[np.float64]
    price_usd_per_hour: NDArray[np.float64]
    available_nodes: NDArray[np.int64]
    templates: TemplateArrays
    running: Running
    options: AllocationOptions
    shortfall_weight: NDArray[np.float64] | None = None
    most_unserved: NDArray[np.float64] | None = None
    startable: NDArray[np.bool_] | None = None
    excluded: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()
    _rate: NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        checks = Checks("allocation_problem")
        self._check_shapes(checks)
        checks.raise_if_any()
        self._check_values(checks)
        self._check_templates(checks)
        self._check_options(checks)
        checks.raise_if_any()
        object.__setattr__(self, "_rate", self._request_rates())

    def _check_shapes(self, checks: Checks) -> None:
        M, Z, C, T = len(self.models), len(self.zones), len(self.configurations), len(self.templates)
        expected = {
            "demand_requests_per_s": (M,),
            "required_requests_per_s": (M,),
            "prompt_tokens": (M,),
            "output_tokens": (M,),
            "price_usd_per_hour": (Z, C),
            "available_nodes": (Z, C),
            "num_gpus": (C,),
        }
        for name, shape in expected.items():
            checks.require(getattr(self, name).shape == shape, f"{name} must have shape {shape}")
        checks.require(self.templates.nodes.shape == (T, C), f"template nodes must have shape {(T, C)}")
        for name in ("models", "regions", "configurations"):
            checks.unique(name[:-1], getattr(self, name))

    def _check_values(self, checks: Checks) -> None:
        for name in (
            "demand_requests_per_s",
            "required_requests_per_s",
            "prompt_tokens",
            "output_tokens",
            "price_usd_per_hour",
            "available_nodes",
        ):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            bad = np.argwhere(~((values >= 0) & (values <= LARGEST)))
            for place in bad:
                checks.require(condition=False, rule=f"{name}{place.tolist()} must be from 0 to {LARGEST:g}")
        for m in np.flatnonzero(self.prompt_tokens + self.output_tokens <= 0):
            checks.require(condition=False, rule="a model needs prompt or output tokens", value=self.models[m])
        weights = self.shortfall_weight
        weights_ok = weights is None or (weights.shape == (len(self.models),) and bool((weights >= 0).all()))
        checks.require(weights_ok, "shortfall_weight needs one value per model, none negative")

    def _check_templates(self, checks: Checks) -> None:
        templates = self.templates
        bad_rate = np.flatnonzero(~((templates.throughput >= 0) & (templates.throughput <= LARGEST)))
        for t in bad_rate[:20]:
            checks.require(
                condition=False, rule=f"throughput must be from 0 to {LARGEST:g}", value=templates.template_id(int(t))
            )
        empty = np.flatnonzero((templates.nodes.sum(axis=1) <= 0) | (templates.nodes < 0).any(axis=1))
        for t in empty[:20]:
            checks.require(
                condition=False, rule="every template needs at least one node", value=templates.template_id(int(t))
            )
        running = self.running
        checks.require(bool((running.count >= 0).all()), "running counts must not be negative")
        checks.unique("running instance row", zip(running.template.tolist(), running.zone.tolist(), strict=True))

    def _check_options(self, checks: Checks) -> None:
        for rules in self.options.model_rules:
            checks.require(rules.model in self.models, "rules name an unknown model", rules.model)
            for region in rules.allowed_regions or ():
                checks.require(region in self.regions, f"rules of {rules.model} name an unknown region", region)
        for cap in self.options.gpu_caps:
            checks.require(cap.model is None or cap.model in self.models, "GPU cap names an unknown model", cap.model)
            known = cap.region is None or cap.region in self.regions
            checks.require(known, "GPU cap names an unknown region", cap.region)
        for name in self.options.excluded_configurations:
            checks.require(name in self.configurations, "unknown configuration is excluded", name)

    def _request_rates(self) -> NDArray[np.float64]:
        per_request = np.ones((len(PHASES), len(self.models)))
        per_request[0], per_request[1] = self.prompt_tokens, self.output_tokens
        need = per_request[self.templates.phase, self.templates.model]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(need > 0, self.templates.throughput / need, np.inf)

    @property
    def request_rate(self) -> NDArray[np.float64]:
        """Requests/s that one instance carries in its phase, [T]; infinite where a model has no tokens of it."""
        return self._rate

    def excess_unserved(self, m: int, unserved: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Requests/s of ``unserved`` above what model ``m`` may leave unserved, beyond the tolerance, else 0."""
        if self.most_unserved is None:
            return np.zeros(np.shape(unserved))
        slack = SERVED_TOLERANCE * max(1.0, float(self.required_requests_per_s[m]))
        over = np.asarray(unserved, dtype=np.float64) - float(self.most_unserved[m])
        return np.where(over > slack, over, 0.0)

    @property
    def is_regional(self) -> bool:
        """Whether prefill and decode of a request must share a region."""
        return self.options.phase_coupling is PhaseCoupling.REGIONAL

    @property
    def num_places(self) -> int:
        """Places in which phases must match: every region, or one for all."""
        return len(self.regions) if self.is_regional else 1

    def place_of_zone(self) -> NDArray[np.int64]:
        """Place of each zone, [Z]."""
        return np.array([zone.region if self.is_regional else 0 for zone in self.zones], dtype=np.int64)

    def allowed(self) -> NDArray[np.bool_]:
        """Whether a model may run in a zone, [M, Z]: allowed regions, and no spot where its share is 0."""
        table = np.ones((len(self.models), len(self.zones)), dtype=np.bool_)
        for m, model in enumerate(self.models):
            rules = self.options.rules_of(model)
            for z, zone in enumerate(self.zones):
                region_ok = rules.allowed_regions is None or self.regions[zone.region] in rules.allowed_regions
                spot_ok = zone.market is not Market.SPOT or (rules.max_spot_share > 0 and self.options.use_spot)
                table[m, z] = region_ok and spot_ok
        return table

    def usable_templates(self) -> NDArray[np.bool_]:
        """Templates that options leave, [T]: runtimes and excluded configurations."""
        excluded = np.isin(np.array(self.configurations, dtype=object), list(self.options.excluded_configurations))
        keep = ~(self.templates.nodes[:, excluded.astype(bool)] > 0).any(axis=1)
        keep &= self.templates.throughput > 0
        allowed = np.ones((len(self.models), len(RUNTIMES)), dtype=np.bool_)
        for m, model in enumerate(self.models):
            for limit in (self.options.allowed_runtimes, self.options.rules_of(model).allowed_runtimes):
                if limit is not None:
                    allowed[m] &= np.array([runtime in limit for runtime in RUNTIMES])
        return np.asarray(keep & allowed[self.templates.model, self.templates.runtime], dtype=np.bool_)

    def held_nodes(self) -> NDArray[np.int64]:
        """Nodes that running instances hold, [Z, C]."""
        held = np.zeros(self.available_nodes.shape, dtype=np.int64)
        for t, z, n in zip(self.running.template, self.running.zone, self.running.count, strict=True):
            held[z] += self.templates.nodes[t].astype(np.int64) * n
        return held
