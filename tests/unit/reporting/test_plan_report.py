"""The plan page shows the plan's own figures, escapes names, and stands without the internet."""

from __future__ import annotations

import re

import pytest

from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import LatencySplit, Market, Phase, Runtime
from coral_tasks.domain.plan import (
    AllocationPlan,
    Certificate,
    PlannedInstances,
    ServedRate,
    Shortfall,
    SolveStatus,
)
from coral_tasks.domain.profiles import LimitedBy, ProfileSource
from coral_tasks.domain.templates import NodeCombination, Placement, ServingTemplate, Stage, template_id
from coral_tasks.reporting.page import write_page
from coral_tasks.reporting.plan_report import instance_cost_usd_per_hour, plan_report

EVIL = "<script>alert(1)</script>"
PRICES = {("r", "L4x1", Market.ON_DEMAND): 0.8, ("r", "A10Gx4", Market.ON_DEMAND): 5.672}


def _plan(model: str = "tiny") -> AllocationPlan:
    nodes = NodeCombination.of(["L4x1", "L4x1", "A10Gx4"])
    slo = LatencySlo(ttft_s=1.0, tpot_s=0.05)
    stages = (
        Stage(nodes=NodeCombination.of(["A10Gx4"]), num_layers=30, num_quanta=40),
        Stage(nodes=NodeCombination.of(["L4x1", "L4x1"]), num_layers=10, num_quanta=20),
    )
    name = template_id(model=model, phase=Phase.DECODE, slo=slo, nodes=nodes, runtime=Runtime.HYBRID)
    template = ServingTemplate(
        id=name,
        model=model,
        phase=Phase.DECODE,
        slo=slo,
        nodes=nodes,
        throughput=1234.5,
        placement=Placement(stages=stages, total_quanta=60),
        latency_split=LatencySplit.FREE,
        runtime=Runtime.HYBRID,
        limited_by=LimitedBy.KV,
        sources=(("A10Gx4", ProfileSource.ANALYTIC), ("L4x1", ProfileSource.DATABASE)),
    )
    row = PlannedInstances(template=name, region="r", market=Market.ON_DEMAND, count=2, num_kept=1)
    proof = Certificate(
        status=SolveStatus.OPTIMAL,
        cost_usd_per_hour=14.544,
        startup_usd_per_hour=0.0,
        bound_usd_per_hour=14.544,
        gap=0.0,
        shortage_proved=True,
    )
    return AllocationPlan(
        id="p1",
        library_version="v1",
        instances=(row,),
        templates=(template,),
        served=(ServedRate(model=model, region="r", disaggregated_requests_per_s=9.0, aggregated_requests_per_s=0.0),),
        shortfalls=(Shortfall(model=model, required_requests_per_s=10.0, shortfall_requests_per_s=1.0),),
        certificate=proof,
    )


def test_the_page_of_the_steps_is_linked_if_there_is_one() -> None:
    """A plan with a transition links its page, escaped; one without has no link."""
    assert "<a " not in plan_report(_plan(), PRICES)
    assert '<a href="t&quot;.html">' in plan_report(_plan(), PRICES, transition='t".html')


def test_cost_of_an_instance_is_the_sum_of_its_nodes() -> None:
    """2 × 0.8 + 5.672 = 7.272 USD/h."""
    plan = _plan()
    assert instance_cost_usd_per_hour(plan.templates[0], plan.instances[0], PRICES) == pytest.approx(7.272)


def test_the_page_shows_cost_shortage_and_layers() -> None:
    """Headline cost, the unserved rate and each stage's layers are on the page."""
    html = plan_report(_plan(), PRICES)
    assert "14.54 USD/h" in html
    assert "tiny: 1 of 10 requests/s not served." in html
    assert "layers 0–29 on 1*A10Gx4, 40/60" in html
    assert "layers 30–39 on 2*L4x1, 20/60" in html


def test_names_are_escaped() -> None:
    """A model name cannot run a script, neither in text nor inside a chart's data."""
    html = plan_report(_plan(EVIL), PRICES, why=[EVIL])
    assert EVIL not in html
    assert "&lt;script&gt;alert(1)" in html
    assert html.count("</script>") == html.count("<script")


def test_the_page_names_no_outside_address(tmp_path) -> None:
    """The page loads plotly from the file beside it and nothing else."""
    write_page(tmp_path / "plan.html", plan_report(_plan(), PRICES))
    html = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="([^"]*)"', html) == ["plotly.min.js"]
    assert (tmp_path / "plotly.min.js").stat().st_size > 1_000_000


def test_a_missing_price_is_an_error() -> None:
    """The report never shows a cost that rests on a guess."""
    with pytest.raises(KeyError):
        plan_report(_plan(), {})
