"""A data folder with plans, runs, a dispatch and failures, made without solving anything: for tests and benchmarks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.market import Demand, NodeAvailability, NodePrice
from coral_tasks.domain.models import LatencySlo, RequestShape
from coral_tasks.domain.names import LatencySplit, Market, Phase, Runtime
from coral_tasks.domain.plan import AllocationPlan, Certificate, PlannedInstances, ServedRate, Shortfall, SolveStatus
from coral_tasks.domain.profiles import LimitedBy, ProfileSource
from coral_tasks.domain.templates import NodeCombination, Placement, ServingTemplate, Stage, template_id
from coral_tasks.ingestion.batch import parquet_bytes
from coral_tasks.ingestion.rows import availability_table, demand_table, price_table, running_table

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
SLO = LatencySlo(ttft_s=1.0, tpot_s=0.05)
REGIONS = ("aws/us-east-2", "gcp/us-central1")
CONFIGURATIONS = ("L4x1", "L40Sx1")
PRICES = {"L4x1": 0.8, "L40Sx1": 1.9}
COST_OF_INSTANCE = 2 * 0.8 + 1.9
"""USD/h: every instance has two L4x1 and one L40Sx1."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much the folder holds. ``instances`` are spread evenly over models, two phases and two regions."""

    models: int = 2
    instances: int = 8
    runs: int = 3


def model_name(number: int, prefix: str = "model-") -> str:
    """Name of one model."""
    return f"{prefix}{number:02d}"


def make_template(model: str, phase: Phase) -> ServingTemplate:
    """Two stages: 30 layers on one L40Sx1, 10 on two L4x1."""
    nodes = NodeCombination.of({"L4x1": 2, "L40Sx1": 1})
    stages = (
        Stage(nodes=NodeCombination.of({"L40Sx1": 1}), num_layers=30, num_quanta=40),
        Stage(nodes=NodeCombination.of({"L4x1": 2}), num_layers=10, num_quanta=20),
    )
    return ServingTemplate(
        id=template_id(model=model, phase=phase, slo=SLO, nodes=nodes, runtime=Runtime.HYBRID),
        model=model,
        phase=phase,
        slo=SLO,
        nodes=nodes,
        throughput=5000.0,
        placement=Placement(stages=stages, total_quanta=60),
        latency_split=LatencySplit.FREE,
        runtime=Runtime.HYBRID,
        limited_by=LimitedBy.LATENCY,
        sources=(("L4x1", ProfileSource.ANALYTIC), ("L40Sx1", ProfileSource.DATABASE)),
    )


def make_plan(size: Size, *, prefix: str = "model-", short: bool = False) -> AllocationPlan:
    """Every model in both regions, prefill and decode, the instances spread evenly."""
    models = [model_name(number, prefix) for number in range(size.models)]
    templates = {(model, phase): make_template(model, phase) for model in models for phase in list(Phase)[:2]}
    keys = [(model, phase, region) for model in models for phase in list(Phase)[:2] for region in REGIONS]
    each, more = divmod(size.instances, len(keys))
    counts = [each + (number < more) for number in range(len(keys))]
    cost = size.instances * COST_OF_INSTANCE
    return AllocationPlan(
        id="plan-0123456789abcdef",
        library_version="40d74dba04886bc2",
        instances=tuple(
            PlannedInstances(
                template=templates[model, phase].id, region=region, market=Market.ON_DEMAND, count=count, num_kept=0
            )
            for (model, phase, region), count in zip(keys, counts, strict=True)
            if count
        ),
        templates=tuple(templates.values()),
        served=tuple(
            ServedRate(model=model, region=REGIONS[0], disaggregated_requests_per_s=12.0, aggregated_requests_per_s=0.0)
            for model in models
        ),
        shortfalls=tuple(
            Shortfall(model=model, required_requests_per_s=15.0, shortfall_requests_per_s=3.0)
            for model in (models[:1] if short else ())
        ),
        certificate=Certificate(
            status=SolveStatus.OPTIMAL,
            cost_usd_per_hour=cost,
            startup_usd_per_hour=0.0,
            bound_usd_per_hour=cost,
            gap=0.0,
            shortage_proved=True,
        ),
    )


