"""The gate of one table: accept, accept with warnings, or quarantine, with every violation and where it is.

Owns the verdict. Must not read or keep files, and knows no single table (``registry`` does).

API::

    check_table(contract, table_or_frame_or_RawTable, context) -> GateOutcome(report, table)
    GateReport: .verdict .findings .as_json() ; Finding: table, row, value, rule, text, severity
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from data_contracts.coerce import CellFlaw, coerce
from data_contracts.contract import STAGE_ORDER, Column, Contract, GateContext, Rule, Severity, Stage
from data_contracts.files import CUT_OFF, FileFlaw, RawTable
from data_contracts.rules import rules_of
from data_contracts.suite import RuleResult, applicable, run_directly, run_rules

_SHOWN_NAMES: Final = 12
_HINTED: Final = 100
_SHOWN_LENGTH: Final = 200


class Verdict(StrEnum):
    """What the gate decides about one batch."""

    ACCEPTED = "accepted"
    ACCEPTED_WITH_WARNINGS = "accepted_with_warnings"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One violation: table, row (data row from 1 with its key, "" for the whole table), value, rule and its text."""

    table: str
    row: str
    column: str
    value: str
    rule: str
    text: str
    severity: Severity
    releasable: bool = False

    def __str__(self) -> str:
        where = f"{self.table}, {self.row}" if self.row else self.table
        found = f" (found {self.value})" if self.value else ""
        return f"{where}: {self.text}{found} [{self.rule}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """Everything the gate says about one batch. ``unchecked``: rules that the context had no names or values for."""

    table: str
    contract_version: str
    source: str
    checked_at: datetime
    num_rows: int
    num_rules: int
    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> Verdict:
        """Quarantined if any finding is critical."""
        if any(finding.severity is Severity.CRITICAL for finding in self.findings):
            return Verdict.QUARANTINED
        return Verdict.ACCEPTED_WITH_WARNINGS if self.findings else Verdict.ACCEPTED

    @property
    def accepted(self) -> bool:
        """With or without warnings."""
        return self.verdict is not Verdict.QUARANTINED

    @property
    def releasable(self) -> bool:
        """A person may let the batch in: every critical finding is one that judgement may overrule."""
        return all(finding.releasable for finding in self.findings if finding.severity is Severity.CRITICAL)

    def released(self, note: str) -> GateReport:
        """The report after a person let the batch in: critical findings become warnings, ``note`` says by whom."""
        lowered = tuple(replace(finding, severity=Severity.WARNING) for finding in self.findings)
        return replace(self, findings=lowered, notes=(*self.notes, note))

    def as_json(self) -> dict[str, Any]:
        """JSON-ready mapping; times in ISO 8601."""
        # field by field: asdict copies every value of every finding, which takes seconds for 100,000 of them
        about = {one.name: getattr(self, one.name) for one in fields(self)}
        names = [one.name for one in fields(Finding)]
        return {
            **about,
            "checked_at": self.checked_at.isoformat(),
            "verdict": self.verdict.value,
            "releasable": self.releasable,
            "findings": [{name: getattr(finding, name) for name in names} for finding in self.findings],
        }


class GateOutcome(NamedTuple):
    """``table``: the batch in the contract's schema, None unless it could be read and every critical rule holds."""

    report: GateReport
    table: pa.Table | None
    readable: pa.Table | None


def check_table(
    contract: Contract,
    batch: RawTable | pa.Table | pd.DataFrame,
    context: GateContext,
    *,
    source: str = "",
    rules: Sequence[Rule] | None = None,
    direct: bool = False,
) -> GateOutcome:
    """Judge one batch. Never raises for what the batch holds; every violation is in the report at once.

    ``rules``: judge these only; None: all of the contract's. ``direct``: by pandas alone (``suite.run_directly``).
    """
    judged = rules_of(contract) if rules is None else tuple(rules)
    raw = _with_cut_cell(contract, _as_raw(batch, source))
    findings = [_of_file(contract, flaw) for flaw in raw.flaws]
    table: pa.Table | None = None
    unchecked: tuple[str, ...] = ()
    if raw.table is not None:
        coerced = coerce(contract, raw.table)
        table = coerced.table
        names = _Rows(contract, table)
        findings += [_of_cell(contract, flaw, names) for flaw in coerced.flaws]
        if table is not None:
            results = (run_directly if direct else run_rules)(contract.name, _frame(table), judged, context)
            findings += _judge(contract, _Cells(table, names, context), results, coerced.flaws)
            findings += _absent(contract, table, findings)
            unchecked = _unchecked(judged, context)
    report = GateReport(
        table=contract.name,
        contract_version=contract.version,
        source=raw.source,
        checked_at=context.now,
        num_rows=0 if raw.table is None else raw.table.num_rows,
        num_rules=len(judged),
        findings=tuple(findings),
        unchecked=unchecked,
    )
    typed = None if table is None or not _fits(report) else table.cast(contract.schema)
    return GateOutcome(report=report, table=typed if report.accepted else None, readable=typed)


