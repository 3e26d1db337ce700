"""The live page in Airflow's UI: plan, proof, costs, demand, fleet, pipelines, transition, library, runs.

Owns the content's order and look, from the plain values of ``tasks.views``. Everything shown is escaped. Charts are
data in an attribute, drawn by the page's script where scripts may run; every chart stands beside a table or figures
that say the same, since a sandboxed frame runs none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final
from urllib.parse import quote

from coral_tasks.reporting.page import Figure, figures, table

Values = Mapping[str, Any]

MAX_OPEN_MODELS: Final = 6
"""With more models than this, pipelines start folded."""

_FACTS: Final = ("as_of", "library_version", "mode", "reason", "setup")
_PHASE_COLORS: Final = {"prefill": "#3b82c4", "decode": "#e8804c", "aggregated": "#3f9e6e"}
_OTHER_COLORS: Final = ("#3b82c4", "#e8804c", "#3f9e6e", "#8f6bc0", "#c9a227", "#c2556e", "#4aa3a8", "#7d8a97")

_COLORS: Final = (
    "--bg:#fff;--fg:#1b2733;--dim:#5b6b7a;--card:#f4f6f8;--line:#d9e0e6;--accent:#e8604c;--good:#2f855a;--bad:#c53030"
)
_DARK: Final = (
    "--bg:#14191f;--fg:#e6ebf0;--dim:#9aa8b5;--card:#1d242c;--line:#303a44;--accent:#ef7a68;"
    "--good:#68d391;--bad:#fc8181"
)
_STYLE: Final = f"""
:root{{color-scheme:light;{_COLORS}}}
@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{_DARK}}}}}
:root[data-theme=dark]{{color-scheme:dark;{_DARK}}}
*{{box-sizing:border-box}}
body{{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:1rem;
max-width:80rem;overflow-wrap:anywhere}}
a{{color:inherit;text-decoration-color:var(--accent);text-underline-offset:.2em}}
h1{{font-size:1.5rem;margin:.2rem 0}}
h2{{font-size:1.15rem;margin:0 0 .6rem;padding-top:1.6rem;border-top:1px solid var(--line)}}
section{{margin-top:1.6rem;scroll-margin-top:3rem}}
h3{{font-size:.95rem;margin:1rem 0 .3rem}}
.dim{{color:var(--dim)}}.good{{color:var(--good)}}.bad{{color:var(--bad)}}
nav{{position:sticky;top:0;z-index:2;background:var(--bg);display:flex;gap:.9rem;overflow-x:auto;white-space:nowrap;
padding:.5rem 0;margin:.5rem 0;border-bottom:1px solid var(--line);font-size:.9rem}}
.figures{{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.6rem;margin:1rem 0}}
.figure{{background:var(--card);border-radius:.5rem;padding:.6rem .8rem;font-size:.85rem}}
.figure b{{display:block;font-size:1.2rem}}
.scroll{{overflow-x:auto;overflow-wrap:normal}}
table{{border-collapse:collapse;width:100%;font-size:.88rem}}
th,td{{padding:.3rem .6rem;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:top}}
td.n,th.n{{text-align:right;font-variant-numeric:tabular-nums}}td.wrap{{white-space:normal;min-width:16rem}}
.two{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,28rem),1fr));gap:1.2rem}}
.chart{{min-width:0;overflow:hidden}}
.warn{{border-left:4px solid var(--accent);padding:.5rem .8rem;background:var(--card);margin:.8rem 0;
white-space:pre-wrap}}
details{{margin:.4rem 0}}summary{{cursor:pointer;padding:.25rem 0}}
.group{{border:1px solid var(--line);border-radius:.5rem;padding:.5rem .8rem;margin:.5rem 0;
content-visibility:auto;contain-intrinsic-size:auto 9rem}}
.pipe{{display:flex;gap:.3rem;margin:.25rem 0;align-items:stretch}}
.stage{{background:var(--card);border:1px solid var(--line);border-top:3px solid var(--tone,var(--accent));
border-radius:.3rem;padding:.2rem .5rem;font-size:.8rem;min-width:7rem}}
.prefill{{--tone:{_PHASE_COLORS["prefill"]}}}.decode{{--tone:{_PHASE_COLORS["decode"]}}}
.aggregated{{--tone:{_PHASE_COLORS["aggregated"]}}}
.tag{{border:1px solid var(--tone,var(--line));border-radius:1rem;padding:0 .5rem;font-size:.8rem;white-space:nowrap}}
.meter{{display:inline-block;width:6rem;height:.55rem;background:var(--line);border-radius:.3rem;overflow:hidden}}
.meter i{{display:block;height:100%;background:var(--accent)}}
input[type=search]{{width:100%;max-width:24rem;padding:.4rem .6rem;border:1px solid var(--line);border-radius:.4rem;
background:var(--card);color:inherit;font:inherit}}
pre{{white-space:pre-wrap;font-size:.82rem;margin:.2rem 0}}
"""


def overview_page(values: Values, *, airflow: str = "") -> str:
    """The main page. ``airflow``: path under which Airflow's UI lies, "" for the root."""
    plan = values["plan"]
    sections = [
        ("plan", "Plan", _plan_section(plan)),
        ("why", "What binds", _why_section(values["explanation"])),
        ("change", "What changed", _change_section(values["change"])),
        ("cost", "Cost over time", _cost_section(values["history"])),
        ("demand", "Demand and capacity", _demand_section(plan)),
        ("fleet", "Fleet", _fleet_section(plan, values["fleet"])),
        ("pipelines", "Pipelines", _pipelines_section(plan, values["fleet"])),
        ("transition", "Transition", _progress_note(values["progress"]) + _transition_part(values)),
        ("library", "Template library", _library_section(values["library"])),
        ("runs", "Runs, gate, failures", _runs_section(values["runs"])),
    ]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{escape(title)}</h2>{text}</section>' for name, title, text in sections)
    return _document("Coral", f"{_head(values, airflow)}<nav>{links}</nav>{body}")


