"""The paper's evaluation side by side: plans of every planner on the same inputs, simulated on the same trace.

Joins library, allocation, baselines and simulation. Owns the evaluation's cases: demand mixes, availability, traces.

API::

    compare_setup(CompareRequest(setup="core", case="scarce", ...)) -> Comparison
    comparison_as_json(comparison) -> dict      # cost_ratio and goodput_ratio per baseline, solve_seconds, paper's
    PAPER_FIGURES

What is not at hand and therefore made up, from a seed, and said in the output: availability (the paper follows a
cluster trace; here every region and configuration gets an uneven share of nodes worth ``supply`` times the cheapest
plan, and wanders from epoch to epoch); BurstGPT's lengths (log-normal with the stated means); the demand mixes.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import UnknownName, ValidationFailed, Violation
from coral_tasks.domain.fleet import InstanceState, ServingInstance
from coral_tasks.domain.market import Demand, NodeAvailability, NodePrice
from coral_tasks.domain.names import InstanceId, LatencySplit, Market, NodeConfigurationId, NodeId, RegionId, Runtime
from coral_tasks.domain.validation import Checks

if TYPE_CHECKING:
    from coral_tasks.allocation.problem import AllocationProblem
    from coral_tasks.baselines.helix import HelixNode
    from coral_tasks.catalog import Setup, SetupModel
    from coral_tasks.domain.plan import AllocationPlan
    from coral_tasks.domain.profiles import ProfileTable
    from coral_tasks.domain.template_set import TemplateSet
    from coral_tasks.simulation import RequestTrace, SimulationResult

CASES: Final = ("default", "scarce", "large-heavy", "small-heavy")
ARRIVALS: Final = ("poisson", "trace")
ROUTERS: Final = ("weighted_round_robin", "least_loaded")
ALL_PLANNERS: Final = ("homo", "cauchy", "homo-whole", "cauchy-whole", "melange")
SUPPLY: Final = {"default": 12.0, "scarce": 3.5, "large-heavy": 12.0, "small-heavy": 12.0}
"""Hourly value of all nodes on offer over the cheapest plan's by unit cost, as in the project's allocation oracle."""

MELANGE_SLICES: Final = 2
"""Slices of each of Mélange's four length buckets: eight for each model and phase, as its source cuts a bucket."""

type Progress = Callable[[str], None]

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_WANDER: Final = 0.2
"""Standard deviation of the logarithm of availability from one epoch to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """What the paper states (section 6): baseline's cost over Coral's, Coral's goodput over the baseline's."""

    cost_ratio: float | None = None
    goodput_ratio: float | None = None


PAPER_FIGURES: Final[Mapping[tuple[str, str], Mapping[str, PaperFigure]]] = {
    ("core", "default"): {"homo": PaperFigure(cost_ratio=1.62), "cauchy": PaperFigure(cost_ratio=1.60)},
    ("extended", "default"): {"homo": PaperFigure(cost_ratio=3.14), "cauchy": PaperFigure(cost_ratio=2.66)},
    ("extended", "large-heavy"): {"homo": PaperFigure(cost_ratio=2.79), "cauchy": PaperFigure(cost_ratio=3.47)},
    ("core", "large-heavy"): {"homo": PaperFigure(cost_ratio=1.82), "cauchy": PaperFigure(cost_ratio=1.78)},
    ("extended", "small-heavy"): {"homo": PaperFigure(cost_ratio=2.34), "cauchy": PaperFigure(cost_ratio=1.64)},
    ("core", "small-heavy"): {"homo": PaperFigure(cost_ratio=1.1), "cauchy": PaperFigure(cost_ratio=1.1)},
    ("core", "scarce"): {
        "homo": PaperFigure(cost_ratio=1.0, goodput_ratio=1.24),
        "cauchy": PaperFigure(cost_ratio=1.51, goodput_ratio=1.0),
    },
    ("extended", "scarce"): {
        "homo": PaperFigure(cost_ratio=1 / 1.52, goodput_ratio=7.64),
        "cauchy": PaperFigure(cost_ratio=1.25, goodput_ratio=2.39),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """One evaluation. ``traces``: folder with Azure traces (``*conv*``, ``*code*``); None: log-normal lengths.

    ``arrivals``: "poisson" at the setup's rates with lengths from the traces, or "trace" with the traces' own times
    stretched to the rates. ``work``: folder for the library and the report. ``availability``: CSV of epoch, region,
    configuration, available_nodes instead of the made-up one. ``supply``: None for the case's own.
    ``allowed_runtimes``, ``regions``: None for all. ``slowdown``: stages take this many times their profiled time.
    ``measured``: folder with Helix's measured files (``compare helix`` only).
    ``library``: build options; equal latency shares, since pipelines keep a free split's promise in prefill only: a
    batch that stays whole through the stages needs them all at one pace (docs/simulation.md has the figures).
    """

    setup: str = "core"
    case: str = "default"
    work: Path
    traces: Path | None = None
    arrivals: str = "poisson"
    availability: Path | None = None
    supply: float | None = None
    num_epochs: int = 5
    epoch_s: float = 360.0
    startup_s: float = 120.0
    headroom: float = 0.7
    seed: int = 0
    time_limit_s: float = 60.0
    gap: float = 1e-4
    planners: tuple[str, ...] = ALL_PLANNERS
    library: Mapping[str, Any] = field(default_factory=lambda: {"latency_split": "equal"})
    slowdown: float = 1.0
    router: str = "weighted_round_robin"
    measured: Path | None = None
    allowed_runtimes: tuple[str, ...] | None = None
    regions: tuple[str, ...] | None = None
    simulate: bool = True

    def __post_init__(self) -> None:
        named = [("case", self.case, CASES), ("arrivals", self.arrivals, ARRIVALS), ("router", self.router, ROUTERS)]
        named += [("planner", planner, ALL_PLANNERS) for planner in self.planners]
        named += [("latency split", self.library.get("latency_split", "equal"), tuple(LatencySplit))]
        for kind, name, known in named:
            if name not in known:
                raise UnknownName(kind=kind, name=name, known=known)
        checks = Checks("compare")
        checks.positive(
            num_epochs=self.num_epochs, epoch_s=self.epoch_s, slowdown=self.slowdown, time_limit_s=self.time_limit_s
        )
        checks.not_negative(startup_s=self.startup_s, gap=self.gap, seed=self.seed)
        checks.require(0 < self.headroom <= 1, "headroom must be above 0 and at most 1", self.headroom)
        if self.supply is not None:
            checks.positive(supply=self.supply)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOutcome:
    """One planner over all epochs. ``solve_seconds``: of each epoch; ``result``: None where nothing was simulated."""

    name: str
    plans: tuple[AllocationPlan, ...]
    solve_seconds: tuple[float, ...]
    result: SimulationResult | None

    @property
    def planned_usd_per_hour(self) -> float:
        """Mean cost of the plans."""
        return sum(plan.certificate.cost_usd_per_hour for plan in self.plans) / len(self.plans)

    @property
    def usd_per_hour(self) -> float:
        """Simulated cost, start-up included; the plans' where nothing was simulated."""
        return self.planned_usd_per_hour if self.result is None else self.result.cost_usd_per_hour

    @property
    def shortfall_requests_per_s(self) -> float:
        """Requests/s (headroom included) that the plans leave out, mean over epochs."""
        short = [sum(row.shortfall_requests_per_s for row in plan.shortfalls) for plan in self.plans]
        return sum(short) / len(short)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Coral first, then the baselines. ``notes``: what was made up or decided, in words."""

    request: CompareRequest
    outcomes: tuple[PlannerOutcome, ...]
    demand_requests_per_s: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def coral(self) -> PlannerOutcome:
        """Our planner."""
        return self.outcomes[0]


def compare_setup(request: CompareRequest, on_progress: Progress = lambda _: None) -> Comparison:
    """Plan every epoch with every planner and replay the trace on each planner's plans."""
    on_progress("library")
    world = make_world(request)
    on_progress("trace")
    trace = make_trace(request, world.setup, world.rates)
    outcomes = []
    for name in ("coral", *request.planners):
        on_progress(name)
        outcomes.append(_run_planner(world, name, trace))
    return Comparison(
        request=request,
        outcomes=tuple(outcomes),
        demand_requests_per_s=world.rates,
        notes=_notes(request, world.setup),
    )


