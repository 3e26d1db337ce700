"""Analytic source: a roofline with efficiency factors per GPU type and phase (design 2.1, third source).

Owns the formulae; the factors come from ``calibration``. Knows every GPU type with a calibration row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.hardware import CPU_ARCHITECTURE, IntraNodeLink
from coral_tasks.domain.models import AttentionKind, ServedModel
from coral_tasks.domain.names import Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.profiling.aggregated import planning_correction
from coral_tasks.profiling.calibration import Efficiency, load_calibration
from coral_tasks.profiling.costs import LayerCosts, Work
from coral_tasks.profiling.memory import (
    BYTES_16BIT,
    is_sparse,
    kv_bytes_per_layer,
    layer_params,
)

FP8_BYTES = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineSource:
    """CostSource by formula. ``calibration``: factors by GPU type and phase."""

    calibration: dict[tuple[str, Phase], Efficiency]
    source: ProfileSource = ProfileSource.ANALYTIC

    @classmethod
    def load(cls) -> RooflineSource:
        """With the project's own calibration file."""
        return cls(calibration=load_calibration())

    def costs(self, work: Work) -> LayerCosts | None:
        """Time of every batch; None for a machine without GPU or a type without calibration."""
        gpu = work.configuration.gpu
        efficiency = self.calibration.get((gpu.name, work.phase))
        if gpu.architecture == CPU_ARCHITECTURE or efficiency is None:
            return None
        return corrected(roofline_costs(work, efficiency), work, efficiency)


def corrected(costs: LayerCosts, work: Work, efficiency: Efficiency) -> LayerCosts:
    """Costs times what end-to-end measurements of the family showed over kernel times (``corrections.csv``).

    For sparse models always, since factors of experts come from kernel times on every card; for dense ones where all
    factors do. Without it a card that only the roofline knows would look faster than one in the database.
    """
    sparse = work.model.experts is not None
    if not (sparse or efficiency.from_kernels):
        return costs
    correction = planning_correction(work.model.hub_name, sparse=sparse)
    factor = correction.for_phase(work.phase)
    return replace(
        costs,
        layer_s=costs.layer_s * factor,
        constant_s=(costs.constant_s - efficiency.step_s) * factor + efficiency.step_s,
        provenance=f"{costs.provenance}; correction {correction.family}",
    )


def roofline_costs(work: Work, efficiency: Efficiency) -> LayerCosts:
    """Layer = max(compute, memory) + all-reduces + launch; constant = head and embedding + step overhead."""
    return LayerCosts(
        layer_s=layer_s(work, efficiency),
        constant_s=_head_s(work, efficiency) + efficiency.step_s,
        extrapolated=np.zeros(len(work.sequences), dtype=bool),
        source=ProfileSource.ANALYTIC,
        provenance=f"roofline; factors {efficiency.provenance}",
    )


def layer_s(work: Work, efficiency: Efficiency, kv_factor: float = 1.0) -> NDArray[np.float64]:
    """Seconds of each layer, shape (B, L). ``kv_factor``: KV bytes read over those stored (1 for today's kernels)."""
    bandwidth = work.configuration.gpu.memory_bandwidth_bytes_per_s
    flops, read = work_flops(work), work_bytes(work)
    peak = _peak_flops(work) * work.split.tp
    compute = flops.dense / (peak * efficiency.compute) + flops.experts / (peak * efficiency.expert_compute)
    memory = read.dense / (bandwidth * efficiency.bandwidth) + read.experts / (bandwidth * efficiency.expert_bandwidth)
    memory += read.kv * kv_factor / (bandwidth * efficiency.kv)
    return np.asarray(np.maximum(compute, memory) + efficiency.launch_s + all_reduce_s(work, efficiency)[:, None])


def _peak_flops(work: Work) -> float:
    gpu = work.configuration.gpu
    if work.model.weight_bytes_per_param <= FP8_BYTES and gpu.fp8_flops_per_s is not None:
        return gpu.fp8_flops_per_s
    return gpu.flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Amounts:
    """Work of each layer for each batch, shapes (B, L): operations over all GPUs, or bytes that one GPU reads."""

    dense: NDArray[np.float64]
    experts: NDArray[np.float64]
    kv: NDArray[np.float64]


