"""Predicted against measured TTFT and TPOT of aggregated serving (issue 3, point 6).

Owns the errors and their grouping. Points that a fit has seen are counted apart, so are flagged ones; what cannot be
predicted is listed with the reason, never left out silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coral_tasks.catalog import Catalog, load_catalog
from coral_tasks.domain.errors import Unavailable
from coral_tasks.domain.hardware import IntraNodeLink, NodeConfiguration
from coral_tasks.domain.models import ServedModel
from coral_tasks.domain.names import Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.profiling.aggregated import AggregatedFit, family_of, load_corrections, load_fit, predict
from coral_tasks.profiling.calibration import load_calibration
from coral_tasks.profiling.costs import Work
from coral_tasks.profiling.database import DatabaseSource, step_times
from coral_tasks.profiling.helix import (
    GROUPED_KV_FACTOR,
    predict_kv_blocks,
    predict_layer_times,
    read_kv_capacities,
    read_layer_times,
)
from coral_tasks.profiling.memory import MemoryParameters, Parallelism
from coral_tasks.profiling.points import AggregatedPoint, fitted_keys
from coral_tasks.profiling.roofline import RooflineSource

SPLIT = (
    "Of each model and system in the project's own points, the first half of the configurations by SHA-256 was fitted "
    "on and is reported under 'fit' only; the figures at the top are of the other points of the file. Flagged rows are "
    "in neither and stand under 'flagged'."
)
NUM_WORST = 5

SYSTEM_GPU = {"h100_sxm": "H100", "h200_sxm": "H200", "a100_sxm": "A100-80GB", "l40s": "L40S", "b200_sxm": "B200"}
"""GPU type of a system in aiconfigurator's words."""

