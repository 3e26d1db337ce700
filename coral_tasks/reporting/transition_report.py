"""The page of one transition: what each node does in each group of steps, and what is served meanwhile.

Owns looks only; the replay is ``transition_rows``. The drawing is SVG inside the page, in the page's own colours, so
the one file stands alone, in light and dark. Nodes that nothing happens to are counted, not drawn; in a large
transition nodes with the same history share a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from coral_tasks.domain.fleet import Fleet, Node, ServingInstance
from coral_tasks.domain.names import InstanceId
from coral_tasks.domain.transition import Step, StepKind, Transition
from coral_tasks.reporting.page import Figure, figures, page, table
from coral_tasks.reporting.transition_rows import (
    Activity,
    Bar,
    CapacityLine,
    Column,
    History,
    NodeRow,
    build_history,
)

MAX_SINGLE_ROWS = 80
"""Up to this many changing nodes each has a row of its own."""

_LABEL_PX, _ROW_PX, _LINE_PX, _HEAD_PX, _WIDTH_PX = 250, 22, 40, 44, 1100
_MIN_COLUMN_PX, _MAX_COLUMN_PX, _CHAR_PX = 62.0, 120.0, 6.3
# Mid tones that keep white text readable and stand out on light and dark ground.
_COLOURS = ("#2f74c0", "#c2552d", "#3f8f4f", "#8a57b0", "#9a7b1c", "#23878f", "#bb4072", "#64707d")
_OPACITY = {
    Activity.LOADING: 0.55,
    Activity.READY: 0.45,
    Activity.SERVING: 1.0,
    Activity.DRAINING: 0.75,
    Activity.STOPPING: 0.2,
    Activity.FAILED: 0.2,
}
_OVERLAY = {Activity.LOADING: "hatch", Activity.DRAINING: "fade"}
_STYLE = """<style>
.move text{font:11px system-ui,sans-serif;fill:var(--fg)}.move .dim{fill:var(--dim)}.move .on{fill:#fff}
.move .head{font-weight:600}.move .band{fill:var(--card)}.move .free{stroke:var(--line);stroke-width:2}
.move .box{fill:none;stroke:var(--dim);stroke-dasharray:3 3}.move .floor{stroke:var(--dim);stroke-dasharray:4 3}
.move .steps{shape-rendering:crispEdges}.move .dip{fill:var(--accent)}.move .hatch{stroke:var(--bg);stroke-width:4;
stroke-opacity:.55}
.move .fade{stop-color:var(--bg)}
.key{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;font-size:.85rem;margin:.5rem 0}
.key span{display:inline-flex;align-items:center;gap:.4rem}.key i{width:1rem;height:.8rem;border-radius:.15rem}
</style>"""
_DEFINITIONS = """<defs>
<pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line class="hatch" x1="2" y1="0" x2="2" y2="8"/></pattern>
<linearGradient id="fade"><stop class="fade" offset="0" stop-opacity="0"/>
<stop class="fade" offset="1" stop-opacity=".75"/></linearGradient></defs>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Canvas:
    """Where columns lie, and which colour a model has."""

    num_columns: int
    colours: Mapping[str, str]

    @property
    def column_px(self) -> float:
        fitting = (_WIDTH_PX - _LABEL_PX) / self.num_columns
        return min(_MAX_COLUMN_PX, max(_MIN_COLUMN_PX, fitting))

    @property
    def width_px(self) -> float:
        return self.left(self.num_columns) + 4

    def left(self, column: int) -> float:
        return _LABEL_PX + column * self.column_px


def transition_report(transition: Transition, fleet: Fleet, *, unreachable: Sequence[str] = ()) -> str:
    """HTML document of ``transition``, planned on ``fleet``. ``unreachable``: agents that did not answer.

    Raises KeyError if the transition names an instance or a node that neither it nor the fleet knows.
    """
    history = build_history(transition, fleet)
    body = [
        f'{_STYLE}<h1>Transition</h1><div class="dim">to {escape(transition.plan)}, before anything starts</div>',
        figures(_headline(transition)),
        *(f'<p class="warn">{escape(note)}</p>' for note in _notes(transition, unreachable)),
    ]
    if transition.is_empty:
        body.append("<p>The fleet is as planned: no step is needed.</p>")
    else:
        body += _pictures(history)
        body += [f"<details><summary>All {len(transition.steps)} steps</summary>", _steps(transition), "</details>"]
    return page(f"Coral transition to {transition.plan}", "\n".join(body), charts=False)


def _headline(transition: Transition) -> list[Figure]:
    released = sum(len(step.nodes) for step in transition.steps if step.kind is StepKind.RELEASE)
    counts = {
        "Steps": len(transition.steps),
        "Instances kept": len(transition.kept),
        "Started": len(transition.started),
        "Stopped": len(transition.stopped),
        "Nodes to rent": len(transition.pending),
        "Nodes to release": released,
    }
    return [Figure(label=label, value=f"{count:,}") for label, count in counts.items()] + [
        Figure(label="Served capacity", value="falls" if transition.dips else "no fall")
    ]


def _notes(transition: Transition, unreachable: Sequence[str]) -> Iterator[str]:
    for dip in transition.dips:
        fall = f"falls to {_number(dip.lowest)}, below min(old, new) = {_number(dip.floor)}"
        yield f"Capacity of {dip.what} {fall}: no order of the steps avoids that."
    for one in transition.unplaced:
        yield f"{one.count} of {one.template} in {one.region} not placed: {one.reason}"
    if unreachable:
        yield f"No answer from {', '.join(sorted(unreachable))}: what runs there is not in this picture and stays."


def _pictures(history: History) -> list[str]:
    models = sorted({str(one.model) for one in history.instances.values()})
    colours = {model: _COLOURS[index % len(_COLOURS)] for index, model in enumerate(models)}
    canvas = _Canvas(num_columns=len(history.columns), colours=colours)
    return [
        "<h2>Nodes</h2>",
        '<div class="dim">Time runs to the right, one column for steps that run together; no scale of time.</div>',
        _key(colours),
        _svg(canvas, list(_node_rows(history, canvas)), history.columns, "What each node does in each step"),
        "<h2>Served capacity</h2>",
        '<div class="dim">Throughput of the instances that receive requests; dashed: min(before, after).</div>',
        _svg(canvas, [_line(one, canvas) for one in history.lines], history.columns, "Served capacity in each step"),
    ]


def _key(colours: Mapping[str, str]) -> str:
    models = "".join(f'<span><i style="background:{tone}"></i>{escape(name)}</span>' for name, tone in colours.items())
    tone = _COLOURS[-1]
    samples = "".join(
        f'<span><svg class="move" width="26" height="13">{_block(0, 0, 26, 13, activity, tone)}</svg>'
        f"{escape(activity.value)}</span>"
        for activity in (*_OPACITY, Activity.IDLE, Activity.PROVISIONING)
    )
    return f'<div class="key">{models}</div><div class="key">{samples}</div>'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """One row, drawn from y = 0, and how high it is."""

    height_px: int
    marks: str


def _svg(canvas: _Canvas, rows: Sequence[_Drawn], columns: Sequence[Column], title: str) -> str:
    tops = [_HEAD_PX]
    for row in rows:
        tops.append(tops[-1] + row.height_px)
    placed = "".join(f'<g transform="translate(0 {top})">{row.marks}</g>' for top, row in zip(tops, rows, strict=False))
    head = "".join(_column(canvas, index, column, tops[-1]) for index, column in enumerate(columns))
    size = f'width="{canvas.width_px:.0f}" height="{tops[-1] + 4}"'
    return (
        f'<div class="scroll"><svg class="move" role="img" aria-label="{escape(title)}" {size}>'
        f"{_DEFINITIONS}{head}{placed}</svg></div>"
    )


def _column(canvas: _Canvas, index: int, column: Column, height_px: int) -> str:
    left, width = canvas.left(index), canvas.column_px
    band = f'<rect class="band" x="{left:.1f}" y="0" width="{width:.1f}" height="{height_px}"/>' if index % 2 else ""
    middle = left + width / 2
    below = _count(column)
    return (
        f'{band}<text class="head" x="{middle:.1f}" y="16" text-anchor="middle">{escape(column.title)}</text>'
        f'<text class="dim" x="{middle:.1f}" y="31" text-anchor="middle">{below}</text>'
    )


def _count(column: Column) -> str:
    if not column.steps:
        return ""
    first = column.steps[0]
    if first.kind is StepKind.ROUTE:
        return f"{len(column.steps[-1].routed):,} routed"
    if first.instance is None:
        num_nodes = sum(len(step.nodes) for step in column.steps)
        return f"{num_nodes:,} node{'s' * (num_nodes != 1)}"
    return f"{len(column.steps):,}"


def _node_rows(history: History, canvas: _Canvas) -> Iterator[_Drawn]:
    """Pool by pool: a heading, the nodes that change, how many do not."""
    single = sum(row.changes for row in history.rows) <= MAX_SINGLE_ROWS
    for pool, run in groupby(history.rows, key=lambda row: _pool(row.node)):
        rows = list(run)
        quiet = [row for row in rows if not row.changes]
        yield _heading(pool, quiet)
        changing = [row for row in rows if row.changes]
        for some in _shared(changing, history.instances, single=single):
            yield _node_row(some, history.instances, canvas)


def _pool(node: Node) -> str:
    return f"{node.configuration} in {node.region}, {node.market.value.replace('_', ' ')}"


def _heading(pool: str, quiet: Sequence[NodeRow]) -> _Drawn:
    busy = sum(row.bars[0].instance is not None for row in quiet)
    counts = {"stay as they are": busy, "stay free": len(quiet) - busy}
    parts = [f"{count:,} {what}" for what, count in counts.items() if count]
    note = f'<tspan class="dim" dx="10" font-weight="400">{", ".join(parts)}</tspan>' if parts else ""
    return _Drawn(height_px=26, marks=f'<text class="head" x="0" y="19">{escape(pool)}{note}</text>')


def _shared(
    rows: Sequence[NodeRow], instances: Mapping[InstanceId, ServingInstance], *, single: bool
) -> list[list[NodeRow]]:
    """Rows drawn as one: each its own, or those that do the same for the same templates."""
    if single:
        return [[row] for row in rows]
    alike: dict[tuple[object, ...], list[NodeRow]] = {}
    for row in rows:
        key = tuple(
            (bar.first, bar.activity, instances[bar.instance].template if bar.instance else "") for bar in row.bars
        )
        alike.setdefault(key, []).append(row)
    return list(alike.values())


def _node_row(rows: Sequence[NodeRow], instances: Mapping[InstanceId, ServingInstance], canvas: _Canvas) -> _Drawn:
    first = rows[0]
    names = ", ".join(row.node.id for row in rows)
    one = "to be rented" if first.bars[0].activity is Activity.ABSENT else first.node.id
    label = one if len(rows) == 1 else f"{len(rows):,} nodes alike"
    text = escape(_fit(label, _LABEL_PX - 16))
    marks = [f'<g><title>{escape(names)}</title><text class="dim" x="10" y="15">{text}</text></g>']
    marks += [_bar(bar, first.node, len(rows), instances, canvas) for bar in first.bars]
    return _Drawn(height_px=_ROW_PX, marks="".join(marks))


def _bar(bar: Bar, node: Node, num_nodes: int, instances: Mapping[InstanceId, ServingInstance], canvas: _Canvas) -> str:
    left, width = canvas.left(bar.first), canvas.column_px * (bar.last - bar.first + 1)
    instance = instances[bar.instance] if bar.instance else None
    colour = canvas.colours[instance.model] if instance else _COLOURS[-1]
    text = _bar_text(instance, node, num_nodes) if instance else ""
    title = f"{bar.activity.value}: {text}" if text else bar.activity.value
    shown = text if bar.activity in (Activity.SERVING, Activity.LOADING) else bar.activity.value
    if bar.activity in (Activity.IDLE, Activity.ABSENT):
        shown = ""
    style = "on" if bar.activity is Activity.SERVING else ""
    return (
        f"<g><title>{escape(title)}</title>{_block(left + 1, 2, width - 2, _ROW_PX - 4, bar.activity, colour)}"
        f'<text class="{style}" x="{left + 6:.1f}" y="15">{escape(_fit(shown, width - 10))}</text></g>'
    )


def _bar_text(instance: ServingInstance, node: Node, num_nodes: int) -> str:
    if num_nodes > 1:
        return f"{instance.model} {instance.phase.value}"
    stages = len(instance.stage_nodes)
    stage = next((index for index, nodes in enumerate(instance.stage_nodes, 1) if node.id in nodes), 0)
    return f"{instance.id}, stage {stage} of {stages}" if stages > 1 else instance.id


def _block(left: float, top: float, width: float, height: float, activity: Activity, colour: str) -> str:
    """The shape of one activity."""
    area = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="3"'
    if activity is Activity.ABSENT:
        return ""
    if activity is Activity.IDLE:
        middle = top + height / 2
        return f'<line class="free" x1="{left:.1f}" x2="{left + width:.1f}" y1="{middle}" y2="{middle}"/>'
    if activity not in _OPACITY:
        return f'<rect class="box" {area}/>'
    marks = f'<rect {area} fill="{colour}" fill-opacity="{_OPACITY[activity]}"/>'
    if activity in _OVERLAY:
        marks += f'<rect {area} fill="url(#{_OVERLAY[activity]})"/>'
    if activity in (Activity.STOPPING, Activity.FAILED):
        marks += f'<rect class="box" {area}/>'
    return marks


def _line(line: CapacityLine, canvas: _Canvas) -> _Drawn:
    """Steps of throughput over the columns, the floor dashed, what is below it in the warning colour."""
    name = escape(_fit(f"{line.model} {line.phase}", _LABEL_PX - 16))
    label = f'<text x="0" y="18">{name}</text><text class="dim" x="0" y="32">{escape(_range(line))}</text>'
    if line.values is None:
        return _Drawn(height_px=_LINE_PX, marks=label)
    floor, top = min(line.values[0], line.values[-1]), max(line.values) or 1.0
    scale = (_LINE_PX - 8) / top
    marks = [_step(canvas, line, index, floor, scale) for index in range(len(line.values))]
    at, right = _LINE_PX - 2 - floor * scale, canvas.left(canvas.num_columns)
    marks.append(f'<line class="floor" x1="{_LABEL_PX}" x2="{right:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
    return _Drawn(height_px=_LINE_PX, marks=label + "".join(marks))


def _step(canvas: _Canvas, line: CapacityLine, index: int, floor: float, scale: float) -> str:
    value = line.values[index] if line.values is not None else 0.0
    height, below = value * scale, value < floor * (1 - 1e-9)
    fill = 'class="dip"' if below else f'fill="{canvas.colours[line.model]}" fill-opacity=".8"'
    return (
        f'<g class="steps"><title>{_number(value)} {escape(line.unit)}</title>'
        f'<rect {fill} x="{canvas.left(index):.1f}" y="{_LINE_PX - 2 - height:.1f}" width="{canvas.column_px:.1f}" '
        f'height="{height:.1f}"/></g>'
    )


def _range(line: CapacityLine) -> str:
    if line.values is None:
        return "throughput not reported"
    first, last, lowest = line.values[0], line.values[-1], min(line.values)
    text = f"{_number(first)} to {_number(last)} {line.unit}"
    return f"{text}, lowest {_number(lowest)}" if lowest < min(first, last) * (1 - 1e-9) else text


def _steps(transition: Transition) -> str:
    rows = [(step.number, _words(step), step.instance or "", _on(step)) for step in transition.steps]
    return table(("step", "what", "instance", "nodes"), rows)


def _words(step: Step) -> str:
    return step.kind.value.replace("_", " ")


def _on(step: Step) -> str:
    return f"{len(step.routed):,} routed" if step.kind is StepKind.ROUTE else ", ".join(step.nodes)


def _fit(text: str, width_px: float) -> str:
    """``text`` with its middle cut out if it is too long: names differ at their ends. "" if almost nothing fits."""
    room = int(width_px / _CHAR_PX)
    if len(text) <= room:
        return text
    tail = (room - 1) // 2
    return f"{text[: room - 1 - tail]}…{text[-tail:]}" if tail > 1 else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
