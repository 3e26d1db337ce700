"""Every contract's examples: the valid one passes, and each rule has an example that breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from data_contracts.contract import Contract, GateContext, Rule
from data_contracts.gate import Verdict, check_table
from data_contracts.registry import TABLES, contract_of
from data_contracts.rules import rules_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
KINDS = {
    "model": "model",
    "region": "region",
    "origin": "region",
    "configuration": "configuration",
    "template_id": "template",
    "node_id": "node",
    "command_id": "command",
    "instance_id": "instance",
}


def example_context(contract: Contract) -> GateContext:
    """Context that knows exactly the names of the valid example, and one more configuration."""
    example = contract.example_table(NOW)
    known: dict[str, frozenset[str]] = {}
    for column, kind in KINDS.items():
        if column in example.column_names:
            names = {name for name in example.column(column).to_pylist() if name is not None}
            known[kind] = known.get(kind, frozenset()) | names
    return GateContext(now=NOW, known=known)


def broken_example(contract: Contract, rule: Rule) -> tuple[pa.Table, GateContext]:
    """The rule's invalid example and the context it is judged in."""
    example, context = contract.example_table(NOW), example_context(contract)
    rows: list[dict[str, Any]] = [dict(row) for row in example.to_pylist()]
    how = rule.broken
    assert how is not None
    for number, cells in how.cells.items():
        for column, value in cells.items():
            rows[number][column] = value(context) if callable(value) else value
    if how.repeat_row is not None:
        rows.append(rows[how.repeat_row])
    rows = [] if how.drop_all else rows
    columns = {c.name: pa.array([row[c.name] for row in rows], c.type) for c in contract.columns}
    changed = how.context(context, example) if how.context else context
    return pa.table(columns), changed


def contracts() -> list[Contract]:
    """All contracts."""
    return [contract_of(table) for table in TABLES]


def rules() -> Iterator[Any]:
    """Every rule of a table's own, and of the rules that follow from its columns one of each kind."""
    for contract in contracts():
        seen: set[str] = set()
        for rule in rules_of(contract):
            kind = rule.name.rpartition("_")[2]
            standard = rule not in contract.rules
            if rule.broken is not None and not (standard and kind in seen):
                seen.add(kind)
                yield pytest.param(contract, rule, id=f"{contract.name}-{rule.name}")


@pytest.mark.parametrize("contract", contracts(), ids=lambda contract: contract.name)
def test_the_valid_example_is_accepted(contract: Contract) -> None:
    """The valid example passes without a single warning and keeps its values."""
    example = contract.example_table(NOW)
    outcome = check_table(contract, example, example_context(contract))
    assert [str(finding) for finding in outcome.report.findings] == []
    assert outcome.report.verdict is Verdict.ACCEPTED
    assert outcome.table is not None
    assert outcome.table.equals(example)


@pytest.mark.parametrize(("contract", "rule"), list(rules()))
def test_each_rule_is_broken_by_its_example(contract: Contract, rule: Rule) -> None:
    """The invalid example of a rule is reported under that rule, with its text and severity; by pandas alone too."""
    table, context = broken_example(contract, rule)
    outcome = check_table(contract, table, context, rules=[rule])
    assert check_table(contract, table, context, rules=[rule], direct=True).report == outcome.report
    mine = [finding for finding in outcome.report.findings if finding.rule == rule.name]
    assert mine, [str(finding) for finding in outcome.report.findings]
    assert all(rule.text in finding.text and finding.severity is rule.severity for finding in mine)
    if rule.columns and rule.name != "row_count_jump":
        assert all(finding.row.startswith("row ") and finding.value for finding in mine)


@pytest.mark.parametrize("contract", contracts(), ids=lambda contract: contract.name)
def test_every_rule_has_an_invalid_example(contract: Contract) -> None:
    """Only the upper row limit of tables that may be empty goes without one (it would need millions of rows)."""
    without = [rule.name for rule in rules_of(contract) if rule.broken is None]
    assert without == (["row_count"] if contract.empty_ok else [])


@pytest.mark.parametrize("contract", contracts(), ids=lambda contract: contract.name)
def test_rule_names_are_unique(contract: Contract) -> None:
    """A finding's rule name leads to one rule."""
    names = [rule.name for rule in rules_of(contract)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("contract", contracts(), ids=lambda contract: contract.name)
def test_every_field_states_unit_and_meaning(contract: Contract) -> None:
    """Unit and meaning are in the Arrow field's metadata, and numbers with a dimension have a unit."""
    for field in contract.schema:
        assert field.metadata[b"meaning"]
        assert b"unit" in field.metadata
        if pa.types.is_floating(field.type):
            assert field.metadata[b"unit"], field.name


def test_an_older_minor_version_is_read_and_a_foreign_major_is_refused() -> None:
    """Evolution: columns added in a minor step are filled with null; another major version has its own message."""
    contract = contract_of("prices")
    example = contract.example_table(NOW)
    older = example.drop_columns(["source"]).replace_schema_metadata(
        {"coral.contract": "prices", "coral.version": "1.0"}
    )
    assert check_table(contract, older, example_context(contract)).report.verdict is Verdict.ACCEPTED
    foreign = example.replace_schema_metadata({"coral.contract": "prices", "coral.version": "2.0"})
    report = check_table(contract, foreign, example_context(contract)).report
    assert [finding.text for finding in report.findings] == ["contract version 2.0; this reader knows 1.0"]
    assert replace(contract, version="2.1").schema.metadata[b"coral.version"] == b"2.1"