def run_page(values: Values, *, airflow: str = "") -> str:
    """The page of one run: its plan, what the gate said, what was sent, what failed."""
    run, pinned = values["run"], _sound(values["pinned"]) or {}
    begun = pinned or _sound(values["nightly"]) or {}
    state = "complete" if values["sealed"] else "not complete"
    facts = ", ".join(f"{name.replace('_', ' ')} {begun[name]}" for name in _FACTS if begun.get(name))
    link = _airflow_link(run, airflow, "open in Airflow") if pinned else ""
    parts = [
        f'<p><a href="./">All of Coral</a></p><h1>Run {escape(run)}</h1>',
        f'<p class="dim">{escape(f"{state}; {facts}")} {link}</p>',
        *map(_failure_note, values["failures"]),
        _section("Given by hand", _given_table(begun.get("given") or {})) if begun.get("given") else "",
        _section("Approval", _approval_note(values["approval"])) if values["approval"] else "",
        _section("What it changes", _change_section(values["change"]) + _transition_link(run, drawn=values["drawn"])),
        _section("Plan", _plan_section(values["plan"])),
        _section("What binds", _why_section(values["explanation"])),
        _section("Gate", "".join(map(_gate_report, values["gate"])) or _none("The gate has not looked yet.")),
        _section("Dispatch", _dispatch_note(values["dispatch"])),
        _section("Demand and capacity", _demand_section(values["plan"])),
        _section("Pipelines", _pipelines_section(values["plan"], None)),
    ]
    return _document(f"Coral run {run}", "".join(parts))


def library_diff_page(values: Values) -> str:
    """What changed from one library version to another."""
    title = f"Library {values['before']} → {values['after']}"
    rows = [
        (
            _cell(" ".join(one["name"])),
            *(_number(one[name], 0) for name in ("num_before", "num_after", "num_gained", "num_lost")),
            f'<td class="wrap">{"<br>".join(escape(_shift_text(shift)) for shift in one["shifts"])}</td>',
        )
        for one in values["sets"]
    ]
    named = "".join(
        _fold(f"{' '.join(one['name'])}: {word}", _list(one[word]))
        for one in values["sets"]
        for word in ("gained", "lost")
        if one[word]
    )
    columns = ("model, phase, limit", "before", "after", "gained", "lost", "throughput of what both have")
    body = _raw_table(columns, rows) + named if rows else _none("Both versions hold the same templates.")
    return _document(title, f'<p><a href="./#library">All of Coral</a></p><h1>{escape(title)}</h1>{body}')


def message_page(title: str, text: str) -> str:
    """A page that says one thing."""
    return _document(title, f'<p><a href="./">All of Coral</a></p><h1>{escape(title)}</h1><p>{escape(text)}</p>')


