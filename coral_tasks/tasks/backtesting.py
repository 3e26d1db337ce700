"""Back-test of planning policies over a recorded day: demand, prices and availability together.

Joins a day of demand, prices and availability, library, allocation and (if asked) the simulator. Owns the policies and
the figures: cost with start-up, shortage, churn, SLO attainment. The day is a record in files (``recorded_day``), or
the setup's day of demand with the catalogue's prices and an availability made up as in ``comparing``, which wanders.

API::

    backtest(BacktestRequest(setup="core", hours=24, every=3)) -> (JSON values, path of the page)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import StaleInput, UnknownName
from coral_tasks.domain.market import Demand, NodeAvailability, NodePrice
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import Market, Phase
from coral_tasks.domain.validation import Checks
from coral_tasks.ingestion.forecast import ForecastSettings, Method, forecast_demand
from coral_tasks.tasks.comparing import (
    ROUTERS,
    START,
    CompareRequest,
    World,
    drawn_lengths,
    make_world,
    offered_nodes,
    running_instances,
    trace_file,
)

if TYPE_CHECKING:
    from coral_tasks.domain.plan import AllocationPlan
    from coral_tasks.simulation import RequestTrace

INTERVAL_S: Final = 300.0
WANDER_INTERVALS: Final = 6
"""Made-up availability changes every half hour, however often is planned: else a policy that plans more often would
meet another supply."""

MAX_HOURS: Final = 744.0
"""A month."""

SMALL: Final = 1e-6
"""Share of a rate that is rounding, no shortage."""

POLICIES: Final = ("forecast", "last", "oracle", "peak")
"""forecast: plan as the pipeline does, on its own forecast of the next interval from those before. last: on the last
interval's demand times the margin. oracle: on the demand to come. peak: once, for the day's highest rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BacktestRequest:
    """``every``: intervals of 5 minutes between two plans. ``simulate``: replay Poisson requests on the plans too.

    ``demand``, ``prices``, ``availability``: records in files; without ``demand`` the setup's day is replayed, and then
    the others must be missing too, since their times would not be the day's. ``traces``: folder with the Azure traces,
    whose lengths the simulated requests take; None: log-normal ones, whose tail is far longer. ``margin``: of the
    policy last; ``forecast``: of the policy forecast, as ``<home>/forecast.json`` has it for the pipeline.
    """

    work: Path
    demand: Path | None = None
    prices: Path | None = None
    availability: Path | None = None
    traces: Path | None = None
    setup: str = "core"
    hours: float = 24.0
    every: int = 3
    margin: float = 1.1
    forecast: ForecastSettings = field(default_factory=ForecastSettings)
    headroom: float = 0.7
    startup_s: float = 120.0
    policies: tuple[str, ...] = POLICIES
    seed: int = 0
    time_limit_s: float = 60.0
    gap: float = 1e-3
    supply: float = 12.0
    simulate: bool = False
    router: str = "weighted_round_robin"

    def __post_init__(self) -> None:
        checks = Checks("backtest")
        checks.positive(hours=self.hours, every=self.every, margin=self.margin)
        checks.not_negative(seed=self.seed)
        checks.require(not self.hours > MAX_HOURS, f"hours must be at most {MAX_HOURS:g}", self.hours)
        checks.require(0 < self.headroom <= 1, "headroom must be above 0 and at most 1", self.headroom)
        recorded = self.demand is not None or (self.prices is None and self.availability is None)
        checks.require(recorded, "records of prices and availability need one of demand: their times are its")
        checks.raise_if_any()
        for kind, name, known in (
            ("router", self.router, ROUTERS),
            *(("policy", one, POLICIES) for one in self.policies),
        ):
            if name not in known:
                raise UnknownName(kind=kind, name=name, known=known)

    @property
    def num_intervals(self) -> int:
        """Intervals of the day that are replayed."""
        return max(round(self.hours * 3600 / INTERVAL_S), 1)

    @property
    def num_plans(self) -> int:
        """Plans that a policy makes."""
        return -(-self.num_intervals // self.every)


def forecast_settings(*, method: str, quantile: float, season: int, max_gap: int) -> ForecastSettings:
    """Settings by the names of ``<home>/forecast.json``. Raises UnknownName or ValidationFailed."""
    if method not in tuple(Method):
        raise UnknownName(kind="forecast method", name=method, known=tuple(Method))
    return ForecastSettings(method=Method(method), quantile=quantile, season=season, max_gap=max_gap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """Demand of every interval, and what the planners know besides. A model without a row in one: unknown, not zero.

    ``prices``, ``availability``: rows at each planning moment where they were recorded, else empty: the world's prices,
    ``offered`` nodes.
    """

    world: World
    intervals: tuple[tuple[Demand, ...], ...]
    offered: tuple[Mapping[Any, int], ...]
    recorded: bool = False
    prices: tuple[tuple[NodePrice, ...], ...] = ()
    availability: tuple[tuple[NodeAvailability, ...], ...] = ()

    @property
    def notes(self) -> str:
        """Where each of the three comes from."""
        demand = "recorded demand" if self.recorded else "the setup's day of demand (derived from the Azure traces)"
        prices = "recorded prices" if self.prices else "catalogue prices"
        return f"{demand}; {prices}; {'recorded availability' if self.availability else 'availability is made up'}"

    def start(self, interval: int) -> datetime:
        """Start of the interval of that number, counted from the first one that has a row."""
        number, row = next((k, row) for k, rows in enumerate(self.intervals) for row in rows)
        return row.interval_start + timedelta(seconds=INTERVAL_S * (interval - number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a policy plans on: a row for each model, and by model what a forecast had to replace."""

    demand: tuple[Demand, ...]
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDay:
    """The plan in force from each planning moment on; ``refused``: why none was made, by number of the moment.

    Where it was refused the plan before stays; before the first one a plan without instances stands for none.
    ``notes``: plans by what their forecasts had to replace.
    """

    plans: tuple[AllocationPlan, ...]
    refused: Mapping[int, str]
    notes: Mapping[str, int]

    @property
    def num_without_plan(self) -> int:
        """Planning moments before the first plan."""
        return next((k for k in range(len(self.plans)) if k not in self.refused), len(self.plans))


def backtest(
    request: BacktestRequest, on_progress: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, Any], Path]:
    """Run every policy over the day and write page and JSON; (JSON values, path of the page)."""
    from coral_tasks.reporting.comparison import write_table_page
    from coral_tasks.tasks.comparing import write_json

    on_progress("library")
    day = read_day(request)
    hours = len(day.intervals) * INTERVAL_S / 3600
    request = dataclasses.replace(request, hours=min(request.hours, hours))
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"setup": request.setup, "rows": rows}
    notes = [
        f"{request.num_intervals} intervals of 5 minutes, a plan every {request.every}; margin {request.margin:g}",
        day.notes,
    ]
    for policy in request.policies:
        on_progress(policy)
        planned = plan_day(request, day, policy)
        rows.append({"policy": policy, **judge_day(request, day, planned)})
        if policy == "forecast":
            notes += _forecast_notes(request, day, planned)
            summary["forecast"] = _forecast_json(request, day, planned)
    summary["notes"] = notes
    path = request.work / f"backtest-{request.setup}.html"
    write_table_page(path, f"Back-test: {request.setup}", rows, notes)
    write_json(path.with_suffix(".json"), summary)
    return summary, path


def read_day(request: BacktestRequest) -> Day:
    """The record in the request's files, or the setup's day from midnight on. Raises ValidationFailed for bad files."""
    world = _world(request)
    if request.demand is None:
        return Day(world=world, intervals=_setup_day(request), offered=_offered(request, world))
    return _recorded_day(request, request.demand, world)


def _recorded_day(request: BacktestRequest, demand: Path, world: World) -> Day:
    from coral_tasks.tasks.recorded_day import read_availability, read_demand_record, read_prices

    models = [str(one.model.id) for one in world.setup.models]
    intervals = read_demand_record(demand, interval_s=INTERVAL_S, models=models)[: request.num_intervals]
    moments = [rows[0].interval_start for rows in intervals[:: request.every]]
    prices = None if request.prices is None else read_prices(request.prices)
    availability = None if request.availability is None else read_availability(request.availability)
    return Day(
        world=world,
        intervals=intervals,
        offered=_offered(request, world),
        recorded=True,
        prices=() if prices is None else tuple(prices.at(moment) for moment in moments),
        availability=() if availability is None else tuple(availability.at(moment) for moment in moments),
    )


def _offered(request: BacktestRequest, world: World) -> tuple[Mapping[Any, int], ...]:
    """Made-up nodes on offer at each planning moment."""
    num_changes = -(-request.num_intervals // WANDER_INTERVALS)
    wandering = dataclasses.replace(world, request=dataclasses.replace(world.request, num_epochs=num_changes))
    offered = offered_nodes(wandering)
    return tuple(offered[k * request.every // WANDER_INTERVALS] for k in range(request.num_plans))


def _world(request: BacktestRequest) -> World:
    compare = CompareRequest(
        setup=request.setup,
        work=request.work,
        num_epochs=request.num_plans,
        epoch_s=INTERVAL_S * request.every,
        startup_s=request.startup_s,
        headroom=request.headroom,
        seed=request.seed,
        supply=request.supply,
    )
    return make_world(compare)


def _setup_day(request: BacktestRequest) -> tuple[tuple[Demand, ...], ...]:
    from coral_tasks.ingestion.demand_day import demand_history, read_demand_day

    count = request.num_intervals
    last = START + timedelta(seconds=INTERVAL_S * (count - 1))
    rows = demand_history(read_demand_day(request.setup), last, num_intervals=count)
    per_interval = len(rows) // count
    return tuple(tuple(rows[k * per_interval : (k + 1) * per_interval]) for k in range(count))


def _forecast_notes(request: BacktestRequest, day: Day, planned: PlannedDay) -> list[str]:
    """How the policy forecast was set, and what it did where it knew too little, in words."""
    count = len(planned.plans)
    wanted = request.forecast
    settings = f"quantile {wanted.quantile:g}, season {wanted.season}, max_gap {wanted.max_gap}"
    found = [f"forecast by {wanted.method}, {settings}: of the interval at each planning moment, from those before it"]
    if planned.refused:
        why = planned.refused[min(planned.refused)]
        found.append(
            f"forecast: {len(planned.refused)} of {count} plans refused, first: {why}; as in the pipeline the plan in "
            "force stays"
        )
    if planned.num_without_plan:
        num_intervals = min(planned.num_without_plan * request.every, len(day.intervals))
        share = _asked(day.intervals[:num_intervals]) / max(_asked(day.intervals), 1e-12)
        found.append(
            f"forecast: no plan in force for the first {num_intervals} intervals: {share:.3f} of the demand, all short"
        )
    return found + [f"forecast: {plans} of {count} plans: {text}" for text, plans in sorted(planned.notes.items())]


def _forecast_json(request: BacktestRequest, day: Day, planned: PlannedDay) -> dict[str, Any]:
    """Settings, every refused plan with its moment, and the number of plans by what their forecasts replaced."""
    refused = [
        {"at": day.start(k * request.every).isoformat(), "why": why} for k, why in sorted(planned.refused.items())
    ]
    return {**dataclasses.asdict(request.forecast), "refused": refused, "notes": dict(sorted(planned.notes.items()))}


def _asked(intervals: Sequence[Sequence[Demand]]) -> float:
    return sum(row.requests_per_s for rows in intervals for row in rows)


def plan_day(request: BacktestRequest, day: Day, policy: str) -> PlannedDay:
    """The plan of each planning moment, each started from the one before."""
    plans: list[AllocationPlan] = []
    refused: dict[int, str] = {}
    notes: Counter[str] = Counter()
    for k in range(request.num_plans):
        if policy == "peak" and plans:
            plans.append(plans[-1])
            continue
        try:
            expected = expected_demand(request, day, policy, k * request.every)
        except StaleInput as refusal:
            refused[k] = str(refusal)
            plans.append(plans[-1] if plans else _nothing(request, day))
            continue
        plans.append(_plan(request, day, k, expected.demand, plans[-1] if plans else None))
        notes.update({text for texts in expected.notes.values() for text in texts})
    return PlannedDay(plans=tuple(plans), refused=refused, notes=notes)


def _plan(
    request: BacktestRequest, day: Day, number: int, demand: Sequence[Demand], before: AllocationPlan | None
) -> AllocationPlan:
    from coral_tasks.allocation.solve import solve_allocation

    problem = day.world.problem(
        number,
        day.offered[number],
        running_instances(before) if before else (),
        demand=demand,
        prices=day.prices[number] if day.prices else None,
        availability=day.availability[number] if day.availability else None,
    )
    return solve_allocation(problem, time_limit_s=request.time_limit_s, gap=request.gap)


def _nothing(request: BacktestRequest, day: Day) -> AllocationPlan:
    """A plan without instances, for the time before the first one: nothing asked for, so nothing planned."""
    rows = covering_demand(day.intervals)
    return _plan(request, day, 0, [dataclasses.replace(row, requests_per_s=0.0) for row in rows], None)


def expected_demand(request: BacktestRequest, day: Day, policy: str, interval: int) -> Expected:
    """What the policy plans on at the start of an interval.

    Raises StaleInput where the forecast knows too little: the pipeline then stops, and the plan in force stays.
    """
    if policy == "forecast":
        # Of the running interval only which models it has is used: one that was never seen is not planned at zero.
        rows = [row for rows in day.intervals[: interval + 1] for row in rows]
        demand, notes = forecast_demand(rows, day.start(interval), request.forecast)
        return Expected(demand=demand, notes=notes)
    if policy == "oracle":
        return Expected(demand=covering_demand(day.intervals[interval : interval + request.every]))
    if policy == "peak":
        return Expected(demand=covering_demand(day.intervals))
    before = day.intervals[interval - 1] if interval else day.intervals[0]
    return Expected(demand=covering_demand([before], request.margin))


def covering_demand(intervals: Sequence[Sequence[Demand]], factor: float = 1.0) -> tuple[Demand, ...]:
    """One row for each model that asks for what the most asking interval does, of each kind apart, times the factor.

    Rate: the highest. Mean lengths: such that rate times length is the most tokens/s of any interval, since the
    interval of most requests need not be the one of most prompt or output tokens. p95: the longest.
    """
    by_model: dict[str, list[Demand]] = {}
    for rows in intervals:
        for row in rows:
            by_model.setdefault(row.model, []).append(row)
    return tuple(_covering_row(rows, factor) for rows in by_model.values())


def _covering_row(rows: Sequence[Demand], factor: float) -> Demand:
    rate = max(row.requests_per_s for row in rows)
    if rate == 0:
        return rows[0]
    asking = [row for row in rows if row.requests_per_s > 0]

    def mean(name: str) -> float:
        return max(row.requests_per_s * float(getattr(row.shape, name)) for row in asking) / rate

    shape = RequestShape(
        mean_prompt_tokens=mean("mean_prompt_tokens"),
        p95_prompt_tokens=max(row.shape.p95_prompt_tokens for row in asking),
        mean_output_tokens=mean("mean_output_tokens"),
        p95_output_tokens=max(row.shape.p95_output_tokens for row in asking),
    )
    return dataclasses.replace(rows[0], requests_per_s=rate * factor, shape=shape)


def judge_day(request: BacktestRequest, day: Day, planned: PlannedDay) -> dict[str, Any]:
    """Cost with start-up, shortage and surplus against the real demand, churn, and attainment if simulated.

    ``shortage_share``, ``surplus_share``: demand beyond the capacity of the plan in force, and capacity beyond the
    demand (headroom is part of it), summed over models and intervals, over the demand.
    """
    plans = planned.plans
    short = surplus = 0.0
    short_intervals = 0
    for k, rows in enumerate(day.intervals):
        room = [capacity(plans[k // request.every], row) - row.requests_per_s for row in rows]
        short += sum(max(-value, 0.0) for value in room)
        surplus += sum(max(value, 0.0) for value in room)
        short_intervals += any(-value > SMALL * row.requests_per_s for value, row in zip(room, rows, strict=True))
    asked = _asked(day.intervals)
    started, startup = _started(request, plans[planned.num_without_plan :])
    nodes, hours = _nodes_usd(request, day, plans), len(day.intervals) * INTERVAL_S / 3600
    found = {
        "cost_usd": nodes + startup,
        "startup_usd": startup,
        "usd_per_hour": (nodes + startup) / hours,
        "shortage_share": short / asked if asked else 0.0,
        "surplus_share": surplus / asked if asked else 0.0,
        "short_intervals": short_intervals,
        "instances_started": started,
        "plans_refused": len(planned.refused),
    }
    return found if not request.simulate else {**found, **_simulated(request, day, plans)}


def _nodes_usd(request: BacktestRequest, day: Day, plans: Sequence[AllocationPlan]) -> float:
    """USD for the nodes of the plans in force, each till the next one or the day's end, at the prices of its time."""
    total = 0.0
    for k, plan in enumerate(plans):
        num_intervals = min(request.every, len(day.intervals) - k * request.every)
        kept = k > 0 and plan is plans[k - 1] and bool(day.prices)
        hourly = _held_usd_per_hour(plan, day.prices[k]) if kept else plan.certificate.cost_usd_per_hour
        total += hourly * num_intervals * INTERVAL_S / 3600
    return total


def _held_usd_per_hour(plan: AllocationPlan, prices: Sequence[NodePrice]) -> float:
    """Cost of a plan at other prices than it was made at; reserved nodes cost nothing at the margin."""
    price = {(row.region, row.configuration, row.market): row.price_usd_per_hour for row in prices}
    return sum(
        row.count * num_nodes * price[row.region, name, row.market]
        for row in plan.instances
        if row.market is not Market.RESERVED
        for name, num_nodes in plan.template(row.template).nodes.counts
    )


def capacity(plan: AllocationPlan, row: Demand) -> float:
    """Requests/s of a row's model and lengths that a plan's instances carry.

    In each region the lesser of prefill and decode, since the cache stays there, and the aggregated ones. By the row's
    own lengths: a plan made for long prompts and short answers carries fewer requests whose answers are long.
    """
    by_region: dict[str, dict[Phase, float]] = {}
    for one in plan.instances:
        template = plan.template(one.template)
        if template.model == row.model:
            phases = by_region.setdefault(one.region, {})
            phases[template.phase] = phases.get(template.phase, 0.0) + one.count * template.throughput
    return sum(
        phases.get(Phase.AGGREGATED, 0.0)
        + min(
            phases.get(Phase.PREFILL, 0.0) / row.shape.mean_prompt_tokens,
            phases.get(Phase.DECODE, 0.0) / row.shape.mean_output_tokens,
        )
        for phases in by_region.values()
    )


def _started(request: BacktestRequest, plans: Sequence[AllocationPlan]) -> tuple[int, float]:
    """Instances started over the day, the first plan's apart, and USD paid while they started."""
    count = 0
    seconds_usd = 0.0
    for before, after in itertools.pairwise(plans):
        had = {(row.template, row.region, row.market): row.count for row in before.instances}
        count += sum(max(row.count - had.get((row.template, row.region, row.market), 0), 0) for row in after.instances)
        if after is not before:
            seconds_usd += after.certificate.startup_usd_per_hour * request.every * INTERVAL_S / 3600
    return count, seconds_usd


def _simulated(request: BacktestRequest, day: Day, plans: Sequence[AllocationPlan]) -> dict[str, Any]:
    from coral_tasks.simulation import PlanEpoch, Router, SimulationOptions, simulate
    from coral_tasks.tasks.simulating import ProfileTimings, catalog_prices, transfer_timings

    epochs = [PlanEpoch(start_s=k * request.every * INTERVAL_S, plan=plan) for k, plan in enumerate(plans)]
    options = SimulationOptions(
        timing=ProfileTimings(setup=day.world.setup),
        transfer=transfer_timings(day.world.setup),
        startup_s=request.startup_s,
        admission=False,
        shed_late=True,
        router=Router(request.router),
    )
    # With recorded prices the simulator's bill, which knows one price for each node, is left out.
    prices = catalog_prices()
    for rows in day.prices:
        prices |= {(row.region, row.configuration, row.market): row.price_usd_per_hour for row in rows}
    result = simulate(epochs, day_trace(request, day), prices=prices, options=options)
    found = {"attainment": result.attainment}
    return found if day.prices else {**found, "simulated_usd_per_hour": result.cost_usd_per_hour}


def day_trace(request: BacktestRequest, day: Day) -> RequestTrace:
    """Poisson requests at each interval's rate, with the interval's lengths: drawn from a trace, else log-normal."""
    from coral_tasks.simulation import merge_traces, poisson_trace

    recorded = _recorded_lengths(request, day)
    parts = []
    for k, rows in enumerate(day.intervals):
        for m, row in enumerate(rows):
            if row.requests_per_s <= 0:
                continue
            seed = (request.seed * 100_003 + k) * len(rows) + m
            part = poisson_trace({row.model: (row.requests_per_s, row.shape)}, duration_s=INTERVAL_S, seed=seed)
            if row.model in recorded:
                source = recorded[row.model]
                source = source if day.recorded else _same_time(source, row)
                part = stretched(drawn_lengths(part, source, seed=(request.seed, k, m)), source, row.shape)
            parts.append(dataclasses.replace(part, arrival_s=part.arrival_s + k * INTERVAL_S))
    return merge_traces(parts)


def _same_time(hour: RequestTrace, row: Demand) -> RequestTrace:
    """Requests of the hour's twelfth from which the setup's day took the row's lengths (``trace_demand``'s rule)."""
    from coral_tasks.ingestion.trace_demand import INTERVALS_PER_HOUR, MIN_REQUESTS_FOR_SHAPE

    place = (row.interval_start.minute * 60 + row.interval_start.second) // int(INTERVAL_S)
    bins = np.floor(hour.arrival_s / max(hour.duration_s, 1e-9) * INTERVALS_PER_HOUR).astype(np.int64)
    mine = np.minimum(bins, INTERVALS_PER_HOUR - 1) == place
    if mine.sum() < MIN_REQUESTS_FOR_SHAPE:
        return hour
    return dataclasses.replace(
        hour,
        arrival_s=hour.arrival_s[mine],
        model=hour.model[mine],
        prompt_tokens=hour.prompt_tokens[mine],
        output_tokens=hour.output_tokens[mine],
    )


def stretched(trace: RequestTrace, source: RequestTrace, shape: RequestShape) -> RequestTrace:
    """Lengths drawn from ``source`` times what brings its means to those of ``shape``; at least one token.

    What a policy is told is then what comes, whatever trace gives the lengths their spread.
    """
    prompt = shape.mean_prompt_tokens / source.prompt_tokens.mean()
    output = shape.mean_output_tokens / source.output_tokens.mean()
    return dataclasses.replace(
        trace,
        prompt_tokens=_whole(trace.prompt_tokens * prompt),
        output_tokens=_whole(trace.output_tokens * output),
    )


def _whole(tokens: NDArray[np.float64]) -> NDArray[np.int64]:
    from coral_tasks.simulation.trace import MAX_TOKENS

    return np.clip(np.rint(tokens), 1, MAX_TOKENS).astype(np.int64)


def _recorded_lengths(request: BacktestRequest, day: Day) -> dict[str, RequestTrace]:
    """Trace of each model that has one."""
    from coral_tasks.tasks.demand import TRACE_OF
    from coral_tasks.tasks.simulating import read_request_trace

    if request.traces is None:
        return {}
    models = {row.model for rows in day.intervals for row in rows if row.model in TRACE_OF}
    return {m: read_request_trace(trace_file(request.traces, TRACE_OF[m]), m) for m in sorted(models)}
