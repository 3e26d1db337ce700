"""Runs a table's rules as one Great Expectations suite. The only module that imports Great Expectations.

``run_directly`` judges the same rules by pandas alone, in milliseconds: for files that a person plans on by hand, and
for tables that passed the suite before. A property test holds the two against each other.

Owns the ephemeral context (nothing on disk, no analytics), and the guard that every rule was really evaluated: a rule
that raised or was left out is reported, never taken for success.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from data_contracts.contract import Expectation, GateContext, Rule

os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")


class RuleResult(NamedTuple):
    """``positions``: broken rows from 0; empty when the rule holds or concerns the table. ``error``: it raised."""

    rule: Rule
    holds: bool
    positions: tuple[int, ...]
    observed: str
    error: str


class _Judged(NamedTuple):
    rule: Rule
    expectation: Expectation


def run_rules(name: str, frame: pd.DataFrame, rules: Sequence[Rule], context: GateContext) -> list[RuleResult]:
    """Judge every rule on ``frame`` (index 0…n−1). Rules that the context cannot judge are left out.

    Helper columns are added to a copy of the frame. Raises nothing for bad data.
    """
    judged, wide, failed = _prepare(frame.reset_index(drop=True), rules, context)
    return [*failed, *_validate(name, wide, judged)]


def run_directly(name: str, frame: pd.DataFrame, rules: Sequence[Rule], context: GateContext) -> list[RuleResult]:
    """The same results as ``run_rules``, without Great Expectations."""
    del name
    judged, wide, failed = _prepare(frame.reset_index(drop=True), rules, context)
    return [*failed, *(_direct(one, wide) for one in judged)]


def _direct(one: _Judged, frame: pd.DataFrame) -> RuleResult:
    kind, arguments = one.expectation
    if kind == "expect_table_row_count_to_be_between":
        holds = arguments["min_value"] <= len(frame) <= arguments["max_value"]
        return RuleResult(rule=one.rule, holds=holds, positions=(), observed=str(len(frame)), error="")
    column: pd.Series = frame.loc[:, arguments["column"]]
    good = _GOOD[kind](column, arguments)
    positions = tuple(np.flatnonzero(~good.to_numpy(dtype=bool)).tolist())
    return RuleResult(rule=one.rule, holds=not positions, positions=positions, observed="", error="")


def _within(column: pd.Series, arguments: dict[str, Any]) -> pd.Series:
    numbers = column.astype("float64")
    low, high = arguments.get("min_value", -np.inf), arguments.get("max_value", np.inf)
    above = numbers > low if arguments.get("strict_min") else numbers >= low
    good: pd.Series = numbers.isna() | (above & (numbers <= high))
    return good


_GOOD: Final[dict[str, Callable[[pd.Series, dict[str, Any]], pd.Series]]] = {
    "expect_column_values_to_not_be_null": lambda column, _: column.notna(),
    "expect_column_values_to_be_between": _within,
    "expect_column_values_to_be_in_set": lambda column, given: column.isna() | column.isin(given["value_set"]),
    "expect_column_values_to_match_regex": lambda column, given: (
        column.isna() | column.str.contains(given["regex"]).eq(other=True)
    ),
}
"""By the expectation's name: which values are good. As in Great Expectations, only a null's own rule judges nulls."""


def applicable(rules: Sequence[Rule], context: GateContext) -> list[Rule]:
    """Rules that the context has what they need for."""
    return [rule for rule in rules if rule.expect("x", context) is not None]


def _prepare(
    frame: pd.DataFrame, rules: Sequence[Rule], context: GateContext
) -> tuple[list[_Judged], pd.DataFrame, list[RuleResult]]:
    judged: list[_Judged] = []
    helpers: dict[str, pd.Series] = {}
    failed: list[RuleResult] = []
    for rule in rules:
        column = f"rule:{rule.name}" if rule.derive else next(iter(rule.columns), "")
        expectation = rule.expect(column, context)
        if expectation is None:
            continue
        if rule.derive is not None:
            try:
                helpers[column] = rule.derive(frame, context).reset_index(drop=True)
            except Exception as error:  # noqa: BLE001  a rule that cannot be computed must not pass
                failed.append(_raised(rule, f"{type(error).__name__}: {error}"))
                continue
        judged.append(_Judged(rule, expectation))
    wide = pd.concat([frame, pd.DataFrame(helpers, index=frame.index)], axis=1) if helpers else frame
    return judged, wide, failed


def _raised(rule: Rule, message: str) -> RuleResult:
    return RuleResult(rule=rule, holds=False, positions=(), observed="", error=message)


def _validate(name: str, frame: pd.DataFrame, judged: Sequence[_Judged]) -> list[RuleResult]:
    if not judged:
        return []
    # yes or no first, in half the time; the rows only of what failed
    first = _great_expectations(name, frame, judged, {"result_format": "BOOLEAN_ONLY"})
    failed = [number for number in range(len(judged)) if number not in first or not first[number].success]
    # COMPLETE without index columns: row positions in 0.1 s instead of 10 s for 100,000 broken rows
    complete = {"result_format": "COMPLETE", "include_unexpected_rows": False}
    again = _great_expectations(name, frame, [judged[number] for number in failed], complete) if failed else {}
    second = {number: again.get(place) for place, number in enumerate(failed)}
    return [_read(one.rule, second.get(number, first.get(number))) for number, one in enumerate(judged)]


def _great_expectations(
    name: str, frame: pd.DataFrame, judged: Sequence[_Judged], result_format: dict[str, Any]
) -> dict[int, Any]:
    """Results by the rule's place in ``judged``; a place without a result was not evaluated."""
    gx = _library()
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = gx.data_context.types.base.ProgressBarsConfig(
        globally=False, metric_calculations=False
    )
    asset = context.data_sources.add_pandas(name).add_dataframe_asset(name)
    batch = asset.add_batch_definition_whole_dataframe(name).get_batch({"dataframe": _judged_columns(frame, judged)})
    expectations = [_expectation(gx, number, one) for number, one in enumerate(judged)]
    suite = gx.ExpectationSuite(name=name, expectations=expectations)
    result = batch.validate(suite, result_format=result_format)
    return {int(one.expectation_config.meta["number"]): one for one in result.results}


