"""The ``coral`` command. Owns arguments, output and exit codes; every piece of work is a call into ``tasks``.

Exit codes: 0 done and good; 1 an expected "no" (refused, infeasible, differences found); 2 wrong usage;
3 a fault (storage, source, solver, protocol, engine).
"""

from __future__ import annotations

import sys
from typing import Final

import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError

from coral_tasks.cli import (
    agent,
    demand,
    demo,
    forecast,
    gate,
    library,
    metrics,
    plan,
    profile,
    replay,
    simulate,
    verify,
)
from coral_tasks.domain.errors import CoralFault, ExpectedOutcome
from coral_tasks.settings import Settings

EXIT_EXPECTED_NO: Final = 1
EXIT_WRONG_USAGE: Final = 2
EXIT_FAULT: Final = 3

# Which extra brings a package that a part of the commands needs.
_EXTRA_OF: Final = {
    **dict.fromkeys(
        ("great_expectations", "highspy", "numba", "pandas", "plotly", "prometheus_client", "pulp", "pyarrow"),
        "planner",
    ),
    **dict.fromkeys(("psutil", "zmq"), "agent"),
    "boto3": "aws",
    "airflow": "airflow",
}

app = typer.Typer(
    name="coral",
    help="Plan and deploy cost-efficient serving of many LLMs on mixed cloud GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

# One line for each group: app.add_typer(group.app, name="group")
agent.register(app)
demo.register(app)
plan.register(app)
simulate.register(app)
app.add_typer(verify.app, name="verify")
app.add_typer(library.app, name="library")
app.add_typer(gate.app, name="gate")
app.add_typer(demand.app, name="demand")
app.add_typer(forecast.app, name="forecast")
app.command()(replay.replay)
app.command()(metrics.metrics)
app.command()(metrics.pull)
app.add_typer(profile.app, name="profile")


@app.callback()
def _root() -> None:
    """Keep ``coral`` a group of commands even while it has only one."""


def main() -> None:
    """Run the command line; turn the project's exceptions into messages and exit codes."""
    try:
        app()
    except ExpectedOutcome as outcome:
        sys.stderr.write(f"coral: {outcome}\n")
        sys.exit(EXIT_EXPECTED_NO)
    except SettingsError as error:
        sys.stderr.write(f"coral: {error}: {error.__cause__}\n")
        sys.exit(EXIT_WRONG_USAGE)
    except ValidationError as error:
        if error.title != Settings.__name__:
            raise
        sys.stderr.write("".join(f"coral: {line}\n" for line in _wrong_settings(error)))
        sys.exit(EXIT_WRONG_USAGE)
    except ModuleNotFoundError as missing:
        extra = _EXTRA_OF.get((missing.name or "").split(".")[0])
        if extra is None:
            raise
        sys.stderr.write(f"coral: this command needs {missing.name}: pip install 'coral[{extra}]'\n")
        sys.exit(EXIT_EXPECTED_NO)
    except CoralFault as fault:
        sys.stderr.write(f"coral: {type(fault).__name__}: {fault}\n")
        sys.exit(EXIT_FAULT)


def _wrong_settings(error: ValidationError) -> list[str]:
    """One line for each wrong setting, by the environment variable's name."""
    return [
        f"setting CORAL_{'.'.join(map(str, one['loc'])).upper()}={one['input']}: {one['msg']}"
        for one in error.errors(include_url=False)
    ]
