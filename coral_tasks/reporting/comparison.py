"""The HTML page of an evaluation: planners side by side, the paper's figures beside ours, bars of cost and goodput.

Owns the page's content, from the plain values that ``comparison_as_json`` and ``sweep_as_json`` give. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from coral_tasks.reporting.page import Figure, figures, page, stacked_bars, table, write_page


def write_comparison_page(path: Path, comparison: Mapping[str, Any]) -> None:
    """Write the page of one setup and case."""
    title = f"Coral beside baselines: {comparison['setup']}, {comparison['case']}"
    write_page(path, page(title, _body(title, comparison)))


def _body(title: str, comparison: Mapping[str, Any]) -> str:
    planners: Sequence[Mapping[str, Any]] = comparison["planners"]
    coral = planners[0]
    parts = [
        f"<h1>{escape(title)}</h1>",
        "".join(f'<p class="dim">{escape(note)}</p>' for note in comparison["notes"]),
        figures(_headline(coral, comparison)),
        "<h2>Ratios to the baselines, the paper's beside ours</h2>",
        table(*_ratio_table(comparison["baselines"])),
        "<h2>Planners</h2>",
        table(*_planner_table(planners)),
        "<h2>Cost</h2>",
        stacked_bars("cost", {"USD/h": {row["name"]: row["usd_per_hour"] for row in planners}}, "USD per hour"),
    ]
    if "goodput_requests_per_s" in coral:
        parts += [
            "<h2>Goodput</h2>",
            stacked_bars("goodput", _goodput_parts(planners, comparison), "requests per second"),
            "<h2>Models on Coral's plan</h2>",
            table(*_model_table(coral["models"])),
        ]
    return "".join(parts)


def _headline(coral: Mapping[str, Any], comparison: Mapping[str, Any]) -> list[Figure]:
    seconds = comparison["solve_seconds"]
    found = [
        Figure(label="cost", value=f"{coral['usd_per_hour']:.2f} USD/h"),
        Figure(label="solve, worst epoch", value=f"{max(seconds):.2f} s"),
        Figure(label="largest gap", value=f"{coral['gap']:.2g}"),
    ]
    if "attainment" in coral:
        found.append(Figure(label="requests within SLO", value=f"{coral['attainment']:.1%}"))
    return found


def _ratio_table(baselines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str | float]]]:
    kinds = ("cost_ratio", "goodput_ratio", "cost_per_goodput_ratio")
    words = ("its cost / ours", "our goodput / its", "its cost per goodput / ours")
    names = [name for kind in kinds for name in (kind, f"paper_{kind}")]
    columns = ["baseline", *(column for word in words for column in (word, "paper"))]
    return columns, [[str(row["name"]), *(_number(row.get(name)) for name in names)] for row in baselines]


def _number(value: float | None) -> str | float:
    return "–" if value is None else float(value)


def _planner_table(planners: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str | float]]]:
    columns = [
        "planner",
        "USD/h",
        "planned USD/h",
        "left out, requests/s",
        "goodput, requests/s",
        "within SLO",
        "solve s",
    ]
    rows: list[list[str | float]] = [
        [
            row["name"],
            float(row["usd_per_hour"]),
            float(row["planned_usd_per_hour"]),
            float(row["shortfall_requests_per_s"]),
            _number(row.get("goodput_requests_per_s")),
            f"{row['attainment']:.1%}" if "attainment" in row else "–",
            float(sum(row["solve_seconds"]) / len(row["solve_seconds"])),
        ]
        for row in planners
    ]
    return columns, rows


def _goodput_parts(planners: Sequence[Mapping[str, Any]], comparison: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {
        model: {row["name"]: row["models"][model]["goodput_requests_per_s"] for row in planners}
        for model in comparison["demand_requests_per_s"]
        if all(model in row["models"] for row in planners)
    }


def _model_table(models: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str | float]]]:
    columns = ["model", "within SLO", "TTFT within", "TPOT within", "TTFT p99 s", "TPOT p99 s", "goodput, requests/s"]
    rows: list[list[str | float]] = [
        [
            name,
            *(f"{row[key]:.1%}" for key in ("attainment", "ttft_attainment", "tpot_attainment")),
            *(_number(row[key]) for key in ("ttft_p99_s", "tpot_p99_s")),
            float(row["goodput_requests_per_s"]),
        ]
        for name, row in models.items()
    ]
    return columns, rows


def write_table_page(path: Path, title: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> None:
    """A page with one table whose columns are the keys of its rows (sweep, backtest, Helix)."""
    columns = list(rows[0]) if rows else []
    body = [f"<h1>{escape(title)}</h1>", *(f'<p class="dim">{escape(note)}</p>' for note in notes)]
    body.append(table(columns, [[_cell(row[name]) for name in columns] for row in rows]))
    write_page(path, page(title, "".join(body)))


def _cell(value: Any) -> str | float:
    if value is None:
        return "–"
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