def make_world(request: CompareRequest) -> World:
    """Everything the planners are given: setup, library, demand and prices."""
    from coral_tasks.catalog import load_catalog

    catalog = load_catalog()
    setup = catalog.setup(request.setup)
    version, sets = library_of(request)
    prices = tuple(price.as_node_price(START) for price in catalog.prices(setup) if price.market is Market.ON_DEMAND)
    rates = demand_mix(setup, request.case)
    return World(request=request, setup=setup, version=version, sets=sets, rates=rates, prices=prices)


def compare_and_report(request: CompareRequest, on_progress: Progress = lambda _: None) -> tuple[dict[str, Any], Path]:
    """Compare, write the HTML page and the JSON beside it; (JSON values, path of the page)."""
    from coral_tasks.reporting.comparison import write_comparison_page

    summary = comparison_as_json(compare_setup(request, on_progress))
    path = request.work / f"compare-{request.setup}-{request.case}.html"
    write_comparison_page(path, summary)
    write_json(path.with_suffix(".json"), summary)
    return summary, path


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write beside and rename."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    temporary.replace(path)


HELIX_CLUSTER: Final = {"A100": 4, "V100": 6, "L4": 8, "T4": 10, "L4x2": 4, "T4x2": 6, "T4x4": 4}
"""Helix's high-heterogeneity cluster: 42 machines, 64 GPUs (its section 6.1)."""

HELIX_PRICES: Final = {"A100": 3.67, "V100": 2.67, "L4": 0.71, "T4": 0.54, "L4x2": 2.0, "T4x2": 0.89, "T4x4": 1.59}
"""USD/h, GCP us-central1: A100 and L4 from the collected list prices; T4 and V100 as 0.35 and 2.48 USD per GPU with an
n1-standard-4, public list prices that were not collected: an assumption."""

HELIX_MODEL: Final = "LLaMA-1-30B"
"""Six of these machines hold its 60 layers; of LLaMA-2 70B's 80 most of them hold 4 to 7, beyond N_max = 6."""

HELIX_LAYERS: Final = 60
HELIX_HIDDEN_BYTES: Final = 6656 * 2
HELIX_NETWORK_BYTES_PER_S: Final = 1.25e9
HELIX_PROMPT_TOKENS: Final = 763
HELIX_OUTPUT_TOKENS: Final = 232
"""Mean lengths of Helix's trace (its section 6.1)."""