def _judged_columns(frame: pd.DataFrame, judged: Sequence[_Judged]) -> pd.DataFrame:
    """The columns that rules name, lists as their lengths: of lists only nulls are judged, and the library hashes the
    whole frame, which takes ten seconds where it holds lists.
    """
    names = dict.fromkeys(one.expectation[1]["column"] for one in judged if "column" in one.expectation[1])
    return pd.DataFrame({name: _without_lists(frame[name]) for name in names}, index=frame.index)


def _without_lists(column: pd.Series) -> pd.Series:
    if not isinstance(column.dtype, pd.ArrowDtype):
        return column
    lengths = column.list.len().to_numpy(dtype="float64", na_value=np.nan)
    return pd.Series(lengths, index=column.index)


@cache
def _library() -> Any:
    """Great Expectations, imported once; it takes seconds."""
    with warnings.catch_warnings():
        # its own use of deprecated standard modules, at import only
        warnings.simplefilter("ignore", DeprecationWarning)
        import great_expectations as gx
        import great_expectations.data_context.types.base
        import great_expectations.expectations.metadata_types
        import great_expectations.expectations.registry
    # several of its modules set their own level to INFO
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("great_expectations")]:
        logging.getLogger(name).setLevel(logging.WARNING)
    return gx


def _expectation(gx: Any, number: int, one: _Judged) -> Any:
    kind, arguments = one.expectation
    severity = gx.expectations.metadata_types.FailureSeverity(one.rule.severity.value)
    make = gx.expectations.registry.get_expectation_impl(kind)
    return make(**arguments, meta={"rule": one.rule.name, "number": number}, severity=severity)


def _read(rule: Rule, result: Any) -> RuleResult:
    if result is None:
        return _raised(rule, "the rule was not evaluated")
    if result.success:
        return RuleResult(rule=rule, holds=True, positions=(), observed="", error="")
    if result.exception_info and _exception(result.exception_info):
        return _raised(rule, _exception(result.exception_info))
    positions = tuple(int(index) for index in result.result.get("unexpected_index_list") or ())
    observed = result.result.get("observed_value", "")
    return RuleResult(rule=rule, holds=False, positions=positions, observed=str(observed), error="")


def _exception(info: Any) -> str:
    """First exception message in a result; it comes flat, or nested by metric."""
    if info.get("raised_exception"):
        return str(info.get("exception_message"))
    nested = [part for part in info.values() if isinstance(part, dict) and part.get("raised_exception")]
    return str(nested[0].get("exception_message")) if nested else ""
