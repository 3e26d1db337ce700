"""From plans over time to the kernel's arrays: lives of instances, stages, nodes, weights, control events.

Owns which instance lives from when to when and what it can hold. Must not run anything.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coral_tasks.domain.models import LatencySlo, RequestShape
from coral_tasks.domain.names import Market, ModelId, NodeConfigurationId, Phase, RegionId, TemplateId
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.domain.templates import ServingTemplate, Stage
from coral_tasks.domain.timing import StageTiming, TransferTiming
from coral_tasks.simulation.scenario import PlanEpoch, Router, SimulationOptions
from coral_tasks.simulation.state import (
    AGGREGATED,
    CLOCK,
    DECODE,
    DRAIN,
    EVENT,
    GROUP,
    INSTANCE,
    LOSE,
    MAKE_READY,
    MODEL,
    NODE,
    OUT,
    PREFILL,
    SET_ADMITTED,
    SET_WEIGHT,
    SLOT,
    STAGE,
    Records,
    State,
)
from coral_tasks.simulation.timing import promised_timing
from coral_tasks.simulation.trace import RequestTrace

PHASE_CODES = {Phase.PREFILL: PREFILL, Phase.DECODE: DECODE, Phase.AGGREGATED: AGGREGATED}
_NO_TRANSFER = TransferTiming(fixed_s=0.0, per_token_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One instance from provisioning to its order to drain (infinite: till the end). ``number``: as in NodeLoss."""

    template: ServingTemplate
    region: RegionId
    market: Market
    number: int
    start_s: float
    ready_s: float
    drain_s: float

    @property
    def key(self) -> tuple[TemplateId, RegionId, Market]:
        """What the plan counts."""
        return self.template.id, self.region, self.market


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeShare:
    timing: StageTiming
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """A stage as the kernel sees it: nodes with their share, and what one batch and the cache may hold."""

    nodes: tuple[_NodeShare, ...]

    def _least(self, name: str) -> float:
        return min(float(getattr(node.timing, name)) / node.share for node in self.nodes)

    @property
    def max_batch_tokens(self) -> float:
        """Tokens of a batch before its first node is full."""
        return self._least("max_batch_tokens")

    @property
    def max_batch_sequences(self) -> float:
        """Sequences of a batch before its first node is full."""
        return self._least("max_batch_sequences")

    @property
    def kv_capacity_tokens(self) -> float:
        """Tokens of cache before its first node is full."""
        return self._least("kv_capacity_tokens")


def shapes_of(trace: RequestTrace) -> dict[ModelId, RequestShape]:
    """Mean lengths by model, as the trace has them; the p95 is of no use here and set to the mean."""
    shapes = {}
    for model in trace.models:
        prompt, output = trace.mean_lengths(model)
        if prompt:
            shapes[model] = RequestShape(
                mean_prompt_tokens=prompt, p95_prompt_tokens=prompt, mean_output_tokens=output, p95_output_tokens=output
            )
    return shapes


def instance_lives(epochs: Sequence[PlanEpoch], options: SimulationOptions) -> list[Life]:
    """Lives in a stable order: by model, template, region, market and start.

    An instance that a later plan no longer wants drains (youngest first) when the newcomers of that epoch are ready.
    """
    running: dict[tuple[TemplateId, RegionId, Market], list[Life]] = defaultdict(list)
    ended: list[Life] = []
    numbers: dict[tuple[TemplateId, RegionId, Market], int] = defaultdict(int)
    for k, epoch in enumerate(epochs):
        delay = _startup_delay_s(k, options)
        wanted = {(row.template, row.region, row.market): row.count for row in epoch.plan.instances}
        for key in sorted(set(wanted) | set(running)):
            lives = running[key]
            while len(lives) > wanted.get(key, 0):
                ended.append(_until(lives.pop(), epoch.start_s + delay))
            while len(lives) < wanted.get(key, 0):
                lives.append(_born(epoch, key, numbers[key], delay))
                numbers[key] += 1
    alive = [life for lives in running.values() for life in lives]
    return sorted([*ended, *alive], key=lambda one: (one.template.model, *one.key, one.number))


def _startup_delay_s(number: int, options: SimulationOptions) -> float:
    """Seconds from an epoch's start until its newcomers are ready, the leaving drain and its routes are in force."""
    return options.startup_s if number or options.cold_start else 0.0


