"""``coral demo`` and ``coral serve``: the whole pipeline on one machine. Owns arguments and output only."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from coral_tasks.settings import Settings
from coral_tasks.tasks import demo as work

if TYPE_CHECKING:
    from coral_tasks.tasks.demo import DemoSummary

_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this group to ``coral``."""
    commands: dict[str, Callable[..., None]] = {"demo": demo, "serve": serve}
    for name, command in commands.items():
        app.command(name)(command)


def demo(
    stop: Annotated[bool, typer.Option("--stop", help="End the local node agents and their engines.")] = False,
    as_of: Annotated[
        datetime | None, typer.Option("--as-of", help="Plan for this moment (UTC); default: the last noon.")
    ] = None,
    as_json: _JSON = False,
) -> None:
    """Run both DAGs to their end with local node agents, and print the plan."""
    settings = Settings()
    if stop:
        Console().print(f"{work.stop_demo(settings)} node agents ended")
        return
    made = work.run_demo(settings, as_of=as_of)
    if as_json:
        typer.echo(json.dumps(_as_json(made)))
    else:
        _print(made)


def serve() -> None:
    """Run Airflow's UI and scheduler on this machine, on loopback, until Ctrl-C."""
    settings = Settings()
    Console().print(f"Airflow's UI will be at http://127.0.0.1:{settings.ui_port} (no password); Ctrl-C ends it.")
    raise typer.Exit(work.serve(settings))


def _as_json(made: DemoSummary) -> dict[str, object]:
    proof = made.plan.certificate
    return {
        "plan": made.plan.id,
        "cost_usd_per_hour": proof.cost_usd_per_hour,
        "gap": proof.gap,
        "num_commands": made.num_commands,
        "instances": [asdict(group) for group in made.groups],
        "library": made.library,
        "report": made.report,
        "plan_file": made.plan_file,
    }


def _print(made: DemoSummary) -> None:
    proof, console = made.plan.certificate, Console()
    table = Table("model", "phase", "region", title=f"Plan {made.plan.id}", title_justify="left")
    table.add_column("instances", justify="right")
    table.add_column("nodes", justify="right")
    for group in made.groups:
        table.add_row(group.model, group.phase, group.region, str(group.count), str(group.num_nodes))
    console.print(table)
    console.print(
        f"Cost {proof.cost_usd_per_hour:.2f} USD/h; proved within {proof.gap:.4%} of the optimum"
        f" ({proof.status.value}). {_short(made)}",
        soft_wrap=True,
    )
    sent = f"{made.num_commands} commands sent" if made.num_commands else "no command needed"
    console.print(f"Fleet as planned: {sent}.")
    for name, value in (("Library", made.library), ("Plan", made.plan_file), ("Report", made.report)):
        console.print(f"{name + ':':9}{value}", soft_wrap=True)
    console.print("Look:    make serve, then the address it prints", soft_wrap=True)
    console.print("End:     .venv/bin/coral demo --stop ends the local node agents and their engines", soft_wrap=True)


def _short(made: DemoSummary) -> str:
    missing = [row for row in made.plan.shortfalls if row.shortfall_requests_per_s > 0]
    if not missing:
        return "All demand is served."
    return "Not served: " + ", ".join(f"{row.model} {row.shortfall_requests_per_s:.3g} requests/s" for row in missing)
