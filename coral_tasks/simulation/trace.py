"""Request traces: what arrives when, for which model and how long it is.

Owns the checks of a trace and the making of synthetic ones from a seed. Files are the caller's matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import ModelId
from coral_tasks.domain.validation import Checks

MAX_TOKENS: Final = 1_000_000
"""Longest prompt or answer that is believed; no served model has a longer context."""

MAX_ARRIVAL_S: Final = 1e8
"""Three years. Above it a time is no second from the start, but a date in seconds, milliseconds or worse."""

_SHOWN: Final = 10
_SIGMAS_TO_P95: Final = 1.6448536269514722


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestTrace:
    """Requests in the order of their arrival.

    ``arrival_s``: float64 seconds from the start, not falling. ``model``: index into ``models``. ``prompt_tokens``,
    ``output_tokens``: int64, 1 to MAX_TOKENS. Raises ValidationFailed with every broken rule, its first rows and
    their number; an empty trace is refused too.
    """

    models: tuple[ModelId, ...]
    arrival_s: NDArray[np.float64]
    model: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    def __post_init__(self) -> None:
        violations = _broken_rules(self)
        if violations:
            raise ValidationFailed(violations)

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """Span from time 0 to the last arrival."""
        return float(self.arrival_s[-1])

    def mean_lengths(self, model: ModelId) -> tuple[float, float]:
        """Mean prompt and output tokens of a model's requests; (0, 0) if it has none."""
        mine = self.model == self.models.index(model)
        if not mine.any():
            return 0.0, 0.0
        return float(self.prompt_tokens[mine].mean()), float(self.output_tokens[mine].mean())

    def num_requests(self, model: ModelId) -> int:
        """Requests of a model."""
        return int((self.model == self.models.index(model)).sum())


def _broken_rules(trace: RequestTrace) -> list[Violation]:
    sizes = {len(trace.arrival_s), len(trace.model), len(trace.prompt_tokens), len(trace.output_tokens)}
    if len(sizes) != 1:
        return [_violation("", sorted(sizes), "columns must have equal lengths")]
    if sizes == {0}:
        return [_violation("", "", "the trace is empty")]
    arrival = trace.arrival_s
    finite = np.isfinite(arrival) & (arrival >= 0)
    late = np.concatenate([[False], np.diff(arrival) < 0])
    found = _rows(~finite, arrival, "arrival_s must be finite and not negative")
    too_late = np.isfinite(arrival) & (arrival > MAX_ARRIVAL_S)
    found += _rows(too_late, arrival, f"arrival_s counts seconds from the start, at most {MAX_ARRIVAL_S:.0f}")
    found += _rows(late & finite, arrival, "arrival_s must not fall: the trace is out of order")
    found += _rows((trace.model < 0) | (trace.model >= len(trace.models)), trace.model, "unknown model number")
    for name in ("prompt_tokens", "output_tokens"):
        values = getattr(trace, name)
        found += _rows(values < 1, values, f"{name} must be at least 1")
        found += _rows(values > MAX_TOKENS, values, f"{name} must be at most {MAX_TOKENS}")
    return found


def _rows(broken: NDArray[np.bool_], values: NDArray[np.generic], rule: str) -> list[Violation]:
    rows = np.flatnonzero(broken)
    found = [_violation(f"request {row}", values[row].item(), rule) for row in rows[:_SHOWN]]
    if len(rows) > _SHOWN:
        found.append(_violation("", f"{len(rows)} requests in all", rule))
    return found


def _violation(row: str, value: object, rule: str) -> Violation:
    return Violation(table="trace", row=row, value=str(value), rule=rule)


def merge_traces(traces: Iterable[RequestTrace]) -> RequestTrace:
    """One trace out of several, by arrival; equal times keep the order of ``traces``. Names may repeat."""
    parts = list(traces)
    if not parts:
        raise ValidationFailed([_violation("", "", "there is no trace to merge")])
    names = tuple(dict.fromkeys(name for part in parts for name in part.models))
    number = {name: k for k, name in enumerate(names)}
    arrival = _joined([part.arrival_s for part in parts])
    order = np.argsort(arrival, kind="stable")
    codes = [np.array([number[name] for name in part.models], dtype=np.int64)[part.model] for part in parts]
    return RequestTrace(
        models=names,
        arrival_s=arrival[order],
        model=_joined(codes)[order],
        prompt_tokens=_joined([part.prompt_tokens for part in parts])[order],
        output_tokens=_joined([part.output_tokens for part in parts])[order],
    )


