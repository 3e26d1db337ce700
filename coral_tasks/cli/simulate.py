"""``coral simulate``, ``compare``, ``backtest``, ``fidelity``: arguments and tables; the work is in ``tasks``."""

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
    app.command("compare")(compare)
    app.command("backtest")(backtest)
    app.command("fidelity")(fidelity)


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


def compare(
    setup: Annotated[str, typer.Argument(help="core, extended, helix, sweep or restrictions.")],
    case: Annotated[str, typer.Argument(help="default, scarce, large-heavy or small-heavy.")] = "default",
    traces: Annotated[Path | None, typer.Option(help="Folder with the Azure traces (*conv*, *code*).")] = None,
    work: Annotated[Path, typer.Option(help="Folder for library and report.")] = Path(".coral/compare"),
    availability: Annotated[Path | None, typer.Option(help="CSV: epoch, region, configuration, nodes.")] = None,
    arrivals: Annotated[str, typer.Option(help="poisson, or trace: the trace's own times.")] = "poisson",
    headroom: Annotated[float, typer.Option(help="Share of capacity that demand may use.")] = 0.7,
    supply: Annotated[float | None, typer.Option(help="Nodes on offer, in cheapest plans' worth.")] = None,
    latency_split: Annotated[str, typer.Option(help="equal or free latency shares of stages.")] = "equal",
    router: Annotated[str, typer.Option(help="weighted_round_robin or least_loaded.")] = "weighted_round_robin",
    measured: Annotated[Path | None, typer.Option(help="helix only: folder with Helix's measured files.")] = None,
    slowdown: Annotated[float, typer.Option(help="Stages take this many times their profiled time.")] = 1.0,
    planner: Annotated[list[str] | None, typer.Option(help="Baseline to compare with; repeat. Default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of availability and trace.")] = 0,
    time_limit_s: Annotated[float, typer.Option(help="Limit of one solve.")] = 60.0,
    *,
    json_output: JsonOption = False,
) -> None:
    """Rerun the paper's evaluation: every planner on the same inputs, simulated, the paper's figures beside ours."""
    from coral_tasks.tasks import comparing

    request = comparing.CompareRequest(
        setup="core" if setup in ("helix", "sweep", "restrictions") else setup,
        case=case,
        work=work,
        traces=traces,
        arrivals=arrivals,
        availability=availability,
        supply=supply,
        headroom=headroom,
        seed=seed,
        time_limit_s=time_limit_s,
        library={"latency_split": latency_split},
        router=router,
        measured=measured,
        slowdown=slowdown,
        planners=tuple(planner) if planner else comparing.ALL_PLANNERS,
    )
    console = Console(stderr=True)
    runs = {
        "helix": comparing.compare_helix,
        "sweep": comparing.compare_sweep,
        "restrictions": comparing.compare_restrictions,
    }
    summary, report = runs.get(setup, comparing.compare_and_report)(request, lambda text: console.print(f"… {text}"))
    if json_output:
        typer.echo(json.dumps(summary, indent=1))
        return
    _print_rows(summary["baselines"] if "baselines" in summary else summary["rows"])
    if "planners" in summary:
        names = ("name", "usd_per_hour", "shortfall_requests_per_s", "goodput_requests_per_s", "attainment")
        _print_rows([{name: row.get(name) for name in names} for row in summary["planners"]])
    for note in summary["notes"]:
        typer.echo(note)
    typer.echo(f"report: {report}")