def plotly_script() -> str:
    """Plotly's script, from its own package."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script


# Frame -----------------------------------------------------------------------------------------------------------


def _document(title: str, body: str) -> str:
    # Styles stand inside: a sandboxed frame has no cookie to fetch them with.
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        '<script src="coral.js"></script><script src="plotly.min.js" defer></script></head>'
        f"<body>{body}</body></html>"
    )


def _section(title: str, text: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{text}</section>"


def _none(text: str) -> str:
    return f'<p class="dim">{escape(text)}</p>'


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _fold(title: str, text: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{text}</details>"


def _warn(text: str) -> str:
    return f'<p class="warn">{escape(text)}</p>'


def _sound(part: Values | None) -> Values | None:
    """The part, None if it is missing or unreadable."""
    return None if part is None or "error" in part else part


def _missing(part: Values | None, text: str) -> str:
    """What to say in place of a part that is not there."""
    return _none(text) if part is None else _warn(f"Cannot be shown: {part['error']}")


def _time(text: str) -> str:
    """An ISO time, shown in the reader's zone where scripts run."""
    shown = text.replace("T", " ").replace("+00:00", " UTC")
    return f'<time datetime="{escape(text)}">{escape(shown)}</time>'


def _run_link(run: str) -> str:
    return f'<a href="run?id={quote(run, safe="")}">{escape(run)}</a>'


def _airflow_link(run: str, airflow: str, text: str) -> str:
    address = f"{airflow}/dags/coral_allocation/runs/{quote(run, safe='')}"
    return f'<a data-top href="{escape(address)}">{escape(text)}</a>'


def _shown(text: str) -> str:
    """Text for a chart: plotly reads a few tags in it."""
    return escape(text, quote=False)


def _chart(label: str, traces: Sequence[Values], layout: Values, height: int) -> str:
    """A chart for the page's script. ``label``: what a reader who does not see it hears."""
    data = json.dumps({"data": traces, "layout": {"height": height, **layout}}, allow_nan=False)
    return (
        f'<div class="chart" role="img" aria-label="{escape(label)}" style="min-height:{height}px" '
        f'data-figure="{escape(data)}"></div>'
    )


# Head ------------------------------------------------------------------------------------------------------------


def _head(values: Values, airflow: str) -> str:
    plan = _sound(values["plan"])
    notes = [*_plan_warnings(plan), *_transition_warnings(_sound(values["transition"]))]
    asked = "".join(_waiting_note(one, airflow) for one in values["waiting"])
    latest = values["runs"][0] if values["runs"] else None
    if latest is not None and latest["failures"]:
        notes.append(f"The newest run failed; what runs and the plan in force are unchanged. {_first(latest)}")
    link = _airflow_link(plan["run"], airflow, "its run in Airflow") if plan is not None and plan["run"] else ""
    what = "No plan is in force yet." if plan is None else f"Plan {plan['id']}, library {plan['library_version']}."
    return (
        f'<h1>Coral</h1><p class="dim">{escape(what)} {link} As of {_time(values["generated_at"])}</p>'
        f"{asked}{''.join(map(_warn, notes))}"
    )


def _waiting_note(waiting: Values, airflow: str) -> str:
    link = _airflow_link(waiting["run"], airflow, "answer in Airflow, under Required Actions")
    why = escape("; ".join(waiting["why"]))
    return f'<p class="warn"><b>A change waits for your answer</b> until {_time(waiting["until"])}: {why}. {link}</p>'


def _first(run: Values) -> str:
    failure = run["failures"][0]
    return f"{failure['task']}: {failure['message']}"


def _plan_warnings(plan: Values | None) -> list[str]:
    if plan is None:
        return []
    return [
        f"{row['model']}: {row['shortfall_requests_per_s']:.3g} requests/s are not served."
        for row in plan["models"]
        if row["shortfall_requests_per_s"] > 0
    ]


def _transition_warnings(transition: Values | None) -> list[str]:
    if transition is None or transition["converged"]:
        return []
    word = "a newer controller took over" if transition["superseded"] else "the fleet is not as planned"
    return [f"Epoch {transition['epoch']}: {word}. {' '.join(transition['problems'])}"]


# Plan ------------------------------------------------------------------------------------------------------------


def _plan_section(plan: Values | None) -> str:
    found = _sound(plan)
    if found is None:
        return _missing(plan, "No plan yet: run the DAG coral_allocation, in mode auto to bring it into force.")
    proof, rows = found["certificate"], found["instances"]
    status = proof["status"].replace("_", " ")
    items = [
        Figure(label="Cost", value=f"{proof['cost_usd_per_hour']:,.2f} USD/h"),
        Figure(label="Proved gap to optimum", value=f"{proof['gap']:.3%}"),
        Figure(label="Bound, with start-up", value=f"{proof['bound_usd_per_hour']:,.2f} USD/h"),
        Figure(label="Start-up charge", value=f"{proof['startup_usd_per_hour']:,.2f} USD/h"),
        Figure(label="Instances", value=f"{sum(row['count'] for row in rows):,}"),
        Figure(label="Nodes", value=f"{sum(row['num_nodes'] for row in rows):,}"),
        Figure(label="Solver", value=status),
    ]
    shortage = "least shortage proved" if proof["shortage_proved"] else "least shortage not proved"
    certificate = (
        f"Certificate: {status}; no plan with the same shortage costs less than {proof['bound_usd_per_hour']:,.4f} "
        f"USD/h; this one costs {proof['objective_usd_per_hour']:,.4f} with start-ups; {shortage}; {found['check']}."
    )
    note = _warn(f"Prices and demand are not shown: {found['note']}") if found["note"] else ""
    return f'{figures(items)}<p class="dim">{escape(certificate)}</p>{note}'