def _born(epoch: PlanEpoch, key: tuple[TemplateId, RegionId, Market], number: int, delay: float) -> Life:
    template, region, market = key
    return Life(
        template=epoch.plan.template(template),
        region=region,
        market=market,
        number=number,
        start_s=epoch.start_s,
        ready_s=epoch.start_s + delay,
        drain_s=math.inf,
    )


def _until(life: Life, drain_s: float) -> Life:
    return Life(
        template=life.template,
        region=life.region,
        market=life.market,
        number=life.number,
        start_s=life.start_s,
        ready_s=life.ready_s,
        drain_s=drain_s,
    )


def stage_shapes(template: ServingTemplate, shape: RequestShape, options: SimulationOptions) -> list[StageShape]:
    """Each stage's nodes with timings and shares.

    A node's share follows its own rate at the stage's latency, but no more than its cache sustains: that is how the
    profile tables rate it, and the node of the least cache for its share bounds the whole instance.
    """
    return [_stage_shape(template, stage, shape, options) for stage in template.placement.stages]


def _stage_shape(
    template: ServingTemplate, stage: Stage, shape: RequestShape, options: SimulationOptions
) -> StageShape:
    timings = [_node_timing(template, stage, name, shape, options) for name in stage.nodes]
    limit_s = template.slo.limit_s(template.phase)
    tau = stage.num_quanta / template.placement.total_quanta * limit_s
    rates = [
        min(_rate(one, template.phase, tau, shape), _held(one, template.phase, shape) / limit_s) for one in timings
    ]
    total = sum(rates)
    nodes = tuple(_NodeShare(timing=timing, share=rate / total) for timing, rate in zip(timings, rates, strict=True))
    return StageShape(nodes=nodes)


def _node_timing(
    template: ServingTemplate,
    stage: Stage,
    configuration: NodeConfigurationId,
    shape: RequestShape,
    options: SimulationOptions,
) -> StageTiming:
    if options.timing is not None:
        timing = options.timing.stage_timing(
            model=template.model, phase=template.phase, configuration=configuration, num_layers=stage.num_layers
        )
        if timing is not None:
            return timing
    return promised_timing(template, stage, shape)


def _rate(timing: StageTiming, phase: Phase, tau: float, shape: RequestShape) -> float:
    """Tokens or sequences per second of a node whose batch takes about ``tau``; at least one in a batch."""
    context = shape.mean_prompt_tokens + shape.mean_output_tokens / 2
    decode = timing.per_sequence_s + timing.per_context_token_s * context
    per_unit = timing.per_prompt_token_s if phase is Phase.PREFILL else decode
    batch = max((tau - timing.fixed_s) / per_unit, 1.0) if per_unit > 0 else float(timing.max_batch_sequences)
    return batch / (timing.fixed_s + per_unit * batch)


def _held(timing: StageTiming, phase: Phase, shape: RequestShape) -> float:
    """Tokens (prefill) or sequences whose cache a node holds; each stays for the whole limit (Little's law)."""
    per_unit = 1.0 if phase is Phase.PREFILL else shape.mean_prompt_tokens + shape.mean_output_tokens
    return timing.kv_capacity_tokens / per_unit


def instance_weights(
    plan: AllocationPlan, lives: Sequence[Life], active: Sequence[int], shapes: Mapping[ModelId, RequestShape]
) -> dict[int, float]:
    """Routing weight of each active instance.

    Entry instances get their share of what their region serves (requests/s, from the plan's served rates where it has
    them), so that prefill does not send more to a region than its decode instances take; decode instances get their
    throughput.
    """
    weights = {i: lives[i].template.throughput for i in active}
    groups: dict[tuple[ModelId, RegionId, Phase], list[int]] = defaultdict(list)
    for i in active:
        groups[lives[i].template.model, lives[i].region, lives[i].template.phase].append(i)
    served = {(row.model, row.region): row for row in plan.served}
    for (model, region, phase), members in groups.items():
        if phase is Phase.DECODE or model not in shapes:
            continue
        row = served.get((model, region))
        planned = None
        if row is not None:
            planned = row.aggregated_requests_per_s if phase is Phase.AGGREGATED else row.disaggregated_requests_per_s
        capacity = sum(weights[i] for i in members)
        rate = planned or _coupled_rate(groups, weights, (model, region, phase), shapes[model])
        for i in members:
            weights[i] *= rate / capacity
    return weights