HELIX_CONTEXT_TOKENS: Final = HELIX_PROMPT_TOKENS + HELIX_OUTPUT_TOKENS / 2
HELIX_TPOT_S: Final = 1.75
"""Time per token, prompts of others in between: what Helix's prototype showed on its 24-machine mix (1.70 to 1.84)."""


def compare_helix(request: CompareRequest, on_progress: Progress = lambda _: None) -> tuple[dict[str, Any], Path]:
    """LLaMA-1 30B on Helix's 64 GPUs: Helix's max-flow placement beside Coral's templates.

    Both from Helix's own measured layer times and KV blocks (``request.measured``). Coral: most throughput on the
    same nodes, and least cost at Helix's throughput. Raises ValidationFailed without the files.
    """
    from coral_tasks.baselines.helix import place_helix
    from coral_tasks.reporting.comparison import write_table_page

    nodes = helix_nodes(request)
    on_progress("Helix: max-flow placement")
    cluster = [nodes[kind] for kind, count in HELIX_CLUSTER.items() for _ in range(count)]
    begun = time.perf_counter()
    helix = place_helix(cluster, HELIX_LAYERS, time_limit_s=request.time_limit_s)
    helix_s = time.perf_counter() - begun
    helix_cost = sum(
        HELIX_PRICES[node.kind] for node, (first, end) in zip(cluster, helix.layers, strict=True) if end > first
    )
    on_progress("Coral: library and plans")
    world = _helix_world(request)
    most = _helix_plan(world, request, tokens_per_s=10 * helix.tokens_per_s)
    same = _helix_plan(world, request, tokens_per_s=helix.tokens_per_s)
    rows = [
        {"planner": "helix", "tokens_per_s": helix.tokens_per_s, "usd_per_hour": helix_cost, "solve_s": helix_s},
        {"planner": "coral, most throughput", **most},
        {"planner": "coral, Helix's throughput", **same},
    ]
    summary = {
        "setup": "helix",
        "rows": rows,
        "cost_ratio": helix_cost / same["usd_per_hour"] if same["usd_per_hour"] else None,
        "goodput_ratio": most["tokens_per_s"] / helix.tokens_per_s,
        "paper_cost_ratio": 1 / (1 - 0.21),
        "paper_goodput_ratio": 1.26,
        "helix_bound_tokens_per_s": helix.bound_tokens_per_s,
        "solve_seconds": [most["solve_s"], same["solve_s"]],
        "notes": [
            "LLaMA-1 30B, 16 bit, output tokens/s with their prompts, from Helix's measured layer times and KV blocks",
            f"mean context {HELIX_CONTEXT_TOKENS:.0f} tokens; {HELIX_TPOT_S:g} s per token for both",
            "prices: GCP list prices; T4 and V100 were not collected (assumption)",
        ],
    }
    path = request.work / "compare-helix.html"
    write_table_page(path, "Helix's 64-GPU cluster", rows, summary["notes"])
    write_json(path.with_suffix(".json"), summary)
    return summary, path


def helix_nodes(request: CompareRequest) -> dict[str, HelixNode]:
    """Machines with their throughput by layers held: best batch that the KV blocks beside the layers allow."""
    from coral_tasks.baselines.helix import HelixNode

    found = {}
    for kind in HELIX_CLUSTER:
        times, room = helix_measurements(request, kind)
        rates = []
        for j, capacity in enumerate(room, start=1):
            little = capacity / HELIX_CONTEXT_TOKENS / HELIX_TPOT_S
            fitting = [b for b, layer_s in times.items() if j * layer_s <= HELIX_TPOT_S]
            rates.append(min(max((b / (j * times[b]) for b in fitting), default=0.0), little))
        rates = np.minimum.accumulate(rates).tolist()
        while rates and rates[-1] == 0.0:
            rates.pop()
        link = HELIX_NETWORK_BYTES_PER_S / HELIX_HIDDEN_BYTES
        found[kind] = HelixNode(kind=kind, tokens_per_s=tuple(rates), link_tokens_per_s=link)
    return found


def helix_measurements(request: CompareRequest, kind: str) -> tuple[dict[int, float], list[float]]:
    """Seconds of one layer by decode batch, its share of prompt work included, and KV tokens by layers held.

    Each output token brings 763 / 232 prompt tokens, at the pace of the fastest measured prompt batch.
    """
    from coral_tasks.tasks.simulating import read_frame

    if request.measured is None:
        rule = "needs the folder with helix_layer_times.csv and helix_kv_blocks.csv: --measured FOLDER"
        raise ValidationFailed([Violation(table="helix", row="", value="", rule=rule)])
    layers = read_frame(request.measured / "helix_layer_times.csv", ("model", "machine", "phase", "batch_tokens"))
    blocks = read_frame(request.measured / "helix_kv_blocks.csv", ("model", "machine", "layers_on_machine"))
    mine = layers[(layers["model"] == HELIX_MODEL) & (layers["machine"] == kind) & (layers["batch_tokens"] > 0)]
    decode, prompt = mine[mine["phase"] == "decode"], mine[mine["phase"] == "prompt"]
    prompt_s = float((prompt["layer_time_ms"] / prompt["batch_tokens"]).min()) / 1e3 * HELIX_PROMPT_TOKENS
    times = {
        int(batch): float(ms) / 1e3 + batch / HELIX_OUTPUT_TOKENS * prompt_s
        for batch, ms in zip(decode["batch_tokens"], decode["layer_time_ms"], strict=True)
    }
    rows = blocks[(blocks["model"] == HELIX_MODEL) & (blocks["machine"] == kind)].sort_values("layers_on_machine")
    return times, [float(tokens) for tokens in rows["kv_token_capacity"]]


