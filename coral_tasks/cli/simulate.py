"""``coral simulate``, ``coral compare``, ``coral backtest``: arguments and tables; the work is in ``tasks``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coral_tasks.domain.errors import ValidationFailed, Violation

TraceOption = Annotated[
    list[str], typer.Option("--trace", help="FILE with a model column, or MODEL=FILE for an Azure trace; repeat.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the root: they have no group of their own."""
    app.command("simulate")(simulate)


def simulate(
    plan: Annotated[Path, typer.Argument(help="Plan file (JSON), as coral plan writes it.")],
    trace: TraceOption,
    setup: Annotated[str, typer.Option(help="Setup whose profiles give the stage timings.")] = "extended",
    prices: Annotated[Path | None, typer.Option(help="CSV or Parquet of prices; default: the catalogue's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Parquet file with one row per request.")] = None,
    rate: Annotated[float | None, typer.Option(help="Stretch the trace to this many requests per second.")] = None,
    startup_s: Annotated[float, typer.Option(help="Seconds from start to ready.")] = 0.0,
    timing: Annotated[str, typer.Option(help="profile (step times) or promise (the plan's own).")] = "profile",
    slowdown: Annotated[float, typer.Option(help="Stages take this many times their profiled time.")] = 1.0,
    *,
    shed_late: Annotated[bool, typer.Option(help="Drop requests that waited past their TTFT limit.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Replay a request trace on a plan: TTFT, TPOT, goodput, use and cost.

    Exit status 1 if the plan cannot keep up with the demand (unstable).
    """
    from coral_tasks.tasks.simulating import SimulationRequest, result_as_json, simulate_files

    request = SimulationRequest(
        plan=plan,
        traces=tuple(_trace_argument(text) for text in trace),
        setup=setup,
        prices=prices,
        out=out,
        requests_per_s=rate,
        startup_s=startup_s,
        shed_late=shed_late,
        timing=timing,
        slowdown=slowdown,
    )
    result = simulate_files(request)
    summary = result_as_json(result)
    if json_output:
        typer.echo(json.dumps(summary, indent=1))
    else:
        _print_simulation(summary)
    if not result.stable:
        raise typer.Exit(1)


def _trace_argument(text: str) -> tuple[str | None, Path]:
    model, separator, path = text.partition("=")
    if separator and not path:
        raise ValidationFailed([Violation(table="--trace", row="", value=text, rule="needs MODEL=FILE or FILE")])
    return (model, Path(path)) if separator else (None, Path(text))


def _print_simulation(summary: dict[str, Any]) -> None:
    table = Table("model", "requests", "within SLO", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "goodput tokens/s")
    for row in summary["models"]:
        table.add_row(
            row["model"],
            f"{row['num_requests']:,}",
            f"{row['attainment']:.2%}",
            *(_milliseconds(row[name][share]) for name in ("ttft", "tpot") for share in ("p50_s", "p99_s")),
            f"{row['goodput_tokens_per_s']:,.0f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{summary['num_requests']:,} requests over {summary['trace_s']:.0f} s; "
        f"{summary['cost_usd_per_hour']:.2f} USD/h; {summary['statement']}"
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.0f} ms"