def _why_section(explanation: Values | None) -> str:
    found = _sound(explanation)
    if found is None:
        return _missing(explanation, "This plan has no explanation.")
    sentences = found["sentences"]
    shown = _list(sentences[:8])
    more = _fold(f"{len(sentences) - 8} more", _list(sentences[8:])) if len(sentences) > 8 else ""
    return f"{_binding_table(found)}{_ban_table(found)}{_short_table(found)}{shown}{more}"


def _binding_table(explanation: Values) -> str:
    rows = [
        (f"{one['pool']}: all {one['used_nodes']} nodes used", "one more node", one) for one in explanation["binding"]
    ]
    rows += [(one["option"], "without it", one) for one in explanation["options"]]
    columns = ("what binds", "change", "saves USD/h", "serves requests/s more", "")
    if not rows:
        return _none("No supply is used up and no option costs anything.")
    return table(
        columns,
        [
            (
                what,
                change,
                float(one["saving_usd_per_hour"]),
                float(one["serves_requests_per_s"]),
                "exact" if one["exact"] else "at least",
            )
            for what, change, one in rows
        ],
    )


def _ban_table(explanation: Values) -> str:
    """What doing without something, or a tighter SLO, would cost; nobody has asked for it."""
    rows: list[Sequence[Any]] = [
        (
            one["ban"],
            float(one["cost_usd_per_hour"]),
            float(one["loses_requests_per_s"]),
            "exact" if one["exact"] else "at most",
        )
        for one in explanation["bans"]
    ]
    rows += [_slo_step_row(one) for one in explanation["slo_steps"] if one["loses_requests_per_s"] is not None]
    columns = ("without, or tighter", "costs USD/h more", "loses requests/s", "")
    return table(columns, rows) if rows else ""


def _slo_step_row(step: Values) -> Sequence[Any]:
    times = "" if step["factor"] is None else f" ({step['factor']:g} times)"
    cost = step["cost_usd_per_hour"]
    return (
        f"SLO one step tighter{times}, {step['model'] or 'all models'}",
        "-" if cost is None else float(cost),
        float(step["loses_requests_per_s"]),
        "exact" if step["exact"] else "at most",
    )


def _change_section(change: Values | None) -> str:
    found = _sound(change)
    if found is None:
        return _missing(change, "Not compared with what ran.")
    before, share = found["cost_before"], found["cost_change"]
    items = [
        Figure(label="Cost of what ran, today's prices", value="?" if before is None else f"{before:,.2f} USD/h"),
        Figure(label="Cost of the plan", value=f"{found['cost_after']:,.2f} USD/h"),
        Figure(label="Change", value="new" if share is None else f"{share:+.1%}"),
        Figure(label="Nodes started", value=f"{found['nodes_started']:,}"),
        Figure(label="Nodes stopped", value=f"{found['nodes_stopped']:,}"),
    ]
    lists = [("Started", found["started"]), ("Stopped", found["stopped"])]
    lists += [(f"Changed {name}", texts) for name, texts in sorted(found["moved"].items())]
    shown = [_fold(f"{title}: {len(texts)}", _list(texts), is_open=len(texts) <= 8) for title, texts in lists if texts]
    return figures(items) + ("".join(shown) or _none("The same instances go on, on the same inputs."))


def _given_table(given: Values) -> str:
    rows = [(name, json.dumps(value, ensure_ascii=False)) for name, value in sorted(given.items())]
    return _raw_table(
        ("parameter", "value"), [(_cell(name), f'<td class="wrap">{escape(text)}</td>') for name, text in rows]
    )


def _approval_note(approval: Values) -> str:
    if "error" in approval:
        return _warn(f"Cannot be shown: {approval['error']}")
    asked = f"Asked {_time(approval['asked_at'])}: {escape('; '.join(approval['why']))}."
    return f"<p>{asked} {_answer(approval['answer'])}</p>"


def _answer(answer: Values | None) -> str:
    if answer is None:
        return "No answer yet."
    if answer["timed_out"]:
        return '<b class="bad">No answer in time</b>: nothing was sent.'
    word = '<b class="good">approved</b>' if answer["approved"] else '<b class="bad">rejected</b>: nothing was sent'
    return f"{escape(answer['by'])}, {_time(answer['at'])}: {word}."


