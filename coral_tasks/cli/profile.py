"""``coral profile``: arguments and tables of building, showing, validating and measuring profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Profiles: how fast each node configuration is.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
HomeOption = Annotated[Path | None, typer.Option("--home", help="Folder of the pipeline; default: CORAL_HOME.")]


def _home(given: Path | None) -> Path:
    from coral_tasks.settings import Settings

    return given if given is not None else Settings().home


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, sort_keys=True))


@app.command()
def build(
    setup: Annotated[str, typer.Option(help="Setup of the catalogue.")] = "",
    measured: Annotated[
        list[Path] | None, typer.Option(help="Files of `coral profile run`, beside those in HOME/measurements.")
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build the profile tables of a setup from the best source for each node configuration."""
    from coral_tasks.settings import Settings
    from coral_tasks.tasks import profiling as tasks

    folder = tasks.build_profiles(setup or Settings().setup, _home(home), measured=measured or ())
    manifest = json.loads((folder / tasks.MANIFEST).read_text(encoding="utf-8"))
    if as_json:
        _print_json(manifest | {"folder": str(folder)})
        return
    typer.echo(f"version {manifest['version']}: {len(manifest['tables'])} tables in {folder}")
    for one in manifest["missing"]:
        typer.echo(f"left out: {one['model']} {one['phase']} {one['configuration']}: {one['reason']}")
    for one in manifest["unreachable"]:
        needs = f"{one['needed_s']:.4g} s alone on {one['configuration']}, limit {one['limit_s']:g} s"
        typer.echo(f"infeasible by SLO: {one['model']} {one['phase']} needs {needs}")
    for one in manifest["repairs"]:
        typer.echo(f"made monotone: {one['model']} {one['phase']} {one['configuration']}, {one['largest_change']:.2%}")


@app.command()
def show(
    model: Annotated[str, typer.Option(help="Only this model.")] = "",
    phase: Annotated[str, typer.Option(help="Only this phase.")] = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the current tables say: source, layers that fit, what limits, best figures."""
    from coral_tasks.domain.errors import UnknownName
    from coral_tasks.tasks import profiling as tasks

    rows = tasks.summarize(tasks.read_profiles(_home(home)))
    for kind, wanted in (("model", model), ("phase", phase)):
        known = sorted({row[kind] for row in rows})
        if wanted and wanted not in known:
            raise UnknownName(kind=kind, name=wanted, known=known)
    rows = [row for row in rows if model in ("", row["model"]) and phase in ("", row["phase"])]
    if as_json:
        _print_json(rows)
    else:
        _print_summary(rows)


def _print_summary(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "phase", "configuration", "tp", "source", "layers", "stopped by", "1 layer /s", "best /s")
    for row in rows:
        layers = f"{row['max_layers']} of {row['num_layers']}"
        numbers = (f"{row['one_layer']:,.0f}", f"{row['best']:,.1f}")
        names = (row["model"], row["phase"], row["configuration"], str(row["tp"]), row["source"])
        table.add_row(*names, layers, row["limit"], *numbers)
    Console().print(table)


@app.command()
def validate(
    points: Annotated[Path | None, typer.Option(help="Points in the columns of vllm_agg_points.csv.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for validation.html and validation.json.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predicted against measured TTFT and TPOT, with median and 90th percentile of the error."""
    from coral_tasks.tasks import profiling as tasks

    report = tasks.validate_profiles(points, out)
    if as_json:
        _print_json(report)
        return
    _print_validation(report)


def _print_validation(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("GPU", "model", "source", "TTFT median", "TTFT p90", "TPOT median", "TPOT p90", "points")
    groups = [{"gpu": "all", "model": "held out", "source": report["source"], **report}, *report["by"]]
    groups.append({"gpu": "all", "model": "flagged", "source": report["source"], **report["flagged"]})
    for one in groups:
        figures = [one["ttft"]["median"], one["ttft"]["p90"], one["tpot"]["median"], one["tpot"]["p90"]]
        texts = ["no points" if value is None else f"{value:.1%}" for value in figures]
        table.add_row(one["gpu"], one["model"], one["source"], *texts, str(one["ttft"]["count"]))
    console = Console()
    console.print(table)
    console.print(report["split"])
    if report["not_predicted"]:
        console.print(f"{len(report['not_predicted'])} points not predicted by a source; see --json")


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="File for the rows: JSON if it ends in .json, else Parquet.")],
    model: Annotated[str, typer.Option(help="Model of the catalogue.")] = "",
    configuration: Annotated[str, typer.Option(help="Node configuration that this machine is; cpu without GPU.")] = "",
    request: Annotated[Path | None, typer.Option(help="JSON file with model, configuration and options.")] = None,
    interpreter: Annotated[Path, typer.Option(help="Python of the environment with vLLM.")] = Path(
        ".venv-vllm/bin/python"
    ),
    layers: Annotated[str, typer.Option(help="Layer counts, two or more.")] = "2,4",
    sequences: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8",
    tokens: Annotated[str, typer.Option(help="Prompt lengths and contexts.")] = "128,512",
    repeats: Annotated[int, typer.Option(help="Timed repeats of each point.")] = 5,
    timeout_s: Annotated[float, typer.Option(help="Limit of one engine, its start included.")] = 1800.0,
    as_json: JsonOption = False,
) -> None:
    """Profile this machine with real vLLM (dummy weights, truncated layer counts).

    A node agent runs this for its PROFILE command: `coral profile run --request {request} --out {output}`.
    """
    from coral_tasks.tasks import profiling as tasks

    if (request is None) == (not model or not configuration):
        raise typer.BadParameter("needs either --model and --configuration, or --request")

    options = {
        "layer_counts": _numbers("layers", layers),
        "sequences": _numbers("sequences", sequences),
        "tokens": _numbers("tokens", tokens),
        "repeats": repeats,
        "timeout_s": timeout_s,
    }
    if request is not None:
        model, configuration, options = tasks.read_request(request)
    result = tasks.run_measurement(model, configuration, interpreter=interpreter, out=out, options=options)
    _print_rows(result, as_json=as_json)


