"""Results of a simulation: streamed percentiles, counts, goodput, use, cost. Owns the meaning of each figure.

Limits are those of the phases, as the paper states them: TTFT is the time to the end of prefill, TPOT the time from the
moment the cache lies at the decode instance, waiting there included, over the tokens after the first. The hand-over in
between belongs to neither and is told apart. ``client_*`` is what a client of stock vLLM sees behind a prefill/decode
proxy, where the decode instance gives out the first token: hand-over and wait count as TTFT.

Percentiles come from histograms with bins of 0.1 % width, so memory does not grow with the number of requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import ModelId, RegionId, TemplateId
from coral_tasks.simulation.state import Outcome, Records

_LOWEST_S: Final = 1e-6
_BINS_PER_E: Final = 1000.0
_NUM_BINS: Final = 24_000
PERCENTILES: Final = (50.0, 90.0, 95.0, 99.0)


@dataclass(slots=True)
class Histogram:
    """Counts in logarithmic bins from 1 µs to about 26,000 s; percentiles within 0.1 %. Mutable, one owner."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_NUM_BINS, dtype=np.int64))
    total_s: float = 0.0
    largest_s: float = 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        """Count the values, in seconds."""
        if len(values) == 0:
            return
        bins = np.floor(np.log(np.maximum(values, _LOWEST_S) / _LOWEST_S) * _BINS_PER_E).astype(np.int64)
        self.counts += np.bincount(np.minimum(bins, _NUM_BINS - 1), minlength=_NUM_BINS)
        self.total_s += float(values.sum())
        self.largest_s = max(self.largest_s, float(values.max()))

    @property
    def count(self) -> int:
        """Values seen."""
        return int(self.counts.sum())

    @property
    def mean_s(self) -> float | None:
        """Mean; None without values."""
        return self.total_s / self.count if self.count else None

    def percentile(self, share: float) -> float | None:
        """Value that ``share`` percent do not exceed, at most 0.1 % too high; None without values."""
        if not self.count:
            return None
        rank = max(math.ceil(share / 100 * self.count), 1)
        k = int(np.searchsorted(np.cumsum(self.counts), rank))
        return min(_LOWEST_S * math.exp((k + 1) / _BINS_PER_E), self.largest_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """Seconds; None without a single value."""

    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p95_s: float | None
    p99_s: float | None
    max_s: float | None

    @classmethod
    def of(cls, histogram: Histogram) -> LatencySummary:
        """Read a histogram."""
        p50, p90, p95, p99 = (histogram.percentile(share) for share in PERCENTILES)
        top = histogram.largest_s if histogram.count else None
        return cls(mean_s=histogram.mean_s, p50_s=p50, p90_s=p90, p95_s=p95, p99_s=p99, max_s=top)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """One model over the whole trace.

    ``num_by_outcome``: requests by Outcome name; they add up to ``num_requests``. ``within_slo``: completed with both
    TTFT and TPOT within their limits. ``goodput_*``: rate of those, over the trace's span; output tokens.
    ``offered_*``: the same rates of everything that arrived. ``*_attainment``: share of all arrivals.
    ``handover``: from the end of prefill to the cache at the decode instance. ``client_*``: see the module's words.
    """

    model: ModelId
    num_requests: int
    num_by_outcome: Mapping[str, int]
    num_within_slo: int
    ttft: LatencySummary
    tpot: LatencySummary
    handover: LatencySummary
    client_ttft: LatencySummary
    client_tpot: LatencySummary
    offered_requests_per_s: float
    offered_tokens_per_s: float
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    ttft_attainment: float
    tpot_attainment: float
    attainment: float
    client_attainment: float
    num_preemptions: int
    num_retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSummary:
    """One instance. ``utilisation``: busy share of each stage while the instance was up. ``billed_s``: of a node."""

    template: TemplateId
    region: RegionId
    number: int
    num_finished: int
    num_steps: int
    utilisation: tuple[float, ...]
    kv_peak_tokens: float
    billed_s: float
    cost_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Summary of a run. ``statement``: one sentence on how it ended; ``stable`` is False where demand outran the plan.

    ``simulated_s``: clock at the end. ``cost_usd``: nodes from provisioning to release, start-up and drain included.
    """

    models: tuple[ModelSummary, ...]
    instances: tuple[InstanceSummary, ...]
    trace_s: float
    simulated_s: float
    cost_usd: float
    cost_usd_per_hour: float
    stable: bool
    statement: str
    num_events: int
    peak_in_flight: int
    num_cross_region: int

    @property
    def num_requests(self) -> int:
        """Requests of all models."""
        return sum(model.num_requests for model in self.models)

    @property
    def goodput_requests_per_s(self) -> float:
        """Requests/s within their SLO, all models."""
        return sum(model.goodput_requests_per_s for model in self.models)

    @property
    def goodput_tokens_per_s(self) -> float:
        """Output tokens/s of requests within their SLO, all models."""
        return sum(model.goodput_tokens_per_s for model in self.models)

    @property
    def attainment(self) -> float:
        """Share of all arrivals that met their SLO."""
        return sum(model.num_within_slo for model in self.models) / self.num_requests


@dataclass(slots=True)
class ModelTally:
    """Running counts of one model. Mutable, one owner."""

    model: ModelId
    slo: LatencySlo | None
    outcomes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(Outcome), dtype=np.int64))
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    handover: Histogram = field(default_factory=Histogram)
    client_ttft: Histogram = field(default_factory=Histogram)
    client_tpot: Histogram = field(default_factory=Histogram)
    good: int = 0
    good_client: int = 0
    good_tokens: int = 0
    good_ttft: int = 0
    good_tpot: int = 0
    tokens: int = 0
    preemptions: int = 0
    retries: int = 0

    def add(self, rows: Records) -> None:
        """Count finished requests of this model (dtype OUT)."""
        self.outcomes += np.bincount(rows["outcome"], minlength=len(Outcome))
        self.tokens += int(rows["output"].sum())
        self.preemptions += int(rows["preemptions"].sum())
        self.retries += int(rows["retries"].sum())
        done = rows[rows["outcome"] == Outcome.COMPLETED]
        ttft, tpot = done["first"] - done["arrival"], time_per_output_token(done)
        self.ttft.add(ttft)
        self.tpot.add(tpot[np.isfinite(tpot)])
        self.handover.add((done["ready"] - done["first"])[moved(done)])
        self._count_good(done, ttft, tpot)
        self._count_client(done)

    def _count_client(self, done: Records) -> None:
        ttft, tpot = client_times(done)
        self.client_ttft.add(ttft)
        self.client_tpot.add(tpot[np.isfinite(tpot)])
        if self.slo is not None:
            self.good_client += int(((ttft <= self.slo.ttft_s) & ~(tpot > self.slo.tpot_s)).sum())

    def _count_good(self, done: Records, ttft: NDArray[np.float64], tpot: NDArray[np.float64]) -> None:
        if self.slo is None:
            return
        fast = ttft <= self.slo.ttft_s
        steady = ~(tpot > self.slo.tpot_s)  # a single token has no TPOT and cannot miss it
        self.good_ttft += int(fast.sum())
        self.good_tpot += int(steady.sum())
        self.good += int((fast & steady).sum())
        self.good_tokens += int(done["output"][fast & steady].sum())

    def summary(self, trace_s: float) -> ModelSummary:
        """The figures over a trace of that span."""
        count, span = int(self.outcomes.sum()), max(trace_s, 1e-9)
        return ModelSummary(
            model=self.model,
            num_requests=count,
            num_by_outcome={one.name.lower(): int(self.outcomes[one]) for one in Outcome},
            num_within_slo=self.good,
            ttft=LatencySummary.of(self.ttft),
            tpot=LatencySummary.of(self.tpot),
            handover=LatencySummary.of(self.handover),
            client_ttft=LatencySummary.of(self.client_ttft),
            client_tpot=LatencySummary.of(self.client_tpot),
            offered_requests_per_s=count / span,
            offered_tokens_per_s=self.tokens / span,
            goodput_requests_per_s=self.good / span,
            goodput_tokens_per_s=self.good_tokens / span,
            ttft_attainment=self.good_ttft / max(count, 1),
            tpot_attainment=self.good_tpot / max(count, 1),
            attainment=self.good / max(count, 1),
            client_attainment=self.good_client / max(count, 1),
            num_preemptions=self.preemptions,
            num_retries=self.retries,
        )


def time_per_output_token(rows: Records) -> NDArray[np.float64]:
    """Seconds per token after the first, from the cache's arrival on, waiting included; NaN for a single token."""
    return _per_token(rows["finish"] - rows["ready"], rows["output"] - 1)


def moved(rows: Records) -> NDArray[np.bool_]:
    """Which requests decoded on another instance than the one they entered."""
    return np.asarray(rows["instance"] != rows["entry"], dtype=np.bool_)


def client_times(rows: Records) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """TTFT and TPOT as a client of stock vLLM sees them: a request that moved gets its first token from decode.

    TPOT is NaN where no token follows; of a request that moved, over the decode steps after the first.
    """
    away = moved(rows)
    seen = np.where(away, rows["second"], rows["first"])
    return seen - rows["arrival"], _per_token(rows["finish"] - seen, rows["output"] - 1 - away)


def _per_token(span: NDArray[np.float64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    later = tokens.astype(np.float64)
    later[later <= 0] = np.nan
    return span / later