def _helix_world(request: CompareRequest) -> TemplateSet:
    """Templates of up to six machines from the measured times, by the same build as every library."""
    from coral_tasks.templates import BuildOptions, build_template_set

    return build_template_set(helix_table(request), BuildOptions(memory_ratio=None)).templates


def helix_table(request: CompareRequest) -> ProfileTable:
    """T[c, j, q] of decode from Helix's measurements, with Little's law over the whole step for the KV room."""
    from coral_tasks.domain.models import LatencySlo, RequestShape
    from coral_tasks.domain.names import ModelId, Phase
    from coral_tasks.domain.profiles import NUM_QUANTA, LimitedBy, ProfileSource, ProfileTable

    kinds = sorted(HELIX_CLUSTER)
    rates = np.stack([_helix_rates(*helix_measurements(request, kind), NUM_QUANTA) for kind in kinds])
    limited = np.where(rates > 0, LimitedBy.LATENCY, LimitedBy.WEIGHTS).astype(np.uint8)
    context = HELIX_CONTEXT_TOKENS
    return ProfileTable(
        model=ModelId(HELIX_MODEL.lower()),
        num_layers=HELIX_LAYERS,
        checkpoint_bytes=65e9,
        phase=Phase.DECODE,
        slo=LatencySlo(ttft_s=10.0, tpot_s=HELIX_TPOT_S),
        shape=RequestShape(
            mean_prompt_tokens=763, p95_prompt_tokens=763, mean_output_tokens=232, p95_output_tokens=232
        ),
        configurations=tuple(NodeConfigurationId(kind) for kind in kinds),
        node_memory_bytes=tuple(16 * 2**30 for _ in kinds),
        tp_degree=tuple(1 for _ in kinds),
        throughput=rates,
        limited_by=limited,
        sources=tuple(ProfileSource.MEASURED for _ in kinds),
        provenance=tuple(f"Helix artifact, {kind}, context {context:.0f}" for kind in kinds),
        version="helix",
    )


def _helix_rates(times: Mapping[int, float], room: Sequence[float], num_quanta: int) -> NDArray[np.float64]:
    """Tokens/s by layers and quanta, shape (HELIX_LAYERS, Q): b / stage time within share and room.

    Sequences in flight over the whole step hold their cache: rate x TPOT limit x context within the room.
    """
    share = HELIX_TPOT_S * np.arange(1, num_quanta + 1) / num_quanta
    rates = np.zeros((HELIX_LAYERS, num_quanta))
    for j, capacity in enumerate(room[:HELIX_LAYERS], start=1):
        for batch, layer_s in times.items():
            stage_s = j * layer_s + 1e-4
            little = capacity / HELIX_CONTEXT_TOKENS / (stage_s + HELIX_TPOT_S - share)
            rate = np.minimum(batch / stage_s, little)
            fits = (stage_s <= share) & (batch * HELIX_CONTEXT_TOKENS <= capacity)
            rates[j - 1] = np.maximum(rates[j - 1], np.where(fits, rate, 0.0))
    rates = np.minimum.accumulate(rates, axis=0)
    return np.asarray(np.minimum.accumulate(rates[:, ::-1], axis=1)[:, ::-1].copy(), dtype=np.float64)


def _helix_plan(templates: TemplateSet, request: CompareRequest, *, tokens_per_s: float) -> dict[str, Any]:
    """Cheapest plan that decodes ``tokens_per_s`` on the cluster, or as much of it as the nodes can."""
    from coral_tasks.allocation.options import AllocationOptions
    from coral_tasks.allocation.problem import AllocationProblem, Running, TemplateArrays, Zone
    from coral_tasks.allocation.solve import solve_allocation
    from coral_tasks.domain.names import LibraryVersion

    count, nothing = len(templates), np.zeros(0, dtype=np.int64)
    problem = AllocationProblem(
        library_version=LibraryVersion("helix"),
        models=(templates.model,),
        regions=(RegionId("gcp/helix"),),
        configurations=templates.configurations,
        zones=(Zone(region=0, market=Market.ON_DEMAND),),
        num_gpus=np.array([int(name.partition("x")[2] or 1) for name in templates.configurations], dtype=np.int64),
        demand_requests_per_s=np.array([tokens_per_s]),
        required_requests_per_s=np.array([tokens_per_s]),
        prompt_tokens=np.zeros(1),
        output_tokens=np.ones(1),
        price_usd_per_hour=np.array([[HELIX_PRICES[name] for name in templates.configurations]]),
        available_nodes=np.array([[HELIX_CLUSTER[name] for name in templates.configurations]], dtype=np.int64),
        templates=TemplateArrays(
            model=np.zeros(count, dtype=np.int32),
            phase=np.ones(count, dtype=np.int8),
            runtime=templates.runtime.astype(np.int8),
            nodes=templates.node_counts,
            throughput=templates.throughput,
            template_id=lambda row: templates.ids[row],
            serving_template=templates.template,
        ),
        running=Running(template=nothing, zone=nothing, count=nothing),
        options=AllocationOptions(),
    )
    begun = time.perf_counter()
    plan = solve_allocation(problem, time_limit_s=request.time_limit_s, gap=request.gap)
    short = sum(row.shortfall_requests_per_s for row in plan.shortfalls)
    carried = sum(one.count * plan.template(one.template).throughput for one in plan.instances)
    return {
        "tokens_per_s": carried if short else max(tokens_per_s, carried),
        "usd_per_hour": plan.certificate.cost_usd_per_hour,
        "solve_s": time.perf_counter() - begun,
    }


