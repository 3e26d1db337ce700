"""The fits behind the data files, run by hand: ``python -m coral_tasks.profiling.fit``. Nothing imports it at run time.

Owns which points each fit sees: the fit half of the end-to-end points (``points.fit_half``, flagged rows
left out) and, for the roofline, the fit models of the database and the fit half of Helix's layer times. What a report
shows is never fitted on.
"""

from __future__ import annotations

import csv
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral_tasks.catalog import Catalog, load_catalog
from coral_tasks.domain.errors import Unavailable
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import Phase
from coral_tasks.profiling.aggregated import (
    CORRECTIONS_FILE,
    FIT_FILE,
    AggregatedFit,
    Correction,
    family_of,
    predict,
)
from coral_tasks.profiling.calibration import COLUMNS, DATA_FILE, KERNELS, MAX_SHARE, SHARES, Efficiency
from coral_tasks.profiling.costs import Work, work_for
from coral_tasks.profiling.database import DatabaseSource, StepTimes, step_times
from coral_tasks.profiling.helix import (
    GROUPED_KV_FACTOR,
    KvCapacity,
    LayerTime,
    predict_kv_blocks,
    predict_layer_times,
    read_kv_capacities,
    read_layer_times,
)
from coral_tasks.profiling.memory import GIB, MemoryParameters, choose_parallelism
from coral_tasks.profiling.points import AggregatedPoint, fitted_keys, read_points
from coral_tasks.profiling.roofline import layer_s
from coral_tasks.profiling.search import coordinate_descent

LOG = logging.getLogger(__name__)
SHRINK = 0.05
"""Weight of the pull of family factors towards 1: a family with few points should not swallow its noise."""


def fit_aggregated(
    points: Sequence[AggregatedPoint], times: Sequence[StepTimes]
) -> tuple[list[Correction], AggregatedFit]:
    """Family factors and formula parameters with the least mean absolute log error of TTFT and TPOT."""
    families = sorted({family_of(point.model, sparse=point.ep is not None) for point in points})
    index = np.asarray(
        [families.index(family_of(point.model, sparse=point.ep is not None)) for point in points], dtype=np.intp
    )
    count = len(families)
    arrays = _arrays(points, times)

    def loss(x: NDArray[np.float64]) -> float:
        ttft, tpot = _predict(x, index, count, arrays)
        error = np.abs(np.log(ttft / arrays["ttft"])).mean() + np.abs(np.log(tpot / arrays["tpot"])).mean()
        return float(error + SHRINK * np.abs(np.log(x[: 2 * count])).mean())

    start = np.concatenate([np.ones(2 * count), [1e-3, 3e-4, 0.4, 0.5, 1.0]])
    best = coordinate_descent(loss, start)
    sizes = np.bincount(index, minlength=count)
    corrections = [
        Correction(
            family=family,
            prefill=round(float(best[count + i]), 4),
            decode=round(float(best[i]), 4),
            num_points=int(sizes[i]),
            fitted_from="fit half of vllm_agg_points.csv, aiconfigurator-core 0.12.0 kernels, least absolute log error",
        )
        for i, family in enumerate(families)
    ]
    names = ("prefill_step_s", "decode_step_s", "queue", "power", "mixing")
    values = (float(f"{value:.4g}") for value in best[2 * count :])
    return corrections, AggregatedFit(**dict(zip(names, values, strict=True)))


def _arrays(points: Sequence[AggregatedPoint], times: Sequence[StepTimes]) -> dict[str, NDArray[np.float64]]:
    return {
        "prefill": np.asarray([time.prefill_s for time in times]),
        "decode": np.asarray([time.decode_s for time in times]),
        "concurrency": np.asarray([point.concurrency for point in points], dtype=np.float64),
        "osl": np.asarray([point.osl for point in points], dtype=np.float64),
        "ttft": np.asarray([point.ttft_s for point in points]),
        "tpot": np.asarray([point.tpot_s for point in points]),
    }


