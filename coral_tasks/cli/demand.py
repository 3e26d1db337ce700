"""``coral demand``: arguments of deriving a day of demand from traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Demand data.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Demand data."""


@app.command()
def derive(
    trace: Annotated[list[Path], typer.Option(help="Azure LLM inference trace (CSV or CSV.gz); repeat for each.")],
    out: Annotated[Path, typer.Option(help="CSV file to write.")],
    setup: Annotated[str, typer.Option(help="Setup of the catalogue: models and their mean rates.")] = "core",
) -> None:
    """Derive a day of demand (5-minute intervals) for each model of a setup from one-hour request traces."""
    from coral_tasks.tasks.demand import derive_demand_day

    rows = derive_demand_day(setup, trace, out)
    typer.echo(f"{out}: {rows} rows")