def _joined[T: np.generic](parts: Sequence[NDArray[T]]) -> NDArray[T]:
    return np.concatenate(parts)


def scale_rate(trace: RequestTrace, *, requests_per_s: float) -> RequestTrace:
    """The same requests, arrival times stretched so that their mean rate is ``requests_per_s`` (paper 6.1).

    Raises ValidationFailed for a rate that is not finite and above zero, or so small that times leave their range.
    """
    checks = Checks("trace")
    checks.positive(requests_per_s=requests_per_s)
    checks.raise_if_any()
    factor = len(trace) / requests_per_s / trace.duration_s if trace.duration_s > 0 else 1.0
    return _replaced(trace, trace.arrival_s * factor)


def repeat_until(trace: RequestTrace, *, duration_s: float) -> RequestTrace:
    """The trace cut at ``duration_s``, after being repeated as often as needed; mean gap between repetitions."""
    period = trace.duration_s * (len(trace) + 1) / len(trace) if len(trace) > 1 else max(trace.duration_s, 1.0)
    copies = int(np.ceil(duration_s / period)) if period > 0 else 1
    arrival = (np.arange(copies)[:, None] * period + trace.arrival_s[None, :]).ravel()
    keep = arrival < duration_s
    return RequestTrace(
        models=trace.models,
        arrival_s=arrival[keep],
        model=np.tile(trace.model, copies)[keep],
        prompt_tokens=np.tile(trace.prompt_tokens, copies)[keep],
        output_tokens=np.tile(trace.output_tokens, copies)[keep],
    )


def _replaced(trace: RequestTrace, arrival_s: NDArray[np.float64]) -> RequestTrace:
    return RequestTrace(
        models=trace.models,
        arrival_s=arrival_s,
        model=trace.model,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
    )


def poisson_trace(
    shapes: Mapping[ModelId, tuple[float, RequestShape]], *, duration_s: float, seed: int
) -> RequestTrace:
    """Poisson arrivals with log-normal lengths of the given mean and p95, for each model (requests/s, shape).

    A model of rate 0 gets no request. Lengths are rounded to at least one token.
    """
    parts = []
    for k, (model, (rate, shape)) in enumerate(sorted(shapes.items())):
        random = np.random.default_rng([seed, k])
        gaps = random.exponential(1 / rate, max(int(rate * duration_s * 1.2) + 50, 1)) if rate > 0 else np.zeros(0)
        arrival = np.cumsum(gaps)
        arrival = arrival[arrival < duration_s]
        if len(arrival):
            parts.append(_poisson_part(model, arrival, shape, random))
    if not parts:
        raise ValidationFailed([_violation("", "", "the trace is empty")])
    return merge_traces(parts)


def _poisson_part(
    model: ModelId, arrival: NDArray[np.float64], shape: RequestShape, random: np.random.Generator
) -> RequestTrace:
    count = len(arrival)
    return RequestTrace(
        models=(model,),
        arrival_s=arrival,
        model=np.zeros(count, dtype=np.int64),
        prompt_tokens=lognormal_lengths(shape.mean_prompt_tokens, shape.p95_prompt_tokens, count, random),
        output_tokens=lognormal_lengths(shape.mean_output_tokens, shape.p95_output_tokens, count, random),
    )


def lognormal_lengths(mean: float, p95: float, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Whole lengths of a log-normal with that mean and 95th percentile (the steeper of two solutions' smaller spread).

    With z = 1.645: p95 / mean = exp(z s - s²/2), so s = z - sqrt(z² - 2 ln(p95/mean)); a ratio at or above
    exp(z²/2) = 3.87, which no log-normal has, takes s = z.
    """
    ratio = float(np.log(max(p95 / mean, 1.0)))
    sigma = _SIGMAS_TO_P95 - float(np.sqrt(max(_SIGMAS_TO_P95**2 - 2 * ratio, 0.0)))
    values = random.lognormal(float(np.log(mean)) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(values), 1, MAX_TOKENS).astype(np.int64)
