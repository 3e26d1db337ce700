"""Any mutation of a valid batch is accepted with equal meaning or refused with a message; nothing ever raises."""

from __future__ import annotations

import io
import math
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_contracts.contract import GateContext
from data_contracts.files import read_bytes
from data_contracts.gate import GateOutcome, check_table
from data_contracts.registry import contract_of
from data_contracts.rules import rules_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
DEMAND = contract_of("demand")
VALID = DEMAND.example_table(NOW)
CONTEXT = GateContext(now=NOW, known={"model": frozenset(VALID.column("model").to_pylist())}, previous=VALID)
NUMBERS = ["requests_per_s", "mean_prompt_tokens", "p95_prompt_tokens", "interval_s"]


def csv_text(table: pa.Table) -> str:
    """CSV of a table, written here and not by the code under test."""
    lines = [",".join(table.column_names)]
    for row in table.to_pylist():
        cells = [
            "" if value is None else value.isoformat() if isinstance(value, datetime) else str(value)
            for value in row.values()
        ]
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


TEXT = csv_text(VALID)
SINK = io.BytesIO()
pq.write_table(VALID, SINK)
PARQUET = SINK.getvalue()


def settled(outcome: GateOutcome) -> None:
    """Either there is a table, or there is a critical finding with a text."""
    assert (outcome.table is not None) == outcome.report.accepted
    if not outcome.report.accepted:
        assert all(finding.text for finding in outcome.report.findings)
    outcome.report.as_json()


@settings(max_examples=300)
@given(position=st.integers(0, len(TEXT)), removed=st.integers(0, 30), inserted=st.text(max_size=8))
@example(position=0, removed=0, inserted='"')
@example(position=len(TEXT), removed=0, inserted="\0")
def test_edits_of_the_text_never_raise(position: int, removed: int, inserted: str) -> None:
    """Any cut and any insertion of text anywhere in the file ends in a verdict."""
    data = (TEXT[:position] + inserted + TEXT[position + removed :]).encode("utf-8", "surrogatepass")
    settled(check_table(DEMAND, read_bytes(data, "x.csv"), CONTEXT, rules=[]))


@settings(max_examples=150)
@given(position=st.integers(0, len(PARQUET) - 1), value=st.integers(0, 255), length=st.integers(1, len(PARQUET)))
def test_damage_to_a_parquet_file_never_raises(position: int, value: int, length: int) -> None:
    """A changed byte and a cut end in a verdict; a cut file is never accepted."""
    damaged = bytearray(PARQUET)
    damaged[position] = value
    settled(check_table(DEMAND, read_bytes(bytes(damaged), "x.parquet"), CONTEXT, rules=[]))
    if length < len(PARQUET):
        cut = check_table(DEMAND, read_bytes(PARQUET[:length], "x.parquet"), CONTEXT, rules=[])
        assert not cut.report.accepted


SPELLINGS = st.sampled_from(["repr", "exponent", "padded", "plus"])


def spelled(value: float, how: str) -> str:
    """The same number, written otherwise."""
    return {"repr": repr(value), "exponent": f"{value:.17e}", "padded": f"  {value!r} ", "plus": f"+{value!r}"}[how]


@settings(max_examples=100)
@given(
    values=st.lists(st.floats(0, 1e6, allow_nan=False), min_size=3, max_size=3),
    how=SPELLINGS,
    separator=st.sampled_from([",", ";", "\t"]),
    order=st.permutations(list(range(len(DEMAND.columns)))),
)
@example(values=[0.0, 0.0, 1.9999999998835847], how="plus", separator=",", order=list(range(len(DEMAND.columns))))
def test_another_spelling_of_the_same_values_reads_the_same(
    values: list[float], how: str, separator: str, order: list[int]
) -> None:
    """Spelling of numbers, separator and order of columns change no value, to the last bit."""
    index = VALID.schema.get_field_index("requests_per_s")
    wanted = VALID.set_column(index, VALID.schema.field(index), pa.array(values))
    rows = [line.split(",") for line in csv_text(wanted).splitlines()]
    for row, value in zip(rows[1:], values, strict=True):
        row[index] = spelled(value, how)
    text = "\n".join(separator.join(row[place] for place in order) for row in rows) + "\n"
    outcome = check_table(DEMAND, read_bytes(text.encode(), "x.csv"), CONTEXT, rules=[])
    assert outcome.table is not None, outcome.report.findings
    assert outcome.table.equals(wanted)


RULES = [rule for rule in rules_of(DEMAND) if rule.name.startswith(("requests_per_s", "mean_prompt", "key", "row"))]


@settings(max_examples=40)
@given(
    column=st.sampled_from(NUMBERS[:2]),
    value=st.one_of(st.floats(), st.none(), st.just(math.nan)),
    repeat=st.booleans(),
)
@example(column="requests_per_s", value=0.0, repeat=False)
@example(column="requests_per_s", value=-0.0, repeat=False)
@example(column="requests_per_s", value=5e-324, repeat=False)
@example(column="requests_per_s", value=1.7976931348623157e308, repeat=False)
def test_what_is_accepted_is_finite_not_negative_and_unique(column: str, value: float | None, repeat: bool) -> None:
    """The rules let exactly the good values through, whatever a cell is changed to."""
    rows: list[dict[str, Any]] = VALID.to_pylist()
    rows[0][column] = value
    rows += rows[:1] if repeat else []
    table = pa.table({one.name: pa.array([row[one.name] for row in rows], one.type) for one in DEMAND.columns})
    outcome = check_table(DEMAND, table, CONTEXT, rules=RULES)
    settled(outcome)
    lowest = 0.0 if column == "requests_per_s" else 5e-324
    usual = VALID.to_pylist()[0][column]
    fine = value is not None and math.isfinite(value) and lowest <= value <= 10 * max(usual, 1.0)
    if column == "mean_prompt_tokens":
        fine = fine and value is not None and value >= usual / 10
    assert outcome.report.accepted == (fine and not repeat), [str(one) for one in outcome.report.findings]
