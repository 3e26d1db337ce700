"""The page of one allocation plan: what it costs and why it can be trusted, where everything runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from coral_tasks.domain.names import Market, NodeConfigurationId, RegionId
from coral_tasks.domain.plan import AllocationPlan, PlannedInstances
from coral_tasks.domain.templates import Placement, ServingTemplate
from coral_tasks.reporting.page import Figure, figures, page, stacked_bars, table

Prices = Mapping[tuple[RegionId, NodeConfigurationId, Market], float]
"""USD per hour of one node."""


def instance_cost_usd_per_hour(template: ServingTemplate, row: PlannedInstances, prices: Prices) -> float:
    """Cost of one instance of ``row``. KeyError if a price is missing: a plan never rests on a guess."""
    return sum(prices[row.region, name, row.market] * count for name, count in template.nodes.counts)


def plan_report(plan: AllocationPlan, prices: Prices, *, why: Sequence[str] = (), transition: str = "") -> str:
    """HTML document for ``plan``. ``why``: sentences that explain it. ``transition``: page of the steps towards it."""
    body = [
        f'<h1>Allocation plan</h1><div class="dim">{escape(plan.id)}, library {escape(plan.library_version)}</div>',
        figures(_headline(plan)),
        *(f'<p class="warn">{escape(note)}</p>' for note in _shortage_notes(plan)),
        *_link(transition),
        *_why(why),
        "<h2>Cost by model and phase</h2>",
        stacked_bars("cost-by-model", _cost_by_model(plan, prices), "USD/h"),
        "<h2>Cost by region and node configuration</h2>",
        stacked_bars("cost-by-configuration", _cost_by_configuration(plan, prices), "USD/h"),
        "<h2>Instances</h2>",
        _instance_table(plan, prices),
        "<h2>Pipelines</h2>",
        *(_pipeline(template) for template in sorted(plan.templates, key=lambda one: one.id)),
        "<h2>Served</h2>",
        _served_table(plan),
    ]
    return page(f"Coral plan {plan.id}", "\n".join(body))


def _headline(plan: AllocationPlan) -> list[Figure]:
    proof = plan.certificate
    num_nodes = sum(row.count * plan.template(row.template).nodes.num_nodes for row in plan.instances)
    return [
        Figure(label="Cost", value=f"{proof.cost_usd_per_hour:,.2f} USD/h"),
        Figure(label="Proved within", value=f"{proof.gap:.3%} of the optimum"),
        Figure(label="Least cost and start-up (bound)", value=f"{proof.bound_usd_per_hour:,.2f} USD/h"),
        Figure(label="Start-up charge", value=f"{proof.startup_usd_per_hour:,.2f} USD/h"),
        Figure(label="Instances", value=str(sum(row.count for row in plan.instances))),
        Figure(label="Nodes", value=str(num_nodes)),
        Figure(label="Solver", value=proof.status.value.replace("_", " ")),
    ]


def _shortage_notes(plan: AllocationPlan) -> list[str]:
    return [
        f"{row.model}: {row.shortfall_requests_per_s:.3g} of {row.required_requests_per_s:.3g} requests/s not served."
        for row in plan.shortfalls
        if row.shortfall_requests_per_s > 0
    ]


def _link(transition: str) -> list[str]:
    link = f'<p><a href="{escape(transition)}">Steps from the running fleet to this plan</a></p>'
    return [link] if transition else []


def _why(sentences: Sequence[str]) -> list[str]:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return ["<h2>Why</h2>", f"<ul>{items}</ul>"] if sentences else []


def _cost_by_model(plan: AllocationPlan, prices: Prices) -> dict[str, dict[str, float]]:
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in plan.instances:
        template = plan.template(row.template)
        parts[template.phase.value][template.model] += row.count * instance_cost_usd_per_hour(template, row, prices)
    return parts


def _cost_by_configuration(plan: AllocationPlan, prices: Prices) -> dict[str, dict[str, float]]:
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in plan.instances:
        for name, count in plan.template(row.template).nodes.counts:
            parts[row.region][name] += row.count * count * prices[row.region, name, row.market]
    return parts


def _instance_table(plan: AllocationPlan, prices: Prices) -> str:
    columns = ("model", "phase", "region", "market", "nodes", "count", "kept", "throughput each", "", "USD/h")
    rows = []
    for row in plan.instances:
        template = plan.template(row.template)
        cost = row.count * instance_cost_usd_per_hour(template, row, prices)
        where = (template.model, template.phase.value, row.region, row.market.value, str(template.nodes))
        unit = template.phase.throughput_unit
        rows.append((*where, row.count, row.num_kept, float(template.throughput), unit, float(cost)))
    return table(columns, rows)


def _pipeline(template: ServingTemplate) -> str:
    stages = "".join(_stage(template.placement, index) for index in range(len(template.placement.stages)))
    label = f"{template.id}: limited by {template.limited_by.name.lower()}"
    return f'<div class="dim">{escape(label)}</div><div class="scroll"><div class="pipe">{stages}</div></div>'


def _stage(placement: Placement, index: int) -> str:
    stage = placement.stages[index]
    first = sum(one.num_layers for one in placement.stages[:index])
    text = (
        f"layers {first}–{first + stage.num_layers - 1} on {stage.nodes}, {stage.num_quanta}/{placement.total_quanta}"
    )
    return f'<div class="stage" style="flex:{stage.num_layers} 1 0">{escape(text)} of the latency</div>'


def _served_table(plan: AllocationPlan) -> str:
    rows = [
        (row.model, row.region, row.disaggregated_requests_per_s, row.aggregated_requests_per_s) for row in plan.served
    ]
    return table(("model", "region", "disaggregated requests/s", "aggregated requests/s"), rows)
