"""``coral replay``: recompute a run's plan from what the run kept. Exit code 1 if it differs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from coral_tasks.settings import Settings


def replay(
    run: Annotated[str, typer.Argument(help="Run id: a folder under <home>/runs.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recompute a run's plan from its inputs and compare it with the plan that was made, byte by byte."""
    from coral_tasks.tasks.replay import replay as recompute

    verdict = recompute(Settings(), run)
    if as_json:
        typer.echo(json.dumps(asdict(verdict), indent=1))
    elif verdict.same:
        typer.echo(f"run {run}: plan {verdict.plan} ({verdict.status}) recomputed, equal to the byte")
    else:
        typer.echo(f"run {run}: the plan differs ({verdict.status}); {verdict.first_difference}")
    if not verdict.same:
        raise typer.Exit(1)