@app.command()
def measure(
    node: Annotated[str, typer.Option(help="Idle node whose agent has a profile_command.")],
    model: Annotated[str, typer.Option(help="Model of the catalogue.")] = "",
    request: Annotated[Path | None, typer.Option(help="JSON file with model, configuration and options.")] = None,
    layers: Annotated[str, typer.Option(help="Layer counts, two or more.")] = "2,4",
    sequences: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8",
    tokens: Annotated[str, typer.Option(help="Prompt lengths and contexts.")] = "128,512",
    repeats: Annotated[int, typer.Option(help="Timed repeats of each point.")] = 5,
    timeout_s: Annotated[float, typer.Option(help="Limit of the whole job; the agent ends it then.")] = 3600.0,
    job: Annotated[
        str, typer.Option(help="Id of a job begun before: its result is fetched, nothing starts twice.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="File for the rows; default: in HOME/measurements.")] = None,
    agents: Annotated[Path | None, typer.Option(help="TOML file of agents; default HOME/agents.toml.")] = None,
    keys: Annotated[Path | None, typer.Option(help="Folder of key files; default HOME/keys.")] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Profile one idle node through its agent with real vLLM; later builds use the rows first."""
    from coral_tasks.tasks import measuring
    from coral_tasks.tasks.profiling import read_request, require_writable, summary_of_rows

    if (request is None) == (not model):
        raise typer.BadParameter("needs either --model or --request")
    fleet = measuring.Fleet.of(_home(home), agents=agents, keys=keys)
    options: dict[str, Any] = {
        "layer_counts": _numbers("layers", layers),
        "sequences": _numbers("sequences", sequences),
        "tokens": _numbers("tokens", tokens),
        "repeats": repeats,
    }
    configuration = measuring.configuration_of(node, fleet)
    if request is not None:
        model, named, options = read_request(request)
        measuring.require_same(node, configuration, named)
    path = out or measuring.measurement_file(_home(home), configuration, model)
    require_writable(path)
    job = job or measuring.new_job_id(model, configuration)
    typer.echo(f"job {job} on node {node}; to come back to it: --job '{job}'", err=True)
    rows = measuring.measure_now(node, model, configuration, options, fleet=fleet, job_id=job, timeout_s=timeout_s)
    measuring.write_rows(path, rows)
    _print_rows(summary_of_rows(rows, path), as_json=as_json)


def _print_rows(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        _print_json(result)
        return
    counts = f"{result['ok']} ok, {result['oom']} out of memory, {result['failed']} failed"
    typer.echo(f"{result['points']} points: {counts}; in {result['out']}")
    for fit in result["fits"]:
        typer.echo(
            f"{fit['phase']} {fit['sequences']} x {fit['tokens']}: {fit['constant_s'] * 1e3:.2f} ms + "
            f"{fit['layer_s'] * 1e3:.3f} ms per layer, residual {fit['residual']:.1%}"
        )


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{name} must be whole numbers with commas, not {text!r}") from error