def make_fleet(plan: AllocationPlan) -> Fleet:
    """Every planned instance, running on nodes of its own."""
    nodes: list[Node] = []
    instances: list[ServingInstance] = []

    def rent(region: str, configuration: str) -> str:
        node = Node(id=f"node-{len(nodes)}", region=region, configuration=configuration, market=Market.ON_DEMAND)
        nodes.append(node)
        return node.id

    for row in plan.instances:
        template = plan.template(row.template)
        for _ in range(row.count):
            stages = tuple(tuple(rent(row.region, name) for name in stage.nodes) for stage in template.placement.stages)
            instances.append(
                ServingInstance(
                    id=f"{template.model}-{template.phase.value}-{len(instances)}",
                    template=template.id,
                    model=template.model,
                    phase=template.phase,
                    region=row.region,
                    market=row.market,
                    state=InstanceState.READY,
                    stage_nodes=stages,
                )
            )
    return Fleet(nodes=tuple(nodes), instances=tuple(instances))


def make_home(home: Path, size: Size | None = None, *, prefix: str = "model-", short: bool = False) -> AllocationPlan:
    """Fill ``home``; the plan in force, which the newest run made."""
    size = size or Size()
    plan = make_plan(size, prefix=prefix, short=short)
    fleet = make_fleet(plan)
    for number in range(size.runs):
        make_run(home, plan, fleet, NOW + timedelta(minutes=5 * number))
    _write(home / "current" / "plan.json", msgspec.json.encode(plan))
    newest = run_id(NOW + timedelta(minutes=5 * (size.runs - 1))) if size.runs else ""
    in_force = {**pinned(plan, NOW + timedelta(minutes=5 * (size.runs - 1))), "run": newest, "plan": plan.id}
    _write(home / "current" / "run.json", json.dumps(in_force).encode())
    _write(home / "dispatch" / "7.json", _dispatched(plan, fleet))
    return plan


def run_id(moment: datetime) -> str:
    """As Airflow names a run started by hand."""
    return f"manual__{moment.isoformat()}_abcdefgh"


CHANGE = {
    "plan": "plan-0123456789abcdef",
    "plan_before": "",
    "cost_before": 20.0,
    "cost_after": 28.0,
    "cost_change": 0.4,
    "fleet_change": 0.5,
    "nodes_before": 16,
    "nodes_started": 8,
    "nodes_stopped": 0,
    "started": ["2 × model-00/decode in aws/us-east-2 on_demand"],
    "stopped": [],
    "moved": {"prices": ["aws/us-east-2 L4x1 on_demand: 0.7 to 0.8 USD/h"]},
}


def pinned(plan: AllocationPlan, moment: datetime) -> dict[str, object]:
    """``run.json`` of a run."""
    return {
        "as_of": moment.isoformat(),
        "reason": "schedule",
        "mode": "auto",
        "library_version": plan.library_version,
        "given": {"dry_run": False, "demand": [{"model": "model-00", "requests_per_s": 9.0}]},
    }


