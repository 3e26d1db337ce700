"""Building blocks for rules: ranges, known names, freshness, jumps, uniqueness. Owns no single table's rules.

Each block returns a ``Rule`` whose expectation is a Great Expectations type name with arguments. Great Expectations
passes over nulls, so every column that may not be null has a rule of its own for that, and every range has both ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from data_contracts.contract import (
    LARGEST_FLOAT,
    Broken,
    Column,
    Contract,
    Derive,
    Expectation,
    GateContext,
    Rule,
    Severity,
    Stage,
)

STAND_INS: Final = (
    *("nan", "-nan", "null", "\\n", "none", "nil", "n/a", "na", "undefined", "unknown", "missing", "-", "--", "?", "."),
    *('""', "''", '"', "'"),
)
"""What people and programs write where a value is missing; in any case, and after a # too (a spreadsheet's #N/A)."""

_STAND_IN: Final = "|".join(re.escape(word) for word in STAND_INS)
NAME_PATTERN: Final = rf"\A(?!(?i:#?(?:{_STAND_IN})|#[a-z0-9/]+[!?])\Z)[!-~]{{1,500}}\Z"
"""A name is 1 to 500 printable ASCII characters without blanks: two names that look alike are the same name."""

_NAME_TEXT: Final = "must be a name: printable ASCII without blanks, and no stand-in for a missing value"

EARLIEST: Final = pd.Timestamp("2020-01-01", tz="UTC")
"""Older times are counts in another unit, or a clock that was never set."""

Bound = float | Callable[[GateContext], float]


def rules_of(contract: Contract) -> tuple[Rule, ...]:
    """Every rule of a table: what follows from its columns and key, then its own."""
    return (*standard_rules(contract), *contract.rules)


def timeless_rules(contract: Contract) -> tuple[Rule, ...]:
    """Rules that hold at any clock and that no judgement may overrule: for files that a person plans on by hand."""
    return tuple(rule for rule in rules_of(contract) if not (rule.releasable or rule.name.endswith("_not_future")))


def standard_rules(contract: Contract) -> tuple[Rule, ...]:
    """Row count, presence, finiteness, names, times and key: what follows from the columns alone."""
    rules = [_row_count(contract), _row_jump(contract)]
    rules += [_present(column) for column in contract.columns if not (column.nullable or column.blank)]
    rules += [_finite(column) for column in contract.columns if pa.types.is_floating(column.type)]
    rules += [_name(column) for column in contract.columns if _holds_names(contract, column)]
    rules += [_dated(column) for column in contract.columns if pa.types.is_timestamp(column.type)]
    rules.append(_unique_key(contract))
    alike = [column.name for column in contract.columns if column.name in contract.key and _is_text(column)]
    return (*rules, _names_alike(alike))


def between(
    column: str,
    minimum: Bound,
    maximum: Bound,
    text: str,
    *,
    broken: Any,
    strict_minimum: bool = False,
    **options: Any,
) -> Rule:
    """``column`` within [minimum, maximum]; bounds are numbers or functions of the context (limits)."""

    def expect(name: str, context: GateContext) -> Expectation:
        return _range(name, _bound(minimum, context), _bound(maximum, context), strict_minimum=strict_minimum)

    settings: dict[str, Any] = {"name": f"{column}_range", "stage": Stage.VALUE, **options}
    return Rule(text=text, columns=(column,), expect=expect, broken=Broken(cells={0: {column: broken}}), **settings)


def one_of(column: str, choices: Sequence[str], *, broken: str = "neither") -> Rule:
    """``column`` is one of fixed words."""
    return Rule(
        name=f"{column}_choice",
        text=f"{column} must be one of {', '.join(choices)}",
        columns=(column,),
        expect=lambda name, _: ("expect_column_values_to_be_in_set", {"column": name, "value_set": list(choices)}),
        broken=Broken(cells={0: {column: broken}}),
        stage=Stage.VALUE,
    )