SWEEP: Final = tuple((num_nodes, ratio) for ratio in (4.0, 8.0, 12.0) for num_nodes in (1, 2, 3, 4, 5, 6))
"""(N_max, rho) pairs of ``coral compare sweep``."""


def compare_sweep(request: CompareRequest, on_progress: Progress = lambda _: None) -> tuple[dict[str, Any], Path]:
    """What N_max and rho cost: library size, CPU seconds to build it, and the plan's cost in the case's first epoch."""
    from coral_tasks.reporting.comparison import write_table_page

    rows = []
    for num_nodes, ratio in SWEEP:
        on_progress(f"N_max {num_nodes}, rho {ratio:g}")
        library = {**request.library, "max_nodes": num_nodes, "memory_ratio": ratio}
        rows.append(_sweep_row(dataclasses.replace(request, library=library, simulate=False), num_nodes, ratio))
    best = min(row["usd_per_hour"] for row in rows if row["shortfall_requests_per_s"] == 0)
    for row in rows:
        row["over_best"] = row["usd_per_hour"] / best
    notes = [*_notes(request, _setup(request)), "cost of the first epoch's plan; a smaller library can only cost more"]
    summary = {"setup": request.setup, "case": request.case, "rows": rows, "notes": notes}
    path = request.work / f"compare-sweep-{request.setup}.html"
    write_table_page(path, f"N_max and rho: {request.setup}, {request.case}", rows, notes)
    write_json(path.with_suffix(".json"), summary)
    return summary, path


def _sweep_row(request: CompareRequest, num_nodes: int, ratio: float) -> dict[str, Any]:
    begun = time.process_time()
    world = make_world(request)
    built_s = time.process_time() - begun
    plan = _solve(world.problem(0, offered_nodes(world)[0], ()), "coral", request)
    return {
        "n_max": num_nodes,
        "rho": ratio,
        "num_templates": sum(len(one) for one in world.sets),
        "library_cpu_s": built_s,
        "usd_per_hour": plan.certificate.cost_usd_per_hour,
        "shortfall_requests_per_s": sum(row.shortfall_requests_per_s for row in plan.shortfalls),
    }


def compare_restrictions(
    request: CompareRequest, on_progress: Progress = lambda _: None
) -> tuple[dict[str, Any], Path]:
    """What each restriction costs: plan of the case's first epoch without it and with it, on the same supply."""
    from coral_tasks.reporting.comparison import write_table_page

    rows: list[dict[str, Any]] = []
    for name, changes in _restrictions(request):
        on_progress(name)
        row = _sweep_row(dataclasses.replace(request, simulate=False, **changes), 6, 12.0)
        kept = {key: row[key] for key in ("num_templates", "usd_per_hour", "shortfall_requests_per_s")}
        over = row["usd_per_hour"] / rows[0]["usd_per_hour"] if rows else 1.0
        rows.append({"restriction": name, **kept, "over_none": over})
    notes = [*_notes(request, _setup(request)), "free shares promise more than pipelines keep (docs/simulation.md)"]
    summary = {"setup": request.setup, "case": request.case, "rows": rows, "notes": notes}
    path = request.work / f"compare-restrictions-{request.setup}.html"
    write_table_page(path, f"Price of restrictions: {request.setup}, {request.case}", rows, notes)
    write_json(path.with_suffix(".json"), summary)
    return summary, path


def _restrictions(request: CompareRequest) -> list[tuple[str, dict[str, Any]]]:
    free = {**request.library, "latency_split": "free"}
    regions = [str(region) for region in _setup(request).regions]
    return [
        ("none (free latency split)", {"library": free}),
        ("equal latency split", {"library": {**free, "latency_split": "equal"}}),
        ("runtime vllm only", {"library": free, "allowed_runtimes": ("vllm",)}),
        *((f"N_max {count}", {"library": {**free, "max_nodes": count}}) for count in (1, 2, 3)),
        *((f"only {region}", {"library": free, "regions": (region,)}) for region in regions),
    ]


def _setup(request: CompareRequest) -> Setup:
    from coral_tasks.catalog import load_catalog

    return load_catalog().setup(request.setup)


def library_of(request: CompareRequest) -> tuple[str, tuple[TemplateSet, ...]]:
    """The setup's library under ``work``, built where it is not there yet; (version, template sets)."""
    from coral_tasks.storage.library import read_version
    from coral_tasks.storage.objects import open_store
    from coral_tasks.tasks.library import Publication, build_library, default_options, profile_tables

    address = str(request.work / "library")
    summary = build_library(
        address,
        profile_tables(request.setup),
        default_options(**request.library),
        publication=Publication(publish=False),
    )
    library = read_version(open_store(address), summary.version)
    return summary.version, tuple(library.sets)


