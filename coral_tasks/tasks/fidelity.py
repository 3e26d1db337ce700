"""How close the simulator is to real systems: measured points, Helix's prototype, a recorded run of real vLLM.

Joins profiling's timings and the simulator; owns the three comparisons and what their figures mean. It predicts nothing
that the simulator does not say, and measures nothing itself (``benchmarks/record_vllm_run.py`` records).

API::

    fidelity("points" | "helix" | "replay", folder) -> dict
    points_fidelity(points) -> dict            # aggregated vLLM serving, requests/s given by those in flight
    helix_fidelity(folder) -> dict             # pipelines of Helix's prototype, at their measured requests in flight
    replay_fidelity(folder) -> dict            # a recorded run of this machine, request by request
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import StorageFault, Unavailable, UnknownName, ValidationFailed, Violation
from coral_tasks.domain.names import ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.timing import StageTiming
from coral_tasks.domain.validation import Checks
from coral_tasks.tasks.comparing import HELIX_HIDDEN_BYTES, HELIX_NETWORK_BYTES_PER_S
from coral_tasks.tasks.simulating import are_whole, fit_terms, read_frame

if TYPE_CHECKING:
    import pandas as pd

    from coral_tasks.domain.plan import AllocationPlan
    from coral_tasks.profiling.measured import MeasuredRow
    from coral_tasks.profiling.points import AggregatedPoint
    from coral_tasks.simulation.stagewise import SelfBatchingStage
    from coral_tasks.simulation.state import Records

COMPARISONS: Final = ("points", "helix", "replay")
MODEL: Final = ModelId("replayed")
NODE: Final = NodeConfigurationId("node")
ROUNDS: Final = 8
"""Requests replayed per request in flight, in closed loops. How long the measured runs were is not published; their
TTFT depends on it through the first round, when all prompts come at once. Of 5 and 8 rounds the nearer one."""

SPREAD: Final = 0.1
"""Answers of measured points are replayed up to this much longer or shorter: equal ones would stay in step for ever."""

HELIX_LAYER_EXTRA_S: Final = {"A100": 0.0006, "L4": 0.00017, "T4": 0.00013}
"""What a layer of the prototype takes beyond its measured time, as work of the machine: the fastest 5 % of decode steps
of the LLaMA-1 30B online run with fewest requests in flight (0.09, 0.28, 0.29 s), over 60 layers, less the layer time
of the smallest batch. Not fitted on throughput or mean latency, nor on any of the 70B runs."""

HELIX_PASSES: Final = 3
"""Passes to find the arrival rate at which an online run has its measured number in flight (Little's law)."""

FAR_S: Final = 1e7
DRAIN_LIMIT_S: Final = 1e9
"""Nothing is left unfinished."""

WARM_SHARE: Final = 0.25
"""Requests at the start of a closed loop that are left out: all begin together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _One:
    """A timing source with one timing for whatever is asked."""

    timing: Mapping[int, StageTiming]

    def stage_timing(
        self,
        *,
        model: ModelId,  # noqa: ARG002 - the protocol's
        phase: Phase,  # noqa: ARG002 - the protocol's
        configuration: NodeConfigurationId,  # noqa: ARG002 - the protocol's
        num_layers: int,
    ) -> StageTiming | None:
        """The timing of that many layers."""
        return self.timing.get(num_layers)


def fidelity(what: str, folder: Path | None) -> dict[str, Any]:
    """The comparison by name. Raises UnknownName, ValidationFailed where a folder is needed and not given."""
    if what not in COMPARISONS:
        raise UnknownName(kind="comparison", name=what, known=COMPARISONS)
    if what == "points":
        from coral_tasks.profiling.points import read_points

        return points_fidelity(read_points())
    if folder is None:
        rule = f"{what} needs the folder with its files"
        raise ValidationFailed([Violation(table="fidelity", row=what, value="", rule=rule)])
    return helix_fidelity(folder) if what == "helix" else replay_fidelity(folder)


def run_aggregated(
    timings: Sequence[StageTiming],
    arrival_s: NDArray[np.float64],
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
) -> Records:
    """Records of one aggregated pipeline of these stages, in the order of the requests; none is turned away."""
    from coral_tasks.simulation import RequestTrace, SimulationOptions, simulate

    order = np.argsort(arrival_s, kind="stable")
    trace = RequestTrace(
        models=(MODEL,),
        arrival_s=arrival_s[order],
        model=np.zeros(len(order), dtype=np.int64),
        prompt_tokens=prompt[order],
        output_tokens=output[order],
    )
    found: list[Records] = []
    source = _One(timing={k + 1: timing for k, timing in enumerate(timings)})
    options = SimulationOptions(timing=source, drain_limit_s=DRAIN_LIMIT_S, max_in_flight=len(order) + 1)
    simulate(_lone_plan(len(timings)), trace, prices={}, options=options, sink=lambda rows: found.append(rows.copy()))
    rows = np.concatenate(found)
    rows["index"] = order[rows["index"]]
    return rows[np.argsort(rows["index"], kind="stable")]


def _lone_plan(num_stages: int) -> AllocationPlan:
    """One reserved aggregated instance; stage k holds k + 1 layers, so that a timing source can tell them apart."""
    from coral_tasks.domain.models import LatencySlo
    from coral_tasks.domain.names import LatencySplit, LibraryVersion, Market, PlanId, RegionId, Runtime
    from coral_tasks.domain.plan import AllocationPlan, Certificate, PlannedInstances, SolveStatus
    from coral_tasks.domain.profiles import LimitedBy
    from coral_tasks.domain.templates import NodeCombination, Placement, ServingTemplate, Stage, template_id

    lone = NodeCombination.of([NODE])
    stages = tuple(Stage(nodes=lone, num_layers=k + 1, num_quanta=1) for k in range(num_stages))
    placement = Placement(stages=stages, total_quanta=num_stages)
    slo = LatencySlo(ttft_s=1e9, tpot_s=1e9)
    nodes = placement.nodes
    template = ServingTemplate(
        id=template_id(model=MODEL, phase=Phase.AGGREGATED, slo=slo, nodes=nodes, runtime=Runtime.VLLM),
        model=MODEL,
        phase=Phase.AGGREGATED,
        slo=slo,
        nodes=nodes,
        throughput=1.0,
        placement=placement,
        latency_split=LatencySplit.EQUAL,
        runtime=Runtime.VLLM,
        limited_by=LimitedBy.LATENCY,
        sources=(),
    )
    row = PlannedInstances(template=template.id, region=RegionId("here"), market=Market.RESERVED, count=1, num_kept=0)
    zero = Certificate(
        status=SolveStatus.OPTIMAL,
        cost_usd_per_hour=0.0,
        startup_usd_per_hour=0.0,
        bound_usd_per_hour=0.0,
        gap=0.0,
        shortage_proved=True,
    )
    return AllocationPlan(
        id=PlanId("replay"),
        library_version=LibraryVersion("none"),
        instances=(row,),
        templates=(template,),
        served=(),
        shortfalls=(),
        certificate=zero,
    )


def closed_loop(
    timings: Sequence[StageTiming], in_flight: int, prompt: NDArray[np.int64], output: NDArray[np.int64]
) -> Records:
    """Records with ``in_flight`` requests at all times: the next one arrives when one ends.

    Arrivals are the ends of the pass before, until nothing moves: then they are what they should be. At first all but
    ``in_flight`` come long after. Raises Unavailable if the passes do not settle.
    """
    count = len(prompt)
    arrival = np.where(np.arange(count) < in_flight, 0.0, FAR_S)
    for _ in range(10 * count + 10):
        rows = run_aggregated(timings, arrival, prompt, output)
        ends = np.sort(rows["finish"])[: max(count - in_flight, 0)]
        following = np.concatenate([np.zeros(min(in_flight, count)), ends])
        if np.array_equal(following, arrival):
            return rows
        arrival = following
    message = f"a closed loop of {in_flight} in flight did not settle"
    raise Unavailable(message)


def latencies(rows: Records) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """TTFT and TPOT of each record; TPOT is NaN for a single token."""
    from coral_tasks.simulation.outcome import time_per_output_token

    return np.asarray(rows["first"] - rows["arrival"]), time_per_output_token(rows)


# ---- measured points of aggregated vLLM serving


def point_timing(point: AggregatedPoint, engines: dict[tuple[object, ...], Any]) -> StageTiming:
    """Affine timing of a point from corrected database times: a lone prompt, a decode step of one and of all.

    Raises Unavailable where the database cannot price the point.
    """
    from coral_tasks.profiling.aggregated import family_of, load_corrections, load_fit
    from coral_tasks.profiling.database import step_times

    factors, fit = load_corrections()[family_of(point.model, sparse=point.ep is not None)], load_fit()
    times = step_times(point, engines)
    lone = step_times(replace(point, concurrency=1), engines) if point.concurrency > 1 else times
    first = lone.decode_s * factors.decode
    per_sequence = max(times.decode_s * factors.decode - first, 0.0) / max(point.concurrency - 1, 1)
    prompt_s = times.prefill_s * factors.prefill + fit.prefill_step_s
    fixed = max(first - per_sequence, 0.0) + fit.decode_step_s
    return StageTiming(
        fixed_s=fixed,
        per_prompt_token_s=max(prompt_s - fixed, 0.0) / point.isl,
        per_sequence_s=per_sequence,
        max_batch_tokens=max(8192, point.concurrency + 1),
        max_batch_sequences=max(point.concurrency, 1),
    )


def points_fidelity(points: Sequence[AggregatedPoint]) -> dict[str, Any]:
    """Simulated against measured mean TTFT and TPOT of every point that no fit has seen and that carries no flag.

    Errors are relative: ``median``, ``p90``, ``mean`` of the absolute ones, ``bias`` the median with its sign.
    """
    from coral_tasks.profiling.points import fitted_keys

    engines: dict[tuple[object, ...], Any] = {}
    rows, lost, seen = [], 0, fitted_keys()
    for point in points:
        if point.flag or point.configuration_key in seen:
            continue
        try:
            timing = point_timing(point, engines)
        except Unavailable:
            lost += 1
            continue
        rows.append(_point_row(point, timing))
    return {
        "source": "vllm_agg_points.csv, points that no fit has seen",
        "num_points": len(rows),
        "num_not_predicted": lost,
        "ttft": errors([row["ttft_s"] / row["measured_ttft_s"] - 1 for row in rows]),
        "tpot": errors([row["tpot_s"] / row["measured_tpot_s"] - 1 for row in rows]),
        "rows": rows,
    }


def _point_row(point: AggregatedPoint, timing: StageTiming) -> dict[str, Any]:
    count = max(ROUNDS * point.concurrency, 8)
    stretch = 1 + SPREAD * np.random.default_rng(0).uniform(-1, 1, count)
    output = np.maximum(np.rint(point.osl * stretch), 1).astype(np.int64)
    ttft, tpot = latencies(closed_loop([timing], point.concurrency, np.full(count, point.isl), output))
    return {
        "id": point.id,
        "model": point.model,
        "system": point.system,
        "concurrency": point.concurrency,
        "ttft_s": float(ttft.mean()),
        "measured_ttft_s": point.ttft_s,
        "tpot_s": float(np.nanmean(tpot)) if point.osl > 1 else point.tpot_s,
        "measured_tpot_s": point.tpot_s,
    }


def errors(relative: Sequence[float]) -> dict[str, Any]:
    """Median, 90th percentile and mean of absolute errors, and the median with its sign; None without values."""
    if not relative:
        return {"median": None, "p90": None, "mean": None, "bias": None}
    values = np.asarray(relative)
    absolute = np.abs(values)
    return {
        "median": float(np.median(absolute)),
        "p90": float(np.quantile(absolute, 0.9)),
        "mean": float(absolute.mean()),
        "bias": float(np.median(values)),
    }


# ---- Helix's prototype


def helix_fidelity(folder: Path) -> dict[str, Any]:
    """Pipelines of one machine type that Helix's prototype ran, replayed at their measured requests in flight.

    As there, each stage batches for itself (``simulation.stagewise``). Offline runs are closed loops, online runs have
    Poisson arrivals at the rate that gives the measured mean number in flight.

    ``folder`` holds helix_layer_times.csv, helix_kv_blocks.csv, helix_placements.csv and helix_real_system.csv.
    Placements whose machines hold overlapping layers are no pipeline of stages and are counted, not replayed. Lengths
    are log-normal with the run's own mean prompt and mean answer, since each run's requests are not at hand.
    """
    real = read_frame(folder / "helix_real_system.csv", ("model", "method", "machines", "mean_requests_in_flight"))
    placements = read_frame(folder / "helix_placements.csv", ("model", "method", "machines", "first_layer"))
    rows, skipped = [], 0
    for record in real.to_dict("records"):
        run = {str(name): value for name, value in record.items()}
        mine = placements[
            (placements["paper_section"] == run["paper_section"])
            & (placements["model"] == run["model"])
            & (placements["method"] == run["method"])
            & (placements["machines"] == run["machines"])
        ]
        if not _is_pipeline(mine) or not math.isfinite(run["mean_requests_in_flight"]):
            skipped += 1
            continue
        rows.append(_helix_row(folder, run, mine))
    return {
        "source": "Helix's prototype (ASPLOS 2025), pipelines of one machine type",
        "num_runs": len(rows),
        "num_not_replayed": skipped,
        "tokens_per_s": errors([row["tokens_per_s"] / row["measured_tokens_per_s"] - 1 for row in rows]),
        "prompt": errors([row["prompt_s"] / row["measured_prompt_s"] - 1 for row in rows]),
        "decode": errors([row["decode_s"] / row["measured_decode_s"] - 1 for row in rows]),
        "helix_simulator_error": 0.082,
        "rows": rows,
    }


def _is_pipeline(mine: Any) -> bool:
    ordered = mine.sort_values("first_layer")
    starts, ends = ordered["first_layer"].tolist(), ordered["end_layer_exclusive"].tolist()
    return bool(starts) and starts[0] == 0 and starts[1:] == ends[:-1]


def _helix_row(folder: Path, run: Mapping[str, Any], placement: Any) -> dict[str, Any]:
    from coral_tasks.simulation.stagewise import run_stagewise

    answer = run["decode_tokens_in_window"] / max(run["prompts_in_window"], 1)
    in_flight = max(round(run["mean_requests_in_flight"]), 1)
    count = max(ROUNDS * in_flight, 40)
    random = np.random.default_rng(0)
    prompt = spread_lengths(run["mean_prompt_tokens"], 0.8, count, random)
    output = np.maximum(spread_lengths(answer, 0.7, count, random), 2)
    stages = [
        helix_stage(folder, run["model"], machine, layers)
        for machine, layers in zip(placement["machine"], placement["num_layers"], strict=True)
    ]
    rows = run_stagewise(stages, np.zeros(count), prompt, output, in_flight)
    stay_s, held = _mean_stay(rows, in_flight), float(in_flight)
    if run["setup"] == "online":
        arrivals, held = np.cumsum(random.exponential(size=count)), float(run["mean_requests_in_flight"])
        for _ in range(HELIX_PASSES):
            rows = run_stagewise(stages, arrivals * stay_s / held, prompt, output)
            stay_s = _mean_stay(rows, in_flight)
    return _helix_figures(run, _warm(rows, in_flight), held / stay_s)


def _warm(rows: NDArray[Any], in_flight: int) -> NDArray[Any]:
    """Without the requests of the start, and those at whose side the run empties."""
    return rows[int(WARM_SHARE * len(rows)) : len(rows) - in_flight]


def _mean_stay(rows: NDArray[Any], in_flight: int) -> float:
    warm = _warm(rows, in_flight)
    return float((warm["finish"] - warm["arrival"]).mean())


def _helix_figures(run: Mapping[str, Any], warm: NDArray[Any], requests_per_s: float) -> dict[str, Any]:
    """A run's figures beside the measured ones, whole latencies in seconds."""
    steps = (warm["finish"] - warm["first"]) / (warm["output"] - 1)
    return {
        "model": run["model"],
        "setup": run["setup"],
        "method": run["method"],
        "machines": run["machines"],
        "in_flight": float(run["mean_requests_in_flight"]),
        "tokens_per_s": requests_per_s * float(warm["output"].mean()),
        "measured_tokens_per_s": float(run["decode_tokens_per_s"]),
        "prompt_s": float((warm["first"] - warm["arrival"]).mean()),
        "measured_prompt_s": float(run["prompt_mean_s"]),
        "decode_s": float(steps.mean()),
        "measured_decode_s": float(run["decode_mean_s"]),
    }


def spread_lengths(mean: float, sigma: float, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Log-normal lengths of that mean, at least 1."""
    values = random.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return np.maximum(np.rint(values * mean / values.mean()), 1).astype(np.int64)


def helix_stage(folder: Path, model: str, machine: str, num_layers: int) -> SelfBatchingStage:
    """A machine with that many layers from Helix's layer times, between them straight, and its KV blocks.

    Raises ValidationFailed for a machine that was not measured.
    """
    from coral_tasks.simulation.stagewise import SelfBatchingStage

    times = read_frame(folder / "helix_layer_times.csv", ("model", "machine", "phase", "batch_tokens", "layer_time_ms"))
    mine = times[(times["model"] == model) & (times["machine"] == machine) & (times["batch_tokens"] > 0)]
    if mine.empty or machine not in HELIX_LAYER_EXTRA_S:
        rule = "no layer times of this machine and model, or not what its layers take beyond them"
        raise ValidationFailed([Violation(table="helix_layer_times", row=machine, value=model, rule=rule)])
    blocks = read_frame(folder / "helix_kv_blocks.csv", ("model", "machine", "layers_on_machine", "kv_token_capacity"))
    room = blocks[
        (blocks["model"] == model) & (blocks["machine"] == machine) & (blocks["layers_on_machine"] == num_layers)
    ]
    decode, prompt = (
        mine[mine["phase"] == phase].groupby("batch_tokens")["layer_time_ms"].mean() / 1e3
        for phase in ("decode", "prompt")
    )
    floor_s, extra_s = float(decode.iloc[0]), HELIX_LAYER_EXTRA_S[machine]
    return SelfBatchingStage(
        prompt_s=_batch_seconds(prompt, num_layers, floor_s, extra_s),
        decode_s=_batch_seconds(decode, num_layers, floor_s, extra_s),
        token_s=HELIX_HIDDEN_BYTES / HELIX_NETWORK_BYTES_PER_S,
        capacity_tokens=float(room["kv_token_capacity"].iloc[0]) if len(room) else math.inf,
    )


def _batch_seconds(layer_s: Any, num_layers: int, floor_s: float, extra_s: float) -> Callable[[int], float]:
    """Seconds of a batch by its tokens: straight between measured ones, in proportion above, at least the floor."""
    sizes = np.concatenate([[0.0], layer_s.index.to_numpy(dtype=np.float64)])
    seconds = np.concatenate([[0.0], layer_s.to_numpy(dtype=np.float64)])

    def of(tokens: int) -> float:
        beyond = max(tokens / sizes[-1], 1.0)
        seconds_of_layer = max(float(np.interp(tokens, sizes, seconds)) * beyond, floor_s) + extra_s
        return float(num_layers * seconds_of_layer)

    return of


# ---- a recorded run of this machine


def measured_timing(rows: Sequence[MeasuredRow], num_layers: int, run: Mapping[str, Any]) -> StageTiming:
    """Affine timing of the whole model from the runner's fits at both phases, ``num_layers`` layers.

    ``run``: max_sequences and max_batched_tokens of the server. Raises ValidationFailed without points of both phases.
    """
    from coral_tasks.profiling.measured import fit_measurements

    fits = fit_measurements(rows)
    table = [
        (
            1.0,
            fit.sequences * fit.tokens * (fit.phase is Phase.PREFILL),
            fit.sequences * (fit.phase is Phase.DECODE),
            fit.sequences * fit.tokens * (fit.phase is Phase.DECODE),
        )
        for fit in fits
    ]
    if len({fit.phase for fit in fits}) < 2:
        rule = "needs ok points of prefill and decode at two or more layer counts"
        raise ValidationFailed([Violation(table="profile", row="", value="", rule=rule)])
    seconds = np.array([fit.constant_s + num_layers * fit.layer_s for fit in fits])
    fixed, per_prompt, per_sequence, per_context = fit_terms(np.array(table), seconds)
    return StageTiming(
        fixed_s=fixed,
        per_prompt_token_s=per_prompt,
        per_sequence_s=per_sequence,
        per_context_token_s=per_context,
        max_batch_tokens=int(run["max_batched_tokens"]),
        max_batch_sequences=int(run["max_sequences"]),
    )


def replay_fidelity(folder: Path) -> dict[str, Any]:
    """A recorded run against the simulator on the same arrivals and lengths.

    ``folder``: profile.json, requests.csv and run.json as ``benchmarks/record_vllm_run.py`` writes them. Deviations are
    relative: of the means, the medians and the 95th percentiles, and the mean over requests of the absolute ones.
    Raises ValidationFailed for what such a run cannot hold, StorageFault for unreadable files.
    """
    from coral_tasks.profiling.measured import rows_from_records

    run = _read_run(folder / "run.json")
    profile = rows_from_records(_read_json(folder / "profile.json"), "profile.json")
    real = _read_requests(folder / "requests.csv")
    timing = measured_timing(profile, int(run["layers"]), run)
    prompt, output = (real[name].to_numpy(dtype=np.int64) for name in ("prompt_tokens", "output_tokens"))
    sent = real["sent_s"].to_numpy(dtype=np.float64)
    rows = run_aggregated([timing], sent, prompt, output)
    simulated = latencies(rows)
    later = np.where(output > 1, output - 1, np.nan)
    measured = (real["first_s"].to_numpy() - sent, (real["last_s"] - real["first_s"]).to_numpy() / later)
    return {
        "source": f"recorded run, {len(real)} requests",
        "timing": {name: getattr(timing, name) for name in timing.__slots__},
        "ttft": deviations(simulated[0], measured[0]),
        "tpot": deviations(simulated[1], measured[1]),
    }


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read: {error}"
        raise StorageFault(message) from error


def _read_run(path: Path) -> dict[str, Any]:
    """What the server was: whole numbers of at least 1."""
    run = _read_json(path)
    names = ("layers", "max_sequences", "max_batched_tokens")
    found = run if isinstance(run, dict) else {}
    checks = Checks(path.name)
    for name in names:
        value = found.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        checks.require(whole, f"{name} must be a whole number of at least 1", value)
    checks.raise_if_any()
    return found


def _read_requests(path: Path) -> pd.DataFrame:
    """Requests in the order of the record; times in order, lengths whole, and one answer of two tokens at least."""
    import pandas as pd

    times = ["sent_s", "first_s", "last_s"]
    real = read_frame(path, (*times, "prompt_tokens", "output_tokens"))
    seconds = real[times].apply(pd.to_numeric, errors="coerce").to_numpy(dtype=np.float64)
    ordered = np.isfinite(seconds).all(axis=1) & (seconds[:, 0] >= 0)
    ordered &= (np.diff(seconds, axis=1) >= 0).all(axis=1) & (seconds[:, 1] > seconds[:, 0])
    rules = [("sent_s, first_s and last_s must be finite and in this order", ordered)]
    rules += [
        (f"{name} must be a whole number of at least 1", are_whole(real[name], least=1))
        for name in ("prompt_tokens", "output_tokens")
    ]
    checks = Checks(path.name)
    for rule, fits in rules:
        rows = np.flatnonzero(~fits)
        checks.require(not len(rows), rule, f"request {rows[0]}, {len(rows)} in all" if len(rows) else "")
    checks.raise_if_any()
    checks.require(bool((real["output_tokens"] > 1).any()), "needs a request with two output tokens or more", len(real))
    checks.raise_if_any()
    return real.astype(dict.fromkeys(times, np.float64))


def deviations(simulated: NDArray[np.float64], measured: NDArray[np.float64]) -> dict[str, float]:
    """Simulated over measured minus 1 for mean, median and p95; ``mean_absolute``: over requests, of their own."""
    known = np.isfinite(simulated) & np.isfinite(measured)
    one, other = simulated[known], measured[known]
    statistics: dict[str, Callable[[NDArray[np.float64]], float]] = {
        "mean": lambda values: float(values.mean()),
        "p50": lambda values: float(np.quantile(values, 0.5)),
        "p95": lambda values: float(np.quantile(values, 0.95)),
    }
    found = {f"{name}_deviation": take(one) / take(other) - 1 for name, take in statistics.items()}
    found |= {f"measured_{name}_s": take(other) for name, take in statistics.items()}
    return {**found, "mean_absolute": float(np.abs(one / other - 1).mean())}
