"""What ``coral gate`` does: check a file, print an example, list, show and release quarantined batches, rebuild docs.

Checking a file changes nothing: neither quarantine nor the batch accepted last.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_tasks.domain.errors import StorageFault, UnknownName
from coral_tasks.settings import Settings

if TYPE_CHECKING:
    from coral_tasks.storage.quarantine import Quarantine
    from data_contracts.contract import Contract
    from data_contracts.gate import GateReport


def find_contract(table: str) -> Contract:
    """Contract by table name. Raises UnknownName with the known tables."""
    from data_contracts.registry import TABLES, contract_of

    if table not in TABLES:
        raise UnknownName(kind="table", name=table, known=TABLES)
    return contract_of(table)


def check_file(settings: Settings, table: str, path: Path, now: datetime, page: Path | None = None) -> GateReport:
    """Judge one file as this home's next run would; write an HTML page to ``page`` if given."""
    from coral_tasks.tasks.inputs import gate_context
    from data_contracts.files import read_file
    from data_contracts.gate import check_table
    from data_contracts.page import render_page

    contract = find_contract(table)
    report = check_table(contract, read_file(path), gate_context(settings, table, now)).report
    if page is not None:
        _write(page, render_page(f"Gate: {table}, {path.name}", [report]))
    return report


def example_csv(table: str, now: datetime) -> str:
    """The contract's valid example at ``now`` as CSV text; times in ISO 8601, lists as JSON."""
    contract = find_contract(table)
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(contract.column_names)
    for row in contract.example_table(now).to_pylist():
        writer.writerow([_cell(row[name]) for name in contract.column_names])
    return out.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, list):
        return json.dumps(value)
    return str(value)


def quarantine_of(settings: Settings) -> Quarantine:
    """The quarantine of this home."""
    from coral_tasks.storage.quarantine import Quarantine

    return Quarantine(root=settings.home / "quarantine")


def documentation() -> str:
    """Text of ``docs/data_contracts.md``."""
    from data_contracts.documentation import render_documentation
    from data_contracts.registry import TABLES, contract_of

    return render_documentation([contract_of(table) for table in TABLES])


def write_documentation(path: Path) -> None:
    """Write the documentation page. Raises StorageFault."""
    _write(path, documentation())


def _write(path: Path, text: str) -> None:
    from coral_tasks.storage.runs import write_whole

    try:
        write_whole(path, text.encode())
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror or error}"
        raise StorageFault(message) from error


def report_lines(report: GateReport, limit: int) -> Sequence[str]:
    """Findings as lines, ``limit`` at most, then how many more there are."""
    lines = [f"{finding.severity.value}: {finding}" for finding in report.findings[:limit]]
    more = len(report.findings) - limit
    return [*lines, f"… and {more} more (all with --json)"] if more > 0 else lines
