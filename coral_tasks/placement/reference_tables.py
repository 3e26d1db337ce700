"""Deterministic roofline tables that reference case files name by their generator arguments.

Owns a plain synthetic model of five GPU types and six models, for cross-checks and benchmarks only; real profiles
come from ``profiling``. Only + - * / and comparisons are used, so that every IEEE machine makes the same table;
fingerprints in the case files hold it to that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import UnknownName


class ReferenceGpu(NamedTuple):
    """GB, TB/s, dense bf16 TFLOP/s, effective all-reduce GB/s inside a node, all-reduce latency in µs."""

    memory_gb: float
    bandwidth_tb_s: float
    tflops: float
    link_gb_s: float
    latency_us: float


class ReferenceModel(NamedTuple):
    """Per layer: hidden size, attention width, KV bytes per token, dense and one expert's parameters (M), experts,
    active experts, bytes per dense and expert parameter; latency limits in ms (prefill, decode); tokens.
    """

    num_layers: int
    hidden: int
    attention: int
    kv_bytes: int
    dense_m: float
    expert_m: float
    num_experts: int
    num_active: int
    dense_bytes: float
    expert_bytes: float
    slo_ms: tuple[float, float]
    prompt: int
    context: int

    @property
    def size_gb(self) -> float:
        """Weights of all layers."""
        dense, experts = self.dense_m * self.dense_bytes, self.num_experts * self.expert_m * self.expert_bytes
        return self.num_layers * (dense + experts) / 1e3

    @property
    def layer_bytes(self) -> tuple[float, float]:
        """Dense part, and one expert."""
        return self.dense_m * 1e6 * self.dense_bytes, self.expert_m * 1e6 * self.expert_bytes


GPUS: Final = {
    "L4": ReferenceGpu(24, 0.30, 121, 10, 40),
    "A10G": ReferenceGpu(24, 0.60, 70, 10, 40),
    "L40S": ReferenceGpu(48, 0.86, 362, 20, 35),
    "A100-80": ReferenceGpu(80, 2.04, 312, 180, 20),
    "H100": ReferenceGpu(80, 3.35, 989, 300, 15),
}
MODELS: Final = {
    "phi4-14b": ReferenceModel(40, 5120, 5120, 5120, 340.8, 0, 0, 0, 2.0, 2.0, (1200, 60), 1024, 1280),
    "gpt-oss-20b": ReferenceModel(24, 2880, 4096, 1280, 26.5, 24.9, 32, 4, 2.0, 0.53, (900, 30), 2048, 2100),
    "qwen3-32b": ReferenceModel(64, 5120, 8192, 4096, 487.6, 0, 0, 0, 2.0, 2.0, (1600, 100), 600, 800),
    "llama3-70b": ReferenceModel(80, 8192, 8192, 4096, 855.6, 0, 0, 0, 2.0, 2.0, (1500, 80), 600, 800),
    "gpt-oss-120b": ReferenceModel(36, 2880, 4096, 1280, 26.5, 24.9, 128, 4, 2.0, 0.53, (1000, 40), 1024, 1280),
    "qwen3-235b": ReferenceModel(94, 4096, 8192, 2048, 71.3, 18.9, 128, 8, 2.0, 2.0, (1800, 120), 2048, 2100),
}
CONFIGURATIONS: Final = tuple(f"{gpu}x{count}" for gpu in GPUS for count in (1, 2, 4, 8))
CORE_CONFIGURATIONS: Final = CONFIGURATIONS[:12]
PROMPT_BATCHES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
DECODE_BATCHES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def configuration_memory_gb(name: str) -> float:
    """GPU memory of one node."""
    gpu, count = _split(name)
    return gpu.memory_gb * count


def _split(name: str) -> tuple[ReferenceGpu, int]:
    gpu, _, count = name.rpartition("x")
    if gpu not in GPUS or not count.isdigit():
        raise UnknownName(kind="reference configuration", name=name, known=CONFIGURATIONS)
    return GPUS[gpu], int(count)


def _unit_hash(*keys: object) -> float:
    """Deterministic number in [0, 1)."""
    digest = hashlib.sha256(repr(keys).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2.0**48


def make_table(
    model: str,
    phase: str,
    *,
    configs: Sequence[str] = CONFIGURATIONS,
    seed: int = 0,
    jitter: float = 0.15,
    Q: int = 60,
    layers: int | None = None,
    slo_ms: float | None = None,
) -> NDArray[np.float64]:
    """Table [C, L, Q] in tokens/s, rounded to 6 significant digits; argument names are those of the case files.

    ``seed`` other than 0 scales each configuration's compute, bandwidth and overhead within 1 ± ``jitter``.
    """
    if model not in MODELS:
        raise UnknownName(kind="reference model", name=model, known=tuple(MODELS))
    parts = MODELS[model]
    num_layers = parts.num_layers if layers is None else layers
    limit_s = (parts.slo_ms[phase == "decode"] if slo_ms is None else slo_ms) * 1e-3
    budget = np.array([limit_s * q / Q for q in range(1, Q + 1)])
    table = np.zeros((len(configs), num_layers, Q))
    for c, name in enumerate(configs):
        scale = [1.0 if seed == 0 else 1 + jitter * (2 * _unit_hash(seed, model, phase, name, k) - 1) for k in range(3)]
        for batch in PROMPT_BATCHES if phase == "prefill" else DECODE_BATCHES:
            table[c] = np.maximum(table[c], _batch(parts, phase, name, scale, batch, budget, num_layers))
    rounded = [float(f"{value:.6g}") for value in table.ravel()]
    return np.array(rounded).reshape(table.shape)


def _batch(
    model: ReferenceModel,
    phase: str,
    name: str,
    scale: Sequence[float],
    batch: int,
    budget: NDArray[np.float64],
    num_layers: int,
) -> NDArray[np.float64]:
    """Tokens/s with one batch size, [L, Q]; the order of operations is part of the fingerprint."""
    gpu, g = _split(name)
    flops = g * gpu.tflops * 1e12 * 0.55 * scale[0]
    bandwidth = g * gpu.bandwidth_tb_s * 1e12 * 0.80 * scale[1]
    dense, expert = model.layer_bytes
    layer_bytes = dense + model.num_experts * expert
    tokens, work, read, cached = _load(model, phase, batch, len(budget))
    layer_s = max(work / flops, read / bandwidth) + 14e-6 * scale[2]
    if g > 1:
        moved = tokens * model.hidden * 2.0 * 2 * (g - 1) / g / (gpu.link_gb_s * 1e9)
        layer_s += 2 * (gpu.latency_us * 1e-6 + moved)
    hop = 2e-4 + tokens * model.hidden * 2.0 / 3e9
    layers = np.arange(1, num_layers + 1, dtype=np.float64)
    time = layers * layer_s + hop
    room = 0.90 * gpu.memory_gb * g * 1e9
    fits = (time[:, None] <= budget[None, :]) & (layers[:, None] * (layer_bytes + cached[None, :]) <= room)
    return np.where(fits, (tokens / time)[:, None], 0.0)


def _load(
    model: ReferenceModel, phase: str, batch: int, num_quanta: int
) -> tuple[int, float, float, NDArray[np.float64]]:
    """Tokens of a batch; FLOP and bytes read per layer; KV bytes per layer by latency share."""
    active = (model.dense_m + model.num_active * model.expert_m) * 1e6
    dense, expert = model.layer_bytes
    if phase == "prefill":
        tokens = batch * model.prompt
        work = tokens * (2 * active + 2.0 * model.attention * model.prompt)
        return tokens, work, dense + model.num_experts * expert, np.full(num_quanta, tokens * model.kv_bytes * 1.0)
    untouched = 1.0
    if model.num_experts:
        for _ in range(batch):
            untouched *= 1 - model.num_active / model.num_experts
    kv = batch * model.context * model.kv_bytes * 1.0
    read = dense + model.num_experts * (1 - untouched) * expert + kv
    in_flight = np.array([(num_quanta + q - 1) // q for q in range(1, num_quanta + 1)])
    return batch, batch * (2 * active + 4.0 * model.attention * model.context), read, in_flight * kv


def table_digest(table: NDArray[np.float64]) -> str:
    """Short fingerprint of a table rounded to 6 significant digits."""
    text = ",".join(f"{value:.6g}" for value in table.ravel())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