def _absent(contract: Contract, table: pa.Table, findings: Sequence[Finding]) -> list[Finding]:
    """Columns with nulls that the schema has no place for, unless a rule that was judged says so already."""
    said = {name for one in findings if one.severity is Severity.CRITICAL for name in one.column.split(", ")}
    lost = [one.name for one in contract.columns if not one.nullable and one.name not in said]
    return [
        Finding(
            table=contract.name,
            row="",
            column=name,
            value=f"{table.column(name).null_count} empty cells",
            rule="present",
            text=f"{name} must be present",
            severity=Severity.CRITICAL,
        )
        for name in lost
        if table.column(name).null_count
    ]


def _fits(report: GateReport) -> bool:
    """Whether what is critical, if anything, still leaves a table in the contract's schema."""
    return report.accepted or report.releasable


def _as_raw(batch: RawTable | pa.Table | pd.DataFrame, source: str) -> RawTable:
    if isinstance(batch, RawTable):
        return batch
    if isinstance(batch, pa.Table):
        return RawTable(table=batch, flaws=(), source=source)
    try:
        return RawTable(table=pa.Table.from_pandas(batch, preserve_index=False), flaws=(), source=source)
    except (pa.ArrowException, ValueError, TypeError) as error:
        flaw = FileFlaw(row=0, value=str(error).splitlines()[0], text="the frame has columns of mixed or unknown type")
        return RawTable(table=None, flaws=(flaw,), source=source)


def _with_cut_cell(contract: Contract, raw: RawTable) -> RawTable:
    """Refuse a text that may be cut off inside a number or a name: its front part is one too, and another one.

    Times, lists and missing fields are told by their own rules; free text says nothing that a plan rests on.
    """
    cut = [flaw for flaw in raw.flaws if flaw.text == CUT_OFF]
    if not cut or raw.table is None or not raw.table.num_rows:
        return raw
    name = raw.table.column_names[-1]
    kind = next((_cut_kind(column) for column in contract.columns if column.name == name), "")
    if not kind:
        return raw
    value = raw.table.column(name)[-1].as_py()
    text = f"{CUT_OFF}, inside the {kind} {name}; end the file with a line end"
    flaw = FileFlaw(raw.table.num_rows, "empty" if value is None else _cut(str(value)), text)
    return raw._replace(flaws=(*(one for one in raw.flaws if one.text != CUT_OFF), flaw))


def _cut_kind(column: Column) -> str:
    if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
        return "number"
    return "name" if pa.types.is_string(column.type) and not column.words else ""


def _unchecked(rules: Sequence[Rule], context: GateContext) -> tuple[str, ...]:
    judged = {rule.name for rule in applicable(rules, context)}
    return tuple(rule.name for rule in rules if rule.name not in judged)


def _of_file(contract: Contract, flaw: FileFlaw) -> Finding:
    return Finding(
        table=contract.name,
        row=f"row {flaw.row}" if flaw.row else "",
        column="",
        value=flaw.value,
        rule="file",
        text=flaw.text,
        severity=Severity.WARNING if flaw.warning else Severity.CRITICAL,
    )


def _of_cell(contract: Contract, flaw: CellFlaw, names: _Rows) -> Finding:
    return Finding(
        table=contract.name,
        row=names.of(flaw.row) if flaw.row >= 0 else "",
        column=flaw.column,
        value=_cut(repr(flaw.value)) if flaw.value else "",
        rule=flaw.rule,
        text=flaw.text,
        severity=Severity.WARNING if flaw.warning else Severity.CRITICAL,
    )


class _Texts:
    """Cells of a column as text; each distinct value is written once, when the first cell is asked for."""

    def __init__(self, column: pa.ChunkedArray, show: Callable[[object], str]) -> None:
        self._column, self._show = column, show
        self._places: list[int | None] = []
        self._texts: list[str] = []

    def of(self, position: int) -> str:
        """Text of the cell in row ``position``, from 0."""
        if _is_list(self._column.type):
            return self._show(self._column[position].as_py())
        if not self._places:
            encoded = pc.dictionary_encode(self._column.combine_chunks())
            encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
            self._places = encoded.indices.to_pylist()
            self._texts = [self._show(value) for value in encoded.dictionary.to_pylist()]
        place = self._places[position]
        return self._show(None) if place is None else self._texts[place]