def _coupled_rate(
    groups: Mapping[tuple[ModelId, RegionId, Phase], list[int]],
    weights: Mapping[int, float],
    key: tuple[ModelId, RegionId, Phase],
    shape: RequestShape,
) -> float:
    """Requests/s of a region: the lesser of its phases; prefill alone where the model has no decode there."""
    model, region, phase = key
    capacity = sum(weights[i] for i in groups[key])
    if phase is Phase.AGGREGATED:
        return capacity
    prefill = capacity / shape.mean_prompt_tokens
    decode = [weights[i] for i in groups.get((model, region, Phase.DECODE), [])]
    return min(prefill, sum(decode) / shape.mean_output_tokens) if decode else prefill


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltFleet:
    """The kernel's state, ready to run, with what its numbers mean. Stage k of instance i: ``first_stage[i] + k``."""

    state: State
    lives: tuple[Life, ...]
    regions: tuple[RegionId, ...]
    controls: tuple[tuple[float, int, int, float], ...]


def build_fleet(epochs: Sequence[PlanEpoch], trace: RequestTrace, options: SimulationOptions) -> BuiltFleet:
    """Arrays for all instances that ever live. Raises KeyError never: the epochs are checked before."""
    lives = instance_lives(epochs, options)
    shapes = shapes_of(trace)
    lives = [life for life in lives if life.template.model in shapes]
    regions = tuple(sorted({life.region for life in lives}))
    models = _model_rows(trace, lives, options)
    instances, stages, nodes, groups, num_run = _instance_rows(trace, lives, regions, shapes, options)
    controls = _controls(epochs, lives, shapes, options) + _admissions(epochs, trace, options)
    state = State(
        models=models,
        instances=instances,
        stages=stages,
        nodes=nodes,
        groups=groups,
        running=np.zeros(num_run + 1, dtype=np.int64),
        slots=_slot_rows(options.max_in_flight),
        heap=np.zeros(len(groups) + options.max_in_flight + len(controls) + 8, dtype=EVENT),
        out=np.zeros(options.max_in_flight + min(options.chunk_requests, 1 << 16) + 8, dtype=OUT),
        clock=_clock(options),
    )
    return BuiltFleet(state=state, lives=tuple(lives), regions=regions, controls=tuple(controls))


def _clock(options: SimulationOptions) -> Records:
    clock = np.zeros(1, dtype=CLOCK)
    clock["max_retries"] = options.max_retries
    clock["least_loaded"] = options.router is Router.LEAST_LOADED
    return clock


def _slot_rows(count: int) -> Records:
    slots = np.zeros(count, dtype=SLOT)
    slots["next"] = np.arange(1, count + 1)
    slots["next"][-1] = -1
    return slots


def _admissions(
    epochs: Sequence[PlanEpoch], trace: RequestTrace, options: SimulationOptions
) -> list[tuple[float, int, int, float]]:
    """From each epoch's start the share of each model's requests that its plan covers."""
    return [
        (epoch.start_s, k, SET_ADMITTED, admitted_share(epoch.plan, trace, model, options))
        for epoch in epochs
        for k, model in enumerate(trace.models)
    ]


def _model_rows(trace: RequestTrace, lives: Sequence[Life], options: SimulationOptions) -> Records:
    rows = np.zeros(len(trace.models), dtype=MODEL)
    slos = {life.template.model: life.template.slo for life in lives}
    for k, model in enumerate(trace.models):
        mine = [i for i, life in enumerate(lives) if life.template.model == model]
        transfer = options.transfer.get(model, _NO_TRANSFER)
        rows[k]["first_instance"] = mine[0] if mine else 0
        rows[k]["num_instances"] = len(mine)
        rows[k]["ttft_slo"] = slos[model].ttft_s if model in slos else math.inf
        rows[k]["transfer_fixed"], rows[k]["transfer_token"] = transfer.fixed_s, transfer.per_token_s
        rows[k]["admit_share"] = 1.0
        rows[k]["shed"] = options.shed_late
    return rows


def admitted_share(plan: AllocationPlan, trace: RequestTrace, model: ModelId, options: SimulationOptions) -> float:
    """Share of a model's requests let in: 1 unless the plan states a shortfall of it."""
    if not options.admission:
        return 1.0
    short = [row for row in plan.shortfalls if row.model == model and row.shortfall_requests_per_s > 0]
    count = trace.num_requests(model)
    if not short or not count or not trace.duration_s:
        return 1.0
    capacity = short[0].required_requests_per_s - short[0].shortfall_requests_per_s
    return min(1.0, max(capacity, 0.0) * options.admission_utilisation * trace.duration_s / count)


