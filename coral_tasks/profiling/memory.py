"""Memory model of one node that holds part of a model (design 2.1).

Owns bytes: weights per layer, embedding and head, KV cache by attention kind, activations, engine overhead, and the
number of requests that fit. Time is the matter of the cost sources. All figures are per GPU unless they say node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.domain.hardware import GpuType, NodeConfiguration
from coral_tasks.domain.models import AttentionKind, ServedModel
from coral_tasks.domain.validation import Checks

BYTES_16BIT = 2
GIB = 2**30
LARGE_CARD_BYTES = 70 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParameters:
    """How the engine uses a GPU's memory.

    ``gpu_memory_fraction``: vLLM's ``--gpu-memory-utilization``; everything below fits inside that share.
    ``max_batched_tokens``: vLLM's scheduler limit, which sizes the activation peak it reserves and the largest prefill
    batch; None: vLLM's own default, 8192 on cards of 70 GiB and more (A100 apart), 2048 otherwise (``EngineArgs``).
    ``max_sequences``: sequences in one batch. ``overhead_bytes``: CUDA context, graphs, workspaces of one GPU;
    ``activation_factor``: what the activation peak is over the plain count of tensors. Both fitted on Helix's
    KV capacities of LLaMA-1 30B (``python -m coral_tasks.profiling.fit``).
    """

    gpu_memory_fraction: float = 0.9
    max_batched_tokens: int | None = None
    max_sequences: int = 512
    block_tokens: int = 16
    overhead_bytes: float = 0.8 * GIB
    activation_factor: float = 2.19

    def __post_init__(self) -> None:
        checks = Checks("memory_parameters")
        checks.positive(
            gpu_memory_fraction=self.gpu_memory_fraction,
            max_batched_tokens=1 if self.max_batched_tokens is None else self.max_batched_tokens,
            max_sequences=self.max_sequences,
            block_tokens=self.block_tokens,
        )
        checks.not_negative(overhead_bytes=self.overhead_bytes, activation_factor=self.activation_factor)
        checks.require(self.gpu_memory_fraction <= 1, "gpu_memory_fraction must be at most 1", self.gpu_memory_fraction)
        checks.raise_if_any()

    def batched_tokens(self, gpu: GpuType) -> int:
        """Tokens of the largest batch on a card."""
        if self.max_batched_tokens is not None:
            return self.max_batched_tokens
        large = gpu.memory_bytes >= LARGE_CARD_BYTES and not gpu.name.startswith("A100")
        return 8192 if large else 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How one node splits a model: tensor parallel degree, and expert parallel degree of the experts.

    ``expert_tp`` x ``ep`` equals ``tp``: the experts are spread over the same GPUs, in vLLM's words.
    """

    tp: int
    ep: int = 1

    def __post_init__(self) -> None:
        checks = Checks("parallelism")
        checks.positive(tp=self.tp, ep=self.ep)
        checks.require(self.tp % self.ep == 0, "tp must be a multiple of ep", f"tp {self.tp}, ep {self.ep}")
        checks.raise_if_any()

    @property
    def expert_tp(self) -> int:
        """Tensor parallel degree inside one expert."""
        return self.tp // self.ep


def choose_parallelism(model: ServedModel, configuration: NodeConfiguration) -> Parallelism:
    """All GPUs of the node if the heads allow it, else the largest part of them that they allow.

    vLLM requires the attention heads to be a multiple of tp, and the KV heads a multiple of tp or tp a multiple of
    them (``ParallelConfig`` and ``QKVParallelLinear``). A node runs one engine; the GPUs left over stay idle, so that
    nothing is promised that stock vLLM cannot start. Experts go by EP, undivided where their number allows it.
    """
    tp = max(n for n in range(1, configuration.num_gpus + 1) if configuration.num_gpus % n == 0 and _splits(model, n))
    if model.experts is None:
        return Parallelism(tp=tp)
    ep = max(n for n in range(1, tp + 1) if tp % n == 0 and model.experts.num_experts % n == 0)
    return Parallelism(tp=tp, ep=ep)


