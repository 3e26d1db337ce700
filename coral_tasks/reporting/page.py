"""The frame of every HTML page: head, style for light and dark, figures, tables, charts. Owns no content."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_STYLE = """
:root{--bg:#fff;--fg:#1b2733;--dim:#5b6b7a;--card:#f4f6f8;--line:#d9e0e6;--accent:#e8604c}
@media(prefers-color-scheme:dark){:root{--bg:#14191f;--fg:#e6ebf0;--dim:#93a1ae;--card:#1d242c;--line:#303a44}}
body{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:1rem;
max-width:72rem}
a{color:inherit}h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.dim{color:var(--dim)}.figures{display:flex;flex-wrap:wrap;gap:.7rem;margin:1rem 0}
.figure{background:var(--card);border-radius:.5rem;padding:.6rem .9rem;min-width:8rem}
.figure b{display:block;font-size:1.25rem}.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}th,td{padding:.3rem .6rem;text-align:left;
border-bottom:1px solid var(--line);white-space:nowrap}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.pipe{display:flex;gap:.25rem;margin:.2rem 0;align-items:stretch;min-width:26rem}
.stage{background:var(--card);border:1px solid var(--line);border-left:3px solid var(--accent);
border-radius:.3rem;padding:.15rem .5rem;font-size:.8rem;overflow:hidden}
.warn{border-left:4px solid var(--accent);padding:.4rem .8rem;background:var(--card);margin:1rem 0}
"""
_SCRIPT = '<script src="plotly.min.js"></script>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One headline number with its label."""

    label: str
    value: str


def figures(items: Iterable[Figure]) -> str:
    """Headline numbers side by side."""
    cells = "".join(
        f'<div class="figure"><span class="dim">{escape(item.label)}</span><b>{escape(item.value)}</b></div>'
        for item in items
    )
    return f'<div class="figures">{cells}</div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str | float]]) -> str:
    """A table; numbers are set to the right with thousands separators."""
    body = [list(row) for row in rows]
    numeric = [all(isinstance(row[i], int | float) for row in body) and bool(body) for i in range(len(columns))]
    head = "".join(
        f"<th{' class=n' if number else ''}>{escape(name)}</th>" for name, number in zip(columns, numeric, strict=True)
    )
    lines = ("".join(map(_cell, row)) for row in body)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _cell(value: str | float) -> str:
    if isinstance(value, int):
        return f"<td class=n>{value:,}</td>"
    if isinstance(value, float):
        return f"<td class=n>{value:,.2f}</td>"
    return f"<td>{escape(value)}</td>"


def stacked_bars(name: str, series: dict[str, dict[str, float]], unit: str) -> str:
    """Horizontal stacked bars. ``series``: name of each part -> bar -> value in ``unit``."""
    import plotly.graph_objects as go

    bars = sorted({bar for part in series.values() for bar in part}, reverse=True)
    figure = go.Figure(
        [
            go.Bar(name=part, y=bars, x=[values.get(bar, 0.0) for bar in bars], orientation="h")
            for part, values in sorted(series.items())
        ]
    )
    figure.update_layout(
        barmode="stack",
        height=110 + 34 * len(bars),
        margin={"l": 10, "r": 10, "t": 34, "b": 40},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
        xaxis_title=unit,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#7d8a97"},
        yaxis={"automargin": True},
    )
    identifier = "".join(char if char.isalnum() else "-" for char in name)
    # "<" inside JSON would let a name end the script element.
    data = figure.to_json().replace("<", "\\u003c")
    call = f"Plotly.newPlot({json.dumps(identifier)},f.data,f.layout,{{responsive:true,displayModeBar:false}})"
    return f'<div id="{identifier}"></div><script>{{const f={data};{call}}}</script>'


def page(title: str, body: str, *, charts: bool = True) -> str:
    """A whole HTML document. ``body`` is HTML already; ``title`` is escaped. ``charts``: whether it needs plotly."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>{_SCRIPT if charts else ''}</head>"
        f"<body>{body}</body></html>"
    )


def write_page(path: Path, document: str) -> None:
    """Write the page and, if it has charts, once for each folder, plotly's script beside it."""
    from plotly.offline import get_plotlyjs

    path.parent.mkdir(parents=True, exist_ok=True)
    script = path.parent / "plotly.min.js"
    if _SCRIPT in document and not script.is_file():
        _replace(script, get_plotlyjs())
    _replace(path, document)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