def make_run(home: Path, plan: AllocationPlan, fleet: Fleet, moment: datetime) -> str:
    """One sealed run; its id."""
    run = home / "runs" / run_id(moment)
    outcome = {"converged": True, "epoch": 7, "num_commands": 4, "superseded": False, "summary": "fleet as planned"}
    explanation = {
        "sentences": [f"The plan costs {plan.certificate.cost_usd_per_hour:.2f} USD/h."],
        "binding": [
            {
                "pool": "aws/us-east-2 L4x1 on_demand",
                "used_nodes": 4,
                "saving_usd_per_hour": 0.25,
                "serves_requests_per_s": 0.0,
                "exact": True,
            }
        ],
        "options": [],
        "short": [],
        "bans": [
            {"ban": "region gcp/us-central1", "cost_usd_per_hour": 3.5, "loses_requests_per_s": 0.0, "exact": True}
        ],
        "slo_steps": [
            {
                "model": "model-00",
                "slo": {"ttft_s": 0.8, "tpot_s": 0.04, "percentile": 99.0},
                "factor": 0.8,
                "outcome": "solved",
                "cost_usd_per_hour": 4.25,
                "startup_usd_per_hour": 0.25,
                "loses_requests_per_s": 0.0,
                "exact": True,
            },
            {"model": "model-01", "slo": None, "factor": None, "outcome": "no_time"},
        ],
    }
    files = {
        "run.json": pinned(plan, moment),
        "baselines.json": {
            "homo": {"cost_usd_per_hour": 2 * plan.certificate.cost_usd_per_hour, "shortfall_requests_per_s": 0.0},
            "cauchy": {"error": "no plan"},
        },
        "change.json": CHANGE,
        "check.json": {"violations": []},
        "dispatch.json": outcome,
        "explanation.json": explanation,
        "gate/prices.json": gate_report("prices", "accepted"),
        "manifest.json": {"run": run.name, "files": {}},
    }
    for name, value in files.items():
        _write(run / name, json.dumps(value).encode())
    _write(run / "plan" / "plan.json", msgspec.json.encode(plan))
    for name, data in _inputs(plan, fleet).items():
        _write(run / "inputs" / name / "accepted.parquet", data)
    return run.name


def gate_report(table: str, verdict: str, findings: tuple[dict[str, str], ...] = ()) -> dict[str, object]:
    """One report as the gate writes it."""
    return {
        "table": table,
        "verdict": verdict,
        "source": "made",
        "num_rows": 4,
        "num_rules": 3,
        "findings": list(findings),
        "notes": [],
    }


def _inputs(plan: AllocationPlan, fleet: Fleet) -> dict[str, bytes]:
    pools = [(region, name) for region in REGIONS for name in CONFIGURATIONS]
    shape = RequestShape(
        mean_prompt_tokens=500.0, p95_prompt_tokens=900.0, mean_output_tokens=200.0, p95_output_tokens=400.0
    )
    models = sorted({template.model for template in plan.templates})
    tables = {
        "prices": price_table(
            [
                NodePrice(
                    region=region,
                    configuration=name,
                    market=Market.ON_DEMAND,
                    price_usd_per_hour=PRICES[name],
                    observed_at=NOW,
                )
                for region, name in pools
            ],
            "made",
        ),
        "availability": availability_table(
            [
                NodeAvailability(
                    region=region, configuration=name, market=Market.ON_DEMAND, available_nodes=5000, observed_at=NOW
                )
                for region, name in pools
            ],
            "made",
        ),
        "demand": demand_table(
            [
                Demand(model=model, requests_per_s=9.0, shape=shape, interval_start=NOW, interval_s=300.0)
                for model in models
            ]
        ),
        "running": running_table(fleet, NOW),
    }
    return {name: parquet_bytes(table) for name, table in tables.items()}


def _dispatched(plan: AllocationPlan, fleet: Fleet) -> bytes:
    first = fleet.instances[0]
    step = {"number": 0, "kind": "start", "instance": first.id, "nodes": list(first.nodes), "routed": []}
    dip = {"what": str(first.model), "floor": 10.0, "lowest": 5.0}
    return msgspec.json.encode(
        {
            "converged": True,
            "superseded": False,
            "epoch": 7,
            "rounds": 2,
            "num_commands": 4,
            "steps_done": [step],
            "dips": [dip],
            "unplaced": [],
            "unreachable": ["agent-9"],
            "excluded": {},
            "problems": [],
            "shortage": [],
            "fleet": fleet,
            "routing": {"epoch": 7, "step": 0, "routes": []},
        }
    )


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
