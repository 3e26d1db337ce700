"""The validation report as one HTML page. Owns its layout; figures come from ``validate``. It needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}"
    "table{border-collapse:collapse;margin:.5rem 0 1.5rem}th,td{padding:.25rem .7rem;border-bottom:1px solid #d8dee4;"
    "text-align:right}th:first-child,td:first-child{text-align:left}caption{text-align:left;font-weight:600}"
)


def validation_page(report: Mapping[str, Any]) -> str:
    """HTML of a report of ``validate`` with, under ``helix``, one of ``validate_helix``."""
    parts = [
        _table("Held-out points", ("figure", "median", "p90", "points"), _metrics(report)),
        f"<p>Source: {escape(str(report['source']))}. {escape(str(report['split']))}</p>",
        _table("Points the fit has seen", ("figure", "median", "p90", "points"), _metrics(report["fit"])),
        _table("Flagged points", ("figure", "median", "p90", "points"), _metrics(report["flagged"])),
        _table(
            "Roofline on the same held-out points", ("figure", "median", "p90", "points"), _metrics(report["analytic"])
        ),
        _table(
            "By GPU type, model and source",
            ("GPU", "model", "source", "TTFT median", "TTFT p90", "TPOT median", "TPOT p90", "points"),
            [
                (
                    one["gpu"],
                    one["model"],
                    one["source"],
                    *_pair(one["ttft"]),
                    *_pair(one["tpot"]),
                    one["ttft"]["count"],
                )
                for one in report["by"]
            ],
        ),
        _table(
            "Worst points, predicted and measured",
            ("point", "TTFT ms", "TPOT ms"),
            [(one["id"], _arrow(one["ttft_ms"]), _arrow(one["tpot_ms"])) for one in report["worst"]],
        ),
        _helix(report.get("helix")),
        _table(
            "Not predicted",
            ("point", "source", "reason"),
            [(one["id"], one["source"], one["reason"]) for one in report["not_predicted"]],
        ),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Profile validation</title>'
        f"<style>{STYLE}</style></head><body><h1>Profile validation</h1>"
        f"<p>Absolute relative errors of predicted against measured figures.</p>{body}</body></html>"
    )


def _helix(helix: Mapping[str, Any] | None) -> str:
    if helix is None:
        return ""
    rows = [("layer times", *_pair(helix["layer_times"]), helix["layer_times"]["count"])]
    rows += [
        (f"{one['gpu']} x{one['gpus']} {one['phase']}", *_pair(one), one["count"]) for one in helix["layer_times_by"]
    ]
    rows.append(("KV blocks, LLaMA-2 70B", *_pair(helix["kv_blocks"]), helix["kv_blocks"]["count"]))
    rows += [(f"KV blocks, {one['gpu']} x{one['gpus']}", *_pair(one), one["count"]) for one in helix["kv_blocks_by"]]
    return _table("Helix: roofline and memory model", ("figure", "median", "p90", "rows"), rows)


def _metrics(group: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [(name.upper(), *_pair(group[name]), group[name]["count"]) for name in ("ttft", "tpot")]


def _pair(figures: Mapping[str, Any]) -> tuple[str, str]:
    return _percent(figures["median"]), _percent(figures["p90"])


def _percent(value: float | None) -> str:
    return "no points" if value is None else f"{value:.1%}"


def _arrow(pair: Sequence[float]) -> str:
    return f"{pair[0]:g} for {pair[1]:g}"


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