def _predict(
    x: NDArray[np.float64], index: NDArray[np.intp], count: int, arrays: dict[str, NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    prefill_step, decode_step, queue, power, mixing = (float(value) for value in x[2 * count :])
    fit = AggregatedFit(prefill_step_s=prefill_step, decode_step_s=decode_step, queue=queue, power=power, mixing=mixing)
    prefill, decode = x[count : 2 * count][index] * arrays["prefill"], x[:count][index] * arrays["decode"]
    return predict(prefill, decode, arrays["concurrency"], arrays["osl"], fit)


def price(points: Sequence[AggregatedPoint]) -> tuple[list[AggregatedPoint], list[StepTimes]]:
    """Points that the database can price, with their kernel times."""
    engines: dict[tuple[object, ...], Any] = {}
    kept, times = [], []
    for point in points:
        try:
            times.append(step_times(point, engines))
        except Unavailable as reason:
            LOG.warning("not priced: %s", reason)
            continue
        kept.append(point)
    return kept, times


def write_aggregated(corrections: Sequence[Correction], fit: AggregatedFit) -> None:
    """Rewrite ``corrections.csv`` and ``aggregated_fit.json``."""
    with CORRECTIONS_FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(corrections[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(correction) for correction in corrections)
    text = {"parameters": asdict(fit), "fitted_from": corrections[0].fitted_from}
    FIT_FILE.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def fit_memory(rows: Sequence[KvCapacity], catalog: Catalog) -> MemoryParameters:
    """Engine overhead and activation factor with the least mean absolute log error of KV blocks."""
    measured = np.log([row.blocks for row in rows])

    def parameters(x: NDArray[np.float64]) -> MemoryParameters:
        return MemoryParameters(overhead_bytes=float(x[0]) * GIB, activation_factor=float(x[1]))

    def loss(x: NDArray[np.float64]) -> float:
        predicted = np.maximum(predict_kv_blocks(rows, catalog, parameters(x)), 1.0)
        return float(np.abs(np.log(predicted) - measured).mean())

    return parameters(coordinate_descent(loss, np.asarray([1.0, 1.0])))


FREE = ("compute", "bandwidth", "kv", "expert_compute", "expert_bandwidth", "launch_s", "link2", "link4", "link8")
DATABASE_GPUS = ("L40S", "A100-80GB", "H100", "H200", "B200")
HELIX_GPUS = ("A100-40GB", "L4", "T4", "V100")
FIT_MODELS = ("qwen3-32b", "qwen3-30b-a3b", "gpt-oss-20b", "llama3-8b")
"""Models whose database times the roofline is fitted on; it is reported on the others."""

REPORT_MODELS = ("llama3-70b", "gpt-oss-120b", "qwen3-235b")
SHAPE = RequestShape(mean_prompt_tokens=1024, p95_prompt_tokens=2048, mean_output_tokens=256, p95_output_tokens=512)
START = Efficiency(
    compute=0.55,
    bandwidth=0.75,
    kv=0.75,
    expert_compute=0.3,
    expert_bandwidth=0.6,
    launch_s=20e-6,
    link2=0.5,
    link4=0.3,
    link8=0.2,
    link_latency_s=10e-6,
    step_s=0.0,
    fitted_from="start",
)


def database_layer_times(
    gpu: str, phase: Phase, models: Sequence[str], catalog: Catalog, database: DatabaseSource
) -> list[tuple[Work, NDArray[np.float64]]]:
    """Work and database seconds of a mean layer, shape (B,), for 1, 2, 4 and 8 GPUs and each model it holds."""
    found = []
    for name in models:
        for count in (1, 2, 4, 8):
            model, configuration = catalog.model(name), catalog.configuration(f"{gpu}x{count}")
            split = choose_parallelism(model, configuration)
            work = work_for(model, configuration, split, phase, SHAPE, MemoryParameters(max_batched_tokens=16384))
            costs = database.costs(work)
            if costs is not None and split.tp == count:
                found.append((work, costs.layer_s.mean(axis=1)))
    return found


def fit_to_database(times: Sequence[tuple[Work, NDArray[np.float64]]], source: str) -> Efficiency:
    """Factors with the least mean absolute log error of layer times."""
    measured = np.concatenate([np.log(seconds) for _, seconds in times])

    def build(x: NDArray[np.float64]) -> Efficiency:
        return _with_shares(replace(START, fitted_from=source), x, FREE)

    def loss(x: NDArray[np.float64]) -> float:
        efficiency = build(x)
        predicted = np.concatenate([np.log(layer_s(work, efficiency).mean(axis=1)) for work, _ in times])
        return float(np.abs(predicted - measured).mean())

    start = np.asarray([getattr(START, name) for name in FREE])
    return _rounded(build(coordinate_descent(loss, start, smallest=0.01)))


def fit_to_helix(
    rows: Sequence[LayerTime], catalog: Catalog, base: Efficiency, grouped_kv_factor: float, source: str
) -> Efficiency:
    """Factors of one GPU type and phase from layer times; links only where the rows have several GPUs.

    What the rows cannot show (experts, larger links, launches: whole milliseconds) stays as in ``base``.
    """
    counts = {row.num_gpus for row in rows}
    names = ["compute", "bandwidth", "kv", *(f"link{count}" for count in (2, 4) if count in counts)]
    gpu, phase = rows[0].gpu, rows[0].phase
    measured = np.log([row.seconds for row in rows])

    def build(x: NDArray[np.float64]) -> Efficiency:
        return _with_shares(replace(base, fitted_from=source), x, names)

    def loss(x: NDArray[np.float64]) -> float:
        predicted = predict_layer_times(rows, catalog, {(gpu, phase): build(x)}, grouped_kv_factor)
        return float(np.abs(np.log(predicted) - measured).mean())

    start = np.asarray([getattr(base, name) for name in names])
    return _rounded(build(coordinate_descent(loss, start, smallest=0.01)))


def _rounded(efficiency: Efficiency) -> Efficiency:
    return _with_shares(efficiency, [getattr(efficiency, name) for name in FREE], FREE)


def _with_shares(base: Efficiency, values: Iterable[float], names: Sequence[str]) -> Efficiency:
    """``base`` with other shares, four significant digits, none above MAX_SHARE."""
    changed: dict[str, Any] = {
        name: float(f"{min(float(value), MAX_SHARE):.4g}") for name, value in zip(names, values, strict=True)
    }
    return replace(base, **changed)


def fit_roofline(catalog: Catalog) -> dict[tuple[str, Phase], Efficiency]:
    """Factors of every GPU type: database types from the database, Helix's from Helix, the A10G from its neighbours."""
    database = DatabaseSource.load(corrected=False)
    if database is None:
        message = "the fit needs the package aiconfigurator-core"
        raise Unavailable(message)
    found: dict[tuple[str, Phase], Efficiency] = {}
    for phase in (Phase.PREFILL, Phase.DECODE):
        for gpu in DATABASE_GPUS:
            times = database_layer_times(gpu, phase, FIT_MODELS, catalog, database)
            source = f"{KERNELS} {database.version} layer times of {' '.join(FIT_MODELS)}"
            found[gpu, phase] = fit_to_database(times, source)
        for gpu in HELIX_GPUS:
            rows = [row for row in read_layer_times() if row.gpu == gpu and row.phase is phase and row.for_fit]
            base = found["A100-80GB" if gpu in ("A100-40GB", "V100") else "L40S", phase]
            source = f"fit half of Helix's layer times; experts and links not seen there as {base.fitted_from}"
            found[gpu, phase] = fit_to_helix(rows, catalog, base, GROUPED_KV_FACTOR, source)
        found["A10G", phase] = replace(
            found["L4", phase],
            fitted_from="no measured data: factors of the L4, the nearest PCIe card with measured layer times",
        )
    return found


def write_calibration(found: dict[tuple[str, Phase], Efficiency], fit: AggregatedFit) -> None:
    """Rewrite ``calibration.csv``; the step overhead is the one fitted on end-to-end points."""
    with DATA_FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for (gpu, phase), one in sorted(found.items()):
            step_s = fit.prefill_step_s if phase is Phase.PREFILL else fit.decode_step_s
            shares = [getattr(one, name) for name in SHARES]
            links = shares[5:]
            micro = [round(value * 1e6, 3) for value in (one.launch_s, one.link_latency_s)]
            writer.writerow(
                [gpu, phase.value, *shares[:5], micro[0], *links, micro[1], round(step_s * 1e3, 4), one.fitted_from]
            )


def main() -> None:
    """Refit and rewrite the data files."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    catalog = load_catalog()
    points = [point for point in read_points() if point.configuration_key in fitted_keys() and not point.flag]
    corrections, fit = fit_aggregated(*price(points))
    write_aggregated(corrections, fit)
    memory = fit_memory([row for row in read_kv_capacities() if row.model == "LLaMA-1-30B"], catalog)
    found = fit_roofline(catalog)
    write_calibration(found, fit)
    sys.stdout.write(f"{fit}\n{memory}\n")
    for key, one in sorted(found.items()):
        sys.stdout.write(f"{key}: {one}\n")


if __name__ == "__main__":
    main()
