"""Speed and memory of the simulator at the extended setup's shape: requests per minute of one core, growth by ten."""

from __future__ import annotations

import platform
import resource
import time

import numba
import numpy as np

from coral_tasks.catalog import load_catalog
from coral_tasks.domain.names import LatencySplit, Market, Phase, Runtime
from coral_tasks.domain.plan import AllocationPlan, Certificate, PlannedInstances, SolveStatus
from coral_tasks.domain.profiles import LimitedBy
from coral_tasks.domain.templates import NodeCombination, Placement, ServingTemplate, Stage, template_id
from coral_tasks.simulation import poisson_trace, simulate

PRICES = {("aws/us-east-2", "L40Sx1", Market.ON_DEMAND): 1.86}


def template(one, phase, rate, num_stages):
    stage = Stage(nodes=NodeCombination.of(["L40Sx1"]), num_layers=8, num_quanta=60 // num_stages)
    placement = Placement(stages=(stage,) * num_stages, total_quanta=60)
    return ServingTemplate(
        id=template_id(model=one.model.id, phase=phase, slo=one.slo, nodes=placement.nodes, runtime=Runtime.VLLM),
        model=one.model.id,
        phase=phase,
        slo=one.slo,
        nodes=placement.nodes,
        throughput=rate,
        placement=placement,
        latency_split=LatencySplit.EQUAL,
        runtime=Runtime.VLLM,
        limited_by=LimitedBy.LATENCY,
        sources=(),
    )


def plan_of(setup):
    """Five prefill pipelines of two stages and five decode pipelines of three per model, at 70 % use."""
    templates = []
    for one in setup.models:
        rate = one.requests_per_s / 0.7 / 5
        templates.append(template(one, Phase.PREFILL, rate * one.shape.mean_prompt_tokens, 2))
        templates.append(template(one, Phase.DECODE, rate * one.shape.mean_output_tokens, 3))
    rows = [
        PlannedInstances(template=t.id, region="aws/us-east-2", market=Market.ON_DEMAND, count=5, num_kept=0)
        for t in templates
    ]
    certificate = Certificate(
        status=SolveStatus.OPTIMAL,
        cost_usd_per_hour=0,
        startup_usd_per_hour=0,
        bound_usd_per_hour=0,
        gap=0,
        shortage_proved=True,
    )
    return AllocationPlan(
        id="bench",
        library_version="bench",
        instances=tuple(rows),
        templates=tuple(templates),
        served=(),
        shortfalls=(),
        certificate=certificate,
    )


def measure(plan, setup, duration_s):
    shapes = {one.model.id: (one.requests_per_s, one.shape) for one in setup.models}
    trace = poisson_trace(shapes, duration_s=duration_s, seed=1)
    begun = time.process_time()
    result = simulate(plan, trace, prices=PRICES)
    seconds = time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rate = len(trace) / seconds * 60
    print(
        f"{len(trace):>9,} requests  {seconds:7.2f} CPU s  {rate / 1e6:5.2f} million/min  "
        f"{result.num_events:>11,} events  peak in flight {result.peak_in_flight:,}  {peak:,.0f} MiB  "
        f"{result.statement}"
    )
    return seconds


def main():
    print(
        f"{platform.machine()}, Python {platform.python_version()}, numba {numba.__version__}, numpy {np.__version__}"
    )
    setup = load_catalog().setup("extended")
    plan = plan_of(setup)
    begun = time.process_time()
    measure(plan, setup, 10.0)
    print(f"first run, compilation or its cache included: {time.process_time() - begun:.1f} CPU s")
    small = measure(plan, setup, 700.0)
    large = measure(plan, setup, 7000.0)
    print(f"ten times the requests: {large / small:.1f} times the time")


if __name__ == "__main__":
    main()
