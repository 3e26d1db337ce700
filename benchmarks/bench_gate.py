"""CPU seconds of the gate on 100,000 rows: good, all broken, as CSV; the library's import apart.

Run: ``python benchmarks/bench_gate.py``.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.csv as pc

from data_contracts.contract import GateContext
from data_contracts.files import read_bytes
from data_contracts.gate import GateOutcome, check_table
from data_contracts.registry import contract_of
from data_contracts.suite import _library

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
ROWS = 100_000
PRICES = contract_of("prices")


def table() -> pa.Table:
    """One price for each of 1,000 regions and 100 configurations."""
    rows = [
        {
            "region": f"aws/r{number % 1000}",
            "configuration": f"c{number // 1000}",
            "market": "on_demand",
            "price_usd_per_hour": 1.0 + number % 7,
            "observed_at": NOW,
            "source": "x",
        }
        for number in range(ROWS)
    ]
    return PRICES.table(rows)


def csv_of(good: pa.Table) -> bytes:
    """The table as CSV with ISO times."""
    index = good.schema.get_field_index("observed_at")
    out = io.BytesIO()
    pc.write_csv(good.set_column(index, "observed_at", pa.array([NOW.isoformat()] * ROWS)), out)
    return out.getvalue()


def measure(name: str, work: Callable[[], GateOutcome | object]) -> None:
    """Print CPU and wall seconds of ``work``."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    found = (
        f", {result.report.verdict.value}, {len(result.report.findings)} findings"
        if isinstance(result, GateOutcome)
        else ""
    )
    print(f"{name}: {time.process_time() - cpu:.2f} CPU-s, {time.perf_counter() - wall:.2f} s{found}")


def main() -> None:
    """Measure each case once."""
    good = table()
    index = good.schema.get_field_index("price_usd_per_hour")
    broken = good.set_column(index, good.schema.field(index), pa.array([-1.0] * ROWS))
    data = csv_of(good)
    context = GateContext(now=NOW, previous=good)
    measure("import of Great Expectations", _library)
    measure("good rows", lambda: check_table(PRICES, good, context))
    measure("CSV of good rows", lambda: check_table(PRICES, read_bytes(data, "x.csv"), context))
    measure("every row broken", lambda: check_table(PRICES, broken, context))


if __name__ == "__main__":
    main()