def _short_table(explanation: Values) -> str:
    rows = [
        (
            one["model"],
            float(one["shortfall_requests_per_s"]),
            float(one["required_requests_per_s"]),
            one["reason"],
            one["cheapest_relaxation"],
        )
        for one in explanation["short"]
    ]
    columns = ("model", "not served, requests/s", "of", "reason", "cheapest way out")
    return table(columns, rows) if rows else ""


def _cost_section(history: Sequence[Values]) -> str:
    if not history:
        return _none("No run has ended yet.")
    times = [one["at"] for one in history]
    cost = [one["cost_usd_per_hour"] for one in history]
    bound = [one["bound_usd_per_hour"] - one["startup_usd_per_hour"] for one in history]
    text = [_shown(f"{one['run']}, {one['mode']}, {one['reason']}") for one in history]
    line = {"shape": "hv", "color": _OTHER_COLORS[1]}
    traces: list[Values] = [
        {"name": "cost of the plan", "x": times, "y": cost, "text": text, "mode": "lines+markers", "line": line},
        {
            "name": "least cost proved possible",
            "x": times,
            "y": bound,
            "mode": "lines",
            "hoverinfo": "skip",
            "line": {"dash": "dot", "shape": "hv", "color": _OTHER_COLORS[7]},
        },
    ]
    traces += _baseline_traces(history, times)
    chart = _chart("Cost of every run's plan over time", traces, {"yaxis": {"title": {"text": "USD/h"}}}, 300)
    last = history[-1]
    items = [
        Figure(label="Last run", value=f"{last['cost_usd_per_hour']:,.2f} USD/h"),
        Figure(label="Least", value=f"{min(cost):,.2f} USD/h"),
        Figure(label="Most", value=f"{max(cost):,.2f} USD/h"),
        Figure(label="Runs shown", value=str(len(history))),
        Figure(label="With a shortage", value=str(sum(one["shortfall_requests_per_s"] > 0 for one in history))),
        *_baseline_figures(last),
    ]
    return figures(items) + chart


def _baseline_traces(history: Sequence[Values], times: Sequence[str]) -> list[Values]:
    """What simpler planners' plans for the same inputs cost; a gap where one made none."""
    names = sorted({name for one in history for name in one["baselines"]})
    return [
        {
            "name": f"{name}, same inputs",
            "x": times,
            "y": [one["baselines"].get(name) for one in history],
            "mode": "lines",
            "line": {"shape": "hv", "color": _OTHER_COLORS[number % len(_OTHER_COLORS)]},
        }
        for number, name in enumerate(names, start=3)
    ]


def _baseline_figures(last: Values) -> list[Figure]:
    cost = last["cost_usd_per_hour"]
    return [
        Figure(label=f"{name}, same inputs", value=f"{other:,.2f} USD/h ({other / cost:.2f}×)")
        for name, other in sorted(last["baselines"].items())
        if other is not None and cost > 0
    ]


def _demand_section(plan: Values | None) -> str:
    found = _sound(plan)
    if found is None:
        return _missing(plan, "No plan yet.")
    rows = found["models"]
    names = [_shown(row["model"]) for row in rows]
    traces: list[Values] = [
        {
            "name": label,
            "type": "bar",
            "x": names,
            "y": [row[key] for row in rows],
            "marker": {"color": color},
        }
        for label, key, color in (
            ("demand", "demand_requests_per_s", _OTHER_COLORS[7]),
            ("can be served", "served_requests_per_s", _OTHER_COLORS[2]),
        )
    ]
    chart = _chart("Demand and capacity by model", traces, {"yaxis": {"title": {"text": "requests/s"}}}, 300)
    columns = ("model", "demand, requests/s", "can be served", "load", "not served")
    lines = [_demand_row(row) for row in rows]
    return f'<div class="two">{chart}<div>{_raw_table(columns, lines)}</div></div>'


def _demand_row(row: Values) -> Sequence[str]:
    demand, served = row["demand_requests_per_s"], row["served_requests_per_s"]
    load = "" if demand is None or not served else f"{_meter(demand / served)} {demand / served:.0%}"
    short = row["shortfall_requests_per_s"]
    return (
        _cell(row["model"]),
        _number(demand),
        _number(served),
        f"<td>{load}</td>",
        _number(short) if short else '<td class="n good">0</td>',
    )


