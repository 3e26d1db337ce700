"""Small plans, templates and fleets for the tests of protocol, dispatch and agent. Holds no assertion."""

from __future__ import annotations

from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import (
    InstanceId,
    LatencySplit,
    LibraryVersion,
    Market,
    ModelId,
    NodeConfigurationId,
    NodeId,
    Phase,
    PlanId,
    RegionId,
    Runtime,
    TemplateId,
)
from coral_tasks.domain.plan import AllocationPlan, Certificate, PlannedInstances, SolveStatus
from coral_tasks.domain.profiles import LimitedBy, ProfileSource
from coral_tasks.domain.templates import NodeCombination, Placement, ServingTemplate, Stage

REGION = RegionId("aws/us-east-2")
SLO = LatencySlo(ttft_s=1.0, tpot_s=0.1)


def template(
    name: str,
    *,
    model: str = "m",
    phase: Phase = Phase.AGGREGATED,
    stages: tuple[tuple[str, ...], ...] = (("L4x1",),),
    layers: tuple[int, ...] | None = None,
    throughput: float = 10.0,
) -> ServingTemplate:
    """A template whose stages name their node configurations."""
    layers = layers or tuple(4 for _ in stages)
    made = tuple(
        Stage(
            nodes=NodeCombination.of([NodeConfigurationId(node) for node in stage]),
            num_layers=count,
            num_quanta=60 // len(stages),
        )
        for stage, count in zip(stages, layers, strict=True)
    )
    placement = Placement(stages=made, total_quanta=60)
    return ServingTemplate(
        id=TemplateId(name),
        model=ModelId(model),
        phase=phase,
        slo=SLO,
        nodes=placement.nodes,
        throughput=throughput,
        placement=placement,
        latency_split=LatencySplit.FREE,
        runtime=Runtime.VLLM if all(len(stage) == 1 for stage in stages) else Runtime.HYBRID,
        limited_by=LimitedBy.LATENCY,
        sources=tuple((name, ProfileSource.ANALYTIC) for name, _ in placement.nodes.counts),
    )


def plan(rows: dict[str, int], *templates: ServingTemplate, region: RegionId = REGION) -> AllocationPlan:
    """A plan of so many instances of each template in one region, on demand."""
    planned = tuple(
        PlannedInstances(template=TemplateId(name), region=region, market=Market.ON_DEMAND, count=count, num_kept=0)
        for name, count in sorted(rows.items())
        if count
    )
    return AllocationPlan(
        id=PlanId("plan-" + "-".join(f"{name}{count}" for name, count in sorted(rows.items()))),
        library_version=LibraryVersion("test"),
        instances=planned,
        templates=templates,
        served=(),
        shortfalls=(),
        certificate=Certificate(
            status=SolveStatus.OPTIMAL,
            cost_usd_per_hour=1.0,
            startup_usd_per_hour=0.0,
            bound_usd_per_hour=1.0,
            gap=0.0,
            shortage_proved=True,
        ),
    )


def node(name: str, configuration: str = "L4x1", *, region: RegionId = REGION) -> Node:
    """One node on demand."""
    return Node(
        id=NodeId(name), region=region, configuration=NodeConfigurationId(configuration), market=Market.ON_DEMAND
    )


def instance(
    name: str,
    of: ServingTemplate,
    nodes: tuple[tuple[str, ...], ...],
    *,
    state: InstanceState = InstanceState.READY,
    region: RegionId = REGION,
) -> ServingInstance:
    """A running instance of a template on these nodes."""
    return ServingInstance(
        id=InstanceId(name),
        template=of.id,
        model=of.model,
        phase=of.phase,
        region=region,
        market=Market.ON_DEMAND,
        state=state,
        stage_nodes=tuple(tuple(NodeId(one) for one in stage) for stage in nodes),
        throughput=of.throughput,
    )


def fleet(nodes: list[Node], *instances: ServingInstance) -> Fleet:
    """A fleet."""
    return Fleet(nodes=tuple(nodes), instances=tuple(instances))
