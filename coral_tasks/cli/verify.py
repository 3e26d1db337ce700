"""``coral verify``: our answers against reference cases. Owns arguments and output only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from coral_tasks.domain.errors import ExpectedOutcome

app = typer.Typer(help="Compare our answers with reference cases.", no_args_is_help=True)

_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_FILES = Annotated[list[Path], typer.Argument(help="Instance or case files.")]


class Differences(ExpectedOutcome):
    """Some answers differ from what is expected."""


@app.callback()
def _group() -> None:
    """Compare our answers with reference cases."""


@app.command()
def allocation(
    files: _FILES,
    time_limit_s: Annotated[float, typer.Option("--time-limit-s", min=0.1, help="For each file.")] = 60.0,
    gap: Annotated[float, typer.Option("--gap", min=0.0, help="Stop at this proved relative gap.")] = 1e-9,
    as_json: _JSON = False,
) -> None:
    """Solve allocation instances in the format of the reference solver and compare with expected values."""
    from coral_tasks.tasks.planning import verify_case

    verdicts = [verify_case(path, time_limit_s=time_limit_s, gap=gap) for path in files]
    if as_json:
        typer.echo(msgspec.json.encode(verdicts))
    else:
        table = Table("file", "status", "objective", "expected", "bound", "CPU s", "agrees")
        for one in verdicts:
            figures = ["" if value is None else f"{value:.9g}" for value in (one.objective, one.expected, one.bound)]
            agrees = "yes" if one.agrees else "NO"
            table.add_row(Path(one.file).name, one.status, *figures, f"{one.seconds:.2f}", agrees)
        Console().print(table)
    wrong = [one.file for one in verdicts if not one.agrees]
    if wrong:
        raise Differences(f"{len(wrong)} of {len(verdicts)} differ: {', '.join(wrong)}")


@app.command()
def placement(files: _FILES, as_json: _JSON = False) -> None:
    """Recompute placement case files in the format of the reference and report every difference."""
    from coral_tasks.tasks.verify import verify_placement_file

    verdicts = [verify_placement_file(path) for path in files]
    if as_json:
        typer.echo(msgspec.json.encode(verdicts))
    else:
        for one in verdicts:
            for case, text in one.differences:
                typer.echo(f"{one.file}: {case}: {text}")
            agree = one.num_cases - len({case for case, _ in one.differences})
            typer.echo(f"{one.file}: {agree} of {one.num_cases} cases agree")
    wrong = [one.file for one in verdicts if one.differences]
    if wrong:
        raise Differences(f"{len(wrong)} of {len(verdicts)} differ: {', '.join(wrong)}")