def _meter(share: float) -> str:
    return f'<span class="meter"><i style="width:{min(max(share, 0.0), 1.0):.0%}"></i></span>'


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _number(value: float | None, digits: int = 2) -> str:
    return f'<td class="n">{"?" if value is None else f"{value:,.{digits}f}"}</td>'


def _raw_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


# Fleet -----------------------------------------------------------------------------------------------------------


def _fleet_section(plan: Values | None, fleet: Values | None) -> str:
    found, seen = _sound(plan), _sound(fleet)
    chart = "" if found is None else _configuration_chart(found)
    if seen is None:
        return chart + _missing(fleet, "Nothing was dispatched yet, so no fleet was observed.")
    planned = _planned_nodes(found)
    rows = [
        (
            _cell(pool["region"]),
            _cell(pool["configuration"]),
            _cell(pool["market"].replace("_", " ")),
            _number(pool["num_nodes"], 0),
            _number(pool["num_used"], 0),
            _number(planned.get((pool["region"], pool["configuration"], pool["market"]), 0), 0),
            f"<td>{_meter(pool['num_used'] / pool['num_nodes'])}</td>",
        )
        for pool in _by_use(seen)
    ]
    used = [row for row, pool in zip(rows, _by_use(seen), strict=True) if pool["num_used"]]
    columns = ("region", "node configuration", "market", "nodes", "in use", "planned", "")
    idle = _fold(f"{len(rows) - len(used)} more with every node idle", _raw_table(columns, rows[len(used) :]))
    note = (
        f'<p class="dim">As node agents reported it at {_time(seen["seen_at"])}, at the end of the last dispatch.</p>'
    )
    return f"{chart}{note}{_raw_table(columns, used)}{idle if len(used) < len(rows) else ''}"


def _by_use(fleet: Values) -> list[Values]:
    return sorted(fleet["pools"], key=lambda one: (-one["num_used"], one["region"], one["configuration"]))


def _planned_nodes(plan: Values | None) -> Mapping[tuple[str, str, str], int]:
    counts: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for row in () if plan is None else plan["instances"]:
        for name, part in row["by_configuration"].items():
            counts[row["region"], name, row["market"]] += part["nodes"]
    return counts


def _configuration_chart(plan: Values) -> str:
    costs: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in plan["instances"]:
        for name, part in row["by_configuration"].items():
            costs[name][row["region"]] += part["cost_usd_per_hour"]
    regions = sorted({region for one in costs.values() for region in one}, reverse=True)
    traces = [
        {
            "name": _shown(name),
            "type": "bar",
            "orientation": "h",
            "y": [_shown(region) for region in regions],
            "x": [parts.get(region, 0.0) for region in regions],
            "marker": {"color": _OTHER_COLORS[number % len(_OTHER_COLORS)]},
        }
        for number, (name, parts) in enumerate(sorted(costs.items()))
    ]
    layout = {"barmode": "stack", "xaxis": {"title": {"text": "USD/h"}}}
    return _chart("Cost by region and node configuration", traces, layout, 150 + 40 * len(regions))


# Pipelines -------------------------------------------------------------------------------------------------------


def _pipelines_section(plan: Values | None, fleet: Values | None) -> str:
    found = _sound(plan)
    if found is None:
        return _missing(plan, "No plan yet.")
    running = _running(_sound(fleet))
    by_model: defaultdict[str, list[str]] = defaultdict(list)
    counts: defaultdict[str, int] = defaultdict(int)
    for row in found["instances"]:
        template = found["templates"][row["template"]]
        here = running.pop((row["template"], row["region"], row["market"]), [])
        by_model[template["model"]].append(_group(template, row, here))
        counts[template["model"]] += row["count"]
    is_open = len(by_model) <= MAX_OPEN_MODELS
    groups = "".join(
        _fold(f"{model}: {counts[model]} instances", "".join(parts), is_open=is_open)
        for model, parts in sorted(by_model.items())
    )
    search = '<p><input type="search" data-filter=".group" placeholder="Filter by model, node, region, state …"></p>'
    return f"{search}{groups}{_leftovers(running)}"


def _running(fleet: Values | None) -> dict[tuple[str, str, str], list[Values]]:
    found: defaultdict[tuple[str, str, str], list[Values]] = defaultdict(list)
    for one in () if fleet is None else fleet["instances"]:
        found[one["template"], one["region"], one["market"]].append(one)
    return found