def known(column: str, kind: str, *, severity: Severity = Severity.CRITICAL) -> Rule:
    """``column`` names something the catalogue or library holds (``context.known[kind]``)."""

    def expect(name: str, context: GateContext) -> Expectation | None:
        names = context.known.get(kind)
        if names is None:
            return None
        return ("expect_column_values_to_be_in_set", {"column": name, "value_set": sorted(names)})

    return Rule(
        name=f"{column}_known",
        text=f"unknown {kind}",
        columns=(column,),
        expect=expect,
        broken=Broken(cells={0: {column: f"no-such-{kind}"}}),
        severity=severity,
    )


def not_future(column: str, horizon: Callable[[GateContext], float], *, text: str = "") -> Rule:
    """``column`` at most ``horizon`` seconds after now."""

    def expect(name: str, context: GateContext) -> Expectation:
        return _range(name, None, horizon(context))

    return Rule(
        name=f"{column}_not_future",
        text=text or f"{column} lies in the future",
        columns=(column,),
        derive=lambda frame, context: seconds(frame[column] - context.now_utc),
        expect=expect,
        broken=Broken(cells={0: {column: lambda context: context.now + timedelta(days=2)}}),
    )


def fresh(column: str, limit: Callable[[GateContext], float], *, by: Sequence[str] = ()) -> Rule:
    """The newest ``column`` (of each ``by``) at most ``limit`` seconds old; a person may release the batch."""

    def derive(frame: pd.DataFrame, context: GateContext) -> pd.Series:
        newest = frame.groupby(list(by), dropna=False)[column].transform("max") if by else frame[column]
        age = seconds(context.now_utc - newest)
        return age.where(frame[column] == newest)

    def cells(context: GateContext) -> Any:
        return context.now - timedelta(days=30)

    return Rule(
        name=f"{column}_fresh",
        text=f"{column} is stale" + (f": the newest row of its {' and '.join(by)} is too old" if by else ""),
        columns=(column,),
        derive=derive,
        expect=lambda name, context: _range(name, None, limit(context)),
        broken=Broken(cells={0: {column: cells}}),
        releasable=True,
    )


def advancing(column: str) -> Rule:
    """The newest ``column`` is not older than that of the batch accepted before (a clock or a source stepped back)."""

    def derive(frame: pd.DataFrame, context: GateContext) -> pd.Series:
        if context.previous is None:
            return pd.Series(np.nan, index=frame.index)
        before = pd.Series(context.previous.column(column).to_pandas()).max()
        newest = frame[column].max()
        return seconds(frame[column] - before).where(frame[column] == newest)

    def later(context: GateContext, table: pa.Table) -> GateContext:
        return _with_previous(context, _shifted(table, column, timedelta(seconds=30)))

    return Rule(
        name=f"{column}_advances",
        text=f"{column} is older than in the batch accepted before: the source or its clock stepped back",
        columns=(column,),
        derive=derive,
        expect=lambda name, context: None if context.previous is None else _range(name, 0.0, None),
        broken=Broken(context=later),
        releasable=True,
    )


def no_jump(
    column: str, by: Sequence[str], *, broken: float, floor: Bound = 0.0, severity: Severity = Severity.CRITICAL
) -> Rule:
    """``column`` within ``limits.max_jump`` times its predecessor (or the reference), up and down.

    Predecessor: the newest earlier row with the same ``by``. Values below ``floor`` count as the floor.
    """

    def derive(frame: pd.DataFrame, context: GateContext) -> pd.Series:
        return jump_factor(frame, context, column, by, _bound(floor, context))

    def expect(name: str, context: GateContext) -> Expectation | None:
        return None if context.before() is None else _range(name, None, context.limits.max_jump)

    return Rule(
        name=f"{column}_jump",
        text=f"{column} jumped against the batch before: wrong unit?",
        columns=(column,),
        derive=derive,
        expect=expect,
        broken=Broken(cells={0: {column: broken}}, context=_with_previous),
        severity=severity,
        releasable=True,
    )


