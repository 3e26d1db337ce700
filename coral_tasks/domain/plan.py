"""Allocation plans and their certificates: what is to run where, what it serves and what it costs.

A plan is self-contained: it carries the templates it uses, so that checking, simulating and dispatching need
neither the library nor the solver. Owns structure, not optimality.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from coral_tasks.domain.names import LibraryVersion, Market, ModelId, PlanId, RegionId, TemplateId
from coral_tasks.domain.templates import ServingTemplate
from coral_tasks.domain.validation import Checks

MAX_COUNT: Final = 2**31 - 1
"""Most instances of one row; a larger number is a broken file, and would not fit the arrays of the check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInstances:
    """``count`` instances of one template in one region and market, ``num_kept`` of which run already."""

    template: TemplateId
    region: RegionId
    market: Market
    count: int
    num_kept: int

    def __post_init__(self) -> None:
        checks = Checks("plan", f"{self.template} {self.region} {self.market}")
        checks.require(1 <= self.count <= MAX_COUNT, f"count must be between 1 and {MAX_COUNT}", self.count)
        checks.require(0 <= self.num_kept <= self.count, "num_kept must be between 0 and count", self.num_kept)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRate:
    """Requests/s of one model that a region can serve, disaggregated and aggregated."""

    model: ModelId
    region: RegionId
    disaggregated_requests_per_s: float
    aggregated_requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Requests/s of one model that no instance serves, out of the demand (headroom included)."""

    model: ModelId
    required_requests_per_s: float
    shortfall_requests_per_s: float


class SolveStatus(StrEnum):
    """How the solve ended. Every one of them comes with a checked plan."""

    OPTIMAL = "optimal"
    GAP_REACHED = "gap_reached"
    TIME_LIMIT = "time_limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What is proved about a plan. Money in USD/h.

    ``objective_usd_per_hour`` = cost + start-up penalty, shortage apart; ``bound_usd_per_hour``: no plan with the
    same (lexicographically least) shortage costs less; ``gap`` = (objective − bound) / max(objective, 1e-9).
    """

    status: SolveStatus
    cost_usd_per_hour: float
    startup_usd_per_hour: float
    bound_usd_per_hour: float
    gap: float
    shortage_proved: bool

    @property
    def objective_usd_per_hour(self) -> float:
        """Cost plus start-up penalty."""
        return self.cost_usd_per_hour + self.startup_usd_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationPlan:
    """What is to run where. ``id`` is a hash of inputs and content: equal inputs give the same plan id."""

    id: PlanId
    library_version: LibraryVersion
    instances: tuple[PlannedInstances, ...]
    templates: tuple[ServingTemplate, ...]
    served: tuple[ServedRate, ...]
    shortfalls: tuple[Shortfall, ...]
    certificate: Certificate

    def __post_init__(self) -> None:
        checks = Checks("plan", self.id)
        known = {template.id for template in self.templates}
        checks.unique("template", [template.id for template in self.templates])
        checks.unique("instances row", [(i.template, i.region, i.market) for i in self.instances])
        for row in self.instances:
            checks.require(row.template in known, "every planned template must be carried by the plan", row.template)
        checks.raise_if_any()

    def template(self, wanted: TemplateId) -> ServingTemplate:
        """The carried template of that id; KeyError if there is none."""
        return {template.id: template for template in self.templates}[wanted]
