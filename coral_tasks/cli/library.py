"""``coral library``: arguments and tables of building, showing, comparing and checking the template library."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer

app = typer.Typer(help="The template library: build, show, diff, verify.", no_args_is_help=True)

LibraryOption = Annotated[
    str,
    typer.Option(
        "--library",
        help="Folder or s3://bucket/prefix of the library; default: CORAL_LIBRARY, or <CORAL_HOME>/library.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]

EXIT_DIFFERENT: Final = 1
EXIT_FAULT: Final = 3


def library_address(given: str) -> str:
    """The address given, or the default one of the settings."""
    if given:
        return given
    from coral_tasks.settings import Settings

    settings = Settings()
    return settings.library or str(settings.home / "library")


@app.command()
def build(
    setup: Annotated[str, typer.Option(help="Setup of the catalogue.")] = "",
    library: LibraryOption = "",
    max_nodes: Annotated[int, typer.Option(help="N_max: most nodes of an instance.")] = 6,
    rho: Annotated[float, typer.Option(help="Most GPU memory over checkpoint size; 'inf' for no limit.")] = 12.0,
    latency_split: Annotated[str, typer.Option(help="by-phase, equal or free.")] = "by-phase",
    reduction: Annotated[str, typer.Option(help="pairs, chain or none.")] = "pairs",
    processes: Annotated[int, typer.Option(help="Processes to work with.")] = 1,
    slo_step: Annotated[
        float | None,
        typer.Option(
            help="Also build every set at this factor times its limits, so that coral explain can tell what a tighter"
            " SLO costs; 0: do not. It doubles the building time. Default: CORAL_SLO_STEP, which is 0.8 unless set."
        ),
    ] = None,
    keep_versions: Annotated[int, typer.Option(help="Publications to keep.")] = 10,
    publish: Annotated[bool, typer.Option(help="Make the version current.")] = True,
    force: Annotated[bool, typer.Option(help="Publish although the regression gate refuses.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build what has changed and publish it as the current version."""
    from coral_tasks.settings import Settings
    from coral_tasks.tasks import library as tasks

    options = _options(max_nodes=max_nodes, rho=rho, latency_split=latency_split, reduction=reduction)
    settings = Settings()
    step = settings.slo_step if slo_step is None else slo_step
    tasks.check_slo_step(step)
    name = setup or settings.setup
    tables, tighter = tasks.profile_tables(name), tasks.profile_tables(name, step) if step else ()
    with _progress(quiet=as_json) as on_progress:
        summary = tasks.build_library(
            library_address(library),
            tables,
            options,
            tighter=tighter,
            slo_step=step,
            processes=processes,
            publication=tasks.Publication(publish=publish, force=force, keep_versions=keep_versions),
            on_progress=on_progress,
        )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(summary), indent=1))
        return
    _print_counts(summary.counts)
    done = "published" if summary.published else "written, not published"
    aside = f" and {summary.num_tighter} at {step:g} times their limits" if step else ""
    sets = f"{summary.num_sets} sets{aside}, {summary.num_reused} of them unchanged"
    typer.echo(f"version {summary.version} {done}: {summary.num_templates} templates in {sets}")


