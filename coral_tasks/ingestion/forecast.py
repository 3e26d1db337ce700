"""Forecast of the next interval's demand: last value, seasonal naive, exponential smoothing; and its back-test.

Owns the step from observed intervals to one expected and one planning rate per model. Missing is not zero: an interval
without a row is unknown, is passed over in learning, and too long a gap before the forecast is an error.

Planning rate = expected rate + the stated quantile of the method's own one-step errors on this history (at least
``MIN_ERRORS`` of them; with fewer, the largest error seen), never below zero. Lengths: the last hour's mean weighted
by requests, and its largest p95.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import StaleInput, ValidationFailed, Violation
from coral_tasks.domain.market import Demand
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.validation import Checks

Rates = NDArray[np.float64]
MIN_ERRORS: Final = 20
ERROR_WINDOW: Final = 288
LENGTH_WINDOW: Final = 12
MAX_INTERVALS: Final = 1_000_000
"""Nine years of intervals of five minutes; more is a wrong time in one row."""
ALPHAS: Final = tuple(k / 10 for k in range(1, 10))


class Method(StrEnum):
    """How the expected rate is made."""

    LAST_VALUE = "last_value"
    SEASONAL_NAIVE = "seasonal_naive"
    SMOOTHING = "smoothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastSettings:
    """``quantile``: of the errors, for planning. ``season``: intervals in a season. ``max_gap``: intervals at the end
    of the history that may be unknown.
    """

    method: Method = Method.SMOOTHING
    quantile: float = 0.95
    season: int = 288
    max_gap: int = 2

    def __post_init__(self) -> None:
        checks = Checks("forecast_settings")
        checks.require(0 < self.quantile < 1, "quantile must be between 0 and 1", self.quantile)
        checks.require(self.season >= 1, "season must be at least 1", self.season)
        checks.require(self.max_gap >= 0, "max_gap must not be negative", self.max_gap)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Expected and planning rate (requests/s) of one model's next interval; ``notes``: what had to be replaced."""

    expected_requests_per_s: float
    planning_requests_per_s: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BacktestRow:
    """One method on one series. Rates in requests/s over ``num_forecasts`` intervals that were observed.

    ``error_share``: sum of absolute errors over sum of rates. ``bias``: mean error (forecast − observed).
    ``covered``: share of intervals whose rate was at most the planning rate. ``surplus_share``: how much the planning
    rates exceed the observed ones where they do, over the sum of rates.
    """

    series: str
    method: Method
    num_forecasts: int
    error_share: float
    bias: float
    covered: float
    surplus_share: float


def one_step(rates: Rates, method: Method, season: int) -> Rates:
    """Expected rate of interval t from intervals before t, for t = 0…N; shape (N+1,), NaN where there is none yet.

    ``rates``: shape (N,), NaN where unknown. Seasonal naive takes the last value where the season before is unknown.
    """
    last = _carried(rates)
    if method is Method.LAST_VALUE:
        return last
    if method is Method.SEASONAL_NAIVE:
        # a season longer than the history has no value in it
        before = np.concatenate([np.full(min(season, len(rates) + 1), np.nan), rates])[: len(rates) + 1]
        return np.where(np.isnan(before), last, before)
    return _smoothed(rates)


def _carried(rates: Rates) -> Rates:
    """Last known rate before each t."""
    known = np.where(~np.isnan(rates), np.arange(len(rates)), -1)
    newest = np.concatenate([[-1], np.maximum.accumulate(known)]) if len(rates) else np.array([-1])
    return np.where(newest >= 0, np.append(rates, np.nan)[newest], np.nan)


def _smoothed(rates: Rates) -> Rates:
    """Exponential smoothing; each step takes the weight with the least squared one-step errors so far.

    So the weight never learns from the interval it forecasts. The smallest of equal weights wins.
    """
    levels = np.stack([_levels(rates, alpha) for alpha in ALPHAS])
    squared = np.nan_to_num((rates - levels[:, :-1]) ** 2)
    so_far = np.concatenate([np.zeros((len(ALPHAS), 1)), np.cumsum(squared, axis=1)], axis=1)
    best = np.argmin(so_far, axis=0)
    return np.asarray(levels[best, np.arange(rates.size + 1)])