def demand_mix(setup: Setup, case: str) -> dict[str, float]:
    """Requests/s by model. Large-heavy and small-heavy keep the total: weights from 0.5 to 1.5 by checkpoint size."""
    models = sorted(setup.models, key=lambda one: one.model.checkpoint_bytes)
    weights = np.ones(len(models))
    if case in ("large-heavy", "small-heavy") and len(models) > 1:
        weights = np.linspace(0.5, 1.5, len(models))
        weights = weights if case == "large-heavy" else weights[::-1]
    total = sum(one.requests_per_s for one in models)
    shares = weights * np.array([one.requests_per_s for one in models])
    shares *= total / shares.sum()
    mix = {one.model.id: float(rate) for one, rate in zip(models, shares, strict=True)}
    return {one.model.id: mix[one.model.id] for one in setup.models}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What every planner is given."""

    request: CompareRequest
    setup: Setup
    version: str
    sets: tuple[TemplateSet, ...]
    rates: Mapping[str, float]
    prices: tuple[NodePrice, ...]

    def problem(
        self,
        epoch: int,
        available: Mapping[tuple[RegionId, NodeConfigurationId], int],
        running: Sequence[ServingInstance],
        demand: Sequence[Demand] | None = None,
        *,
        prices: Sequence[NodePrice] | None = None,
        availability: Sequence[NodeAvailability] | None = None,
    ) -> AllocationProblem:
        """The problem of an epoch; what runs counts as available. ``demand`` None: the case's rates.

        ``prices`` None: the world's. ``availability``: rows of every market instead of ``available``.
        """
        from coral_tasks.allocation.build import build_problem
        from coral_tasks.allocation.options import AllocationOptions
        from coral_tasks.domain.names import LibraryVersion

        at = START + timedelta(seconds=epoch * self.request.epoch_s)
        runtimes = self.request.allowed_runtimes
        rows = [
            NodeAvailability(
                region=region, configuration=name, market=Market.ON_DEMAND, available_nodes=count, observed_at=at
            )
            for (region, name), count in sorted(available.items())
            if self.request.regions is None or region in self.request.regions
        ]
        rows = rows if availability is None else list(availability)
        return build_problem(
            library_version=LibraryVersion(self.version),
            templates=self.sets,
            demand=[self._demand(one, at) for one in self.setup.models] if demand is None else demand,
            prices=self.prices if prices is None else prices,
            availability=rows,
            running=tuple(running),
            options=AllocationOptions(
                headroom=self.request.headroom,
                startup_factor=self.request.startup_s / self.request.epoch_s,
                allowed_runtimes=None if runtimes is None else tuple(Runtime(name) for name in runtimes),
            ),
        )

    def _demand(self, one: SetupModel, at: datetime) -> Demand:
        return Demand(
            model=one.model.id,
            requests_per_s=self.rates[one.model.id],
            shape=one.shape,
            interval_start=at,
            interval_s=self.request.epoch_s,
        )


def _run_planner(world: World, name: str, trace: RequestTrace) -> PlannerOutcome:
    offered = offered_nodes(world)
    plans: list[AllocationPlan] = []
    seconds: list[float] = []
    for epoch, available in enumerate(offered):
        problem = world.problem(epoch, available, running_instances(plans[-1]) if plans else ())
        begun = time.perf_counter()
        plans.append(_solve(problem, name, world.request))
        seconds.append(time.perf_counter() - begun)
    result = _simulate(world, plans, trace) if world.request.simulate else None
    return PlannerOutcome(name=name, plans=tuple(plans), solve_seconds=tuple(seconds), result=result)


def _solve(problem: AllocationProblem, name: str, request: CompareRequest) -> AllocationPlan:
    from coral_tasks.allocation.solve import solve_allocation
    from coral_tasks.baselines import PLANNERS, plan_melange
    from coral_tasks.baselines.melange import length_buckets

    if name == "coral":
        return solve_allocation(problem, time_limit_s=request.time_limit_s, gap=request.gap)
    if name not in PLANNERS:
        raise UnknownName(kind="planner", name=name, known=["coral", *PLANNERS])
    if name == "melange":
        shapes = {one.model.id: length_buckets(one.shape) for one in _setup(request).models}
        return plan_melange(problem, buckets=shapes, num_slices=MELANGE_SLICES)
    return PLANNERS[name](problem)


def running_instances(plan: AllocationPlan) -> tuple[ServingInstance, ...]:
    """The plan as if it ran: one ready instance each, with node names made up from its number."""
    found = []
    for row in plan.instances:
        template = plan.template(row.template)
        for k in range(row.count):
            name = f"{row.template}@{row.region}#{k}"
            stages = tuple(
                tuple(NodeId(f"{name}/{s}.{n}") for n in range(stage.nodes.num_nodes))
                for s, stage in enumerate(template.placement.stages)
            )
            found.append(
                ServingInstance(
                    id=InstanceId(name),
                    template=row.template,
                    model=template.model,
                    phase=template.phase,
                    region=row.region,
                    market=row.market,
                    state=InstanceState.READY,
                    stage_nodes=stages,
                    throughput=template.throughput,
                )
            )
    return tuple(found)


def _simulate(world: World, plans: Sequence[AllocationPlan], trace: RequestTrace) -> SimulationResult:
    from coral_tasks.simulation import PlanEpoch, Router, SimulationOptions, simulate
    from coral_tasks.tasks.simulating import ProfileTimings, catalog_prices, transfer_timings

    epochs = [PlanEpoch(start_s=k * world.request.epoch_s, plan=plan) for k, plan in enumerate(plans)]
    options = SimulationOptions(
        timing=ProfileTimings(setup=world.setup, slowdown=world.request.slowdown),
        transfer=transfer_timings(world.setup),
        startup_s=world.request.startup_s,
        admission_utilisation=world.request.headroom,
        shed_late=True,
        router=Router(world.request.router),
    )
    return simulate(epochs, trace, prices=catalog_prices(), options=options)


def offered_nodes(world: World) -> list[dict[tuple[RegionId, NodeConfigurationId], int]]:
    """Nodes on offer in each epoch, by region and configuration, the same for every planner."""
    if world.request.availability is not None:
        offered = read_offered(world.request.availability, world.request.num_epochs)
        _require_priced(world.request.availability, offered, world.prices)
        return offered
    random = np.random.default_rng([world.request.seed, 7])
    keys = sorted({(price.region, price.configuration): price.price_usd_per_hour for price in world.prices}.items())
    cost = np.array([price for _, price in keys])
    share = 0.25 + random.random(len(keys))
    supply = world.request.supply or SUPPLY[world.request.case]
    nodes = supply * cheapest_usd_per_hour(world) * share / share.sum() / cost
    epochs = []
    for _ in range(world.request.num_epochs):
        counts = np.floor(nodes + 0.5).astype(int)
        epochs.append({key: int(count) for (key, _), count in zip(keys, counts, strict=True)})
        nodes = nodes * np.exp(random.normal(0.0, _WANDER, len(keys)))
    return epochs


def cheapest_usd_per_hour(world: World) -> float:
    """Cost of the demand at the best template's cost per request of each model and phase, nothing rounded."""
    price: dict[str, float] = {}
    for row in world.prices:
        price[row.configuration] = min(row.price_usd_per_hour, price.get(row.configuration, np.inf))
    total = 0.0
    shapes = {one.model.id: one.shape for one in world.setup.models}
    for templates in world.sets:
        shape = shapes[templates.model]
        tokens = {"prefill": shape.mean_prompt_tokens, "decode": shape.mean_output_tokens}[templates.phase.value]
        cost = templates.node_counts @ np.array([price.get(name, np.inf) for name in templates.configurations])
        total += world.rates[templates.model] * float(np.min(cost * tokens / templates.throughput))
    return total


