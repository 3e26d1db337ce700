"""``coral metrics``: the pipeline's state for Prometheus. Owns arguments and output only."""

from __future__ import annotations

from typing import Annotated

import typer

from coral_tasks.settings import Settings
from coral_tasks.tasks import observing, sharing


def metrics(
    serve: Annotated[
        str, typer.Option("--serve", help="HOST:PORT to answer GET /metrics on, until Ctrl-C; default: print once.")
    ] = "",
) -> None:
    """Print cost, gap, times, shortage, gate verdicts and agents' states as Prometheus text, or serve them."""
    if not serve:
        typer.echo(observing.text(Settings()), nl=False)
        return
    host, _, port = serve.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise typer.BadParameter("give HOST:PORT, for example 127.0.0.1:9464", param_hint="--serve")
    server = observing.serve(Settings(), host, int(port))
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


def pull() -> None:
    """Bring state and newest runs from CORAL_SHARED to this machine, for the page and for reading; prints how many."""
    typer.echo(f"{sharing.pull_for_page(Settings())} runs")
