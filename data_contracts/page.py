"""Readable HTML page of one run's gate reports: self-contained, no script, no outside file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Final

from data_contracts.gate import Finding, GateReport

MAX_ROWS: Final = 200
_STYLE: Final = """
body{font:15px/1.45 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;width:100%;margin:.5em 0 1.5em}td,th{border:1px solid #ccc;padding:.3em .6em;
text-align:left;vertical-align:top;overflow-wrap:anywhere}th{background:#f3f3f3;white-space:nowrap}
.accepted{color:#186a3b}.accepted_with_warnings{color:#9a6700}.quarantined{color:#b3261e}
.critical td:first-child{border-left:4px solid #b3261e}.warning td:first-child{border-left:4px solid #c99700}
"""


def render_page(title: str, reports: Sequence[GateReport]) -> str:
    """HTML text: a summary table, then every report with its findings (the first 200; all are in the JSON)."""
    rows = "".join(_summary_row(report) for report in reports)
    head = "<tr><th>table</th><th>verdict</th><th>rows</th><th>critical</th><th>warnings</th><th>source</th></tr>"
    body = "".join(_section(report) for report in reports)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><table>{head}{rows}</table>{body}</body></html>\n"
    )


def _summary_row(report: GateReport) -> str:
    counts = Counter(finding.severity.value for finding in report.findings)
    verdict = report.verdict.value
    cells = [
        f'<a href="#{escape(report.table)}">{escape(report.table)}</a>',
        f'<span class="{verdict}">{verdict.replace("_", " ")}</span>',
        str(report.num_rows),
        str(counts["critical"]),
        str(counts["warning"]),
        escape(report.source),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _section(report: GateReport) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    unchecked = f"<p>Not checked, for want of names to compare with: {escape(', '.join(report.unchecked))}.</p>"
    return (
        f'<h2 id="{escape(report.table)}">{escape(report.table)}</h2>'
        f"<p>Contract {escape(report.contract_version)}, checked at {report.checked_at.isoformat()}.</p>"
        f"{f'<ul>{notes}</ul>' if notes else ''}{_findings(report.findings)}{unchecked if report.unchecked else ''}"
    )


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>No violation.</p>"
    counts = Counter(one.rule for one in findings)
    by_rule = ", ".join(f"{escape(rule)} {count}" for rule, count in counts.most_common())
    head = "<tr><th>row</th><th>column</th><th>value</th><th>rule</th></tr>"
    rows = "".join(
        f'<tr class="{one.severity.value}"><td>{escape(one.row) or "whole table"}</td><td>{escape(one.column)}</td>'
        f"<td>{escape(one.value)}</td><td>{escape(one.text)} <small>[{escape(one.rule)}]</small></td></tr>"
        for one in findings[:MAX_ROWS]
    )
    more = len(findings) - MAX_ROWS
    rest = f"<p>… and {more} more; all are in the JSON.</p>" if more > 0 else ""
    return f"<p>By rule: {by_rule}.</p><table>{head}{rows}</table>{rest}"
