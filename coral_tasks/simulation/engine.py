"""Runs a scenario: checks it, feeds the trace to the compiled loop in chunks, collects the results.

Owns the order of these steps, the limits that end a run, and the bill. No file is read or written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.domain.names import Market, ModelId, Phase
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.simulation.fleet import BuiltFleet, Life, build_fleet, shapes_of, slo_of
from coral_tasks.simulation.kernel import end_unfinished, push_event, run_arrivals, run_until
from coral_tasks.simulation.outcome import InstanceSummary, ModelTally, SimulationResult
from coral_tasks.simulation.scenario import PlanEpoch, PriceList, SimulationOptions, check_epochs
from coral_tasks.simulation.state import ARRIVAL, CONTROL, OUT_IS_FULL, TOO_MANY_IN_FLIGHT, Outcome, Records
from coral_tasks.simulation.trace import RequestTrace

FEW_UNFINISHED: Final = 0.001
"""Share of requests that may be in work at the drain limit (very long answers) without calling the plan unstable."""

type RecordSink = Callable[[Records], None]
"""Receives finished requests in batches (dtype ``state.OUT``, order of their end); the array is reused afterwards."""


def simulate(
    epochs: AllocationPlan | Sequence[PlanEpoch],
    trace: RequestTrace,
    *,
    prices: PriceList,
    options: SimulationOptions | None = None,
    sink: RecordSink | None = None,
) -> SimulationResult:
    """Replay ``trace`` on one plan, or on plans that follow each other.

    Raises ValidationFailed for a plan that knows a model of the trace nowhere, epochs out of order, or a node without
    a price. An overloaded plan does not raise: the run ends at a limit and says so in ``statement``.
    """
    options = options or SimulationOptions()
    if isinstance(epochs, AllocationPlan):
        epochs = [PlanEpoch(start_s=0.0, plan=epochs)]
    check_epochs(epochs, list(shapes_of(trace)))
    fleet = build_fleet(epochs, trace, options)
    _check_prices(fleet.lives, prices)
    tallies = [ModelTally(model, slo_of(epochs, model)) for model in trace.models]
    run = _Run(fleet, trace, options, tallies, sink)
    overflow = run.all_arrivals()
    run.finish(overflow=overflow)
    return _result(run, prices, overflow=overflow)


def _check_prices(lives: Sequence[Life], prices: PriceList) -> None:
    missing = {
        (life.region, name, life.market)
        for life in lives
        for name, _ in life.template.nodes.counts
        if life.market is not Market.RESERVED and (life.region, name, life.market) not in prices
    }
    if missing:
        rows = [Violation(table="prices", row=" ".join(key), value="", rule="no price") for key in sorted(missing)]
        raise ValidationFailed(rows)


class _Run:
    """One pass over the trace. Mutable; lives only inside ``simulate``."""

    def __init__(
        self,
        fleet: BuiltFleet,
        trace: RequestTrace,
        options: SimulationOptions,
        tallies: list[ModelTally],
        sink: RecordSink | None,
    ) -> None:
        self.fleet, self.trace, self.options, self.tallies, self.sink = fleet, trace, options, tallies, sink
        self.state = fleet.state
        for time, instance, action, value in fleet.controls:
            push_event(self.state, time, CONTROL, instance, action, value)

    @property
    def status(self) -> int:
        """Why the loop came back last."""
        return int(self.state.clock["status"][0])

    @property
    def now(self) -> float:
        """The simulated clock."""
        return float(self.state.clock["now"][0])

    @property
    def span_s(self) -> float:
        """What rates and bills count over: till the last arrival; of a trace of one moment, till the last event."""
        return self.trace.duration_s or max(self.now, 1e-9)

    def all_arrivals(self) -> bool:
        """Feed the trace; True if too many requests were in flight."""
        size = self.options.chunk_requests
        return any(self._chunk(first, min(first + size, len(self.trace))) for first in range(0, len(self.trace), size))

    def _chunk(self, first: int, last: int) -> bool:
        arrivals, row = self._arrivals(first, last), 0
        while row < last - first:
            row = int(run_arrivals(self.state, arrivals, row, first))
            self.flush()
            if self.status == TOO_MANY_IN_FLIGHT:
                self._never_arrived(first + row)
                return True
        return False

    def _arrivals(self, first: int, last: int) -> Records:
        rows = np.zeros(last - first, dtype=ARRIVAL)
        rows["time"], rows["model"] = self.trace.arrival_s[first:last], self.trace.model[first:last]
        rows["prompt"], rows["output"] = self.trace.prompt_tokens[first:last], self.trace.output_tokens[first:last]
        return rows

    def _never_arrived(self, first: int) -> None:
        """The rest of the trace counts as unfinished, so that no request is lost from the books."""
        for k, tally in enumerate(self.tallies):
            mine = self.trace.model[first:] == k
            tally.outcomes[Outcome.UNFINISHED] += int(mine.sum())
            tally.tokens += int(self.trace.output_tokens[first:][mine].sum())

    def finish(self, *, overflow: bool) -> None:
        """Let what is in flight end, up to the drain limit; what remains is unfinished."""
        until = self.now if overflow else self.now + self.options.drain_limit_s
        self._run_until(until)
        end_unfinished(self.state)
        self.flush()

    def _run_until(self, until: float) -> None:
        run_until(self.state, until)
        self.flush()
        while self.status == OUT_IS_FULL:
            run_until(self.state, until)
            self.flush()

    def flush(self) -> None:
        """Hand finished requests to the tallies and the sink."""
        count = int(self.state.clock["out_size"][0])
        rows = self.state.out[:count]
        for k, tally in enumerate(self.tallies):
            mine = rows[rows["model"] == k]
            if len(mine):
                tally.add(mine)
        if self.sink is not None and count:
            self.sink(rows)
        self.state.clock["out_size"] = 0


def _result(run: _Run, prices: PriceList, *, overflow: bool) -> SimulationResult:
    clock, trace_s = run.state.clock[0], run.span_s
    models = tuple(tally.summary(trace_s) for tally in run.tallies)
    instances = tuple(_instance_summary(run, i, prices) for i in range(len(run.fleet.lives)))
    cost = math.fsum(instance.cost_usd for instance in instances)
    unfinished = sum(model.num_by_outcome["unfinished"] for model in models)
    return SimulationResult(
        models=models,
        instances=instances,
        trace_s=trace_s,
        simulated_s=run.now,
        cost_usd=cost,
        cost_usd_per_hour=cost / trace_s * 3600,
        stable=not overflow and unfinished <= FEW_UNFINISHED * len(run.trace) and not _shed_by_overload(run),
        statement=_statement(run, overflow=overflow, unfinished=unfinished),
        num_events=int(clock["num_events"]),
        peak_in_flight=int(clock["peak_in_flight"]),
        num_cross_region=int(clock["num_cross_region"]),
    )


def _statement(run: _Run, *, overflow: bool, unfinished: int) -> str:
    few = not overflow and unfinished <= FEW_UNFINISHED * len(run.trace)
    if few and not unfinished:
        return f"every request ended{_without_answer(run)}"
    if few:
        seconds = run.options.drain_limit_s
        return f"{unfinished} long answers still in work {seconds:.0f} s after the last arrival{_without_answer(run)}"
    worst = _overloads(run)
    why = f" ({worst})" if worst else ""
    if overflow:
        limit = run.options.max_in_flight
        return f"unstable: more than {limit} requests in flight at {run.now:.0f} s, {unfinished} not served{why}"
    return f"unstable: {unfinished} requests unfinished {run.options.drain_limit_s:.0f} s after the last arrival{why}"


def _without_answer(run: _Run) -> str:
    """How many requests ended in another way than with their answer, and why where demand is above the plan."""
    counts = {one: sum(int(tally.outcomes[one]) for tally in run.tallies) for one in _ENDED_WITHOUT_ANSWER}
    told = ", ".join(f"{count} {_ENDED_WITHOUT_ANSWER[one]}" for one, count in counts.items() if count)
    if not told:
        return ""
    over = f" ({_overloads(run)})" if _shed_by_overload(run) else ""
    return f", but {told}{over}"


_ENDED_WITHOUT_ANSWER: Final = {
    Outcome.REFUSED: "refused at the door",
    Outcome.TOO_LONG: "longer than any instance can hold",
    Outcome.SHED: "dropped as late",
    Outcome.UNROUTABLE: "without an instance",
    Outcome.LOST: "lost with a node",
}


def _shed_by_overload(run: _Run) -> bool:
    """Whether more than few requests were dropped as late while demand was above the planned capacity.

    Dropping keeps the queue short, yet the plan does not keep up.
    """
    shed = sum(int(tally.outcomes[Outcome.SHED]) for tally in run.tallies)
    return shed > FEW_UNFINISHED * len(run.trace) and bool(_overloads(run))


def _overloads(run: _Run) -> str:
    """Every model whose demand is above its planned capacity, in words."""
    return "; ".join(text for model in run.trace.models if (text := _overload(run, model)))


def _overload(run: _Run, model: ModelId) -> str:
    """Demand against the planned capacity of a model where it is above it, in words."""
    prompt, output = run.trace.mean_lengths(model)
    rate = run.trace.num_requests(model) / run.span_s
    lives = [life.template for life in run.fleet.lives if life.template.model == model]
    aggregated = sum(template.throughput for template in lives if template.phase is Phase.AGGREGATED)
    found = []
    for phase, tokens in ((Phase.PREFILL, prompt), (Phase.DECODE, output)):
        capacity = sum(template.throughput for template in lives if template.phase is phase)
        needed = max(rate - aggregated, 0.0) * tokens
        if needed > capacity:
            found.append(f"{model} needs {needed:.0f} {phase.throughput_unit} in {phase}, planned {capacity:.0f}")
    return ", ".join(found)


def _instance_summary(run: _Run, i: int, prices: PriceList) -> InstanceSummary:
    life, row = run.fleet.lives[i], run.state.instances[i]
    released = float(row["released_at"])
    end = released if math.isfinite(released) else max(run.span_s, life.start_s)
    up = max(end - life.ready_s, 1e-9)
    stages = run.state.stages[row["first_stage"] : row["first_stage"] + row["num_stages"]]
    billed = max(end - life.start_s, 0.0)
    hourly = sum(count * _price(life, name, prices) for name, count in life.template.nodes.counts)
    return InstanceSummary(
        template=life.template.id,
        region=life.region,
        number=life.number,
        num_finished=int(row["num_finished"]),
        num_steps=int(row["num_steps"]),
        utilisation=tuple(float(min(busy / up, 1.0)) for busy in stages["busy"]),
        kv_peak_tokens=float(row["kv_peak"]),
        billed_s=billed,
        cost_usd=hourly * billed / 3600,
    )


def _price(life: Life, name: str, prices: PriceList) -> float:
    return 0.0 if life.market is Market.RESERVED else prices[life.region, name, life.market]  # type: ignore[index]
