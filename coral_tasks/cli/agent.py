"""``coral agent``, ``coral status``, ``coral dispatch`` and ``coral keys``. Owns arguments and output only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from coral_tasks.domain.errors import CoralFault, ExpectedOutcome
from coral_tasks.settings import Settings
from coral_tasks.tasks import dispatching, fleet_access, observing

if TYPE_CHECKING:
    from coral_tasks.domain.transition import Transition

keys_app = typer.Typer(help="Make, rotate and list the CURVE keys of controllers and agents.", no_args_is_help=True)

_KEYS = Annotated[Path | None, typer.Option("--keys", help="Folder of key files; default HOME/keys.")]
_AGENTS = Annotated[Path | None, typer.Option("--agents", help="TOML file of agents; default HOME/agents.toml.")]
_PROVISIONING = Annotated[
    Path | None,
    typer.Option("--provisioning", help="JSON file of the cloud that gives nodes; default HOME/provisioning.json."),
]
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_NAME = Annotated[str, typer.Argument(help="Name of the key's owner.")]
_ROLE = Annotated[str, typer.Option("--role", help="agent or controller.")]


class NotConverged(ExpectedOutcome):
    """The fleet is not as planned; the message says why."""


def register(app: typer.Typer) -> None:
    """Add the commands of this group to ``coral``."""
    commands: dict[str, Callable[..., None]] = {"agent": agent, "status": status, "dispatch": dispatch}
    for name, command in commands.items():
        app.command(name)(command)
    app.add_typer(keys_app, name="keys")


def agent(
    config: Annotated[Path | None, typer.Option("--config", help="TOML file; options override it.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Agent's name, of its key too; default: node.")] = None,
    node: Annotated[str | None, typer.Option("--node", help="Node id, if there is one node only.")] = None,
    region: Annotated[str | None, typer.Option("--region")] = None,
    configuration: Annotated[str | None, typer.Option("--configuration", help="For example L4x4.")] = None,
    market: Annotated[str, typer.Option("--market", help="on_demand, spot or reserved.")] = "on_demand",
    bind: Annotated[str | None, typer.Option("--bind", help="tcp://HOST:PORT, never all interfaces.")] = None,
    advertise: Annotated[
        str | None, typer.Option("--advertise", help="Host under which gateway and followers reach its engines.")
    ] = None,
    engine_host: Annotated[
        str | None, typer.Option("--engine-host", help="Address that engines bind, never all interfaces.")
    ] = None,
    state: Annotated[Path | None, typer.Option("--state", help="Folder of journal, logs and locks.")] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="Folder of key files.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="simulated or vllm.")] = None,
    first_engine_port: Annotated[int | None, typer.Option("--first-engine-port")] = None,
    time_scale: Annotated[float | None, typer.Option("--time-scale", help="Speed of simulated engines.")] = None,
    stop_engines_on_exit: Annotated[
        bool | None, typer.Option("--stop-engines-on-exit/--keep-engines-on-exit", help="Default: keep.")
    ] = None,
) -> None:
    """Run a node agent until TERM."""
    from coral_tasks.agent.config import agent_config, read_agent_config

    given: dict[str, Any] = {
        "name": name or node,
        "bind": bind,
        "advertise": advertise,
        "engine_host": engine_host,
        "state": state,
        "keys": keys,
        "engine": engine,
        "first_engine_port": first_engine_port,
        "time_scale": time_scale,
        "stop_engines_on_exit": stop_engines_on_exit,
    }
    if node is not None:
        given["nodes"] = [{"id": node, "region": region, "configuration": configuration, "market": market}]
    overrides = {key: value for key, value in given.items() if value is not None}
    made = read_agent_config(config, overrides=overrides) if config else agent_config(overrides, source="arguments")
    observing.configure_logs(Settings())
    dispatching.run_agent(made)


def status(
    agents: _AGENTS = None,
    keys: _KEYS = None,
    provisioning: _PROVISIONING = None,
    wait_s: Annotated[float, typer.Option("--wait-s", help="How long to wait for answers.")] = 5.0,
    every: Annotated[bool, typer.Option("--all", help="List the empty nodes too, instead of counting them.")] = False,
    as_json: _JSON = False,
) -> None:
    """Show what every node agent reports now: nodes with an engine or a note; how many are empty."""
    settings = Settings()
    home, cloud = settings.home, fleet_access.provisioner_of(settings, provisioning)
    seen = dispatching.observe(agents or home / "agents.toml", keys or home / "keys", wait_s=wait_s, provisioner=cloud)
    if as_json:
        typer.echo(msgspec.json.encode(seen))
    else:
        _show_nodes(seen, every=every)
    if seen.unreachable:
        raise NotConverged(f"no answer from {', '.join(seen.unreachable)}")


def _show_nodes(seen: Any, *, every: bool) -> None:
    """One row for each node; of the empty ones without a note only their number unless ``every``."""
    table = Table("node", "state", "instance", "in flight", "note")
    table.columns[0].overflow = table.columns[2].overflow = "fold"  # a cut name is of no use
    num_empty = 0
    for name, one in sorted(seen.nodes.items()):
        note = one.excluded or one.detail
        if one.state.value == "empty" and not note and not every:
            num_empty += 1
            continue
        instance = one.spec.instance if one.spec is not None else ""
        load = "" if one.in_flight is None else str(one.in_flight)
        table.add_row(name, one.state.value, instance, load, note)
    console = Console()
    if table.row_count:
        console.print(table)
    if num_empty:
        console.print(f"{num_empty} of {len(seen.nodes)} nodes are empty; --all lists them")


def dispatch(
    plan: Annotated[Path, typer.Option("--plan", help="JSON file of the plan.")],
    agents: _AGENTS = None,
    keys: _KEYS = None,
    provisioning: _PROVISIONING = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the steps, do nothing.")] = False,
    picture: Annotated[Path | None, typer.Option("--picture", help="With --dry-run: draw them as HTML.")] = None,
    as_json: _JSON = False,
) -> None:
    """Bring the fleet to a plan, or show how that would be done."""
    if picture is not None and not dry_run:
        raise typer.BadParameter("goes with --dry-run", param_hint="--picture")
    settings = Settings()
    home, cloud = settings.home, fleet_access.provisioner_of(settings, provisioning)
    agents, keys = agents or home / "agents.toml", keys or home / "keys"
    wanted = dispatching.read_plan(plan)
    if dry_run:
        transition, seen = dispatching.preview(wanted, agents, keys, provisioner=cloud)
        if picture is not None:
            dispatching.write_picture(picture, transition, seen)
        _show_transition(transition, as_json=as_json)
        if seen.unreachable:
            raise NotConverged(f"no answer from {', '.join(seen.unreachable)}")
        return
    options = fleet_access.dispatch_options(settings, provisioning)
    result = dispatching.dispatch(wanted, home=home, agents=agents, keys=keys, options=options, provisioner=cloud)
    if as_json:
        typer.echo(msgspec.json.encode(result))
    else:
        Console().print(dispatching.summary(result))
    if result.superseded:
        raise NotConverged("a newer controller took over: " + "; ".join(result.problems))
    if not result.converged:
        raise NotDispatched("; ".join([*result.problems, *(one.reason for one in result.unplaced)]))


class NotDispatched(CoralFault):
    """A dispatch ended before the fleet was as planned."""


def _show_transition(transition: Transition, *, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.encode(transition))
        return
    table = Table("step", "what", "instance", "nodes")
    for step in transition.steps:
        nodes = ", ".join(step.nodes) if step.nodes else f"{len(step.routed)} routed"
        table.add_row(str(step.number), step.kind.value, step.instance or "", nodes)
    console = Console()
    console.print(table)
    for dip in transition.dips:
        console.print(f"capacity of {dip.what} falls to {dip.lowest:g} (floor {dip.floor:g})")
    for one in transition.unplaced:
        console.print(f"{one.count} of {one.template} not placed: {one.reason}")


@keys_app.command("make")
def make(name: _NAME, role: _ROLE = "agent", keys: _KEYS = None) -> None:
    """Make a key pair; the secret file has mode 0600."""
    typer.echo(dispatching.make_key(keys or Settings().home / "keys", role, name))


@keys_app.command("rotate")
def rotate(
    name: _NAME,
    role: _ROLE = "agent",
    keys: _KEYS = None,
    finish: Annotated[bool, typer.Option("--finish", help="Stop accepting the older keys.")] = False,
) -> None:
    """Replace a key pair; the old public key is accepted until --finish."""
    folder = keys or Settings().home / "keys"
    if finish:
        typer.echo(f"{dispatching.finish_rotation(folder, role, name)} older keys dropped")
    else:
        typer.echo(dispatching.rotate_key(folder, role, name))


@keys_app.command("list")
def list_keys(keys: _KEYS = None, as_json: _JSON = False) -> None:
    """List the public keys in the folder: who may come in."""
    found = dispatching.list_keys(keys or Settings().home / "keys")
    if as_json:
        typer.echo(json.dumps(found, indent=2, sort_keys=True))
        return
    table = Table("role", "name", "public key")
    for role, some in found.items():
        for name, key in some.items():
            table.add_row(role, name, key)
    Console().print(table)