def _splits(model: ServedModel, tp: int) -> bool:
    if model.num_attention_heads % tp:
        return False
    if AttentionKind.MLA in model.attention_kinds:
        return True
    return model.num_kv_heads % tp == 0 if model.num_kv_heads >= tp else tp % model.num_kv_heads == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParams:
    """Parameters of a model by part. ``attention``: projections, norms, router; ``dense_mlp``: of a layer without
    experts; ``shared``: shared experts of a layer; ``expert``: one routed expert; ``embedding``: input table or head.
    """

    attention: float
    dense_mlp: float
    shared: float
    expert: float
    embedding: float


def layer_params(model: ServedModel) -> LayerParams:
    """Split ``num_params`` into parts: what embedding, head and MLPs do not explain is attention and norms.

    Raises ValidationFailed if the dimensions explain more than the stated total.
    """
    width, embedding = model.hidden_size, float(model.vocab_size * model.hidden_size)
    tables = embedding * (1 if model.tied_embeddings else 2)
    mlp = 3.0 * width * model.intermediate_size
    experts = model.experts
    if experts is None:
        parts = LayerParams(attention=0, dense_mlp=mlp, shared=0, expert=0, embedding=embedding)
        explained = tables + model.num_layers * mlp
    else:
        one = 3.0 * width * experts.intermediate_size
        shared = one * experts.num_shared_experts
        parts = LayerParams(attention=0, dense_mlp=mlp, shared=shared, expert=one, embedding=embedding)
        sparse = model.num_layers - experts.num_dense_layers
        explained = tables + sparse * (one * experts.num_experts + shared) + experts.num_dense_layers * mlp
    attention = (model.num_params - explained) / model.num_layers
    if attention <= 0:
        rule = "num_params is smaller than embedding and MLPs alone"
        raise ValidationFailed([Violation(table="models", row=model.id, value=f"{model.num_params:.4g}", rule=rule)])
    return LayerParams(
        attention=attention, dense_mlp=parts.dense_mlp, shared=parts.shared, expert=parts.expert, embedding=embedding
    )


def is_sparse(model: ServedModel) -> NDArray[np.bool_]:
    """Which layers have experts, shape (L,)."""
    sparse = np.zeros(model.num_layers, dtype=bool)
    if model.experts is not None:
        sparse[model.experts.num_dense_layers :] = True
    return sparse


def layer_weight_bytes(model: ServedModel, split: Parallelism) -> NDArray[np.float64]:
    """Weight bytes of each layer on one GPU, shape (L,): dense part / TP + experts / (expert TP x EP)."""
    params = layer_params(model)
    sparse = is_sparse(model)
    shared_part = np.where(sparse, params.shared, params.dense_mlp)
    dense = (params.attention + shared_part) * model.weight_bytes_per_param / split.tp
    num_experts = model.experts.num_experts if model.experts else 0
    expert = num_experts * params.expert * model.expert_bytes_per_param / (split.expert_tp * split.ep)
    return np.asarray(dense + np.where(sparse, expert, 0.0), dtype=np.float64)


def end_weight_bytes(model: ServedModel, split: Parallelism, *, first: bool, last: bool) -> float:
    """Embedding (first stage) and head (last stage) on one GPU; 16 bit in every checkpoint of the catalogue.

    A tied table is held once by a stage that is both first and last, and by both ends otherwise.
    """
    table = layer_params(model).embedding * BYTES_16BIT / split.tp
    copies = 1 if first and last and model.tied_embeddings else int(first) + int(last)
    return table * copies


