"""Served models: dimensions, weights, attention kinds, SLO and the shape of their requests.

Owns what a model is; how fast it runs is a profile's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coral_tasks.domain.names import ModelId, Phase
from coral_tasks.domain.validation import Checks


class AttentionKind(StrEnum):
    """What one layer keeps per token."""

    FULL = "full"
    SLIDING = "sliding"
    MLA = "mla"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySlo:
    """Limits a request must meet at ``percentile`` (0 to 100): seconds to the first token and per later token."""

    ttft_s: float
    tpot_s: float
    percentile: float = 99.0

    def __post_init__(self) -> None:
        checks = Checks("slo")
        checks.positive(ttft_s=self.ttft_s, tpot_s=self.tpot_s, percentile=self.percentile)
        checks.require(self.percentile <= 100, "percentile must be at most 100", self.percentile)
        checks.raise_if_any()

    def limit_s(self, phase: Phase) -> float:
        """Latency budget that the stages of one instance share: TTFT in prefill, TPOT otherwise."""
        return self.ttft_s if phase is Phase.PREFILL else self.tpot_s

    def times(self, factor: float) -> LatencySlo:
        """Both limits times ``factor``, kept to 12 digits so that 0.8 x 0.1 s reads 0.08 s; the percentile stays."""
        ttft_s, tpot_s = (float(f"{limit_s * factor:.12g}") for limit_s in (self.ttft_s, self.tpot_s))
        return LatencySlo(ttft_s=ttft_s, tpot_s=tpot_s, percentile=self.percentile)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """Lengths of a model's requests, in tokens."""

    mean_prompt_tokens: float
    p95_prompt_tokens: float
    mean_output_tokens: float
    p95_output_tokens: float

    def __post_init__(self) -> None:
        checks = Checks("request_shape")
        checks.positive(
            mean_prompt_tokens=self.mean_prompt_tokens,
            p95_prompt_tokens=self.p95_prompt_tokens,
            mean_output_tokens=self.mean_output_tokens,
            p95_output_tokens=self.p95_output_tokens,
        )
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Mixture-of-experts part of a model. ``num_dense_layers``: leading layers without experts."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_dense_layers: int = 0
    num_shared_experts: int = 0

    def __post_init__(self) -> None:
        checks = Checks("experts")
        checks.positive(
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            intermediate_size=self.intermediate_size,
        )
        checks.not_negative(num_dense_layers=self.num_dense_layers, num_shared_experts=self.num_shared_experts)
        checks.require(
            self.experts_per_token <= self.num_experts,
            "experts_per_token must not exceed num_experts",
            self.experts_per_token,
        )
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """An LLM on offer.

    ``attention_kinds`` has one entry per layer, so layers of hybrid models are not interchangeable.
    ``window_tokens`` belongs to SLIDING layers, ``latent_dim`` (values kept per token) to MLA layers.
    ``checkpoint_bytes`` is the size of the published checkpoint, the measure that rho refers to.
    """

    id: ModelId
    hub_name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    experts: ExpertShape | None
    attention_kinds: tuple[AttentionKind, ...]
    window_tokens: int | None
    latent_dim: int | None
    num_params: float
    num_active_params: float
    weight_bytes_per_param: float
    expert_bytes_per_param: float
    kv_bytes_per_value: float
    checkpoint_bytes: float
    max_context_tokens: int
    source: str

    def __post_init__(self) -> None:
        checks = Checks("models", self.id)
        checks.named(id=self.id, hub_name=self.hub_name, source=self.source)
        checks.positive(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            num_params=self.num_params,
            num_active_params=self.num_active_params,
            weight_bytes_per_param=self.weight_bytes_per_param,
            expert_bytes_per_param=self.expert_bytes_per_param,
            kv_bytes_per_value=self.kv_bytes_per_value,
            checkpoint_bytes=self.checkpoint_bytes,
            max_context_tokens=self.max_context_tokens,
        )
        kinds = self.attention_kinds
        checks.require(len(kinds) == self.num_layers, "attention_kinds needs one entry per layer", len(kinds))
        sliding_ok = AttentionKind.SLIDING not in kinds or self.window_tokens is not None
        checks.require(sliding_ok, "sliding layers need window_tokens", self.window_tokens)
        mla_ok = AttentionKind.MLA not in kinds or self.latent_dim is not None
        checks.require(mla_ok, "MLA layers need latent_dim", self.latent_dim)
        checks.raise_if_any()
