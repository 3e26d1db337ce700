"""Database source: kernel times that aiconfigurator-core holds for vLLM (design 2.1, second source).

The only module that imports ``aiconfigurator_core`` (an optional extra). It loads one engine per GPU system and prices
each model's list of operations with it, since loading the tables costs seconds and pricing microseconds. It never
reads the measured end-to-end points that the package also ships: half of them are kept apart for others' checks.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import Unavailable
from coral_tasks.domain.models import AttentionKind, ServedModel
from coral_tasks.domain.names import GpuTypeName, ModelId, Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.profiling.aggregated import load_fit, planning_correction
from coral_tasks.profiling.costs import LayerCosts, Work
from coral_tasks.profiling.memory import Parallelism
from coral_tasks.profiling.model_files import write_model_config
from coral_tasks.profiling.points import AggregatedPoint

LOG = logging.getLogger(__name__)
PACKAGE = "aiconfigurator_core"
BACKEND = "vllm"

SYSTEMS: Mapping[GpuTypeName, tuple[str, float]] = {
    GpuTypeName("L40S"): ("l40s", 1.0),
    GpuTypeName("A100-80GB"): ("a100_sxm", 1.0),
    # Same chip with slower memory: memory-bound times grow by 2039 / 1555 GB/s (datasheets). Marked as extrapolated.
    GpuTypeName("A100-40GB"): ("a100_sxm", 2039 / 1555),
    GpuTypeName("H100"): ("h100_sxm", 1.0),
    GpuTypeName("H200"): ("h200_sxm", 1.0),
    GpuTypeName("B200"): ("b200_sxm", 1.0),
}
"""System that holds a GPU type's kernels, and the factor on memory-bound times. L4, A10G, T4 and V100 have no vLLM data
there."""

CONSTANT_OPS = ("embedding", "logits_gemm", "embedding_ar", "p2p")
"""Operations that run once per step, whatever the number of layers. The hop between nodes is ours, not p2p."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRange:
    """Largest batch of each kind that the tables of a system hold (aiconfigurator-core 0.12.0, read from its files).

    The package prices what lies beyond by its formulae and still calls it silicon, so the bounds are kept here.
    ``tokens``: rows of a matrix product; ``expert_tokens``: tokens of a layer of experts; ``prompt_tokens``,
    ``prompts``, ``prompt_batch_tokens``: prefill attention; ``sequences``, ``context_tokens``, ``cached_tokens``:
    decode attention.
    The head may be wider than the 65,536 columns there; it is one product of a whole step and not counted.
    """

    tokens: int = 32_768
    expert_tokens: int = 16_384
    prompt_tokens: int = 16_384
    prompts: int = 256
    prompt_batch_tokens: int = 131_072
    sequences: int = 2048
    context_tokens: int = 131_072
    cached_tokens: int = 16_777_216

    def outside(self, work: Work) -> NDArray[np.bool_]:
        """Which batches leave the range, shape (B,)."""
        count = np.asarray(work.sequences, dtype=np.float64)
        limit = min(self.tokens, self.expert_tokens) if work.model.experts is not None else self.tokens
        beyond = work.tokens > limit
        if work.phase is Phase.PREFILL:
            beyond |= (count > self.prompts) | (work.tokens > self.prompt_batch_tokens)
            return np.asarray(beyond | (work.context_tokens > self.prompt_tokens))
        beyond |= (count > self.sequences) | (count * work.context_tokens > self.cached_tokens)
        return np.asarray(beyond | (work.context_tokens > self.context_tokens))


RANGES: Mapping[str, KernelRange] = {
    "a100_sxm": KernelRange(tokens=8192, expert_tokens=65_536, cached_tokens=8_388_608)
}
"""Ranges by system; the default for all others."""

HEADED_OPS = ("ContextAttention", "GenerationAttention")
KNOWN_KV_HEADS = (1, 2, 4, 8)