def _options(*, max_nodes: int, rho: float, latency_split: str, reduction: str) -> Any:
    from coral_tasks.domain.names import Phase
    from coral_tasks.tasks import library as tasks

    ratio = None if rho == float("inf") else rho
    changes = {"max_nodes": max_nodes, "memory_ratio": ratio, "reduction": reduction}
    try:
        return {phase: tasks.options_for(phase, latency_split, **changes) for phase in Phase}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def show(
    template: Annotated[str, typer.Argument(help="Template id; none: an overview of the library.")] = "",
    library: LibraryOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the current version, or draw one template's pipeline."""
    from coral_tasks.tasks import library as tasks

    address = library_address(library)
    if template:
        typer.echo(tasks.show_template(address, template))
        return
    overview = tasks.library_overview(address)
    if as_json:
        typer.echo(json.dumps(overview, indent=1))
        return
    typer.echo(f"version {overview['version']}, published {overview['published_at']}")
    for name, value in overview["parameters"].items():
        typer.echo(f"  {name}: {value}")
    _print_counts({f"{one['model']} {one['phase']}": _counts_of(one) for one in overview["sets"]})
    if overview["tighter"]:
        typer.echo("One SLO step tighter, to tell what that would cost; no plan is made of these:")
        _print_counts({f"{one['model']} {one['phase']}": _counts_of(one) for one in overview["tighter"]})


def _counts_of(one: dict[str, Any]) -> dict[str, int]:
    return {name: value for name, value in one.items() if name.startswith("num_")}


_COLUMNS = {
    "num_possible": "possible",
    "num_beyond_memory": "over rho",
    "num_infeasible": "no fit",
    "num_replaced_by_one": "by one",
    "num_replaced_by_two": "by two",
    "num_kept": "kept",
}
_ADDED = ("num_kept_on_request", "num_vllm_extra")


def _print_counts(counts: dict[str, dict[str, int]]) -> None:
    """What became of every combination; narrow enough for 80 columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table("set", box=None, pad_edge=False)
    for title in (*_COLUMNS.values(), "rows"):
        table.add_column(title, justify="right", no_wrap=True)
    for label, row in counts.items():
        rows = row["num_kept"] + sum(row[name] for name in _ADDED)
        table.add_row(label, *(f"{row[name]:,}" for name in _COLUMNS), f"{rows:,}")
    Console().print(table)
    typer.echo(
        "by one, by two: as good as one or two smaller ones. rows: kept, on request, or needed where only vLLM runs."
    )


@app.command()
def diff(
    before: Annotated[str, typer.Argument(help="Version; none: the one before the current one.")] = "",
    after: Annotated[str, typer.Argument(help="Version; none: the current one.")] = "",
    library: LibraryOption = "",
    as_json: JsonOption = False,
) -> None:
    """Compare two versions: templates gained and lost, throughput shifts by GPU type. Exit code 1 if they differ."""
    from coral_tasks.tasks import library as tasks

    address = library_address(library)
    found = tasks.diff_versions(address, before or tasks.previous_version(address), after or None)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
    else:
        for one in found:
            _print_difference(one)
    if any(one.changed for one in found):
        raise typer.Exit(EXIT_DIFFERENT)


def _print_difference(one: Any) -> None:
    change = f"{one.num_before} → {one.num_after} templates, {one.num_gained} gained, {one.num_lost} lost"
    label = f"{' '.join(one.name)}{' (tighter SLO)' if one.tighter else ''}"
    typer.echo(f"{label}: {change if one.changed else f'{one.num_after} templates, unchanged'}")
    for shift in one.shifts:
        if (shift.smallest, shift.largest) != (1.0, 1.0):
            span = f"{shift.smallest - 1:+.2%} to {shift.largest - 1:+.2%}"
            typer.echo(f"  {shift.gpu_type}: median {shift.median - 1:+.2%} ({span}, {shift.num_templates} templates)")
    for sign, names in (("+", one.gained), ("-", one.lost)):
        for name in names[:5]:
            typer.echo(f"  {sign} {name}")


@app.command()
def verify(library: LibraryOption = "") -> None:
    """Read every byte of the current version and report what is wrong. Exit code 3 if anything is."""
    from coral_tasks.tasks import library as tasks

    address = library_address(library)
    problems = tasks.verify_library(address)
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        raise typer.Exit(EXIT_FAULT)
    typer.echo(f"{address}: whole")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Any]:
    """Progress bar with the time left; gives the callback."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, *times, console=Console(stderr=True), disable=quiet) as shown:
        task = shown.add_task("combinations", total=None)

        def on_progress(step: Any) -> None:
            shown.update(task, completed=step.done, total=step.total, description=step.label)

        yield on_progress