def _levels(rates: Rates, alpha: float) -> Rates:
    level = np.nan
    levels = [level]
    for rate in rates:
        if not np.isnan(rate):
            level = rate if np.isnan(level) else level + alpha * (rate - level)
        levels.append(level)
    return np.array(levels)


def planning_margin(errors: Rates, quantile: float) -> float:
    """Quantile of known errors (observed − forecast), at least 0; the largest if there are under ``MIN_ERRORS``."""
    known = errors[~np.isnan(errors)][-ERROR_WINDOW:]
    if known.size == 0:
        return 0.0
    margin = np.quantile(known, quantile, method="higher") if known.size >= MIN_ERRORS else known.max()
    return max(0.0, float(margin))


def forecast_rates(rates: Rates, settings: ForecastSettings, name: str = "series") -> Forecast:
    """Next interval of one series (shape (N,), NaN where unknown).

    Raises StaleInput if nothing was observed in the last ``max_gap`` + 1 intervals: unknown is not zero.
    """
    recent = rates[-(settings.max_gap + 1) :]
    if recent.size == 0 or bool(np.isnan(recent).all()):
        message = (
            f"demand of {name}: nothing observed in the last {settings.max_gap + 1} intervals; missing is not zero"
        )
        raise StaleInput(message)
    expected = one_step(rates, settings.method, settings.season)
    errors = rates - expected[:-1]
    gaps = int(np.isnan(rates).sum())
    notes = [f"{gaps} of {rates.size} intervals unknown"] if gaps else []
    if settings.method is Method.SEASONAL_NAIVE and (rates.size < settings.season or np.isnan(rates[-settings.season])):
        notes.append("no value one season ago: last value taken")
    value = float(expected[-1])
    margin = planning_margin(errors, settings.quantile)
    return Forecast(expected_requests_per_s=value, planning_requests_per_s=max(0.0, value + margin), notes=tuple(notes))


def backtest(name: str, rates: Rates, settings: ForecastSettings, *, warmup: int = 1) -> BacktestRow:
    """Forecast every observed interval after ``warmup`` from those before it, and compare.

    Raises ValidationFailed if fewer than two intervals can be compared.
    """
    checks = Checks("backtest", name)
    checks.require(warmup >= 0, "warmup must not be negative", warmup)
    checks.raise_if_any()
    expected = one_step(rates, settings.method, settings.season)[:-1]
    errors = rates - expected
    judged = [t for t in range(max(1, warmup), rates.size) if not np.isnan(errors[t])]
    if len(judged) < 2:
        rule = "a back-test needs two observed intervals after the warm-up"
        raise ValidationFailed([Violation(table="backtest", row=name, value=str(len(judged)), rule=rule)])
    planned = np.array([max(0.0, expected[t] + planning_margin(errors[:t], settings.quantile)) for t in judged])
    seen, guessed = rates[judged], expected[judged]
    total = max(float(seen.sum()), 1e-12)
    return BacktestRow(
        series=name,
        method=settings.method,
        num_forecasts=len(judged),
        error_share=float(np.abs(seen - guessed).sum()) / total,
        bias=float((guessed - seen).mean()),
        covered=float((seen <= planned + 1e-12).mean()),
        surplus_share=float(np.maximum(planned - seen, 0).sum()) / total,
    )


def rate_series(rows: Iterable[Demand]) -> dict[tuple[str, str], tuple[datetime, float, Rates]]:
    """By model and origin: first interval's start, interval length in seconds, and rates on the regular grid.

    Raises ValidationFailed if a series mixes lengths or has a start off its grid.
    """
    groups: dict[tuple[str, str], list[Demand]] = {}
    for row in rows:
        groups.setdefault((row.model, row.origin or ""), []).append(row)
    return {key: _on_grid(key, sorted(groups[key], key=lambda row: row.interval_start)) for key in sorted(groups)}