ALWAYS_FORMULA = ("add_norm", "act_gate", "embedding", "p2p")
"""Element-wise operations, which the database prices by bandwidth everywhere; no sign of extrapolation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ops:
    """Operation lists of one model and split as JSON for the engine: constant part, every layer, and by attention."""

    constant: str
    every: str
    by_kind: Mapping[AttentionKind, str]
    num_layers: int
    approximated: bool


@dataclass(slots=True, kw_only=True)
class DatabaseSource:
    """CostSource over aiconfigurator-core. Keeps engines and operation lists for its lifetime."""

    source: ProfileSource = ProfileSource.DATABASE
    version: str = ""
    corrected: bool = True
    _engines: dict[str, Any] = field(default_factory=dict)
    _ops: dict[tuple[ModelId, Parallelism, Phase], _Ops | None] = field(default_factory=dict)

    @classmethod
    def load(cls, *, corrected: bool = True) -> DatabaseSource | None:
        """The source, or None where the optional package is not installed.

        ``corrected``: multiply kernel times by what end-to-end measurements showed (``corrections.csv``).
        """
        if importlib.util.find_spec(PACKAGE) is None:
            return None
        # The package warns of every table it fills from another engine; what matters here is marked as extrapolated.
        logging.getLogger(PACKAGE).setLevel(logging.ERROR)
        return cls(version=importlib.metadata.version("aiconfigurator-core"), corrected=corrected)

    def costs(self, work: Work) -> LayerCosts | None:
        """Time of every batch; None for a GPU type or model that the tables do not hold."""
        system = SYSTEMS.get(work.configuration.gpu.name)
        if system is None:
            return None
        ops = self._operations(work)
        if ops is None:
            return None
        try:
            return self._price(work, ops, *system)
        except _missing_data() as error:
            LOG.info("%s on %s: no database profile: %s", work.model.id, work.configuration.id, error)
            return None

    def _price(self, work: Work, ops: _Ops, system: str, memory_factor: float) -> LayerCosts:
        engine = self._engine(system)
        constant, every = (self._sum(engine, part, work) for part in (ops.constant, ops.every))
        kinds = {kind: self._sum(engine, part, work) for kind, part in ops.by_kind.items()}
        per_layer = np.stack(
            [
                every[0] / ops.num_layers + kinds[kind][0] if kind in kinds else every[0] / ops.num_layers
                for kind in work.model.attention_kinds
            ],
            axis=1,
        )
        beyond = (
            constant[1] | every[1] | np.any([part[1] for part in kinds.values()] or [np.zeros_like(every[1])], axis=0)
        )
        correction = planning_correction(work.model.hub_name, sparse=work.model.experts is not None)
        scale = correction.for_phase(work.phase) if self.corrected else 1.0
        scale *= memory_factor if work.phase is not Phase.PREFILL else 1.0
        step_s = load_fit().prefill_step_s if work.phase is Phase.PREFILL else load_fit().decode_step_s
        return LayerCosts(
            layer_s=per_layer * scale,
            constant_s=constant[0] * scale + step_s,
            extrapolated=RANGES.get(system, KernelRange()).outside(work)
            | beyond
            | ops.approximated
            | (memory_factor != 1.0),
            source=ProfileSource.DATABASE,
            provenance=f"{self._provenance(system, memory_factor)}; correction {correction.family}",
        )

    def _provenance(self, system: str, memory_factor: float) -> str:
        note = "" if memory_factor == 1.0 else f", memory-bound times x {memory_factor:.3f} for the slower memory"
        return f"aiconfigurator-core {self.version}, {system}, vLLM kernels{note}"

    def _sum(self, engine: Any, ops_json: str, work: Work) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Seconds of a list of operations for each batch, and whether any of it was extrapolated."""
        prefill = work.phase is Phase.PREFILL
        length = max(1, round(work.context_tokens))
        seconds, beyond = [], []
        for batch in work.sequences:
            parts = engine.evaluate_ops_json(ops_json, prefill, round(batch), length, 0, 1.0, None)
            seconds.append(sum(part[1] for part in parts) / 1e3)
            beyond.append(any(part[1] > 0 and part[3] == "empirical" and not _by_formula(part[0]) for part in parts))
        return np.asarray(seconds), np.asarray(beyond, dtype=bool)

    def _operations(self, work: Work) -> _Ops | None:
        key = (work.model.id, work.split, work.phase)
        if key not in self._ops:
            self._ops[key] = _model_ops(work)
        return self._ops[key]

    def _engine(self, system: str) -> Any:
        if system not in self._engines:
            from aiconfigurator_core import AicEngine
            from aiconfigurator_core.sdk.engine import compile_engine

            # Any model will do: only the system's tables are used.
            spec = compile_engine("Qwen/Qwen3-32B", system, BACKEND, None, tp_size=1)
            self._engines[system] = AicEngine.from_spec(spec)
        return self._engines[system]


def _by_formula(name: str) -> bool:
    return any(part in name for part in ALWAYS_FORMULA)


def _missing_data() -> tuple[type[Exception], ...]:
    from aiconfigurator_core.sdk.errors import PerfDataNotAvailableError

    return (PerfDataNotAvailableError,)