def backtest(
    setup: Annotated[str, typer.Argument(help="Setup with a shipped day of demand.")] = "core",
    work: Annotated[Path, typer.Option(help="Folder for library and report.")] = Path(".coral/compare"),
    demand: Annotated[
        Path | None, typer.Option(help="Recorded demand, 5-minute intervals; default: the setup's day.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="Recorded prices, a row for each change; needs --demand. Default: catalogue.")
    ] = None,
    availability: Annotated[
        Path | None, typer.Option(help="Recorded availability, like --prices. Default: made up.")
    ] = None,
    traces: Annotated[Path | None, typer.Option(help="Folder with the Azure traces: lengths of --simulate.")] = None,
    hours: Annotated[float, typer.Option(help="Hours of the day, from its first interval.")] = 24.0,
    every: Annotated[int, typer.Option(help="Intervals of 5 minutes between two plans.")] = 3,
    margin: Annotated[float, typer.Option(help="Policy last: planned over last demand.")] = 1.1,
    method: Annotated[
        str, typer.Option(help="Policy forecast: last_value, seasonal_naive or smoothing.")
    ] = "smoothing",
    quantile: Annotated[float, typer.Option(help="Policy forecast: quantile of its errors that planning adds.")] = 0.95,
    season: Annotated[int, typer.Option(help="Policy forecast: intervals in a season.")] = 288,
    max_gap: Annotated[int, typer.Option(help="Policy forecast: newest intervals that may be unknown.")] = 2,
    policy: Annotated[
        list[str] | None, typer.Option(help="forecast, last, oracle or peak; repeat. Default: all.")
    ] = None,
    headroom: Annotated[float, typer.Option(help="Share of capacity that demand may use.")] = 0.7,
    router: Annotated[str, typer.Option(help="weighted_round_robin or least_loaded.")] = "weighted_round_robin",
    seed: Annotated[int, typer.Option(help="Seed of availability and trace.")] = 0,
    *,
    simulate: Annotated[bool, typer.Option("--simulate", help="Replay requests on the plans too.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Replay a recorded day under planning policies: cost, shortage, churn and SLO attainment."""
    from coral_tasks.tasks import backtesting

    request = backtesting.BacktestRequest(
        setup=setup,
        work=work,
        demand=demand,
        prices=prices,
        availability=availability,
        traces=traces,
        hours=hours,
        every=every,
        margin=margin,
        forecast=backtesting.forecast_settings(method=method, quantile=quantile, season=season, max_gap=max_gap),
        policies=tuple(policy or backtesting.POLICIES),
        headroom=headroom,
        router=router,
        seed=seed,
        simulate=simulate,
    )
    console = Console(stderr=True)
    summary, report = backtesting.backtest(request, lambda text: console.print(f"… {text}"))
    if json_output:
        typer.echo(json.dumps(summary, indent=1))
        return
    _print_rows(_turned(summary["rows"]))
    for note in summary["notes"]:
        typer.echo(note)
    typer.echo(f"report: {report}")


def fidelity(
    what: Annotated[str, typer.Argument(help="points, helix or replay.")],
    folder: Annotated[Path | None, typer.Argument(help="Measured files (helix) or a recorded run (replay).")] = None,
    *,
    json_output: JsonOption = False,
) -> None:
    """How close the simulator is to real systems: measured points, Helix's prototype, a recorded run of real vLLM.

    replay takes the folder that benchmarks/record_vllm_run.py wrote.
    """
    from coral_tasks.tasks import fidelity as work

    summary = work.fidelity(what, folder)
    if json_output:
        typer.echo(json.dumps(summary, indent=1))
        return
    figures = {name: value for name, value in summary.items() if isinstance(value, dict) and name != "timing"}
    keys = dict.fromkeys(key for value in figures.values() for key in value)
    _print_rows([{"figure": key, **{of: value.get(key) for of, value in figures.items()}} for key in keys])
    _print_rows(summary.get("rows", []))
    typer.echo(summary["source"])


def _turned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each figure and a column for each policy, which fits a narrow terminal; all have the same figures."""
    figures = [name for name in rows[0] if name != "policy"]
    return [{"figure": name.replace("_", " "), **{row["policy"]: row[name] for row in rows}} for name in figures]


def _print_rows(rows: list[dict[str, Any]]) -> None:
    """A table whose columns are the keys of its rows."""
    if not rows:
        return
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


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