def _group(template: Values, row: Values, running: Sequence[Values]) -> str:
    """Instances of one template in one region: the pipeline with its layers, then each running one with its nodes."""
    cost = row["cost_usd_per_hour"]
    price = "" if cost is None else f", {cost:,.2f} USD/h"
    facts = (
        f"{row['count']} × {template['nodes']} in {row['region']}, {row['market'].replace('_', ' ')}{price}; "
        f"{template['throughput']:,.0f} {template['unit']} each; limited by {template['limited_by']}; "
        f"{template['runtime']}; profiles: {', '.join(template['sources'])}"
    )
    stages = "".join(_stage(one) for one in template["stages"])
    drawn = "".join(_instance(one, template["phase"]) for one in running)
    nodes = _fold(f"{len(running)} running, with their nodes", drawn, is_open=len(running) == 1) if running else ""
    phase = escape(template["phase"])
    return (
        f'<div class="group {phase}"><span class="tag">{phase}</span> <b>{escape(template["model"])}</b> '
        f'<span class="dim">{escape(facts)}</span>'
        f'<div class="scroll"><div class="pipe">{stages}</div></div>{nodes}</div>'
    )


def _stage(stage: Values) -> str:
    last = stage["first_layer"] + stage["num_layers"] - 1
    text = f"layers {stage['first_layer']}–{last}<br>{escape(stage['nodes'])}"
    title = f"{stage['num_layers']} layers, {stage['share']:.0%} of the latency limit"
    return f'<div class="stage" style="flex:{stage["num_layers"]} 1 0" title="{escape(title)}">{text}</div>'


def _instance(instance: Values, phase: str) -> str:
    stages = "".join(
        f'<div class="stage">stage {number}<br>{escape(", ".join(nodes))}</div>'
        for number, nodes in enumerate(instance["stage_nodes"], start=1)
    )
    tone = "good" if instance["state"] == "ready" else "bad"
    return (
        f'<div class="{escape(phase)}"><code>{escape(instance["id"])}</code> '
        f'<span class="{tone}">{escape(instance["state"])}</span>'
        f'<div class="scroll"><div class="pipe">{stages}</div></div></div>'
    )


def _leftovers(running: Mapping[tuple[str, str, str], Sequence[Values]]) -> str:
    """Running instances that the plan does not know."""
    others = [one for found in running.values() for one in found]
    if not others:
        return ""
    drawn = "".join(f'<div class="group">{_instance(one, one["phase"])}</div>' for one in others)
    return _fold(f"{len(others)} running that are not in this plan", drawn, is_open=True)


# Transition ------------------------------------------------------------------------------------------------------


def _progress_note(progress: Values | None) -> str:
    """A dispatch that runs now; nothing if none does."""
    if progress is None:
        return ""
    if "error" in progress:
        return _warn(f"Cannot be shown: {progress['error']}")
    done, total = progress["num_done"], progress["num_steps"]
    share = f"{_meter(done / total)} " if total else ""
    text = f"round {progress['rounds']}, {done} of {total} steps done{', last: ' if progress['last'] else ''}"
    return (
        f'<p class="warn"><b>Under way</b>, epoch {progress["epoch"]} of run {_run_link(progress["run"])}: '
        f"{share}{escape(text + progress['last'])}. Last sign of life {_time(progress['at'])}.</p>"
    )


def _transition_part(values: Values) -> str:
    plan = _sound(values["plan"])
    link = "" if plan is None else _transition_link(plan["run"], drawn=values["drawn"])
    return _transition_section(values["transition"]) + link


def _transition_link(run: str, *, drawn: bool) -> str:
    return f'<p><a href="transition?id={quote(run, safe="")}">The transition, step by step</a></p>' if drawn else ""


def _transition_section(transition: Values | None) -> str:
    found = _sound(transition)
    if found is None:
        return _missing(transition, "Nothing was dispatched yet.")
    done = "as planned" if found["converged"] else "not as planned"
    tone = "good" if found["converged"] else "bad"
    line = (
        f'Epoch {found["epoch"]}, ended {_time(found["ended_at"])}: <span class="{tone}">fleet {done}</span> after '
        f"{found['num_commands']} commands in {found['rounds']} round{'' if found['rounds'] == 1 else 's'}."
    )
    notes = [
        *found["problems"],
        *(f"{one['what']}: capacity fell to {one['lowest']:,.3g}, below {one['floor']:,.3g}" for one in found["dips"]),
        *(
            f"{one['count']} of {one['template']} in {one['region']} not placed: {one['reason']}"
            for one in found["unplaced"]
        ),
        *(f"no answer from agent {agent}" for agent in found["unreachable"]),
        *(f"{one['count']} × {one['configuration']} in {one['region']} could not be had" for one in found["shortage"]),
    ]
    rows = [
        (
            str(one["number"] + 1),
            one["kind"].replace("_", " "),
            one["instance"] or (f"{one['num_routed']} instances receive requests" if one["kind"] == "route" else ""),
            ", ".join(one["nodes"]),
        )
        for one in found["steps"]
    ]
    steps = _fold(
        f"{len(rows)} step{'s' if len(rows) != 1 else ''} done",
        table(("", "step", "instance", "nodes"), rows),
        is_open=len(rows) <= 20,
    )
    return f"<p>{line}</p>{''.join(map(_warn, notes))}{steps if rows else _none('No step was needed.')}"