def _instance_rows(
    trace: RequestTrace,
    lives: Sequence[Life],
    regions: Sequence[RegionId],
    shapes: Mapping[ModelId, RequestShape],
    options: SimulationOptions,
) -> tuple[Records, Records, Records, Records, int]:
    instances = np.zeros(len(lives), dtype=INSTANCE)
    stage_rows: list[tuple[int, int, float]] = []
    node_rows: list[tuple[float, float, float, float, float]] = []
    group_rows: list[tuple[int, int, int]] = []
    known: dict[TemplateId, list[StageShape]] = {}
    num_run = 0
    for i, life in enumerate(lives):
        shape = shapes[life.template.model]
        if life.template.id not in known:
            known[life.template.id] = stage_shapes(life.template, shape, options)
        stages = known[life.template.id]
        row = instances[i]
        row["model"], row["region"] = trace.models.index(life.template.model), regions.index(life.region)
        row["phase"] = PHASE_CODES[life.template.phase]
        row["first_stage"], row["num_stages"] = len(stage_rows), len(stages)
        row["first_group"], row["num_groups"] = len(group_rows), options.micro_batches or len(stages)
        row["budget"] = max(int(min(stage.max_batch_tokens for stage in stages)), 1)
        row["kv_capacity"] = min(stage.kv_capacity_tokens for stage in stages)
        row["queue_head"] = row["queue_tail"] = -1
        row["released_at"] = math.nan
        capacity = max(int(min(stage.max_batch_sequences for stage in stages)), 1)
        for _ in range(row["num_groups"]):
            group_rows.append((i, num_run, capacity))
            num_run += capacity
        for stage in stages:
            hop = max(node.timing.hop_s for node in stage.nodes)
            stage_rows.append((len(node_rows), len(stage.nodes), hop))
            node_rows += [_node_row(node) for node in stage.nodes]
    return instances, _rows(stage_rows, STAGE), _rows(node_rows, NODE), _rows(group_rows, GROUP), num_run


def _node_row(node: _NodeShare) -> tuple[float, float, float, float, float]:
    timing = node.timing
    return (
        timing.fixed_s,
        timing.per_prompt_token_s,
        timing.per_sequence_s,
        timing.per_context_token_s,
        node.share,
    )


def _rows(values: Sequence[tuple[float, ...]], kind: np.dtype[np.void]) -> Records:
    """Record array whose leading fields are filled from ``values``, the others zero."""
    rows = np.zeros(len(values), dtype=kind)
    for k, name in enumerate((kind.names or ())[: len(values[0]) if values else 0]):
        rows[name] = [value[k] for value in values]
    return rows


def _controls(
    epochs: Sequence[PlanEpoch],
    lives: Sequence[Life],
    shapes: Mapping[ModelId, RequestShape],
    options: SimulationOptions,
) -> list[tuple[float, int, int, float]]:
    """Control events (time, instance, action, value) in the order in which they are pushed.

    Routes follow docs/protocol.md: a plan's weights, of those that stay and those that are new, come into force when
    the new ones are ready; until then the fleet of the plan before serves by its own weights.
    """
    found: list[tuple[float, int, int, float]] = []
    for k, epoch in enumerate(epochs):
        moment = epoch.start_s + _startup_delay_s(k, options)
        routed = [i for i, life in enumerate(lives) if life.start_s <= epoch.start_s and life.drain_s > moment]
        weights = instance_weights(epoch.plan, lives, routed, shapes)
        found += [(moment, i, SET_WEIGHT, weight) for i, weight in weights.items()]
    for i, life in enumerate(lives):
        found.append((life.ready_s, i, MAKE_READY, 0.0))
        if math.isfinite(life.drain_s):
            found.append((life.drain_s, i, DRAIN, 0.0))
    keys = {(*life.key, life.number): i for i, life in enumerate(lives)}
    for loss in options.losses:
        i = keys.get((loss.template, loss.region, loss.market, loss.number), -1)
        if i >= 0:
            found.append((loss.time_s, i, LOSE, 0.0))
    return sorted(found, key=lambda row: row[0])


def slo_of(epochs: Sequence[PlanEpoch], model: ModelId) -> LatencySlo | None:
    """The limits that the model's templates were made for; None if no plan has one."""
    for epoch in epochs:
        for template in epoch.plan.templates:
            if template.model == model:
                return template.slo
    return None