def _on_grid(key: tuple[str, str], rows: Sequence[Demand]) -> tuple[datetime, float, Rates]:
    start, length = rows[0].interval_start, rows[0].interval_s
    places = [(row.interval_start - start).total_seconds() / length for row in rows]
    bad = [
        Violation(
            table="demand", row=f"{key[0]} {row.interval_start.isoformat()}", value=f"{row.interval_s:g} s", rule=rule
        )
        for row, place in zip(rows, places, strict=True)
        for rule in ["intervals of one series must have one length and touch"]
        if row.interval_s != length or abs(place - round(place)) > 1e-6
    ]
    if bad:
        raise ValidationFailed(bad)
    num_intervals = round(places[-1]) + 1
    _require_span(key[0], num_intervals)
    rates = np.full(num_intervals, np.nan)
    for row, place in zip(rows, places, strict=True):
        rates[round(place)] = row.requests_per_s
    return start, length, rates


def _require_span(name: str, num_intervals: int) -> None:
    if num_intervals > MAX_INTERVALS:
        rule = f"a series must span at most {MAX_INTERVALS} intervals"
        raise ValidationFailed([Violation(table="demand", row=name, value=f"{num_intervals} intervals", rule=rule)])


def forecast_demand(
    rows: Sequence[Demand], at: datetime, settings: ForecastSettings
) -> tuple[tuple[Demand, ...], Mapping[str, tuple[str, ...]]]:
    """Demand to plan for, for the interval that starts at or after ``at``, with notes by model.

    History after ``at`` is not used. Raises StaleInput or ValidationFailed.
    """
    known = [row for row in rows if row.interval_start + timedelta(seconds=row.interval_s) <= at]
    planned, notes = [], {}
    missing = sorted({row.model for row in rows} - {row.model for row in known})
    if missing:
        message = f"no complete interval of {', '.join(missing)} before {at.isoformat()}"
        raise StaleInput(message)
    for (model, origin), (start, length, rates) in rate_series(known).items():
        total = int((at - start).total_seconds() // length)
        _require_span(model, total)
        padded = np.concatenate([rates, np.full(max(0, total - rates.size), np.nan)])
        found = forecast_rates(padded, settings, model)
        mine = [row for row in known if (row.model, row.origin or "") == (model, origin)]
        newest = max(mine, key=lambda row: row.interval_start)
        planned.append(
            replace(
                newest,
                requests_per_s=found.planning_requests_per_s,
                shape=recent_shape(mine),
                interval_start=start + timedelta(seconds=length * padded.size),
            )
        )
        if found.notes:
            notes[model] = found.notes
    return tuple(planned), notes


def recent_shape(rows: Sequence[Demand]) -> RequestShape:
    """Lengths of the newest ``LENGTH_WINDOW`` intervals: means weighted by requests, the largest p95."""
    newest = sorted(rows, key=lambda row: row.interval_start)[-LENGTH_WINDOW:]
    weights = np.array([row.requests_per_s * row.interval_s for row in newest])
    weights = weights if weights.sum() > 0 else np.ones(len(newest))
    return RequestShape(
        mean_prompt_tokens=float(np.average([row.shape.mean_prompt_tokens for row in newest], weights=weights)),
        p95_prompt_tokens=max(row.shape.p95_prompt_tokens for row in newest),
        mean_output_tokens=float(np.average([row.shape.mean_output_tokens for row in newest], weights=weights)),
        p95_output_tokens=max(row.shape.p95_output_tokens for row in newest),
    )


def trace_rates(offset_s: Rates, interval_s: float, duration_s: float | None = None) -> Rates:
    """Requests/s of each whole interval of a trace (offsets in seconds, shape (N,)); the cut-off last one is left out.

    ``duration_s``: of the whole trace, where these are the requests of one of its models; None: to the last one.
    Raises ValidationFailed for an interval that is not positive, longer than the trace, or far too short for it.
    """
    checks = Checks("trace")
    checks.positive(interval_s=interval_s)
    checks.raise_if_any()
    until = duration_s if duration_s is not None else float(offset_s.max(initial=0.0))
    whole = int(until // interval_s)
    checks.require(whole >= 2, "the trace must last two intervals", whole)
    checks.require(whole <= MAX_INTERVALS, f"a series must span at most {MAX_INTERVALS} intervals", whole)
    checks.raise_if_any()
    places = np.floor(offset_s / interval_s).astype(np.int64)
    return np.bincount(places, minlength=whole)[:whole] / interval_s
