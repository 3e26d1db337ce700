"""What is to be simulated: plans over time, losses, options. Owns the inputs' types and their checks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from coral_tasks.domain.names import Market, ModelId, NodeConfigurationId, RegionId, TemplateId
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.domain.timing import TimingSource, TransferTiming
from coral_tasks.domain.validation import Checks

type PriceList = Mapping[tuple[RegionId, NodeConfigurationId, Market], float]
"""USD per node-hour. Reserved nodes need no entry: they cost nothing at the margin."""


class Router(StrEnum):
    """WEIGHTED_ROUND_ROBIN: by weight alone, as the published routing tables say. LEAST_LOADED: regions by weight,
    inside one the fewest tokens outstanding for the weight, as a gateway that sees its instances' queues would do.
    """

    WEIGHTED_ROUND_ROBIN = "weighted_round_robin"
    LEAST_LOADED = "least_loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEpoch:
    """From ``start_s`` on the fleet is brought to ``plan``."""

    start_s: float
    plan: AllocationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoss:
    """At ``time_s`` the ``number``-th (from 0) instance started from this template, region and market loses a node."""

    time_s: float
    template: TemplateId
    region: RegionId
    market: Market
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """How the fleet behaves, apart from the plan.

    ``timing``: stage timings; where it is silent (or None) a template's own promise is used.
    ``transfer``: KV transfer by model; a model without an entry hands over in no time.
    ``startup_s``: from the start of an epoch to a new instance's first request; the first epoch starts warm unless
    ``cold_start``. ``admission``: turn away what a plan's shortfall does not cover, else let everything in.
    ``admission_utilisation``: share of a short model's capacity that is filled.
    ``shed_late``: drop a request that waited past its time to first token. ``max_retries``: after a node loss.
    ``max_in_flight``: more than this in flight ends the simulation as unstable. ``drain_limit_s``: after the last
    arrival. ``chunk_requests``: arrivals handed to the compiled loop at once (memory). ``micro_batches``: batches in
    flight per instance; None: as many as stages, like vLLM.
    """

    timing: TimingSource | None = None
    transfer: Mapping[ModelId, TransferTiming] = field(default_factory=dict)
    startup_s: float = 0.0
    cold_start: bool = False
    admission: bool = True
    admission_utilisation: float = 0.9
    shed_late: bool = False
    max_retries: int = 1
    max_in_flight: int = 100_000
    drain_limit_s: float = 600.0
    chunk_requests: int = 100_000
    micro_batches: int | None = None
    router: Router = Router.WEIGHTED_ROUND_ROBIN
    losses: tuple[NodeLoss, ...] = ()

    def __post_init__(self) -> None:
        checks = Checks("simulation_options")
        checks.not_negative(startup_s=self.startup_s, drain_limit_s=self.drain_limit_s, max_retries=self.max_retries)
        checks.positive(
            max_in_flight=self.max_in_flight,
            chunk_requests=self.chunk_requests,
            admission_utilisation=self.admission_utilisation,
        )
        checks.require(self.micro_batches is None or self.micro_batches >= 1, "micro_batches must be at least 1")
        checks.raise_if_any()


def check_epochs(epochs: Sequence[PlanEpoch], models: Sequence[ModelId]) -> None:
    """Epochs must start at 0 and rise, and every model of the trace must appear in a plan (served or short).

    Raises ValidationFailed.
    """
    checks = Checks("plan")
    starts = [epoch.start_s for epoch in epochs]
    checks.require(bool(starts) and starts[0] == 0.0, "the first plan must start at 0", starts[:1])
    checks.require(all(a < b for a, b in itertools.pairwise(starts)), "plans must follow in time", starts)
    planned = {template.model for epoch in epochs for template in epoch.plan.templates}
    planned |= {row.model for epoch in epochs for row in epoch.plan.shortfalls}
    for model in models:
        known = ", ".join(sorted(planned)) or "none"
        checks.require(model in planned, f"the trace asks for a model that no plan knows; planned: {known}", model)
    checks.raise_if_any()
