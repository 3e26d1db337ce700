"""Demand from Prometheus, in vLLM's own metric names.

Owns the queries and what counts as an answer. Arrivals of an interval = finished requests + growth of the requests
running and waiting, counted on decode and aggregated instances only (a disaggregated request passes a prefill
instance too) and never below zero on any of them: what a crashed engine lost is no other engine's negative demand.

An instance that ran in the interval and has gone since (``past``) counts with what it served, and is not asked to be
there. Series of instances that neither listing holds are left out and noted. An instance of the listing has answered if
its newest sample is recent and if finished, running and waiting all have a finite value wherever it was scraped
twice; below ``min_completeness`` of them the answer is a fault, never a zero. Answers to another question (other
times, a series twice, a target scraped by two jobs) are faults. An earlier interval in which an instance's values are
not whole is left out and noted. Lengths of an interval without requests are the model's ``shapes`` entry, and noted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, NoReturn

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

MAX_REASON: Final = 500
"""Characters of what the server said."""


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


class _Point(NamedTuple):
    """Where a value belongs: instance, vLLM's model name, end of the interval; ``le``: bound of a bucket, else ""."""

    instance: str
    name: str
    end: float
    le: str = ""


Points = dict[_Point, float]
Buckets = dict[float, float]


@dataclass(slots=True)
class _Tally:
    """What was counted for one model and interval. ``whole``: no instance's part is missing."""

    arrivals: float = 0.0
    whole: bool = True
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    buckets: dict[str, Buckets] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))


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
        asked = gone | counted
        arrivals, halves = self._arrivals(last_end, asked)
        fresh -= self._unanswered(last_end, arrivals) | {one.instance for one in halves if one.end == last_end}
        self._require_complete(fresh, counted)
        tallies = self._tallies(last_end, asked, arrivals, [one for one in halves if one.end < last_end])
        rows, replaced = self._rows(tallies, {counted[name].model for name in fresh})
        return batch_of(
            "demand",
            demand_table(rows),
            source=f"prometheus {self.address}",
            observed_at=datetime.fromtimestamp(last_end, UTC),
            expected=len(counted),
            received=len(fresh),
            notes=(*_left_out(foreign, set(counted) - fresh), *replaced),
        )

    def _fresh(self, now: datetime, expected: set[str]) -> tuple[set[str], set[str]]:
        """Expected instances whose newest sample is recent, and instances that are not expected."""
        found = self._query(f"timestamp({RUNNING})", now.timestamp())
        self._require_one_job([series["metric"] for series in found])
        known = {one.instance for one in (*self.targets, *self.past)} - expected
        fresh, foreign = set(), set()
        for series in found:
            instance = series["metric"].get("instance", "")
            age = now.timestamp() - _number(series["value"][1])
            # a sample of the future is a clock that stepped back, and as little of this moment as an old one
            if instance in expected and abs(age) <= self.max_sample_age_s:
                fresh.add(instance)
            elif instance not in expected | known:
                foreign.add(instance)
        return fresh, foreign

    def _require_one_job(self, labels: Sequence[Mapping[str, str]]) -> None:
        jobs: dict[str, set[str]] = defaultdict(set)
        for one in labels:
            jobs[one.get("instance", "")].add(one.get("job", ""))
        twice = sorted(instance for instance, names in jobs.items() if len(names) > 1)
        if twice:
            names = ", ".join(sorted(jobs[twice[0]]))
            self._fail(f"{twice[0]} is scraped by several jobs ({names}): its requests would count several times")

    def _require_complete(self, fresh: set[str], counted: Mapping[str, MetricsTarget]) -> None:
        if not counted:
            self._fail("no instance runs that could be asked; demand is unknown, not zero")
        if len(fresh) < self.min_completeness * len(counted):
            lost = ", ".join(sorted(set(counted) - fresh))
            self._fail(
                f"fresh metrics from {len(fresh)} of {len(counted)} instances"
                f" (none or half of them from {lost}): an outage is not zero demand"
            )

    def _arrivals(self, last_end: float, asked: Mapping[str, MetricsTarget]) -> tuple[Points, list[_Point]]:
        """Requests that came to each instance in each interval; and where a part of the three is no finite number."""
        window = f"[{self.interval_s:g}s]"
        parts = [
            self._points(f"sum by (instance, model_name) ({expression})", last_end, asked)
            for expression in (
                f"increase({FINISHED}{window})",
                f"delta({RUNNING}{window})",
                f"delta({WAITING}{window})",
            )
        ]
        arrivals: Points = {}
        halves = []
        for place in sorted(set().union(*parts)):
            values = [part.get(place, math.nan) for part in parts]
            if all(map(math.isfinite, values)):
                arrivals[place] = max(0.0, sum(values))
            else:
                halves.append(place)
        return arrivals, halves

    def _unanswered(self, last_end: float, arrivals: Points) -> set[str]:
        """Instances that were scraped twice in the newest interval, which is all that rates need, and have none."""
        found = self._query(f"count_over_time({RUNNING}[{self.interval_s:g}s])", last_end)
        scraped = {one["metric"].get("instance", "") for one in found if _number(one["value"][1]) > 1}
        return scraped - {place.instance for place in arrivals if place.end == last_end}

    def _tallies(
        self,
        last_end: float,
        asked: Mapping[str, MetricsTarget],
        arrivals: Points,
        halves: Sequence[_Point],
    ) -> dict[_Key, _Tally]:
        tallies: dict[_Key, _Tally] = defaultdict(_Tally)
        for place, value in arrivals.items():
            tallies[self._key(place)].arrivals += value
        for place in halves:
            tallies[self._key(place)].whole = False
        window = f"[{self.interval_s:g}s]"
        for metric in (PROMPT, OUTPUT):
            for part, kept in (("sum", "sums"), ("count", "counts")):
                expression = f"sum by (instance, model_name) (increase({metric}_{part}{window}))"
                for tally, value, _ in self._lengths(expression, last_end, asked, tallies):
                    getattr(tally, kept)[metric] += value
            expression = f"sum by (instance, model_name, le) (increase({metric}_bucket{window}))"
            for tally, value, bound in self._lengths(expression, last_end, asked, tallies):
                if not _is_number(bound):
                    self._fail(f"{expression}: a bucket has no bound ({bound!r})")
                tally.buckets[metric][float(bound)] += value
        return dict(tallies)

    def _lengths(
        self, expression: str, last_end: float, asked: Mapping[str, MetricsTarget], tallies: Mapping[_Key, _Tally]
    ) -> Iterator[tuple[_Tally, float, str]]:
        """Finite values with the tally they belong to and their bucket's bound; lengths alone are no demand."""
        for place, value in self._points(expression, last_end, asked).items():
            if math.isfinite(value) and self._key(place) in tallies:
                yield tallies[self._key(place)], value, place.le

    def _key(self, place: _Point) -> _Key:
        return _Key(str(self.model_names.get(place.name, place.name)), place.end)

    def _points(self, expression: str, last_end: float, asked: Mapping[str, MetricsTarget]) -> Points:
        """Values of the instances asked for, each at one of the times asked for and there once."""
        points: Points = {}
        for series in self._query_range(expression, last_end):
            labels = series["metric"]
            instance = labels.get("instance", "")
            if instance not in asked:
                continue
            for at, text in series["values"]:
                back = round((last_end - float(at)) / self.interval_s)
                end = last_end - back * self.interval_s
                if not 0 <= back < self.num_intervals or abs(end - float(at)) > 1:
                    self._fail(f"{expression}: a value of another time ({at}) than was asked for")
                place = _Point(instance, labels.get("model_name", ""), end, labels.get("le", ""))
                if place in points:
                    self._fail(f"{expression}: two values of {instance} for one time")
                points[place] = _number(text)
        return points

    def _rows(self, tallies: Mapping[_Key, _Tally], models: set[ModelId]) -> tuple[list[Demand], list[str]]:
        lost = sorted(models - {key.model for key in tallies})
        rows, notes = [], [f"{model}: instances run but count nothing: left out" for model in lost]
        for key in sorted(tallies):
            tally = tallies[key]
            start = datetime.fromtimestamp(key.end - self.interval_s, UTC)
            counted = shape_from(tally.sums, tally.counts, tally.buckets)
            shape = counted or self.shapes.get(key.model)
            if not tally.whole:
                notes.append(f"{key.model}: half an answer for the interval of {start.isoformat()}: left out")
                continue
            if shape is None:
                notes.append(f"{key.model}: no requests and no lengths known: left out")
                continue
            if counted is None:
                notes.append(f"{key.model}: no requests finished, so lengths are those expected")
            rows.append(
                Demand(
                    model=ModelId(key.model),
                    requests_per_s=tally.arrivals / self.interval_s,
                    shape=shape,
                    interval_start=start,
                    interval_s=self.interval_s,
                )
            )
        return rows, list(dict.fromkeys(notes))

    def _fail(self, reason: str) -> NoReturn:
        message = f"prometheus {self.address}: {reason}"
        raise SourceFault(message)

    def _query(self, expression: str, at: float) -> list[dict[str, Any]]:
        return self._ask("/api/v1/query", {"query": expression, "time": f"{at:.3f}"}, "vector")

    def _query_range(self, expression: str, last_end: float) -> list[dict[str, Any]]:
        first = last_end - (self.num_intervals - 1) * self.interval_s
        times = {"start": f"{first:.3f}", "end": f"{last_end:.3f}", "step": f"{self.interval_s:g}"}
        return self._ask("/api/v1/query_range", {"query": expression, **times}, "matrix")

    def _ask(self, path: str, query: Mapping[str, str], kind: str) -> list[dict[str, Any]]:
        answer = get_json(self.address, path, query, self.limits, token=self.token)
        try:
            found = _series(answer, kind)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            found = f"not an answer of Prometheus ({type(error).__name__}: {error})"
        if isinstance(found, str):
            self._fail(f"{query['query']}: {found[:MAX_REASON]}")
        return found