def _dispatch_note(outcome: Values | None) -> str:
    found = _sound(outcome)
    if found is None:
        return _missing(outcome, "Nothing was sent in this run.")
    return f"<pre>{escape(found['skipped'] or found['summary'])}</pre>"


# Library, runs ---------------------------------------------------------------------------------------------------


def _library_section(library: Values | None) -> str:
    found = _sound(library)
    if found is None:
        return _missing(library, "No library is published yet: run the DAG coral_template_library.")
    versions = found["versions"]
    rows = [
        (
            f"<td><code>{escape(one['version'])}</code>{' <b>in force</b>' if number == 0 else ''}</td>",
            f"<td>{_time(one['published_at'])}</td>",
            f"<td>{'the regression gate was overruled' if one['forced'] else 'the regression gate passed'}</td>",
            f"<td>{_diff_link(versions, number)}</td>",
        )
        for number, one in enumerate(versions)
    ]
    sets = [
        (
            one["model"],
            one["phase"],
            one["num_templates"],
            "" if one["num_possible"] is None else f"{one['num_possible']:,}",
            ", ".join(f"{count} {source}" for source, count in sorted(one["sources"].items())),
        )
        for one in found["sets"]
    ]
    columns = ("model", "phase", "templates", "of combinations", "configurations by profile source")
    parameters = ", ".join(f"{name} {value}" for name, value in sorted(found["parameters"].items()) if value)
    return (
        f"{_raw_table(('version', 'published', 'gate', ''), rows)}"
        f'<p class="dim">{escape(parameters)}</p>'
        f"{_fold('Template sets', table(columns, sets), is_open=len(sets) <= 12)}"
    )


def _diff_link(versions: Sequence[Values], number: int) -> str:
    if number + 1 == len(versions):
        return ""
    before, after = (quote(versions[one]["version"], safe="") for one in (number + 1, number))
    return f'<a href="library?before={before}&amp;after={after}">changes</a>'


def _runs_section(runs: Sequence[Values]) -> str:
    if not runs:
        return _none("No run yet.")
    columns = ("run", "time", "USD/h", "gate", "outcome")
    return _raw_table(columns, [_run_row(one) for one in runs])


def _run_row(run: Values) -> Sequence[str]:
    gate = ", ".join(f"{count} {verdict.replace('_', ' ')}" for verdict, count in sorted(run["gate"].items()))
    if run["failures"]:
        told = "".join(
            f'<div><b class="bad">{escape(one["task"])}</b> {escape(one["message"])}</div>' for one in run["failures"]
        )
    else:
        told = '<span class="good">complete</span>' if run["sealed"] else '<span class="dim">not complete</span>'
        told += "".join(f'<div class="dim">{escape(text)}</div>' for text in (run["reason"], run["skipped"]) if text)
    return (
        f"<td>{_run_link(run['run'])}</td>",
        f"<td>{_time(run['at'])}</td>",
        '<td class="n"></td>' if run["cost_usd_per_hour"] is None else _number(run["cost_usd_per_hour"]),
        _cell(gate),
        f'<td class="wrap">{told}</td>',
    )


def _gate_report(report: Values) -> str:
    if "error" in report:
        return _warn(f"{report['table']}: {report['error']}")
    verdict, findings = report["verdict"], report["findings"]
    tone = "good" if verdict.startswith("accept") else "bad"
    head = (
        f'<h3>{escape(report["table"])}: <span class="{tone}">{escape(verdict.replace("_", " "))}</span></h3>'
        f'<p class="dim">{escape(report["source"])}; {report["num_rows"]:,} rows, {report["num_rules"]} rules</p>'
    )
    rows = [(one["row"], one["value"], one["text"], one["rule"], one["severity"]) for one in findings]
    return head + (table(("row", "value", "what is wrong", "rule", "severity"), rows) if rows else "")


def _failure_note(failure: Values) -> str:
    word = "refused" if failure["expected"] else "failed"
    return _warn(f"{failure['task']} {word} ({failure['error']}): {failure['message']}")


def _shift_text(shift: Values) -> str:
    return (
        f"{shift['gpu_type']}: {shift['median'] - 1:+.1%} in the median of {shift['num_templates']} "
        f"({shift['smallest'] - 1:+.1%} to {shift['largest'] - 1:+.1%})"
    )