class _Rows:
    """Names rows by number (from 1) and key."""

    def __init__(self, contract: Contract, table: pa.Table | None) -> None:
        self._columns = [] if table is None else [_Texts(table.column(name), _shown) for name in contract.key]

    def of(self, position: int) -> str:
        key = [part for column in self._columns if (part := column.of(position))]
        return f"row {position + 1}" + (f" ({', '.join(key)})" if key else "")


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat()
    text = _cut(str(value))
    return text if text.isprintable() else repr(text)


def _cut(text: str) -> str:
    """A value as it is shown: a cell may hold a megabyte."""
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}… ({len(text)} characters)"


def _judge(
    contract: Contract, cells: _Cells, results: Sequence[RuleResult], flaws: Sequence[CellFlaw]
) -> list[Finding]:
    """Broken rules, leaving out what an earlier stage already said about the same cell."""
    said = {(flaw.row, flaw.column) for flaw in flaws if flaw.row >= 0}
    found: list[Finding] = []
    for result in sorted(results, key=lambda result: STAGE_ORDER[result.rule.stage]):
        if result.holds:
            continue
        fresh = [row for row in result.positions if not any((row, name) in said for name in result.rule.columns)]
        if result.rule.stage is not Stage.MEANING:
            said.update((row, name) for row in fresh for name in result.rule.columns)
        found += _findings(contract, result, fresh, cells)
    return found


def _frame(table: pa.Table) -> pd.DataFrame:
    """Pandas frame with the dtypes that the rules expect, also where a column is all null; lists stay Arrow's."""
    frame: pd.DataFrame = table.to_pandas(types_mapper=lambda kind: pd.ArrowDtype(kind) if _is_list(kind) else None)
    for column in table.schema:
        if pa.types.is_string(column.type):
            frame[column.name] = frame[column.name].astype("str")
        elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            frame[column.name] = frame[column.name].astype("float64")
    return frame


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind))


class _Cells:
    """Shows values of a table in findings."""

    def __init__(self, table: pa.Table, names: _Rows, context: GateContext) -> None:
        self.names, self.context = names, context
        self._columns = {name: _Texts(table.column(name), _cell) for name in table.column_names}

    def value(self, row: int, columns: Sequence[str]) -> str:
        if len(columns) == 1:
            return self._columns[columns[0]].of(row)
        return ", ".join(f"{name}={self._columns[name].of(row)}" for name in columns)


def _cell(value: object) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, datetime):
        return value.isoformat()
    return "empty" if value is None else _cut(repr(value))


def _findings(contract: Contract, result: RuleResult, rows: Iterable[int], cells: _Cells) -> list[Finding]:
    rule = result.rule
    if result.error:
        return [_finding(contract, rule, text=f"{rule.text}: the rule could not be judged", value=result.error)]
    if not rule.columns or not result.positions:
        return [_finding(contract, rule, text=_text(rule, cells.context), value=_table_value(rule, result))]
    text, close = _text(rule, cells.context), _Closest(rule, cells.context)
    shown = [(i, cells.value(i, rule.columns)) for i in rows]
    return [
        _finding(contract, rule, text=f"{text}{close.hint(value)}", row=cells.names.of(i), value=value)
        for i, value in shown
    ]


class _Closest:
    """For unknown names: the known one that looks most like it."""

    def __init__(self, rule: Rule, context: GateContext) -> None:
        self._names = {name.casefold(): name for name in _known_names(rule, context)}
        self._hints: dict[str, str] = {}

    def hint(self, value: str) -> str:
        # a search among all names takes a while: the first hundred values get a hint
        if not self._names or len(self._hints) >= _HINTED:
            return self._hints.get(value, "")
        if value not in self._hints:
            found = difflib.get_close_matches(value.strip("'").casefold(), self._names, n=1, cutoff=0.8)
            self._hints[value] = f"; did you mean {self._names[found[0]]}?" if found else ""
        return self._hints[value]


def _known_names(rule: Rule, context: GateContext) -> Sequence[str]:
    expectation = rule.expect("x", context) if rule.name.endswith("_known") else None
    names: Sequence[str] = [] if expectation is None else expectation[1]["value_set"]
    return names


def _table_value(rule: Rule, result: RuleResult) -> str:
    return f"{result.observed} rows" if rule.name.startswith("row_count") else result.observed


def _text(rule: Rule, context: GateContext) -> str:
    """The rule's text; for unknown names with the known ones."""
    if rule.name.endswith("_known"):
        names = _known_names(rule, context)
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        return f"{rule.text}; known: {', '.join(names[:_SHOWN_NAMES]) or 'none'}{more}"
    return rule.text


def _finding(contract: Contract, rule: Rule, *, text: str, row: str = "", value: str = "") -> Finding:
    return Finding(
        table=contract.name,
        row=row,
        column=", ".join(rule.columns),
        value=value,
        rule=rule.name,
        text=text,
        severity=rule.severity,
        releasable=rule.releasable,
    )
