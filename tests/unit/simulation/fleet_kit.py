"""Builds small plans, timings and traces for the simulator's tests, and runs them to records in request order."""

import numpy as np

from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import LatencySplit, Market, Phase, Runtime
from coral_tasks.domain.plan import AllocationPlan, Certificate, PlannedInstances, SolveStatus
from coral_tasks.domain.profiles import LimitedBy
from coral_tasks.domain.templates import NodeCombination, Placement, ServingTemplate, Stage, template_id
from coral_tasks.domain.timing import StageTiming
from coral_tasks.simulation import RequestTrace, SimulationOptions, simulate

SLO = LatencySlo(ttft_s=1.0, tpot_s=0.1)
REGIONS = ("r1", "r2")
PRICES = {(region, "L4x1", Market.ON_DEMAND): 1.0 for region in REGIONS}


class Fixed:
    """A timing source with one timing for each phase."""

    def __init__(self, **by_phase):
        self.by_phase = by_phase

    def stage_timing(self, *, model, phase, configuration, num_layers):
        return self.by_phase.get(phase.value)


def timing(**values):
    return StageTiming(**{"fixed_s": 0.0, "per_prompt_token_s": 0.0, "per_sequence_s": 0.0, **values})


def template(phase: Phase, *, stages=1, throughput=1000.0, model="m"):
    placement = Placement(
        stages=tuple(
            Stage(nodes=NodeCombination.of(["L4x1"]), num_layers=8, num_quanta=60 // stages) for _ in range(stages)
        ),
        total_quanta=60,
    )
    return ServingTemplate(
        id=template_id(model=model, phase=phase, slo=SLO, nodes=placement.nodes, runtime=Runtime.VLLM),
        model=model,
        phase=phase,
        slo=SLO,
        nodes=placement.nodes,
        throughput=throughput,
        placement=placement,
        latency_split=LatencySplit.EQUAL,
        runtime=Runtime.VLLM,
        limited_by=LimitedBy.LATENCY,
        sources=(),
    )


def plan(*rows, served=()):
    """Rows of (template, count) or (template, count, region)."""
    rows = [(*row, "r1")[:3] for row in rows]
    templates = {one.id: one for one, _, _ in rows}
    return AllocationPlan(
        id="p",
        library_version="v",
        instances=tuple(
            PlannedInstances(template=one.id, region=region, market=Market.ON_DEMAND, count=count, num_kept=0)
            for one, count, region in rows
        ),
        templates=tuple(templates.values()),
        served=tuple(served),
        shortfalls=(),
        certificate=Certificate(
            status=SolveStatus.OPTIMAL,
            cost_usd_per_hour=0,
            startup_usd_per_hour=0,
            bound_usd_per_hour=0,
            gap=0,
            shortage_proved=True,
        ),
    )


def trace(arrivals, prompt=100, output=1, models=("m",), model=None):
    count = len(arrivals)
    return RequestTrace(
        models=tuple(models),
        arrival_s=np.array(arrivals, dtype=float),
        model=np.zeros(count, dtype=np.int64) if model is None else np.array(model),
        prompt_tokens=np.broadcast_to(np.array(prompt, dtype=np.int64), (count,)).copy(),
        output_tokens=np.broadcast_to(np.array(output, dtype=np.int64), (count,)).copy(),
    )


def run(plan_or_epochs, requests, **options):
    """Result and all records, in the order of the requests."""
    records = []
    result = simulate(
        plan_or_epochs,
        requests,
        prices=PRICES,
        options=SimulationOptions(**options),
        sink=lambda rows: records.append(rows.copy()),
    )
    rows = np.concatenate(records)
    return result, rows[np.argsort(rows["index"], kind="stable")]
