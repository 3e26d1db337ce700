"""What a contract is: columns with units and meaning, key, rules, version, examples, limits and the gate's context.

Owns the vocabulary that every table's module is written in. Must not read files, must not import Great
Expectations (that costs seconds; only ``suite.py`` does) and knows no single table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

import pandas as pd
import pyarrow as pa

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
"""Type of every time column: microseconds, always UTC."""

LARGEST_FLOAT: Final = 1.7976931348623157e308

Expectation = tuple[str, dict[str, Any]]
"""Great Expectations' type name and its arguments."""


class Severity(StrEnum):
    """What a broken rule does to the batch: keep it out, or let it in with a warning."""

    CRITICAL = "critical"
    WARNING = "warning"


class Stage(StrEnum):
    """Order of the rules. A cell that broke an earlier stage is not reported again by a later one."""

    CELL = "cell"
    VALUE = "value"
    MEANING = "meaning"


STAGE_ORDER: Final = {Stage.CELL: 0, Stage.VALUE: 1, Stage.MEANING: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. ``unit`` is "" for names and counts without a unit; both go into the Arrow field's metadata.

    ``words``: the text is free; any other text column holds names (see ``rules.NAME_PATTERN``). ``blank``: an empty
    text is one (CSV cannot tell it from an absent one).
    """

    name: str
    type: pa.DataType
    meaning: str
    unit: str = ""
    nullable: bool = False
    words: bool = False
    blank: bool = False

    def arrow_field(self) -> pa.Field:
        """The Arrow field with unit and meaning as metadata."""
        metadata = {"unit": self.unit, "meaning": self.meaning}
        return pa.field(self.name, self.type, nullable=self.nullable, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """Numbers that the rules compare with; all can be set by the user. Times in seconds, money in USD/h.

    ``max_jump``: largest factor, up or down, between a value and its predecessor. ``max_rows_factor``: largest factor
    between the row count and that of the batch before. Floors keep small numbers from counting as jumps.
    """

    demand_max_age_s: float = 1800.0
    demand_horizon_s: float = 900.0
    prices_max_age_s: float = 86_400.0
    availability_max_age_s: float = 21_600.0
    running_max_age_s: float = 600.0
    future_tolerance_s: float = 60.0
    max_requests_per_s: float = 100_000.0
    max_tokens: float = 10_000_000.0
    max_interval_s: float = 86_400.0
    min_interval_s: float = 1.0
    max_price_usd_per_hour: float = 1000.0
    max_nodes: float = 100_000.0
    max_jump: float = 10.0
    jump_floor_requests_per_s: float = 1.0
    jump_floor_nodes: float = 10.0
    max_rows_factor: float = 5.0
    rows_floor: float = 100.0
    max_rows: float = 5_000_000.0
    spot_tolerance: float = 0.001
    outage_floor_requests_per_s: float = 0.1

    def __post_init__(self) -> None:
        bad = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if not _is_limit(getattr(self, f.name))]
        if bad:
            message = f"gate limits must be finite numbers, not negative: {', '.join(bad)}"
            raise ValueError(message)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> GateLimits:
        """Defaults with ``values`` laid over. Raises ValueError for a name that is no limit or a value that is none."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            message = f"unknown gate limits: {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            raise ValueError(message)
        return replace(cls(), **values)


def _is_limit(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST_FLOAT


@dataclass(frozen=True, slots=True, kw_only=True)
class GateContext:
    """What the gate knows besides the batch.

    ``now``: time of the check, with a zone. ``known``: names by kind ("model", "region", "configuration",
    "template"); a kind that is absent is not checked and the report says so. ``max_context_tokens``: by model.
    ``previous``: the batch of this table accepted last; ``reference``: what values to expect when there is none.
    """

    now: datetime
    known: Mapping[str, frozenset[str]] = field(default_factory=dict)
    max_context_tokens: Mapping[str, int] = field(default_factory=dict)
    previous: pa.Table | None = None
    reference: pa.Table | None = None
    limits: GateLimits = field(default_factory=GateLimits)

    def __post_init__(self) -> None:
        if self.now.tzinfo is None:
            message = "the gate's clock needs a time zone"
            raise ValueError(message)

    @property
    def now_utc(self) -> pd.Timestamp:
        """``now`` as a pandas timestamp in UTC."""
        return pd.Timestamp(self.now.astimezone(UTC))

    def before(self) -> pd.DataFrame | None:
        """Previous batch as a frame, oldest interval first, else the reference, else None."""
        table = self.previous if self.previous is not None else self.reference
        return None if table is None else _oldest_first(table.to_pandas())

    def expected(self) -> pd.DataFrame | None:
        """Reference and, after it, the previous batch: the last row of a key is what its next value is held against.

        So a key that the previous batch lacked is still held against the reference.
        """
        frames = [_oldest_first(one.to_pandas()) for one in (self.reference, self.previous) if one is not None]
        filled = [frame for frame in frames if not frame.empty] or frames[-1:]
        return pd.concat(filled, ignore_index=True) if filled else None


def _oldest_first(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values("interval_start", kind="stable") if "interval_start" in frame.columns else frame


Derive = Callable[[pd.DataFrame, GateContext], pd.Series]
Expect = Callable[[str, GateContext], Expectation | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """How to break one rule and no other: cells of the valid example's rows, and what the context must be.

    ``cells``: row number from 0 → column → value; a callable value gets the context. ``rows``: rows added.
    ``context`` changes the context that the example is judged in.
    """

    cells: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    repeat_row: int | None = None
    drop_all: bool = False
    context: Callable[[GateContext, pa.Table], GateContext] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of a table.

    ``columns``: what the rule speaks about (their values are shown); empty for a rule on the whole table.
    ``derive``: makes the helper column that is judged (null = the rule does not concern that row); None: the only
    column itself. ``expect``: the expectation on the judged column, given its name and the context; None when the
    context lacks what the rule needs. ``releasable``: a person may let the batch in all the same.
    """

    name: str
    text: str
    columns: tuple[str, ...]
    expect: Expect
    broken: Broken | None
    derive: Derive | None = None
    severity: Severity = Severity.CRITICAL
    stage: Stage = Stage.MEANING
    releasable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One table that crosses a process.

    ``version``: "major.minor". A minor step adds nullable columns or loosens a rule: older readers ignore the column,
    newer readers fill it with null. Anything else is a major step, and a reader refuses a foreign major version.
    ``example``: rows of a valid batch at a given time. ``empty_ok``: no rows is an answer, not a fault.
    """

    name: str
    version: str
    meaning: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    rules: tuple[Rule, ...]
    example: Callable[[datetime], Sequence[Mapping[str, Any]]]
    empty_ok: bool = False

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema; contract name and version are its metadata."""
        metadata = {"coral.contract": self.name, "coral.version": self.version}
        return pa.schema([column.arrow_field() for column in self.columns], metadata=metadata)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names in schema order."""
        return tuple(column.name for column in self.columns)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Arrow table of ``rows`` in this contract's schema; absent keys are null. Raises pa.ArrowInvalid."""
        columns = {column.name: [row.get(column.name) for row in rows] for column in self.columns}
        return pa.Table.from_pydict(columns, schema=self.schema)

    def example_table(self, now: datetime) -> pa.Table:
        """The valid example at ``now``."""
        return self.table(self.example(now))
