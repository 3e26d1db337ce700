"""The shipped day of demand and the shipped availability of the demo setups. Owns reading them and giving them a date.

``data/demand_day_<setup>.csv`` is made by ``coral demand derive`` (rule in ``trace_demand``);
``data/availability_<setup>.csv`` states how many nodes the demo assumes, which is no cloud's figure.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from coral_tasks.domain.errors import StorageFault, UnknownName, ValidationFailed, Violation
from coral_tasks.domain.market import Demand, NodeAvailability
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import Market, ModelId, NodeConfigurationId, RegionId
from coral_tasks.ingestion.trace_demand import COLUMNS, INTERVAL_S, INTERVALS_PER_DAY, DayRow

DATA: Final = Path(__file__).parent / "data"


def read_demand_day(setup: str, folder: Path = DATA) -> tuple[DayRow, ...]:
    """The setup's day, by model and interval. Raises UnknownName, StorageFault or ValidationFailed."""
    path = _path("demand_day", setup, folder)
    rows, bad = [], []
    for number, cells in enumerate(_cells(path, COLUMNS), start=1):
        try:
            rows.append(_day_row(cells))
        except (ValueError, ValidationFailed) as error:
            bad.append(Violation(table=path.name, row=f"row {number}", value=str(cells), rule=str(error)))
    if bad:
        raise ValidationFailed(bad)
    return tuple(rows)


def _day_row(cells: dict[str, str]) -> DayRow:
    lengths = {name: float(cells[name]) for name in COLUMNS[3:7]}
    return DayRow(
        model=cells["model"],
        interval_of_day_s=int(cells["interval_of_day_s"]),
        requests_per_s=float(cells["requests_per_s"]),
        shape=RequestShape(**lengths),
        source=cells["source"],
    )


def demand_at(day: Sequence[DayRow], moment: datetime) -> tuple[Demand, ...]:
    """The interval that holds ``moment`` (with a zone), one row for each model."""
    start = interval_start(moment)
    return demand_history(day, start, num_intervals=1)


def demand_history(day: Sequence[DayRow], last: datetime, *, num_intervals: int) -> tuple[Demand, ...]:
    """``num_intervals`` intervals up to and including the one that holds ``last``, the day repeating."""
    by_place = {(row.model, row.interval_of_day_s): row for row in day}
    models = sorted({row.model for row in day})
    newest = interval_start(last)
    starts = [newest - timedelta(seconds=INTERVAL_S * back) for back in reversed(range(num_intervals))]
    return tuple(_dated(by_place[model, _second_of_day(start)], start) for start in starts for model in models)


def interval_start(moment: datetime) -> datetime:
    """Start (UTC) of the 5-minute interval that holds ``moment``."""
    seconds = int(moment.timestamp())
    return datetime.fromtimestamp(seconds - seconds % INTERVAL_S, UTC)


def _second_of_day(moment: datetime) -> int:
    return (moment.hour * 3600 + moment.minute * 60 + moment.second) % (INTERVALS_PER_DAY * INTERVAL_S)


def _dated(row: DayRow, start: datetime) -> Demand:
    return Demand(
        model=ModelId(row.model),
        requests_per_s=row.requests_per_s,
        shape=row.shape,
        interval_start=start,
        interval_s=float(INTERVAL_S),
    )


_AVAILABILITY: Final = ("region", "configuration", "market", "available_nodes", "source")


def read_demo_availability(setup: str, observed_at: datetime, folder: Path = DATA) -> tuple[NodeAvailability, ...]:
    """The setup's nodes as assumed by the demo. Raises UnknownName, StorageFault or ValidationFailed."""
    path = _path("availability", setup, folder)
    rows, bad = [], []
    for number, cells in enumerate(_cells(path, _AVAILABILITY), start=1):
        try:
            rows.append(_availability(cells, observed_at))
        except (ValueError, ValidationFailed) as error:
            bad.append(Violation(table=path.name, row=f"row {number}", value=str(cells), rule=str(error)))
    if bad:
        raise ValidationFailed(bad)
    return tuple(rows)


def _availability(cells: dict[str, str], observed_at: datetime) -> NodeAvailability:
    return NodeAvailability(
        region=RegionId(cells["region"]),
        configuration=NodeConfigurationId(cells["configuration"]),
        market=Market(cells["market"]),
        available_nodes=int(cells["available_nodes"]),
        observed_at=observed_at,
    )


def _path(kind: str, setup: str, folder: Path) -> Path:
    known = sorted(path.stem.removeprefix(f"{kind}_") for path in folder.glob(f"{kind}_*.csv"))
    if setup not in known:
        raise UnknownName(kind=f"setup with a shipped {kind}", name=setup, known=known)
    return folder / f"{kind}_{setup}.csv"


def _cells(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path} cannot be read: {error}"
        raise StorageFault(message) from error
    body = "".join(line for line in io.StringIO(text) if not line.startswith("#"))
    reader = csv.DictReader(io.StringIO(body, newline=""))
    if reader.fieldnames is None or list(reader.fieldnames) != list(columns):
        rule = f"columns must be {', '.join(columns)}"
        raise ValidationFailed([Violation(table=path.name, row="row 0", value=str(reader.fieldnames), rule=rule)])
    return list(reader)