def _series(answer: Any, kind: str) -> list[dict[str, Any]] | str:
    """Series of a whole answer, or why there is none; a broken answer raises whatever it makes of it."""
    if answer["status"] == "success" and not answer.get("warnings") and answer["data"]["resultType"] == kind:
        return _checked(answer["data"]["result"], "value" if kind == "vector" else "values")
    return str(answer.get("error") or "; ".join(answer.get("warnings") or []) or "another kind of result")


def _left_out(foreign: set[str], lost: set[str]) -> list[str]:
    shown = ", ".join(sorted(foreign)[:5])
    notes = [f"left out: {len(foreign)} instances that no longer run ({shown})"] if foreign else []
    return [*notes, f"no whole metrics from {', '.join(sorted(lost))}"] if lost else notes


def _checked(result: Sequence[Any], values: str) -> list[dict[str, Any]]:
    """Series with text labels and numbers where they should be; else LookupError, TypeError, ValueError, …"""
    for series in result:
        points = [series[values]] if values == "value" else series[values]
        for at, text in points:
            if not math.isfinite(float(at)):
                raise ValueError(at)
            float(text)
        if not all(isinstance(text, str) for pair in dict(series["metric"]).items() for text in pair):
            raise TypeError(series["metric"])
    return list(result)


def _number(text: str) -> float:
    """Prometheus writes NaN, +Inf and -Inf as text too."""
    return float(text)


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


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
