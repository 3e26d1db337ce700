"""What an approval is good for: a plan on inputs that are too old, or moved since, is refused, whatever was said."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from coral_tasks.domain.errors import StaleInput
from coral_tasks.domain.fleet import Fleet
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import (
    LatencySplit,
    LibraryVersion,
    Market,
    ModelId,
    NodeConfigurationId,
    Phase,
    PlanId,
    RegionId,
    Runtime,
)
from coral_tasks.domain.plan import AllocationPlan, Certificate, PlannedInstances, SolveStatus
from coral_tasks.domain.profiles import LimitedBy, ProfileSource
from coral_tasks.domain.templates import NodeCombination, Placement, ServingTemplate, Stage, template_id
from coral_tasks.settings import Settings
from coral_tasks.storage.runs import Run
from coral_tasks.tasks import approval, guard
from coral_tasks.tasks.gate import example_csv
from coral_tasks.tasks.inputs import INPUT_TABLES, fetch_again, gate_inputs, ingest_table, run_store

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
LATER = NOON + timedelta(minutes=25)
L4 = NodeConfigurationId("L4x1")
NOBODY = Fleet(nodes=(), instances=())


def plan_of_two() -> AllocationPlan:
    """Two instances of one L4x1 each in aws/us-east-2."""
    nodes = NodeCombination.of([L4])
    slo = LatencySlo(ttft_s=1.2, tpot_s=0.06)
    model = ModelId("phi-4-14b")
    template = ServingTemplate(
        id=template_id(model=model, phase=Phase.AGGREGATED, slo=slo, nodes=nodes, runtime=Runtime.VLLM),
        model=model,
        phase=Phase.AGGREGATED,
        slo=slo,
        nodes=nodes,
        throughput=10.0,
        placement=Placement(stages=(Stage(nodes=nodes, num_layers=40, num_quanta=60),), total_quanta=60),
        latency_split=LatencySplit.FREE,
        runtime=Runtime.VLLM,
        limited_by=LimitedBy.KV,
        sources=((L4, ProfileSource.ANALYTIC),),
    )
    region = RegionId("aws/us-east-2")
    rows = PlannedInstances(template=template.id, region=region, market=Market.ON_DEMAND, count=2, num_kept=0)
    proof = Certificate(
        status=SolveStatus.OPTIMAL,
        cost_usd_per_hour=1.6,
        startup_usd_per_hour=0.0,
        bound_usd_per_hour=1.6,
        gap=0.0,
        shortage_proved=True,
    )
    return AllocationPlan(
        id=PlanId("p1"),
        library_version=LibraryVersion("v1"),
        instances=(rows,),
        templates=(template,),
        served=(),
        shortfalls=(),
        certificate=proof,
    )


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A home whose tables lie in its drop folder, as of noon."""
    home = tmp_path_factory.mktemp("approval")
    (home / "inputs").mkdir()
    for table in ("demand", "prices", "availability"):
        (home / "inputs" / f"{table}.csv").write_text(example_csv(table, NOON))
    return Settings(home=home, setup="core")


@pytest.fixture(scope="module")
def run(settings: Settings) -> Run:
    """A run of noon whose inputs were accepted, and which asked about its plan with nothing running."""
    for table in INPUT_TABLES:
        ingest_table(settings, "r1", table, NOON)
    gate_inputs(settings, "r1", NOON).require()
    found = run_store(settings).find("r1")
    found.put_json("approval.json", {"needed": True, "why": ["nothing runs yet"], "asked_at": "x", "fleet": []})
    return found


def answered(settings: Settings, run: Run, at: datetime) -> None:
    """The look before sending, at a moment."""
    approval.require_still_valid(settings, run, plan_of_two(), NOBODY, lambda: fetch_again(settings, at, {}, "r1"))


def changed(settings: Settings, table: str, change: Callable[[str], str], at: datetime) -> None:
    """The table as of ``at``, changed."""
    (settings.home / "inputs" / f"{table}.csv").write_text(change(example_csv(table, at)))


def test_an_answer_on_inputs_that_moved_little_lets_the_plan_go(settings: Settings, run: Run) -> None:
    """25 minutes later the same rates, prices and nodes are no reason to refuse."""
    for table in ("demand", "prices", "availability"):
        changed(settings, table, lambda text: text, LATER)
    answered(settings, run, LATER)


MOVED: dict[str, tuple[str, Callable[[str], str], str]] = {
    "demand": ("demand", lambda text: text.replace(",10.0,", ",20.0,", 1), "demand for [^ ]*: 10 to 20 requests/s"),
    "price": ("prices", lambda text: text.replace("0.8048", "0.95"), r"price of aws/us-east-2 L4x1 on_demand: 0\.8048"),
    "nodes": (
        "availability",
        lambda text: "".join(
            line.replace(",64,", ",1,") if line.startswith("aws/us-east-2,L4x1,on_demand") else line
            for line in text.splitlines(keepends=True)
        ),
        "aws/us-east-2 L4x1 on_demand: the plan uses 2 nodes, 1 can be had",
    ),
}


@pytest.mark.parametrize("kind", MOVED)
def test_an_answer_on_inputs_that_moved_since_is_refused(settings: Settings, run: Run, kind: str) -> None:
    """A model's rate doubled, a used price rose by a sixth, one node is left of the two that are needed."""
    for table in ("demand", "prices", "availability"):
        changed(settings, table, MOVED[kind][1] if table == MOVED[kind][0] else lambda text: text, LATER)
    with pytest.raises(StaleInput, match=f"approval of run r1 came too late, its plan is not sent: .*{MOVED[kind][2]}"):
        answered(settings, run, LATER)


def test_an_answer_on_inputs_that_are_too_old_by_then_is_refused(settings: Settings, run: Run) -> None:
    """Demand of noon is good for half an hour: nobody brought a newer one, so at 12:31 the yes sends nothing."""
    for table in ("demand", "prices", "availability"):
        changed(settings, table, lambda text: text, NOON)
    answered(settings, run, NOON + timedelta(minutes=29))
    with pytest.raises(StaleInput, match=r"newer inputs do not pass their checks: .*interval_start is stale"):
        answered(settings, run, NOON + timedelta(minutes=31))


def test_an_answer_to_a_run_that_is_too_old_is_refused(settings: Settings, run: Run) -> None:
    """However fresh the inputs: an hour after the run began its plan takes no epoch, and nobody is asked any more."""
    guard.pin_basis(settings, run, datetime.now(UTC) - timedelta(seconds=settings.plan_max_age_s + 1))
    with pytest.raises(StaleInput, match=r"this run began 3,60. s ago, more than CORAL_PLAN_MAX_AGE_S"):
        guard.take_epoch(settings, run, "p1")
