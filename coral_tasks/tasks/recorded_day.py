"""A recorded day from files for the back-test: demand by interval, prices and availability as they stood at a moment.

Owns how records become what a planner would have known; judges no policy. Files are in the columns of their contracts;
prices and availability hold a row for each change, and count from their ``observed_at`` on.

API::

    read_demand_record(path, interval_s=300, models=[…]) -> demand rows of each interval, in order
    read_prices(path).at(moment) -> the newest row of each pool up to then; read_availability(path) alike
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.domain.market import Demand, NodeAvailability, NodePrice
from coral_tasks.tasks.planning import read_table

type _Pool = tuple[str, str, str]


def read_demand_record(path: Path, *, interval_s: float, models: Sequence[str]) -> tuple[tuple[Demand, ...], ...]:
    """Demand of every interval of a record, first to last, each with a row for every model that the record names.

    Raises ValidationFailed, all at once: intervals of another length, gaps, models that are not in ``models``, and
    rows split by origin, which policies would have to plan apart.
    """
    from coral_tasks.ingestion.rows import demand_rows

    rows = demand_rows(read_table("demand", str(path)))
    starts = sorted({row.interval_start for row in rows})
    problems = [*_row_problems(rows, interval_s, models), *_gaps(rows, starts, interval_s)]
    if problems:
        raise ValidationFailed(problems)
    return tuple(tuple(row for row in rows if row.interval_start == start) for start in starts)


def _row_problems(rows: Sequence[Demand], interval_s: float, models: Sequence[str]) -> Iterable[Violation]:
    for row in rows:
        where = f"{row.model} {row.interval_start.isoformat()}"
        if row.interval_s != interval_s:
            rule = f"a day is replayed in intervals of {interval_s:g} s"
            yield Violation(table="demand", row=where, value=f"{row.interval_s:g}", rule=rule)
        if row.origin is not None:
            rule = "the back-test takes one row for a model and interval, without origin"
            yield Violation(table="demand", row=where, value=str(row.origin), rule=rule)
    for model in sorted({str(row.model) for row in rows} - set(models)):
        rule = f"unknown model; the setup has: {', '.join(sorted(models))}"
        yield Violation(table="demand", row=model, value=model, rule=rule)


def _gaps(rows: Sequence[Demand], starts: Sequence[datetime], interval_s: float) -> Iterable[Violation]:
    """A missing interval, of all models or of one, is not zero demand."""
    if not starts:
        yield Violation(table="demand", row="", value="", rule="a record needs at least one interval")
        return
    there = {(row.model, row.interval_start) for row in rows}
    count = round((starts[-1] - starts[0]).total_seconds() / interval_s) + 1
    due = [starts[0] + timedelta(seconds=interval_s * k) for k in range(count)]
    rule = "the record has a gap here: missing is not zero"
    for model in sorted({row.model for row in rows}):
        for start in due:
            if (model, start) not in there:
                yield Violation(table="demand", row=f"{model} {start.isoformat()}", value="", rule=rule)
    for start in sorted(set(starts) - set(due)):
        rule = f"intervals must follow each other by {interval_s:g} s"
        yield Violation(table="demand", row=start.isoformat(), value="", rule=rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRecord[Row: (NodePrice, NodeAvailability)]:
    """Rows of each pool (region, configuration, market) in order of time."""

    name: str
    moments: dict[_Pool, list[datetime]]
    rows: dict[_Pool, list[Row]]

    def at(self, moment: datetime) -> tuple[Row, ...]:
        """The newest row of every pool up to a moment; a pool that was not yet seen has none.

        Raises ValidationFailed if no pool was seen by then: nothing could be planned on.
        """
        found = []
        for pool, moments in sorted(self.moments.items()):
            number = bisect_right(moments, moment)
            if number:
                found.append(self.rows[pool][number - 1])
        if not found:
            rule = "the record begins later than the demand"
            raise ValidationFailed([Violation(table=self.name, row=moment.isoformat(), value="", rule=rule)])
        return tuple(found)


def read_prices(path: Path) -> PoolRecord[NodePrice]:
    """A record of prices. Raises ValidationFailed."""
    from coral_tasks.ingestion.rows import price_rows

    return _record("prices", price_rows(read_table("prices", str(path), record=True)))


def read_availability(path: Path) -> PoolRecord[NodeAvailability]:
    """A record of availability. Raises ValidationFailed."""
    from coral_tasks.ingestion.rows import availability_rows

    return _record("availability", availability_rows(read_table("availability", str(path), record=True)))


def _record[Row: (NodePrice, NodeAvailability)](name: str, rows: Sequence[Row]) -> PoolRecord[Row]:
    by_pool: dict[_Pool, list[Row]] = {}
    for row in sorted(rows, key=lambda one: one.observed_at):
        by_pool.setdefault((row.region, row.configuration, row.market.value), []).append(row)
    moments = {pool: [row.observed_at for row in found] for pool, found in by_pool.items()}
    twice = [
        Violation(table=name, row=" ".join(pool), value=at.isoformat(), rule="two rows of one pool at one moment")
        for pool, times in moments.items()
        for at, after in pairwise(times)
        if at == after
    ]
    if twice:
        raise ValidationFailed(twice)
    return PoolRecord(name=name, moments=moments, rows=by_pool)
