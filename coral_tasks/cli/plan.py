"""``coral plan``, ``coral explain`` and ``coral whatif``. Owns arguments and output only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from coral_tasks.tasks import planning

if TYPE_CHECKING:
    from coral_tasks.domain.plan import AllocationPlan

_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_PLAN = Annotated[Path, typer.Argument(help="plan.json, with request.json beside it.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this group to ``coral``."""
    commands: dict[str, Callable[..., None]] = {"plan": plan, "explain": explain, "whatif": whatif}
    for name, command in commands.items():
        app.command(name)(command)


def plan(
    library: Annotated[str, typer.Option("--library", help="Folder or s3:// address of the template library.")],
    demand: Annotated[str, typer.Option("--demand", help="CSV or Parquet file, see the data contracts.")],
    prices: Annotated[str, typer.Option("--prices", help="CSV or Parquet file.")],
    availability: Annotated[str, typer.Option("--availability", help="CSV or Parquet file.")],
    running: Annotated[str | None, typer.Option("--running", help="CSV or Parquet file; none: nothing runs.")] = None,
    options: Annotated[str | None, typer.Option("--options", help="JSON file of allocation options.")] = None,
    previous: Annotated[str | None, typer.Option("--previous", help="The last plan.json.")] = None,
    at: Annotated[str | None, typer.Option("--at", help="Start of the demand interval; default: the last.")] = None,
    time_limit_s: Annotated[float, typer.Option("--time-limit-s", min=0.1)] = 60.0,
    gap: Annotated[float, typer.Option("--gap", min=0.0, help="Stop at this proved relative gap.")] = 1e-4,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for plan.json and request.json.")] = None,
    supervised: Annotated[
        bool, typer.Option("--supervised/--in-process", help="Solve in a child process with a hard limit.")
    ] = True,
    as_json: _JSON = False,
) -> None:
    """Plan on files: how many instances of which template run where, proved and checked."""
    request = planning.PlanRequest(
        library=library,
        demand=demand,
        prices=prices,
        availability=availability,
        running=running,
        options=options,
        previous=previous,
        at=at,
        time_limit_s=time_limit_s,
        gap=gap,
        supervised=supervised,
    )
    made = planning.plan_files(request)
    if out is not None:
        planning.write_result(out, request, made)
    if as_json:
        typer.echo(msgspec.json.encode(made))
    else:
        _print_plan(made)


def _print_plan(made: AllocationPlan) -> None:
    proof = made.certificate
    table = Table("template", "region", "market", "count", "kept", title=str(made.id))
    for row in made.instances:
        table.add_row(row.template, row.region, row.market.value, str(row.count), str(row.num_kept))
    console = Console()
    console.print(table)
    console.print(
        f"{proof.cost_usd_per_hour:.4f} USD/h, start-up {proof.startup_usd_per_hour:.4f},"
        f" bound {proof.bound_usd_per_hour:.4f}, gap {proof.gap:.4%}, {proof.status.value}"
    )
    for short in made.shortfalls:
        console.print(
            f"short: {short.model} {short.shortfall_requests_per_s:.4g} of"
            f" {short.required_requests_per_s:.4g} requests/s"
        )


def explain(
    path: _PLAN,
    time_limit_s: Annotated[float, typer.Option("--time-limit-s", help="For all probes together.")] = 30.0,
    as_json: _JSON = False,
) -> None:
    """Say why a plan is what it is."""
    told = planning.explain_file(path, time_limit_s=time_limit_s)
    typer.echo(msgspec.json.encode(told) if as_json else "\n".join(told.sentences))


def whatif(
    path: _PLAN,
    demand: Annotated[list[str] | None, typer.Option("--demand", help="MODEL=FACTOR or all=FACTOR.")] = None,
    price: Annotated[
        list[str] | None, typer.Option("--price", help="REGION=FACTOR, CONFIGURATION=FACTOR, REGION/CONFIGURATION=…")
    ] = None,
    nodes: Annotated[list[str] | None, typer.Option("--nodes", help="REGION/CONFIGURATION=+3.")] = None,
    without_region: Annotated[list[str] | None, typer.Option("--without-region")] = None,
    without_configuration: Annotated[list[str] | None, typer.Option("--without-configuration")] = None,
    runtime: Annotated[list[str] | None, typer.Option("--runtime", help="Only these runtimes.")] = None,
    slo_step: Annotated[
        list[str] | None,
        typer.Option("--slo-step", help="MODEL or all: plan with the library's templates of an SLO one step tighter."),
    ] = None,
    options: Annotated[str | None, typer.Option("--options", help="Other allocation options, JSON.")] = None,
    as_json: _JSON = False,
) -> None:
    """Plan again with something changed and show the difference."""
    changes = planning.Changes(
        demand=tuple(demand or ()),
        prices=tuple(price or ()),
        nodes=tuple(nodes or ()),
        without_regions=tuple(without_region or ()),
        without_configurations=tuple(without_configuration or ()),
        runtimes=tuple(runtime or ()),
        slo_step=tuple(slo_step or ()),
        options=options,
    )
    difference, _ = planning.what_if(path, changes)
    if as_json:
        typer.echo(msgspec.json.encode(difference))
        return
    typer.echo(f"cost {difference.cost_before:.4f} -> {difference.cost_after:.4f} USD/h")
    typer.echo(f"unserved {difference.shortfall_before:.4g} -> {difference.shortfall_after:.4g} requests/s")
    moved = (("keep", difference.retuned), ("start", difference.started), ("stop", difference.stopped))
    for verb, rows in moved:
        for row in rows:
            typer.echo(f"{verb} {row}")
