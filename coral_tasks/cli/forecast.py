"""``coral forecast``: arguments and output of back-tests."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Forecasts of demand.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Forecasts of demand."""


@app.command()
def backtest(
    file: Annotated[Path, typer.Argument(help="Request trace (Azure form; CSV, CSV.gz or Parquet) or demand file.")],
    interval_s: Annotated[float, typer.Option(help="Interval that a trace is cut into, in seconds.")] = 60.0,
    quantile: Annotated[float, typer.Option(help="Quantile of the errors that planning adds.")] = 0.95,
    season: Annotated[int, typer.Option(help="Intervals in a season.")] = 12,
    warmup: Annotated[int, typer.Option(help="Intervals that are not judged.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Forecast every interval from those before it, with every method, and compare with what came."""
    from coral_tasks.tasks.forecasting import backtest_any

    rows = backtest_any(file, interval_s=interval_s, quantile=quantile, season=season, warmup=warmup)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table("series", "method", "forecasts", "error / demand", "bias req/s", "covered", "surplus / demand")
    for row in rows:
        figures = (f"{row.error_share:.1%}", f"{row.bias:+.3f}", f"{row.covered:.1%}", f"{row.surplus_share:.1%}")
        table.add_row(row.series, row.method.value, str(row.num_forecasts), *figures)
    Console().print(table)