def _model_ops(work: Work) -> _Ops | None:
    """Operations of one phase, split by how often they run; None for a model the package cannot build."""
    from aiconfigurator_core.sdk.engine import build_ops_json

    model = _build_model(work.model, work.split)
    if model is None:
        return None
    operations = model.context_ops if work.phase is Phase.PREFILL else model.generation_ops
    hybrid = AttentionKind.SLIDING in work.model.attention_kinds
    constant: list[Any] = []
    every: list[Any] = []
    by_kind: dict[AttentionKind, list[Any]] = {}
    approximated = False
    for kind, body in (next(iter(spec.items())) for spec in json.loads(build_ops_json(operations))):
        if any(body["name"].endswith(name) for name in CONSTANT_OPS):
            constant.append({kind: body})
            continue
        known, changed = _known_heads(body) if kind in HEADED_OPS else (body, False)
        approximated |= changed
        if hybrid and kind in HEADED_OPS:
            which = AttentionKind.SLIDING if body["window_size"] else AttentionKind.FULL
            per_layer = known | {"scale_factor": known["scale_factor"] / body["scale_factor"]}
            by_kind.setdefault(which, []).append({kind: per_layer})
        else:
            every.append({kind: known})
    return _Ops(
        constant=json.dumps(constant),
        every=json.dumps(every),
        by_kind={kind: json.dumps(part) for kind, part in by_kind.items()},
        num_layers=_sharing_layers(work.model),
        approximated=approximated,
    )


def _sharing_layers(model: ServedModel) -> int:
    """Layers among which the time of a whole model is shared out evenly.

    Leading dense layers cost less than those with experts; counting them out makes the share an upper bound of either.
    """
    return model.num_layers - (model.experts.num_dense_layers if model.experts else 0)


def _known_heads(body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """An attention operation with a number of KV heads that the tables hold, scaled by heads; whether it changed.

    The tables hold 1, 2, 4 and 8 KV heads (and some larger, in prefill only). Attention over more heads of the same
    group size is the same work once more, so time goes by heads; the result counts as extrapolated.
    """
    heads = body["n_kv"]
    nearest = max((known for known in KNOWN_KV_HEADS if known <= heads), default=heads)
    if nearest == heads or body["n"] % heads:
        return body, False
    fewer = {"n_kv": nearest, "n": body["n"] // heads * nearest}
    return body | fewer | {"scale_factor": body["scale_factor"] * heads / nearest}, True


def _build_model(model: ServedModel, split: Parallelism) -> Any | None:
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model

    sparse = model.experts is not None
    config = build_model_config(split.tp, 1, 1, split.expert_tp if sparse else 1, split.ep if sparse else 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if write_model_config(model, path) is None:
            return None
        try:
            return get_model(str(path), config, BACKEND)
        except (KeyError, ValueError, NotImplementedError) as error:
            LOG.info("%s: the database package cannot build it: %s", model.id, error)
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Kernel seconds of one prompt's prefill and of one decode step of the whole batch, before any correction."""

    prefill_s: float
    decode_s: float


PACKAGE_MODELS: Mapping[str, tuple[str, str | None]] = {
    "meta-llama/Llama-3.1-70B": ("nvidia/Llama-3.1-70B-Instruct-FP8", None),
    "nvidia/Llama-3.1-8B-Instruct-FP8": ("meta-llama/Meta-Llama-3.1-8B", "fp8"),
}
"""Model name of a measured point -> configuration that the package holds, and GEMM precision to force."""


def step_times(point: AggregatedPoint, engines: dict[tuple[object, ...], Any]) -> StepTimes:
    """Kernel times of a measured point's configuration, whole model, as the package models it.

    ``engines``: cache, filled here. Raises Unavailable with the package's reason if it cannot price the point.
    """
    key = (point.model, point.system, point.tp, point.moe_tp, point.ep, point.precision)
    try:
        if key not in engines:
            engines[key] = _point_engine(point)
        engine = engines[key]
        context = point.isl + point.osl // 2
        return StepTimes(
            prefill_s=engine.predict_prefill_latency(1, point.isl, 0) / 1e3,
            decode_s=engine.predict_decode_latency(point.concurrency, context, 2) / 1e3,
        )
    except Exception as error:
        # The package raises many kinds of error, most of them its own or ValueError; all mean "cannot price it".
        message = f"{point.model} on {point.system}, tp {point.tp}: {str(error)[:200]}"
        raise Unavailable(message) from error


def _point_engine(point: AggregatedPoint) -> Any:
    """Engine of a point; experts by EP where the package refuses to cut them by TP (blocks of fp8 scales)."""
    from aiconfigurator_core import AicEngine
    from aiconfigurator_core.sdk.engine import compile_engine

    name, gemm = PACKAGE_MODELS.get(point.model, (point.model, None))
    if point.model == "Qwen/Qwen3-32B" and point.precision == "fp8":
        gemm = "fp8"
    moe_tp, ep = point.moe_tp or 1, point.ep or 1

    def compiled(expert_tp: int, expert_ep: int) -> bytes:
        return bytes(
            compile_engine(
                name,
                point.system,
                BACKEND,
                None,
                tp_size=point.tp,
                attention_dp_size=max(1, moe_tp * ep // point.tp),
                moe_tp_size=expert_tp,
                moe_ep_size=expert_ep,
                gemm_quant_mode=gemm,
            )
        )

    try:
        spec = compiled(moe_tp, ep)
    except ValueError:
        spec = compiled(1, moe_tp * ep)
    return AicEngine.from_spec(spec)
