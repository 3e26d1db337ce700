"""A day of demand per model from one-hour request traces: rates and length statistics of 5-minute intervals.

Owns the rule by which an hour's shape becomes a day. The traces themselves are given by the user and never kept.

Rule. (1) The hour's requests are counted in 12 equal bins between first and last request. (2) Bins are smoothed with
a centred mean over three (the code trace has minutes without any request and then hundreds), ring-wise, so that the
hour can be repeated. (3) The smoothed hour is repeated 24 times and multiplied by a daily curve
1 + 0.5·cos(2π·(h − 14)/24): peak at 14:00 UTC, trough at 02:00, three to one. The curve is an assumption; no public
trace of these models lasts a day. (4) The day is scaled so that its mean rate is the setup's rate. Length statistics
are those of the bin's own requests (mean, and p95 by linear interpolation); a bin with under 20 requests takes those
of the whole hour. A model whose lengths come from no trace at hand (BurstGPT) has the stated statistics in every
interval, and the daily curve alone for its rate.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.models import RequestShape
from coral_tasks.ingestion.trace_file import RequestTrace

INTERVAL_S: Final = 300
INTERVALS_PER_HOUR: Final = 12
INTERVALS_PER_DAY: Final = 288
PEAK_HOUR_UTC: Final = 14.0
DAILY_SWING: Final = 0.5
MIN_REQUESTS_FOR_SHAPE: Final = 20
COLUMNS: Final = (
    "model",
    "interval_of_day_s",
    "requests_per_s",
    "mean_prompt_tokens",
    "p95_prompt_tokens",
    "mean_output_tokens",
    "p95_output_tokens",
    "source",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDay:
    """One model's wish: mean rate, and a trace or stated lengths."""

    model: str
    mean_requests_per_s: float
    trace: RequestTrace | None
    stated_shape: RequestShape | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DayRow:
    """One 5-minute interval of a day, without a date."""

    model: str
    interval_of_day_s: int
    requests_per_s: float
    shape: RequestShape
    source: str


def daily_curve() -> NDArray[np.float64]:
    """Factor of each 5-minute interval of a day, mean 1, shape (288,)."""
    hours = np.arange(INTERVALS_PER_DAY) * INTERVAL_S / 3600
    return np.asarray(1 + DAILY_SWING * np.cos(2 * math.pi * (hours - PEAK_HOUR_UTC) / 24))


def hour_profile(trace: RequestTrace) -> NDArray[np.float64]:
    """Relative rate of the hour's 12 bins, smoothed, mean 1, shape (12,)."""
    counts = np.bincount(_bins(trace), minlength=INTERVALS_PER_HOUR).astype(float)
    smooth = (np.roll(counts, 1) + counts + np.roll(counts, -1)) / 3
    return np.asarray(smooth / smooth.mean())


def _bins(trace: RequestTrace) -> NDArray[np.int64]:
    """Bin of each request, 0 to 11."""
    bins = np.floor(trace.offset_s / trace.duration_s * INTERVALS_PER_HOUR).astype(np.int64)
    return np.minimum(bins, INTERVALS_PER_HOUR - 1)


def shape_of(prompt: NDArray[np.int64], output: NDArray[np.int64]) -> RequestShape:
    """Means and 95th percentiles (linear interpolation), in tokens."""
    return RequestShape(
        mean_prompt_tokens=float(prompt.mean()),
        p95_prompt_tokens=float(np.percentile(prompt, 95)),
        mean_output_tokens=float(output.mean()),
        p95_output_tokens=float(np.percentile(output, 95)),
    )


def hour_shapes(trace: RequestTrace) -> list[RequestShape]:
    """Lengths of each of the hour's 12 bins."""
    bins, whole = _bins(trace), shape_of(trace.prompt_tokens, trace.output_tokens)
    shapes = []
    for number in range(INTERVALS_PER_HOUR):
        mine = bins == number
        enough = mine.sum() >= MIN_REQUESTS_FOR_SHAPE
        shapes.append(shape_of(trace.prompt_tokens[mine], trace.output_tokens[mine]) if enough else whole)
    return shapes


def derive_day(wish: ModelDay) -> list[DayRow]:
    """288 intervals of one model (see the module's rule). Raises ValueError without trace and stated lengths."""
    if wish.trace is None and wish.stated_shape is None:
        message = f"{wish.model}: neither a trace nor stated lengths"
        raise ValueError(message)
    hour = np.ones(INTERVALS_PER_HOUR) if wish.trace is None else hour_profile(wish.trace)
    shapes = [wish.stated_shape] * INTERVALS_PER_HOUR if wish.trace is None else hour_shapes(wish.trace)
    day = np.tile(hour, 24) * daily_curve()
    rates = day / day.mean() * wish.mean_requests_per_s
    return [
        DayRow(
            model=wish.model,
            interval_of_day_s=number * INTERVAL_S,
            requests_per_s=round(float(rate), 4),
            shape=_rounded(shapes[number % INTERVALS_PER_HOUR]),
            source=wish.source,
        )
        for number, rate in enumerate(rates)
    ]


def _rounded(shape: RequestShape | None) -> RequestShape:
    if shape is None:
        message = "no lengths"
        raise ValueError(message)
    return RequestShape(
        mean_prompt_tokens=round(shape.mean_prompt_tokens, 1),
        p95_prompt_tokens=round(shape.p95_prompt_tokens, 1),
        mean_output_tokens=round(shape.mean_output_tokens, 1),
        p95_output_tokens=round(shape.p95_output_tokens, 1),
    )


def write_day(rows: Sequence[DayRow], header: Mapping[str, str]) -> str:
    """CSV text of a day, with ``header`` as comment lines."""
    out = io.StringIO(newline="")
    for name, value in header.items():
        out.write(f"# {name}: {value}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        s = row.shape
        lengths = (s.mean_prompt_tokens, s.p95_prompt_tokens, s.mean_output_tokens, s.p95_output_tokens)
        writer.writerow((row.model, row.interval_of_day_s, row.requests_per_s, *lengths, row.source))
    return out.getvalue()