def kv_bytes_per_layer(
    model: ServedModel, split: Parallelism, context_tokens: float, block_tokens: int = 16
) -> NDArray[np.float64]:
    """KV bytes of one sequence of ``context_tokens`` in each layer on one GPU, shape (L,).

    Full: 2 x KV heads of the GPU x head size, KV heads copied where there are fewer than GPUs. Sliding: the same for at
    most the window and the block it starts in. MLA: the latent vector, whole on every GPU. Whole blocks of tokens.
    """
    blocks = np.ceil(context_tokens / block_tokens) * block_tokens
    heads = max(1.0, model.num_kv_heads / split.tp)
    full = 2.0 * heads * model.head_dim * model.kv_bytes_per_value * blocks
    window = (np.ceil((model.window_tokens or 0) / block_tokens) + 1) * block_tokens
    sliding = full * min(1.0, window / blocks)
    latent = (model.latent_dim or 0) * model.kv_bytes_per_value * blocks
    by_kind = {AttentionKind.FULL: full, AttentionKind.SLIDING: sliding, AttentionKind.MLA: latent}
    return np.asarray([by_kind[kind] for kind in model.attention_kinds], dtype=np.float64)


def activation_bytes(model: ServedModel, gpu: GpuType, split: Parallelism, parameters: MemoryParameters) -> float:
    """Peak of activations that the engine reserves on one GPU (its profiling run with the largest batch).

    Four hidden-size tensors (residual, normed input, attention output, MLP output) and three of the MLP's inner size
    per batched token, 16 bit, times ``activation_factor``.
    """
    experts = model.experts
    inner = model.intermediate_size if experts is None else experts.experts_per_token * experts.intermediate_size
    per_token = BYTES_16BIT * (4 * model.hidden_size + 3 * inner / split.tp)
    return parameters.activation_factor * parameters.batched_tokens(gpu) * per_token


def window_max(per_layer: NDArray[np.float64]) -> NDArray[np.float64]:
    """Largest sum of j consecutive layers, for j = 1..L; ``per_layer`` has shape (..., L), so has the result.

    The search for placements treats all stages alike, so a table must hold for the worst position of a stage.
    """
    count = per_layer.shape[-1]
    total = np.concatenate([np.zeros((*per_layer.shape[:-1], 1)), np.cumsum(per_layer, axis=-1)], axis=-1)
    sums = [(total[..., j:] - total[..., : count + 1 - j]).max(axis=-1) for j in range(1, count + 1)]
    return np.stack(sums, axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Room of one GPU for j = 1..L layers at any position of the pipeline. Shapes (L,), bytes.

    ``free``: left for KV after weights, activations and overhead (negative: the weights do not fit);
    ``kv_of_sequence``: KV of one sequence of the asked length.
    """

    free: NDArray[np.float64]
    kv_of_sequence: NDArray[np.float64]

    def sequences(self) -> NDArray[np.float64]:
        """Whole sequences that fit, per j; 0 where nothing fits."""
        return np.asarray(np.floor(np.maximum(self.free, 0.0) / self.kv_of_sequence), dtype=np.float64)


def stage_memory(
    model: ServedModel,
    configuration: NodeConfiguration,
    split: Parallelism,
    context_tokens: float,
    parameters: MemoryParameters,
) -> StageMemory:
    """Room for KV with j layers, valid wherever the stage stands.

    A stage of fewer than all layers is charged one end (embedding or head, equally large); all layers, both. Layers
    are the heaviest j consecutive ones, for weights and for KV apart: an upper bound of every position's need.
    """
    weights = window_max(layer_weight_bytes(model, split))
    ends = np.full(model.num_layers, end_weight_bytes(model, split, first=False, last=True))
    ends[-1] = end_weight_bytes(model, split, first=True, last=True)
    fixed = activation_bytes(model, configuration.gpu, split, parameters) + parameters.overhead_bytes
    budget = configuration.gpu.memory_bytes * parameters.gpu_memory_fraction
    return StageMemory(
        free=budget - weights - ends - fixed,
        kv_of_sequence=window_max(kv_bytes_per_layer(model, split, context_tokens, parameters.block_tokens)),
    )