OFFERED_COLUMNS: Final = ("epoch", "region", "configuration", "available_nodes")


def read_offered(path: Path, num_epochs: int) -> list[dict[tuple[RegionId, NodeConfigurationId], int]]:
    """Availability by epoch (from 0) from a CSV with epoch, region, configuration, available_nodes.

    Raises ValidationFailed with every row at fault and every epoch without rows; StorageFault for an unreadable file.
    """
    from coral_tasks.tasks.simulating import are_whole, read_frame

    frame = read_frame(path, OFFERED_COLUMNS)
    rule = "must be a whole number of at least 0"
    bad = [
        Violation(table=path.name, row=f"row {k}", value=str(frame[name].iloc[k]), rule=f"{name} {rule}")
        for name in ("epoch", "available_nodes")
        for k in np.flatnonzero(~are_whole(frame[name], least=0))
    ]
    repeated = np.flatnonzero(frame[list(OFFERED_COLUMNS[:3])].duplicated())
    bad += [Violation(table=path.name, row=f"row {k}", value="", rule="a node is listed twice") for k in repeated]
    if bad:
        raise ValidationFailed(bad)
    epochs: list[dict[tuple[RegionId, NodeConfigurationId], int]] = [{} for _ in range(num_epochs)]
    for row in frame.to_dict("records"):
        if int(row["epoch"]) < num_epochs:
            key = RegionId(str(row["region"])), NodeConfigurationId(str(row["configuration"]))
            epochs[int(row["epoch"])][key] = int(row["available_nodes"])
    empty = [k for k, rows in enumerate(epochs) if not rows]
    if empty:
        raise ValidationFailed([Violation(table=path.name, row=f"epoch {k}", value="", rule="no rows") for k in empty])
    return epochs


def _require_priced(
    path: Path, offered: Sequence[Mapping[tuple[RegionId, NodeConfigurationId], int]], prices: Sequence[NodePrice]
) -> None:
    """Every offered node must have a price in the setup, else a wrong name would pass for a node nobody wants."""
    known = {(price.region, price.configuration) for price in prices}
    unknown = sorted({key for rows in offered for key in rows} - known)
    if unknown:
        rule = "the setup has no price of this configuration in this region"
        raise ValidationFailed([Violation(table=path.name, row=" ".join(key), value="", rule=rule) for key in unknown])


def make_trace(request: CompareRequest, setup: Setup, rates: Mapping[str, float]) -> RequestTrace:
    """One trace of all models over all epochs.

    Lengths from the traces where there are any: with Poisson arrivals drawn at random, prompt and answer together, so
    that the demand the planners are told is the demand that comes; a stretch of an hour can be 25 % off its day's mean.
    With the traces' own times their order is kept.
    """
    from coral_tasks.simulation import merge_traces

    duration_s = request.num_epochs * request.epoch_s
    parts = [
        _model_trace(request, one, rates[one.model.id], duration_s, seed=k)
        for k, one in enumerate(setup.models)
        if rates[one.model.id] > 0
    ]
    return merge_traces(parts)


def _model_trace(
    request: CompareRequest, one: SetupModel, rate: float, duration_s: float, *, seed: int
) -> RequestTrace:
    from coral_tasks.simulation import poisson_trace, repeat_until, scale_rate
    from coral_tasks.tasks.demand import TRACE_OF
    from coral_tasks.tasks.simulating import read_request_trace

    poisson = poisson_trace({one.model.id: (rate, one.shape)}, duration_s=duration_s, seed=request.seed * 1000 + seed)
    kind = TRACE_OF.get(one.model.id)
    if request.traces is None or kind is None:
        return poisson
    recorded = read_request_trace(trace_file(request.traces, kind), one.model.id)
    if request.arrivals == "trace":
        return repeat_until(scale_rate(recorded, requests_per_s=rate), duration_s=duration_s)
    return drawn_lengths(poisson, recorded, seed=(request.seed, seed))