def jump_factor(frame: pd.DataFrame, context: GateContext, column: str, by: Sequence[str], floor: float) -> pd.Series:
    """Factor ≥ 1 between each row and its predecessor's value; NaN where there is none."""
    before = context.expected()
    if before is None or before.empty or frame.empty:
        return pd.Series(np.nan, index=frame.index)
    keys = list(by)
    last = before.groupby(keys, dropna=False)[column].last().rename("_before").reset_index()
    old = frame[keys].merge(last, on=keys, how="left")["_before"].to_numpy(dtype=float)
    lowest = max(floor, 1e-12)
    now_value = np.maximum(frame[column].to_numpy(dtype=float), lowest)
    old = np.maximum(old, lowest)
    return pd.Series(np.maximum(now_value / old, old / now_value), index=frame.index)


def seconds(span: pd.Series) -> pd.Series:
    """Time spans as seconds."""
    return pd.Series(span.dt.total_seconds(), index=span.index)


def derived(
    name: str,
    text: str,
    columns: Sequence[str],
    derive: Derive,
    *,
    minimum: Bound | None = None,
    maximum: Bound | None = None,
    broken: Broken,
    **options: Any,
) -> Rule:
    """A helper column within [minimum, maximum]; rows where it is null are not concerned."""

    def expect(judged: str, context: GateContext) -> Expectation:
        low = None if minimum is None else _bound(minimum, context)
        high = None if maximum is None else _bound(maximum, context)
        return _range(judged, low, high)

    return Rule(name=name, text=text, columns=tuple(columns), derive=derive, expect=expect, broken=broken, **options)


def _row_count(contract: Contract) -> Rule:
    low = 0 if contract.empty_ok else 1

    def expect(_: str, context: GateContext) -> Expectation:
        arguments = {"min_value": low, "max_value": int(context.limits.max_rows)}
        return ("expect_table_row_count_to_be_between", arguments)

    text = "the table has too many rows" if contract.empty_ok else "the table must have rows: missing is not zero"
    broken = None if contract.empty_ok else Broken(drop_all=True)
    return Rule(name="row_count", text=text, columns=(), expect=expect, broken=broken)


def _row_jump(contract: Contract) -> Rule:
    """Refuses, except where no rows are an answer: such a table fills up too, as when the first agents come."""

    def expect(_: str, context: GateContext) -> Expectation | None:
        if context.previous is None:
            return None
        most = max(context.limits.rows_floor, context.limits.max_rows_factor * context.previous.num_rows)
        return ("expect_table_row_count_to_be_between", {"min_value": 0, "max_value": int(most)})

    def tiny(context: GateContext, table: pa.Table) -> GateContext:
        limits = replace(context.limits, rows_floor=0.0)
        return replace(context, limits=limits, previous=table.slice(0, 0))

    return Rule(
        name="row_count_jump",
        text="many times the rows of the batch before",
        columns=(),
        expect=expect,
        broken=Broken(context=tiny),
        releasable=not contract.empty_ok,
        severity=Severity.WARNING if contract.empty_ok else Severity.CRITICAL,
    )


def _present(column: Column) -> Rule:
    return Rule(
        name=f"{column.name}_present",
        text=f"{column.name} must be present: not empty, not NaN",
        columns=(column.name,),
        expect=lambda name, _: ("expect_column_values_to_not_be_null", {"column": name}),
        broken=Broken(cells={0: {column.name: None}}),
        stage=Stage.CELL,
    )


def _finite(column: Column) -> Rule:
    return Rule(
        name=f"{column.name}_finite",
        text=f"{column.name} must be finite",
        columns=(column.name,),
        expect=lambda name, _: _range(name, -LARGEST_FLOAT, LARGEST_FLOAT),
        broken=Broken(cells={0: {column.name: float("inf")}}),
        stage=Stage.CELL,
    )


def _is_text(column: Column) -> bool:
    return bool(pa.types.is_string(column.type))