POINT_MODELS = {
    "meta-llama/Llama-3.1-70B": "llama3-70b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama3-8b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}
"""Catalogue model of a point's model name; needed by the roofline only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One point with what a source predicts for it, in seconds."""

    point: AggregatedPoint
    source: ProfileSource
    ttft_s: float
    tpot_s: float

    @property
    def ttft_error(self) -> float:
        """Absolute relative error."""
        return abs(self.ttft_s / self.point.ttft_s - 1)

    @property
    def tpot_error(self) -> float:
        """Absolute relative error."""
        return abs(self.tpot_s / self.point.tpot_s - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPredicted:
    """A point that a source cannot predict, and why."""

    point: AggregatedPoint
    source: ProfileSource
    reason: str


Predictor = Callable[[AggregatedPoint], Prediction]


def database_predictor() -> Predictor:
    """Predicts with corrected kernel times of aiconfigurator-core. Raises Unavailable if it is not installed."""
    if DatabaseSource.load() is None:
        message = "the database source needs the package aiconfigurator-core (extra 'profiling')"
        raise Unavailable(message)
    engines: dict[tuple[object, ...], Any] = {}
    corrections, fit = load_corrections(), load_fit()

    def run(point: AggregatedPoint) -> Prediction:
        times = step_times(point, engines)
        factors = corrections[family_of(point.model, sparse=point.ep is not None)]
        prefill, decode = times.prefill_s * factors.prefill, times.decode_s * factors.decode
        return _prediction(point, ProfileSource.DATABASE, prefill, decode, fit)

    return run


def roofline_predictor(catalog: Catalog | None = None) -> Predictor:
    """Predicts with the roofline for catalogue models on catalogue GPU types."""
    known, source, fit = catalog or load_catalog(), RooflineSource.load(), load_fit()

    def run(point: AggregatedPoint) -> Prediction:
        model, configuration = _model(known, point), _configuration(known, point)
        split = Parallelism(tp=point.tp, ep=point.ep if point.ep and point.tp % point.ep == 0 else 1)
        seconds = []
        for phase, sequences in ((Phase.PREFILL, 1), (Phase.DECODE, point.concurrency)):
            context = point.isl if phase is Phase.PREFILL else point.isl + point.osl / 2
            work = Work(
                model=model,
                configuration=configuration,
                split=split,
                phase=phase,
                context_tokens=context,
                sequences=(sequences,),
            )
            costs = source.costs(work)
            if costs is None:
                message = f"no calibration for {configuration.gpu.name}"
                raise Unavailable(message)
            seconds.append(float(costs.stage_s()[0, -1]))
        return _prediction(point, ProfileSource.ANALYTIC, seconds[0], seconds[1], fit)

    return run


def _model(catalog: Catalog, point: AggregatedPoint) -> ServedModel:
    name = POINT_MODELS.get(point.model)
    if name is None:
        message = f"{point.model} is not in the catalogue; known: {', '.join(sorted(POINT_MODELS))}"
        raise Unavailable(message)
    model = catalog.model(name)
    if point.gemm_quant == "fp8":
        return replace(model, weight_bytes_per_param=1.0, expert_bytes_per_param=1.0)
    return model


def _configuration(catalog: Catalog, point: AggregatedPoint) -> NodeConfiguration:
    gpu = SYSTEM_GPU.get(point.system)
    if gpu is None:
        message = f"system {point.system} has no GPU type in the catalogue; known: {', '.join(sorted(SYSTEM_GPU))}"
        raise Unavailable(message)
    link = IntraNodeLink.NVLINK if catalog.gpu_type(gpu).nvlink_bytes_per_s else IntraNodeLink.PCIE
    return NodeConfiguration(
        gpu=catalog.gpu_type(gpu), num_gpus=point.tp, intra_node_link=link, network_bytes_per_s=1e9
    )


def _prediction(
    point: AggregatedPoint, source: ProfileSource, prefill_s: float, decode_s: float, fit: AggregatedFit
) -> Prediction:
    ttft, tpot = predict(
        np.asarray([prefill_s]),
        np.asarray([decode_s]),
        np.asarray([float(point.concurrency)]),
        np.asarray([float(point.osl)]),
        fit,
    )
    return Prediction(point=point, source=source, ttft_s=float(ttft[0]), tpot_s=float(tpot[0]))


def predict_points(
    points: Iterable[AggregatedPoint], source: ProfileSource, predictor: Predictor
) -> tuple[list[Prediction], list[NotPredicted]]:
    """Predict every point; a point that raises Unavailable is listed with the reason."""
    done: list[Prediction] = []
    lost: list[NotPredicted] = []
    for point in points:
        try:
            done.append(predictor(point))
        except Unavailable as reason:
            lost.append(NotPredicted(point=point, source=source, reason=str(reason)))
    return done, lost


def validate(points: Sequence[AggregatedPoint]) -> dict[str, Any]:
    """The report as plain data (see ``summary`` for its form), over both sources.

    The figures at the top are the database's where it is installed, else the roofline's.
    """
    sources: list[tuple[ProfileSource, Predictor]] = [(ProfileSource.ANALYTIC, roofline_predictor())]
    if DatabaseSource.load() is not None:
        sources.insert(0, (ProfileSource.DATABASE, database_predictor()))
    done: list[Prediction] = []
    lost: list[NotPredicted] = []
    for source, predictor in sources:
        some, without = predict_points(points, source, predictor)
        done += some
        lost += without
    return summary(done, lost, primary=sources[0][0])


def summary(done: Sequence[Prediction], lost: Sequence[NotPredicted], primary: ProfileSource) -> dict[str, Any]:
    """``{"ttft", "tpot", "source", "split", "by", "fit", "flagged", "not_predicted", "worst"}``.

    Errors are absolute and relative: ``{"median", "p90", "count"}``, None where there is no point. ``by``: one entry
    for each GPU type, model and source, held-out points only.
    """
    fitted = fitted_keys()
    main = [one for one in done if not one.point.flag and one.point.configuration_key not in fitted]
    of_primary = [one for one in main if one.source is primary]
    seen = [one for one in done if not one.point.flag and one.point.configuration_key in fitted]
    flagged = [one for one in done if one.point.flag]
    groups = sorted({(one.point.system, one.point.model, one.source) for one in main})
    return {
        **_errors(of_primary),
        "source": primary.value,
        "split": SPLIT,
        "by": [
            {"gpu": SYSTEM_GPU.get(system, system), "model": model, "source": source.value}
            | _errors(
                [one for one in main if (one.point.system, one.point.model, one.source) == (system, model, source)]
            )
            for system, model, source in groups
        ],
        "fit": _errors([one for one in seen if one.source is primary]),
        "flagged": _errors([one for one in flagged if one.source is primary]),
        "analytic": _errors([one for one in main if one.source is ProfileSource.ANALYTIC]),
        "worst": [_row(one) for one in _worst(of_primary)],
        "not_predicted": [{"id": one.point.id, "source": one.source.value, "reason": one.reason} for one in lost],
    }


def _errors(predictions: Sequence[Prediction]) -> dict[str, Any]:
    return {
        "ttft": _quantiles([one.ttft_error for one in predictions]),
        "tpot": _quantiles([one.tpot_error for one in predictions]),
    }


def _quantiles(errors: Sequence[float]) -> dict[str, Any]:
    if not errors:
        return {"median": None, "p90": None, "count": 0}
    median, p90 = np.quantile(errors, [0.5, 0.9])
    return {"median": round(float(median), 4), "p90": round(float(p90), 4), "count": len(errors)}


def _worst(predictions: Sequence[Prediction]) -> list[Prediction]:
    return sorted(predictions, key=lambda one: (-max(one.ttft_error, one.tpot_error), one.point.id))[:NUM_WORST]


def _row(one: Prediction) -> dict[str, Any]:
    return {
        "id": one.point.id,
        "ttft_ms": [round(one.ttft_s * 1e3, 2), round(one.point.ttft_s * 1e3, 2)],
        "tpot_ms": [round(one.tpot_s * 1e3, 3), round(one.point.tpot_s * 1e3, 3)],
        "ttft_error": round(one.ttft_error, 4),
        "tpot_error": round(one.tpot_error, 4),
    }


def validate_helix(catalog: Catalog | None = None) -> dict[str, Any]:
    """Roofline against Helix's layer times and memory model against its KV capacities, absolute relative errors.

    ``layer_times``: rows that the calibration has not seen (half of each by hash, so neighbouring batches of the same
    machine were seen); ``kv_blocks``: LLaMA-2 70B, while overhead and activations were fitted on LLaMA-1 30B.
    """
    known = catalog or load_catalog()
    rows = [row for row in read_layer_times() if not row.for_fit]
    predicted = predict_layer_times(rows, known, load_calibration(), GROUPED_KV_FACTOR)
    errors = np.abs(predicted / np.asarray([row.seconds for row in rows]) - 1)
    capacities = [row for row in read_kv_capacities() if row.model == "LLaMA-2-70B"]
    blocks = predict_kv_blocks(capacities, known, MemoryParameters())
    kv_errors = np.abs(blocks / np.asarray([row.blocks for row in capacities]) - 1)
    machines = sorted({(row.gpu, row.num_gpus, row.phase) for row in rows})
    return {
        "layer_times": _quantiles(list(errors)),
        "layer_times_by": [
            {"gpu": gpu, "gpus": count, "phase": phase.value}
            | _quantiles(
                [e for e, r in zip(errors, rows, strict=True) if (r.gpu, r.num_gpus, r.phase) == (gpu, count, phase)]
            )
            for gpu, count, phase in machines
        ],
        "kv_blocks": _quantiles(list(kv_errors)),
        "kv_blocks_by": [
            {"gpu": gpu, "gpus": count}
            | _quantiles([e for e, r in zip(kv_errors, capacities, strict=True) if (r.gpu, r.num_gpus) == (gpu, count)])
            for gpu, count in sorted({(row.gpu, row.num_gpus) for row in capacities})
        ],
    }