def drawn_lengths(arrivals: RequestTrace, recorded: RequestTrace, *, seed: Sequence[int]) -> RequestTrace:
    """``arrivals`` with lengths drawn at random from ``recorded``, prompt and answer of one request together."""
    rows = np.random.default_rng(list(seed)).integers(len(recorded), size=len(arrivals))
    return dataclasses.replace(
        arrivals, prompt_tokens=recorded.prompt_tokens[rows], output_tokens=recorded.output_tokens[rows]
    )


def trace_file(folder: Path, kind: str) -> Path:
    """The one file in the folder whose name holds ``kind``. Raises ValidationFailed."""
    found = sorted(path for path in folder.glob(f"*{kind}*") if path.is_file())
    if len(found) != 1:
        rule = f"needs exactly one trace whose name holds {kind!r}, found {len(found)}"
        raise ValidationFailed([Violation(table="traces", row="", value=str(folder), rule=rule)])
    return found[0]


def _notes(request: CompareRequest, setup: Setup) -> tuple[str, ...]:
    from coral_tasks.tasks.demand import TRACE_OF

    bursty = [one.model.id for one in setup.models if one.model.id not in TRACE_OF]
    notes = [f"arrivals: {request.arrivals}; seed {request.seed}; headroom {request.headroom:g}"]
    if request.availability is None:
        supply = request.supply or SUPPLY[request.case]
        notes.append(
            f"availability is made up (no cluster trace at hand): nodes worth {supply:g} times the cheapest plan, "
            "spread unevenly over regions and configurations, wandering by 20 % an epoch"
        )
    if request.traces is None:
        notes.append("no traces given: lengths are log-normal with the catalogue's mean and p95")
    elif bursty:
        notes.append(f"BurstGPT is not at hand: lengths of {', '.join(bursty)} are log-normal with its stated means")
    if request.case in ("large-heavy", "small-heavy"):
        notes.append("demand mix: same total, weights from 0.5 to 1.5 by checkpoint size (the paper's are not known)")
    notes.append("late requests are shed: TTFT passed while they waited")
    return tuple(notes)


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    """Plain values: planners with cost, goodput, attainment; ratios beside the paper's; solve_seconds of Coral.

    ``cost_per_goodput_ratio``: USD per request within its limits, the baseline's over Coral's. A baseline that leaves
    demand out looks cheap by cost alone.
    """
    paper = PAPER_FIGURES.get((comparison.request.setup, comparison.request.case), {})
    return {
        "setup": comparison.request.setup,
        "case": comparison.request.case,
        "seed": comparison.request.seed,
        "solve_seconds": list(comparison.coral.solve_seconds),
        "demand_requests_per_s": dict(comparison.demand_requests_per_s),
        "planners": [_outcome_json(outcome) for outcome in comparison.outcomes],
        "baselines": [
            _ratio_json(comparison.coral, outcome, paper.get(outcome.name.removesuffix("-whole"), PaperFigure()))
            for outcome in comparison.outcomes[1:]
        ],
        "notes": list(comparison.notes),
    }


def _outcome_json(outcome: PlannerOutcome) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": outcome.name,
        "usd_per_hour": outcome.usd_per_hour,
        "planned_usd_per_hour": outcome.planned_usd_per_hour,
        "gap": max(plan.certificate.gap for plan in outcome.plans),
        "shortfall_requests_per_s": outcome.shortfall_requests_per_s,
        "solve_seconds": list(outcome.solve_seconds),
        "num_instances": [sum(one.count for one in plan.instances) for plan in outcome.plans],
    }
    result = outcome.result
    if result is not None:
        row |= {
            "goodput_requests_per_s": result.goodput_requests_per_s,
            "goodput_tokens_per_s": result.goodput_tokens_per_s,
            "attainment": result.attainment,
            "statement": result.statement,
            "models": {
                one.model: {
                    "attainment": one.attainment,
                    "ttft_attainment": one.ttft_attainment,
                    "tpot_attainment": one.tpot_attainment,
                    "ttft_p99_s": one.ttft.p99_s,
                    "tpot_p99_s": one.tpot.p99_s,
                    "goodput_requests_per_s": one.goodput_requests_per_s,
                    "outcomes": dict(one.num_by_outcome),
                }
                for one in result.models
            },
        }
    return row


def _product(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other


def _ratio_json(coral: PlannerOutcome, other: PlannerOutcome, paper: PaperFigure) -> dict[str, Any]:
    goodput = None
    if coral.result is not None and other.result is not None and other.result.goodput_requests_per_s > 0:
        goodput = coral.result.goodput_requests_per_s / other.result.goodput_requests_per_s
    return {
        "name": other.name,
        "cost_ratio": other.usd_per_hour / coral.usd_per_hour if coral.usd_per_hour > 0 else None,
        "goodput_ratio": goodput,
        "cost_per_goodput_ratio": _product(other.usd_per_hour / max(coral.usd_per_hour, 1e-12), goodput),
        "paper_cost_per_goodput_ratio": _product(paper.cost_ratio, paper.goodput_ratio or 1.0),
        "paper_cost_ratio": paper.cost_ratio,
        "paper_goodput_ratio": paper.goodput_ratio,
    }
