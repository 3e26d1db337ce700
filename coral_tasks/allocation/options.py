"""What a run may be told about an allocation: limits, priorities, shares. Owns the options and their own rules.

Order of precedence, hardest first: supply, caps, budget, allowed regions, runtimes, excluded configurations, maximum
instances, spot limit and largest change are never broken; then floors by priority class; then demand by priority
class; then fair shares inside a class; then minimum instances; then cost; then what runs stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coral_tasks.domain.names import GpuTypeName, ModelId, NodeConfigurationId, RegionId, Runtime
from coral_tasks.domain.validation import Checks


class PhaseCoupling(StrEnum):
    """REGIONAL: prefill and decode of a request share a region. GLOBAL: the paper's program, any two regions."""

    REGIONAL = "regional"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRules:
    """Rules of one model.

    ``priority``: class, 0 is served first. ``floor_share``: share of its required rate that is served before any
    class's remaining demand. ``share``: its weight among models of its class when supply is short: shortfalls are
    balanced so that share x shortfall / demand is equal. ``min_instances``, ``max_instances``: of all phases together.
    ``allowed_regions``: None means all. ``max_spot_share``: most of the required rate, in each phase, that spot nodes
    may carry; the rest falls to on-demand and reserved nodes. ``allowed_runtimes``: None means all.
    """

    model: ModelId
    priority: int = 0
    floor_share: float = 0.0
    share: float = 1.0
    min_instances: int = 0
    max_instances: int | None = None
    allowed_regions: tuple[RegionId, ...] | None = None
    max_spot_share: float = 1.0
    allowed_runtimes: tuple[Runtime, ...] | None = None

    def __post_init__(self) -> None:
        checks = Checks("allocation_options", self.model)
        checks.not_negative(priority=self.priority, min_instances=self.min_instances)
        checks.positive(share=self.share)
        checks.require(0 <= self.floor_share <= 1, "floor_share must be between 0 and 1", self.floor_share)
        checks.require(0 <= self.max_spot_share <= 1, "max_spot_share must be between 0 and 1", self.max_spot_share)
        if self.max_instances is not None:
            ordered = self.max_instances >= self.min_instances
            checks.require(ordered, "max_instances must not be below min_instances", self.max_instances)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCap:
    """At most ``max_gpus`` GPUs in use, of one type, region or model where named, else of all."""

    max_gpus: int
    gpu_type: GpuTypeName | None = None
    region: RegionId | None = None
    model: ModelId | None = None

    def __post_init__(self) -> None:
        checks = Checks("allocation_options", "gpu_cap")
        checks.not_negative(max_gpus=self.max_gpus)
        checks.raise_if_any()

    def __str__(self) -> str:
        where = f" in {self.region}" if self.region else ""
        whom = f" for {self.model}" if self.model else ""
        return f"{self.max_gpus} {self.gpu_type or 'GPU'}{where}{whom}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationOptions:
    """Options of one run. ``startup_factor``: K, start-up time over adjustment interval.

    ``headroom``: share of an instance's throughput that demand may use; demand is divided by it.
    ``budget_usd_per_hour``: most that the nodes of the plan may cost. ``max_started_instances``: most instances that
    this run may start (the largest change: what it cannot start it must keep running). ``use_spot``: whether spot
    prices are looked at.
    """

    startup_factor: float = 0.0
    headroom: float = 1.0
    phase_coupling: PhaseCoupling = PhaseCoupling.REGIONAL
    model_rules: tuple[ModelRules, ...] = ()
    gpu_caps: tuple[GpuCap, ...] = ()
    budget_usd_per_hour: float | None = None
    max_started_instances: int | None = None
    excluded_configurations: tuple[NodeConfigurationId, ...] = ()
    allowed_runtimes: tuple[Runtime, ...] | None = None
    use_spot: bool = True

    def __post_init__(self) -> None:
        checks = Checks("allocation_options")
        checks.not_negative(startup_factor=self.startup_factor)
        checks.require(0 < self.headroom <= 1, "headroom must be above 0 and at most 1", self.headroom)
        checks.unique("model", [rules.model for rules in self.model_rules])
        if self.budget_usd_per_hour is not None:
            checks.not_negative(budget_usd_per_hour=self.budget_usd_per_hour)
        if self.max_started_instances is not None:
            checks.not_negative(max_started_instances=self.max_started_instances)
        checks.raise_if_any()

    def rules_of(self, model: ModelId) -> ModelRules:
        """Rules of a model; the defaults where none are given."""
        found = [rules for rules in self.model_rules if rules.model == model]
        return found[0] if found else ModelRules(model=model)
