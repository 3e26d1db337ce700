"""``coral gate``: arguments and output of checking a file against its contract, and of the quarantine.

Exit codes: 0 accepted (maybe with warnings); 1 refused, or no such batch; 2 wrong usage; 3 a fault.
"""

from __future__ import annotations

import getpass
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coral_tasks.cli.times import parse_moment
from coral_tasks.settings import Settings

app = typer.Typer(
    help="Check files against their contracts; show and release quarantined batches.", no_args_is_help=True
)

TableName = Annotated[str, typer.Argument(help="Table: demand, prices, availability, running, plan, …")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Now = Annotated[str, typer.Option(help="Check as at this moment (ISO 8601 with a zone); default: now.")]
SHOWN = 50


@app.command()
def check(
    table: TableName,
    file: Annotated[Path, typer.Argument(help="CSV or Parquet file.")],
    now: Now = "",
    page: Annotated[Path | None, typer.Option(help="Write a readable HTML page here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge a file as the next run would. Exit code 0 only if it is accepted; changes nothing."""
    from coral_tasks.tasks.gate import check_file, report_lines

    report = check_file(Settings(), table, file, parse_moment(now), page)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        typer.echo(f"{table}: {report.verdict.value.replace('_', ' ')} ({report.num_rows} rows, {file})")
        for line in report_lines(report, SHOWN):
            typer.echo(f"  {line}")
    if not report.accepted:
        raise typer.Exit(1)


@app.command()
def example(table: TableName, now: Now = "") -> None:
    """Print the contract's valid example as CSV."""
    from coral_tasks.tasks.gate import example_csv

    typer.echo(example_csv(table, parse_moment(now)), nl=False)


@app.command()
def show(
    batch: Annotated[str, typer.Argument(help="Batch id; empty: list all.")] = "", as_json: AsJson = False
) -> None:
    """List quarantined batches, or show one with its violations."""
    from coral_tasks.tasks.gate import quarantine_of

    quarantine = quarantine_of(Settings())
    if batch:
        _show_one(quarantine.report(batch), quarantine.folder(batch), as_json=as_json)
        return
    rows = [(name, quarantine.report(name)) for name in quarantine.ids()]
    if as_json:
        found = [{"batch": name, **_brief(report), "released": quarantine.state(name)} for name, report in rows]
        typer.echo(json.dumps(found, indent=1))
        return
    listing = Table("batch", "source", "checked at", "violations", "releasable", "released")
    for name, report in rows:
        brief = _brief(report)
        released = quarantine.state(name)
        cells = (
            brief["source"],
            brief["checked_at"],
            str(brief["violations"]),
            "yes" if report["releasable"] else "no",
        )
        listing.add_row(name, *cells, released)
    Console().print(listing)


def _brief(report: dict[str, Any]) -> dict[str, Any]:
    critical = [finding for finding in report["findings"] if finding["severity"] == "critical"]
    return {
        "table": report["table"],
        "source": report["source"],
        "checked_at": report["checked_at"],
        "violations": len(critical),
        "releasable": report["releasable"],
    }


def _show_one(report: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    typer.echo(f"{folder}\n{report['table']} from {report['source']}, checked at {report['checked_at']}")
    for finding in report["findings"][:SHOWN]:
        where = finding["row"] or "whole table"
        typer.echo(
            f"  {finding['severity']}: {where}: {finding['text']} (found {finding['value']}) [{finding['rule']}]"
        )
    if len(report["findings"]) > SHOWN:
        typer.echo(f"  … and {len(report['findings']) - SHOWN} more in {folder / 'report.json'}")


@app.command()
def release(
    batch: Annotated[str, typer.Argument(help="Batch id, from `coral gate show`.")],
    reason: Annotated[str, typer.Option(help="Why it is right to plan on it.")],
    by: Annotated[str, typer.Option(help="Who decides; default: the user.")] = "",
) -> None:
    """Let a quarantined batch in: the next run that meets these very bytes accepts them, once, with warnings."""
    from coral_tasks.tasks.gate import quarantine_of

    path = quarantine_of(Settings()).release(batch, by=by or getpass.getuser(), reason=reason, at=datetime.now(UTC))
    typer.echo(f"released: {path}")


@app.command()
def docs(out: Annotated[Path, typer.Option(help="File to write.")] = Path("docs/data_contracts.md")) -> None:
    """Write the documentation page of all contracts."""
    from coral_tasks.tasks.gate import write_documentation

    write_documentation(out)
    typer.echo(str(out))
