"""CPU seconds of the gate on 100,000 rows of every table: good rows from Parquet and CSV, every row broken.

Run: ``python benchmarks/bench_gate.py [TABLE ...]``. The import of Great Expectations (once a process) is apart.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from data_contracts.contract import Contract, GateContext
from data_contracts.files import read_bytes
from data_contracts.gate import GateOutcome, check_table
from data_contracts.registry import TABLES, contract_of
from data_contracts.suite import _library

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
ROWS = 100_000
VARIED = {
    "demand": "origin",
    "prices": "region",
    "availability": "region",
    "running": "node_id",
    "plan": "template_id",
    "commands": "command_id",
    "outcomes": "command_id",
    "routing": "instance_id",
    "measurements": "configuration",
    "profiles": "configuration",
    "templates": "template_id",
}
"""Column of the key that makes each copy of the example's rows another row."""

BROKEN: dict[str, tuple[str, Any]] = {
    "demand": ("requests_per_s", -1.0),
    "prices": ("price_usd_per_hour", -1.0),
    "availability": ("available_nodes", -1),
    "running": ("market", "none"),
    "plan": ("count", 0),
    "commands": ("epoch", -1),
    "outcomes": ("status", "none"),
    "routing": ("weight", -1.0),
    "measurements": ("median_s", -1.0),
    "profiles": ("throughput", -1.0),
    "templates": ("throughput", -1.0),
}


def rows_of(contract: Contract) -> list[dict[str, Any]]:
    """Copies of the example's rows with keys of their own; a fleet's nodes are idle, so that none share an instance."""
    example, column = contract.example_table(NOW).to_pylist(), VARIED[contract.name]
    example = example[-1:] if contract.name == "running" else example
    rows = []
    for number in range(ROWS):
        row = example[number % len(example)]
        rows.append({**row, column: f"{row[column] or 'r'}-{number // len(example)}"})
    return rows


def csv_of(contract: Contract, rows: list[dict[str, Any]]) -> bytes:
    """The rows as CSV with ISO times and lists as JSON."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(contract.column_names)
    for row in rows:
        writer.writerow(_cell(row[name]) for name in contract.column_names)
    return out.getvalue().encode()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps(value)
    return value.isoformat() if isinstance(value, datetime) else value


def measure(name: str, work: Callable[[], GateOutcome | object]) -> None:
    """Print CPU and wall seconds of ``work``."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    found = (
        f", {result.report.verdict.value}, {len(result.report.findings)} findings"
        if isinstance(result, GateOutcome)
        else ""
    )
    print(f"{name}: {time.process_time() - cpu:.2f} CPU-s, {time.perf_counter() - wall:.2f} s{found}", flush=True)


def measure_table(name: str) -> None:
    """Good rows, the same as CSV, and every row broken."""
    contract = contract_of(name)
    rows = rows_of(contract)
    good, data = contract.table(rows), csv_of(contract, rows)
    column, value = BROKEN[name]
    place = good.schema.get_field_index(column)
    broken = good.set_column(place, good.schema.field(place), pa.array([value] * ROWS, good.schema.field(place).type))
    context = GateContext(now=NOW, previous=good, reference=good)
    measure(f"{name}, good rows", lambda: check_table(contract, good, context))
    measure(f"{name}, CSV", lambda: check_table(contract, read_bytes(data, "x.csv"), context))
    measure(f"{name}, every row broken", lambda: check_table(contract, broken, context))


def main() -> None:
    """Measure the named tables, or all."""
    measure("import of Great Expectations", _library)
    for name in sys.argv[1:] or TABLES:
        measure_table(name)


if __name__ == "__main__":
    main()