def work_flops(work: Work) -> Amounts:
    """Floating point operations; attention counts as dense.

    2 per active parameter and token, 4 x heads x head size per token and attended token (half of the prompt on
    average in prefill, since attention is causal).
    """
    model, params = work.model, layer_params(work.model)
    sparse = is_sparse(model)
    active_experts = model.experts.experts_per_token if model.experts else 0
    dense = params.attention + np.where(sparse, params.shared, params.dense_mlp)
    attention = 4.0 * model.num_attention_heads * model.head_dim * attended_tokens(model, work)
    tokens = work.tokens[:, None]
    return Amounts(
        dense=tokens * (2 * dense + attention)[None, :],
        experts=tokens * (2 * active_experts * params.expert * sparse)[None, :],
        kv=np.zeros((len(work.sequences), model.num_layers)),
    )


def attended_tokens(model: ServedModel, work: Work) -> NDArray[np.float64]:
    """Tokens that one token attends to in each layer, on average, shape (L,)."""
    length = work.context_tokens
    full = length / 2 if work.phase is Phase.PREFILL else length
    window = float(model.window_tokens or length)
    if work.phase is Phase.PREFILL:
        # The first `window` tokens see half a window on average, the rest a whole one.
        seen = min(window, length)
        sliding = (seen * seen / 2 + max(0.0, length - seen) * window) / length
    else:
        sliding = min(window, length)
    return np.asarray([sliding if kind is AttentionKind.SLIDING else full for kind in model.attention_kinds])


def work_bytes(work: Work) -> Amounts:
    """Bytes that one GPU reads: weights touched and, in decode, the KV cache.

    Of the experts, those that at least one token of the batch picks (uniform routing); split by EP.
    """
    model, split = work.model, work.split
    params, sparse = layer_params(model), is_sparse(model)
    shape = (len(work.sequences), model.num_layers)
    dense = (params.attention + np.where(sparse, params.shared, params.dense_mlp)) * model.weight_bytes_per_param
    experts, kv = np.zeros(shape), np.zeros(shape)
    if model.experts is not None:
        untouched = (1 - model.experts.experts_per_token / model.experts.num_experts) ** work.tokens
        touched = model.experts.num_experts * (1 - untouched) * params.expert * model.expert_bytes_per_param
        experts = touched[:, None] * sparse[None, :] / (split.expert_tp * split.ep)
    if work.phase is not Phase.PREFILL:
        per_sequence = kv_bytes_per_layer(model, split, work.context_tokens, block_tokens=1)
        kv = np.asarray(work.sequences, dtype=np.float64)[:, None] * per_sequence[None, :]
    return Amounts(dense=np.broadcast_to(dense / split.tp, shape), experts=experts, kv=kv)


def all_reduce_s(work: Work, efficiency: Efficiency) -> NDArray[np.float64]:
    """Seconds of the two all-reduces of one layer, shape (B,); ring: each GPU moves 2 (n-1)/n of the tensor."""
    count = work.split.tp
    if count == 1:
        return np.zeros(len(work.sequences))
    gpu, link = work.configuration.gpu, work.configuration.intra_node_link
    nvlink = gpu.nvlink_bytes_per_s
    rate = nvlink if link is IntraNodeLink.NVLINK and nvlink is not None else gpu.pcie_bytes_per_s
    message = BYTES_16BIT * work.model.hidden_size * work.tokens
    moved = 2 * (count - 1) / count * message
    return np.asarray(2 * (moved / (rate * efficiency.link_for(count)) + efficiency.link_latency_s))


def _head_s(work: Work, efficiency: Efficiency) -> NDArray[np.float64]:
    """Head on one token of each sequence and reading its table, shape (B,)."""
    gpu, embedding = work.configuration.gpu, layer_params(work.model).embedding
    sequences = np.asarray(work.sequences, dtype=np.float64)
    compute = 2 * embedding * sequences / work.split.tp / (gpu.flops_per_s * efficiency.compute)
    memory = embedding * BYTES_16BIT / work.split.tp / (gpu.memory_bandwidth_bytes_per_s * efficiency.bandwidth)
    return np.asarray(np.maximum(compute, memory))
