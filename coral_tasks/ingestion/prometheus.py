"""Demand from Prometheus, in vLLM's own metric names.

Owns the queries and what counts as an answer. Arrivals of an interval = finished requests + growth of the requests
running and waiting, counted on decode and aggregated instances only (a disaggregated request passes a prefill
instance too). An instance that ran in the interval and has gone since (``past``) counts with what it served, and is not
asked to be there. Series of instances that neither listing holds are left out and noted. An instance of the
listing whose series are absent or old makes the answer incomplete: below ``min_completeness`` it is a fault, never a
zero. Lengths of an interval without requests are the model's ``shapes`` entry, and noted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from coral_tasks.domain.errors import SourceFault
from coral_tasks.domain.market import Demand
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import ModelId, Phase
from coral_tasks.ingestion.batch import SourceBatch, batch_of
from coral_tasks.ingestion.http import HttpLimits, get_json
from coral_tasks.ingestion.rows import demand_table

FINISHED: Final = "vllm:request_success_total"
RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
PROMPT: Final = "vllm:request_prompt_tokens"
OUTPUT: Final = "vllm:request_generation_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsTarget:
    """One engine that Prometheus scrapes: value of its ``instance`` label, the model and the phase it serves."""

    instance: str
    model: ModelId
    phase: Phase


class _Key(NamedTuple):
    """Model and end of the interval (seconds since 1970)."""

    model: str
    end: float


Buckets = dict[float, float]


@dataclass(slots=True)
class _Tally:
    """What was counted for one model and interval."""

    arrivals: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    buckets: dict[str, Buckets] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    instances: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSource:
    """Demand of the last ``num_intervals`` whole intervals.

    ``targets``: the engines that run (from agents). ``past``: engines that ran lately: without them demand would seem
    to fall by what each stopped engine served, and the plan with it. ``model_names``: vLLM's ``model_name`` label →
    model id; a name that is not there goes through as it is, for the gate to refuse. ``shapes``: lengths for intervals
    without requests.
    """

    address: str
    targets: tuple[MetricsTarget, ...]
    model_names: Mapping[str, ModelId]
    shapes: Mapping[str, RequestShape]
    interval_s: float = 300.0
    num_intervals: int = 1
    max_sample_age_s: float = 120.0
    min_completeness: float = 0.9
    past: tuple[MetricsTarget, ...] = ()
    limits: HttpLimits = field(default_factory=HttpLimits)
    token: str = field(default="", repr=False)

    def __call__(self, now: datetime) -> SourceBatch:
        """Query and count. Raises SourceFault (no whole answer, or too few instances answered)."""
        last_end = now.timestamp() // self.interval_s * self.interval_s
        counted = {one.instance: one for one in self.targets if one.phase is not Phase.PREFILL}
        current = {one.instance for one in self.targets}
        gone = {
            one.instance: one for one in self.past if one.phase is not Phase.PREFILL and one.instance not in current
        }
        fresh, foreign = self._fresh(now, set(counted))
        self._require_complete(fresh, counted)
        tallies = self._count(last_end, gone | counted)
        notes = (
            [f"left out: {len(foreign)} instances that no longer run ({', '.join(sorted(foreign)[:5])})"]
            if foreign
            else []
        )
        lost = sorted(set(counted) - fresh)
        notes += [f"no fresh metrics from {', '.join(lost)}"] if lost else []
        rows, replaced = self._rows(tallies, {counted[name].model for name in fresh})
        return batch_of(
            "demand",
            demand_table(rows),
            source=f"prometheus {self.address}",
            observed_at=datetime.fromtimestamp(last_end, UTC),
            expected=len(counted),
            received=len(fresh),
            notes=(*notes, *replaced),
        )

    def _fresh(self, now: datetime, expected: set[str]) -> tuple[set[str], set[str]]:
        """Expected instances whose newest sample is recent, and instances that are not expected."""
        found = self._query(f"timestamp({RUNNING})", now.timestamp())
        known = {one.instance for one in (*self.targets, *self.past)} - expected
        fresh, foreign = set(), set()
        for series in found:
            instance = series["metric"].get("instance", "")
            age = now.timestamp() - _number(series["value"][1])
            if instance in expected and age <= self.max_sample_age_s:
                fresh.add(instance)
            elif instance not in expected | known:
                foreign.add(instance)
        return fresh, foreign

    def _require_complete(self, fresh: set[str], counted: Mapping[str, MetricsTarget]) -> None:
        if not counted:
            message = f"prometheus {self.address}: no instance runs that could be asked; demand is unknown, not zero"
            raise SourceFault(message)
        if len(fresh) < self.min_completeness * len(counted):
            lost = ", ".join(sorted(set(counted) - fresh))
            message = (
                f"prometheus {self.address}: fresh metrics from {len(fresh)} of {len(counted)} instances"
                f" (none from {lost}): an outage is not zero demand"
            )
            raise SourceFault(message)

    def _count(self, last_end: float, counted: Mapping[str, MetricsTarget]) -> dict[_Key, _Tally]:
        tallies: dict[_Key, _Tally] = defaultdict(_Tally)
        window = f"[{self.interval_s:g}s]"
        for expression in (f"increase({FINISHED}{window})", f"delta({RUNNING}{window})", f"delta({WAITING}{window})"):
            for tally, value, _ in self._points(
                f"sum by (instance, model_name) ({expression})", last_end, counted, tallies
            ):
                tally.arrivals += value
        for metric in (PROMPT, OUTPUT):
            for part in ("sum", "count"):
                expression = f"sum by (instance, model_name) (increase({metric}_{part}{window}))"
                for tally, value, _ in self._points(expression, last_end, counted, tallies):
                    (tally.sums if part == "sum" else tally.counts)[metric] += value
            expression = f"sum by (instance, model_name, le) (increase({metric}_bucket{window}))"
            for tally, value, labels in self._points(expression, last_end, counted, tallies):
                tally.buckets[metric][_number(labels.get("le", "nan"))] += value
        return tallies

    def _points(
        self, expression: str, last_end: float, counted: Mapping[str, MetricsTarget], tallies: dict[_Key, _Tally]
    ) -> list[tuple[_Tally, float, Mapping[str, str]]]:
        """Finite values of every wanted series with the tally they belong to."""
        points = []
        for series in self._query_range(expression, last_end):
            labels = series["metric"]
            instance = labels.get("instance", "")
            if instance not in counted:
                continue
            name = labels.get("model_name", "")
            model = self.model_names.get(name, name)
            for end, text in series["values"]:
                value = _number(text)
                if math.isfinite(value):
                    tally = tallies[_Key(str(model), float(end))]
                    tally.instances.add(instance)
                    points.append((tally, value, labels))
        return points

    def _rows(self, tallies: Mapping[_Key, _Tally], models: set[ModelId]) -> tuple[list[Demand], list[str]]:
        lost = sorted(models - {key.model for key in tallies})
        rows, notes = [], [f"{model}: instances run but count nothing: left out" for model in lost]
        for key in sorted(tallies):
            tally = tallies[key]
            shape = shape_from(tally.sums, tally.counts, tally.buckets) or self.shapes.get(key.model)
            if shape is None:
                notes.append(f"{key.model}: no requests and no lengths known: left out")
                continue
            if not tally.counts.get(PROMPT):
                notes.append(f"{key.model}: no requests finished, so lengths are those expected")
            rows.append(
                Demand(
                    model=ModelId(key.model),
                    # gauges are extrapolated: a tiny negative sum is noise
                    requests_per_s=max(0.0, tally.arrivals) / self.interval_s,
                    shape=shape,
                    interval_start=datetime.fromtimestamp(key.end - self.interval_s, UTC),
                    interval_s=self.interval_s,
                )
            )
        return rows, list(dict.fromkeys(notes))

    def _query(self, expression: str, at: float) -> list[dict[str, Any]]:
        return self._ask("/api/v1/query", {"query": expression, "time": f"{at:.3f}"}, "vector")

    def _query_range(self, expression: str, last_end: float) -> list[dict[str, Any]]:
        first = last_end - (self.num_intervals - 1) * self.interval_s
        times = {"start": f"{first:.3f}", "end": f"{last_end:.3f}", "step": f"{self.interval_s:g}"}
        return self._ask("/api/v1/query_range", {"query": expression, **times}, "matrix")

    def _ask(self, path: str, query: Mapping[str, str], kind: str) -> list[dict[str, Any]]:
        answer = get_json(self.address, path, query, self.limits, token=self.token)
        try:
            if answer["status"] == "success" and not answer.get("warnings") and answer["data"]["resultType"] == kind:
                return _checked(answer["data"]["result"], "value" if kind == "vector" else "values")
            reason = answer.get("error") or "; ".join(answer.get("warnings") or []) or "another kind of result"
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            reason = f"not an answer of Prometheus ({type(error).__name__}: {error})"
        message = f"prometheus {self.address}: {query['query']}: {reason}"
        raise SourceFault(message)


def _checked(result: Sequence[Any], values: str) -> list[dict[str, Any]]:
    """Series with labels and numbers where they should be; else KeyError, TypeError or ValueError."""
    for series in result:
        points = [series[values]] if values == "value" else series[values]
        for at, text in points:
            float(at), float(text)
        dict(series["metric"])
    return list(result)


def _number(text: str) -> float:
    """Prometheus writes NaN, +Inf and -Inf as text too."""
    return float(text)


def shape_from(
    sums: Mapping[str, float], counts: Mapping[str, float], buckets: Mapping[str, Buckets]
) -> RequestShape | None:
    """Means and p95 from vLLM's histograms; None if nothing was counted."""
    if any(counts.get(metric, 0.0) <= 0 or sums.get(metric, 0.0) <= 0 for metric in (PROMPT, OUTPUT)):
        return None
    p95 = {metric: bucket_quantile(0.95, buckets[metric]) for metric in (PROMPT, OUTPUT)}
    mean = {metric: sums[metric] / counts[metric] for metric in (PROMPT, OUTPUT)}
    if not all(value > 0 for value in p95.values()):
        return None
    return RequestShape(
        mean_prompt_tokens=mean[PROMPT],
        p95_prompt_tokens=p95[PROMPT],
        mean_output_tokens=mean[OUTPUT],
        p95_output_tokens=p95[OUTPUT],
    )


def bucket_quantile(quantile: float, buckets: Buckets) -> float:
    """Quantile of a cumulative histogram, linear inside a bucket as Prometheus does it; nan if it is empty.

    In the last, unbounded bucket the answer is the largest bound.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0 or not math.isinf(bounds[-1]):
        return math.nan
    rank, below, low = quantile * total, 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if math.isinf(bound):
                return low
            inside = buckets[bound] - below
            return low + (bound - low) * ((rank - below) / inside if inside > 0 else 1.0)
        below, low = buckets[bound], bound
    return low
