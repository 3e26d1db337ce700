"""Lists of templates, read and judged all at once, are what a loop over the rows reads and says."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_contracts.coerce import _each, _in_bulk
from data_contracts.contract import GateContext
from data_contracts.gate import _frame
from data_contracts.registry import contract_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
TEMPLATES = contract_of("templates")
CONTEXT = GateContext(now=NOW, known={"configuration": frozenset({"L4x1", "L40Sx1"})})
NAMES = st.one_of(st.none(), st.lists(st.sampled_from(["L4x1", "L40Sx1", "other", ""]), max_size=4))
WHOLE = st.one_of(st.none(), st.lists(st.integers(-2, 4), max_size=4))
COUNT = st.one_of(st.none(), st.integers(-2, 5))
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            **dict.fromkeys(("nodes", "node_source"), NAMES),
            **dict.fromkeys(("node_stage", "stage_layers", "stage_quanta"), WHOLE),
            **dict.fromkeys(("num_nodes", "num_stages", "num_layers", "total_quanta"), COUNT),
        }
    ),
    max_size=6,
)


Row = dict[str, Any]


def gap(row: Row, column: str, wanted: str, measure: Callable[[list[Any]], float]) -> float:
    """Measure of a list less the count beside it; NaN where either is absent."""
    return math.nan if row[column] is None or row[wanted] is None else measure(row[column]) - row[wanted]


def strange_nodes(row: Row) -> float:
    """Nodes of unknown configurations."""
    known = CONTEXT.known["configuration"]
    return math.nan if row["nodes"] is None else sum(one not in known for one in row["nodes"])


def least_layers(row: Row) -> float:
    """Layers of the smallest stage."""
    return math.nan if row["stage_layers"] is None else min(row["stage_layers"], default=math.nan)


def stages_off(row: Row) -> float:
    """Stages without a node and nodes without a stage."""
    if row["node_stage"] is None or row["num_stages"] is None:
        return math.nan
    return len(set(row["node_stage"]) ^ set(range(row["num_stages"])))


def uneven(row: Row) -> float:
    """Sum of what the lists' lengths are off."""
    found = [abs(gap(row, name, "num_nodes", len)) for name in ("nodes", "node_stage", "node_source")]
    found += [abs(gap(row, name, "num_stages", len)) for name in ("stage_layers", "stage_quanta")]
    return sum(one for one in found if not math.isnan(one))


BY_LOOP: dict[str, Callable[[Row], float]] = {
    "nodes_configured": strange_nodes,
    "layers_in_each_stage": least_layers,
    "layers_complete": lambda row: abs(gap(row, "stage_layers", "num_layers", sum)),
    "quanta_within_budget": lambda row: gap(row, "stage_quanta", "total_quanta", sum),
    "nodes_in_stages": stages_off,
    "lists_even": uneven,
}
"""By rule: what its helper column holds for one row; NaN where it does not concern it."""


@settings(max_examples=60)
@given(rows=ROWS)
def test_list_rules_agree_with_a_loop_over_the_rows(rows: list[Row]) -> None:
    """Absent and empty lists, repeated and foreign items, absent and negative counts, no row at all."""
    filled = {
        column.name: pa.array([row.get(column.name) for row in rows], column.type) for column in TEMPLATES.columns
    }
    frame = _frame(pa.table(filled))
    rules = {rule.name: rule for rule in TEMPLATES.rules}
    for name, by_loop in BY_LOOP.items():
        derive = rules[name].derive
        assert derive is not None
        found = derive(frame, CONTEXT).astype(float).tolist()
        wanted = [by_loop(row) for row in rows]
        pd.testing.assert_series_equal(pd.Series(found, dtype=float), pd.Series(wanted, dtype=float))


ITEM = st.sampled_from(
    ["1", "2", "-3", "40000", "1.0", "1.5", "true", "null", "NaN", '"a"', '"]"', '"["', '"', "[", "]", ""]
)
CELL = st.one_of(
    st.lists(ITEM, max_size=3).map(lambda items: f"[{','.join(items)}]"),
    st.lists(st.sampled_from(["1", "2"]), max_size=3).map(lambda items: f" [{', '.join(items)}]\n"),
    st.lists(st.sampled_from(['"a"', '"b,c"']), max_size=3).map(lambda items: f"[{','.join(items)}]"),
    st.text(alphabet='[]",1a ', max_size=6),
)


@settings(max_examples=200)
@given(cells=st.lists(st.one_of(CELL), max_size=4), kind=st.sampled_from([pa.int16(), pa.string()]))
@example(cells=["[1", "2]", "[3],[4]"], kind=pa.int16())
@example(cells=['["]', '["]', '["a"]'], kind=pa.string())
def test_lists_read_all_at_once_are_those_read_one_by_one(cells: list[str], kind: pa.DataType) -> None:
    """Texts that only together are JSON, brackets and quotes inside names, other types: one reading never differs."""
    texts = pa.array(cells, pa.string())
    at_once = _in_bulk(texts, kind)
    if at_once is not None:
        one_by_one, bad = _each(texts, kind)
        assert (at_once.to_pylist(), []) == (one_by_one.to_pylist(), bad)


def test_whole_lists_are_read_at_once() -> None:
    """The quick way is taken where it may be: otherwise the test above would say nothing."""
    found = _in_bulk(pa.array(["[1, 2]", "[]", "[3]"]), pa.int16())
    assert found is not None
    assert found.to_pylist() == [[1, 2], [], [3]]
    names = _in_bulk(pa.array(['["a"]', '["b", "c"]']), pa.string())
    assert names is not None
    assert names.to_pylist() == [["a"], ["b", "c"]]
