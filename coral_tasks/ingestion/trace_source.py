"""Demand from a request log that still grows: trace files (``trace_logs``) that a gateway appends to and rotates.

Owns which intervals the log covers and what a model without requests in one of them counts as. Intervals start at whole
multiples of their length since 1970. One counts if the log begins no later than its start, and holds a request of any
model at or after its end: the log was written then. What lies after the last such interval is unknown: it has no row.
In an interval that counts, a model without requests has a row of 0 requests/s, with the lengths of its latest interval
with requests, if it had one within ``quiet_after_s`` before the interval; else it has no row, for the gate to miss it.
An interval that touches a hole between two files is unknown too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import SourceFault, StorageFault, ValidationFailed, Violation
from coral_tasks.domain.market import Demand
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import ModelId
from coral_tasks.ingestion.batch import SourceBatch, batch_of
from coral_tasks.ingestion.rows import demand_table
from coral_tasks.ingestion.trace_demand import shape_of
from coral_tasks.ingestion.trace_file import first_told
from coral_tasks.ingestion.trace_logs import RequestLogs, Wanted, read_logs, utc
from data_contracts.files import shown_path

QUIET_AFTER_S: Final = 3600.0
"""A model unheard of for longer is unknown: an hour, since a model that is on offer and used at all is asked for
oftener, and one that was taken off the gateway should not stay at zero unnoticed for a day."""

MAX_STEP_BACK_S: Final = 900.0
"""Rows may stand in the order in which requests ended; longer requests than this need ``settle_s``."""


class _Window(NamedTuple):
    """Numbers of the intervals that count, in order, and of the one after the last that could.

    Interval k starts at k times its length. None is earlier than the oldest interval asked for.
    """

    numbers: tuple[int, ...]
    end: int


class _Found(NamedTuple):
    """A model's row of one interval, if it has one, and what is to be said about it."""

    row: Demand | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """One model's requests in time order."""

    model: ModelId
    at_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    interval_s: float
    shapes: dict[int, RequestShape | None] = field(default_factory=dict)

    def count(self, number: int) -> int:
        """Requests in an interval."""
        first, end = self._place(number)
        return end - first

    def last_before(self, at_s: float) -> float:
        """Time of the last request before a moment; minus infinity if there is none."""
        place = int(np.searchsorted(self.at_s, at_s)) - 1
        return float(self.at_s[place]) if place >= 0 else -math.inf

    def lengths(self, number: int) -> RequestShape | None:
        """Lengths of the latest interval with requests up to this one, passing over those of under a token."""
        while (before := self.last_before((number + 1) * self.interval_s)) > -math.inf:
            number = int(before // self.interval_s)
            if self.has_lengths(number):
                return self.shapes[number]
            number -= 1
        return None

    def has_lengths(self, number: int) -> bool:
        """Whether an interval's own requests have lengths of at least a token."""
        if number not in self.shapes:
            self.shapes[number] = self._shape(number)
        return self.shapes[number] is not None

    def _place(self, number: int) -> tuple[int, int]:
        bounds = np.array([number, number + 1]) * self.interval_s
        first, end = np.searchsorted(self.at_s, bounds)
        return int(first), int(end)

    def _shape(self, number: int) -> RequestShape | None:
        """None where requests failed before their first token: a mean or p95 is under one token."""
        first, end = self._place(number)
        prompt, output = self.prompt_tokens[first:end], self.output_tokens[first:end]
        try:
            shape = shape_of(prompt, output) if len(prompt) else None
        except ValidationFailed:
            # a mean or p95 of zero is no length at all
            return None
        return shape if shape is not None and min(astuple(shape)) >= 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSource:
    """Demand of the last ``num_intervals`` whole intervals of one log.

    ``path``: its file, a folder of its files, or a pattern that names them (see ``trace_logs``).
    ``model``: whose requests they are, where the log has no column for it. ``model_names``: other names → model id; a
    name that is not there goes through as it is, for the gate to refuse. ``start``: see ``read_log``. ``settle_s``: how
    long after an interval's end a request must lie for the interval to count: the longest time from a request to its
    row. ``tolerance_s``: how far ahead of the clock a request may be.
    """

    path: Path
    model: str = ""
    model_names: Mapping[str, ModelId] = field(default_factory=dict)
    start: datetime | None = None
    interval_s: float = 300.0
    num_intervals: int = 1
    quiet_after_s: float = QUIET_AFTER_S
    settle_s: float = 0.0
    tolerance_s: float = 60.0

    def __call__(self, now: datetime) -> SourceBatch:
        """Read and count. Raises SourceFault (not to be read, no whole interval), ValidationFailed (bad rows)."""
        log = self._read(now)
        self._require_past(log, now)
        last = float(log.at_s.max())
        window = self._window(log, min(last - self.settle_s, now.timestamp()))
        self._require_forward(log, window)
        _refuse(log.twice(window.numbers[0] * self.interval_s))
        rows, notes = self._rows(log, window)
        end = utc(window.end * self.interval_s)
        notes.append(
            f"nothing is known from {end.isoformat()} on: the log's last request is of {utc(last).isoformat()}"
        )
        return batch_of(
            "demand",
            demand_table(rows),
            source=f"request log {shown_path(self.path)}",
            observed_at=min(utc(last), now),
            expected=self.num_intervals,
            received=len(window.numbers),
            notes=(*notes, *log.notes),
        )

    def _read(self, now: datetime) -> RequestLogs:
        wanted = Wanted(
            now_s=now.timestamp(),
            span_s=self.settle_s + (self.num_intervals + 1) * self.interval_s + self.quiet_after_s,
            interval_s=self.interval_s,
            model=self.model,
            model_names=self.model_names,
            start=self.start,
        )
        try:
            log = read_logs(self.path, wanted)
        except StorageFault as fault:
            self._fail(str(fault))
        if not len(log.at_s):
            self._fail(f"{shown_path(self.path)} holds no request; demand is unknown, not zero")
        return log

    def _require_past(self, log: RequestLogs, now: datetime) -> None:
        """No request after both the clock and its file's last change: a log is written after the fact.

        Requests between the two came since the run began.
        """
        limits = np.maximum(now.timestamp(), log.modified_s) + self.tolerance_s
        rule = "the request lies in the future: the clock of what writes the log is ahead"
        found = np.flatnonzero(log.at_s > limits)
        _refuse([log.violation(int(k), f"{log.at_s[k] - now.timestamp():.0f} s ahead", rule) for k in found])

    def _window(self, log: RequestLogs, known_until: float) -> _Window:
        begun = math.ceil(float(log.at_s.min()) / self.interval_s)
        end = math.floor(known_until / self.interval_s)
        numbers = [k for k in range(max(begun, end - self.num_intervals), end) if not self._touches(log.holes, k)]
        if not numbers:
            self._fail(
                f"{shown_path(self.path)} covers no whole interval of {self.interval_s:g} s: one counts once a later"
                f" request stands in the log; demand is unknown, not zero{''.join(f'; {one}' for one in log.notes)}"
            )
        return _Window(numbers=tuple(numbers), end=end)

    def _touches(self, holes: Iterable[tuple[float, float]], number: int) -> bool:
        start, end = number * self.interval_s, (number + 1) * self.interval_s
        return any(start < begin and gone < end for gone, begin in holes)

    def _require_forward(self, log: RequestLogs, window: _Window) -> None:
        """No step back by more than requests take, if a request on its early side could count."""
        latest = np.maximum.accumulate(log.at_s)
        oldest = window.numbers[0] * self.interval_s - self.quiet_after_s
        most = max(MAX_STEP_BACK_S, self.settle_s)
        stepped = (latest - log.at_s > most) & (latest >= oldest)
        begins = np.flatnonzero(stepped & ~np.concatenate([[False], stepped[:-1]]))
        _refuse(
            [log.violation(int(k), f"{latest[k] - log.at_s[k]:.0f} s back", _step_rule(log, int(k))) for k in begins]
        )

    def _rows(self, log: RequestLogs, window: _Window) -> tuple[list[Demand], list[str]]:
        rows: list[Demand] = []
        notes: list[str] = []
        for series in self._series(log):
            found = {number: self._row(series, number) for number in window.numbers}
            rows += [one.row for one in found.values() if one.row is not None]
            # one note of each kind for a model, with the newest interval it holds for
            said = {one.note: number for number, one in found.items() if one.note}
            notes += [
                f"{series.model}: {text} (newest such interval: {utc(number * self.interval_s).isoformat()})"
                for text, number in sorted(said.items())
            ]
        return rows, notes

    def _series(self, log: RequestLogs) -> Iterator[_Series]:
        order = np.argsort(log.at_s, kind="stable")
        for name in sorted(set(log.models)):
            mine = order[log.models[order] == name]
            yield _Series(
                model=ModelId(name),
                at_s=log.at_s[mine],
                prompt_tokens=log.prompt_tokens[mine],
                output_tokens=log.output_tokens[mine],
                interval_s=self.interval_s,
            )

    def _row(self, series: _Series, number: int) -> _Found:
        """The model's row of an interval: its requests, zero, or none if it is not known to be on offer."""
        start, count = number * self.interval_s, series.count(number)
        silent_s = start - series.last_before(start)
        if not count and silent_s > self.quiet_after_s:
            seen = math.isfinite(silent_s)
            return _Found(None, f"no request for more than {self.quiet_after_s:g} s: no row" if seen else "")
        shape = series.lengths(number)
        if shape is None:
            return _Found(None, "lengths of under a token and no others known: no row")
        row = Demand(
            model=series.model,
            requests_per_s=count / self.interval_s,
            shape=shape,
            interval_start=utc(start),
            interval_s=self.interval_s,
        )
        if not count:
            return _Found(row, "no request: 0 requests/s with the lengths of its latest interval with requests")
        return _Found(
            row, "" if series.has_lengths(number) else "lengths of under a token: those of an earlier interval"
        )

    def _fail(self, reason: str) -> NoReturn:
        message = f"demand: {reason}"
        raise SourceFault(message)


def _step_rule(log: RequestLogs, position: int) -> str:
    """What is wrong with a request that lies long before one above it, in its own file or in one before."""
    above = int(np.argmax(log.at_s[:position]))
    if log.file[above] == log.file[position]:
        return "stands after a request of a much later time: the clock stepped back, and times are not to be trusted"
    name = log.names[log.file[above]]
    return (
        f"lies long before the end of {name}, a file that begins earlier: files of one log follow each other; these are"
        " of two writers, or copies of each other, or a clock stepped back"
    )


def _refuse(violations: list[Violation]) -> None:
    if violations:
        raise ValidationFailed(first_told(violations))