def _holds_names(contract: Contract, column: Column) -> bool:
    """A text column that is neither free text nor held to a pattern or to fixed words by a rule of its own."""
    own = {rule.name for rule in contract.rules}
    judged = {f"{column.name}_choice", f"{column.name}_form"} & own
    return _is_text(column) and not column.words and not judged


def _name(column: Column) -> Rule:
    return Rule(
        name=f"{column.name}_is_name",
        text=f"{column.name} {_NAME_TEXT}",
        columns=(column.name,),
        expect=lambda name, _: ("expect_column_values_to_match_regex", {"column": name, "regex": NAME_PATTERN}),
        broken=Broken(cells={0: {column.name: "two words"}}),
        stage=Stage.VALUE,
    )


def form(column: str, regex: str, text: str, *, broken: str) -> Rule:
    """``column`` has a stated form (a regular expression for the whole text)."""
    return Rule(
        name=f"{column}_form",
        text=text,
        columns=(column,),
        expect=lambda name, _: ("expect_column_values_to_match_regex", {"column": name, "regex": rf"\A(?:{regex})\Z"}),
        broken=Broken(cells={0: {column: broken}}),
        stage=Stage.VALUE,
    )


def _dated(column: Column) -> Rule:
    return Rule(
        name=f"{column.name}_dated",
        text=f"{column.name} lies before 2020: a count in another unit, or a clock that was never set",
        columns=(column.name,),
        derive=lambda frame, _: seconds(frame[column.name] - EARLIEST),
        expect=lambda name, _: _range(name, 0.0, None),
        broken=Broken(cells={0: {column.name: lambda _: datetime(1970, 1, 1, tzinfo=UTC)}}),
        stage=Stage.VALUE,
    )


def _names_alike(columns: Sequence[str]) -> Rule:
    """Keys that differ in capitals only are one key written twice, or two that nobody can tell apart."""

    def derive(frame: pd.DataFrame, _: GateContext) -> pd.Series:
        lowered = {name: frame[name].map(_lower_map(frame[name])) for name in columns}
        kinds = [
            frame[name].groupby(lowered[name], dropna=True).transform("nunique").reindex(frame.index)
            for name in columns
        ]
        return pd.concat(kinds, axis=1).max(axis=1)

    first = columns[0]
    return Rule(
        name="names_alike",
        text=f"{' or '.join(columns)} differs from another row's in capitals only",
        columns=tuple(columns),
        derive=derive,
        expect=lambda name, _: _range(name, None, 1),
        broken=Broken(cells={0: {first: "Name"}, 1: {first: "name"}}),
    )


def _lower_map(names: pd.Series) -> dict[str, str]:
    return {name: name.lower() for name in names.dropna().unique()}


def _unique_key(contract: Contract) -> Rule:
    key = list(contract.key)

    def derive(frame: pd.DataFrame, _: GateContext) -> pd.Series:
        return frame.groupby(key, dropna=False)[key[0]].transform("size") if len(frame) else frame[key[0]]

    return Rule(
        name="key_unique",
        text=f"{', '.join(key)} must not be repeated",
        columns=tuple(key),
        derive=derive,
        expect=lambda name, _: _range(name, None, 1),
        broken=Broken(repeat_row=0),
    )


def _with_previous(context: GateContext, table: pa.Table) -> GateContext:
    return replace(context, previous=table)


def _shifted(table: pa.Table, column: str, by: timedelta) -> pa.Table:
    frame = table.to_pandas()
    frame[column] = frame[column] + by
    return pa.Table.from_pandas(frame, schema=table.schema, preserve_index=False)


def _bound(bound: Bound, context: GateContext) -> float:
    return float(bound(context)) if callable(bound) else float(bound)


def _range(column: str, minimum: float | None, maximum: float | None, *, strict_minimum: bool = False) -> Expectation:
    arguments: dict[str, Any] = {"column": column}
    if minimum is not None:
        arguments["min_value"] = minimum
    if maximum is not None:
        arguments["max_value"] = maximum
    if strict_minimum:
        arguments["strict_min"] = True
    return ("expect_column_values_to_be_between", arguments)
