"""Timing of one node inside a stage: what a simulator or a simulated engine needs beyond a throughput.

Owns the affine form and its fields. A profile may supply it (fitted to measured or computed step times); where none
does, ``simulation.timing`` derives it from a template's promise or from a profile table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from coral_tasks.domain.names import ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.validation import Checks


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTiming:
    """Seconds one node with its share of the layers takes for one batch, and what a batch may hold.

    ``fixed_s + per_prompt_token_s * P + per_sequence_s * B + per_context_token_s * C`` for P prompt tokens, B
    decoding sequences and C tokens of context that those sequences attend to.
    ``hop_s``: hand-over to the next stage. ``max_batch_tokens``: prompt tokens plus sequences of one batch.
    ``kv_capacity_tokens``: tokens whose cache this node can hold for its layers; infinite where nothing is kept.
    """

    fixed_s: float
    per_prompt_token_s: float
    per_sequence_s: float
    per_context_token_s: float = 0.0
    hop_s: float = 0.0
    max_batch_tokens: int = 8192
    max_batch_sequences: int = 256
    kv_capacity_tokens: float = math.inf

    def __post_init__(self) -> None:
        checks = Checks("stage_timing")
        checks.not_negative(
            fixed_s=self.fixed_s,
            per_prompt_token_s=self.per_prompt_token_s,
            per_sequence_s=self.per_sequence_s,
            per_context_token_s=self.per_context_token_s,
            hop_s=self.hop_s,
        )
        some = self.fixed_s + self.per_prompt_token_s + self.per_sequence_s + self.per_context_token_s
        checks.require(some > 0, "a batch must take some time", some)
        checks.positive(max_batch_tokens=self.max_batch_tokens, max_batch_sequences=self.max_batch_sequences)
        checks.require(self.kv_capacity_tokens > 0, "kv_capacity_tokens must be above zero", self.kv_capacity_tokens)
        checks.raise_if_any()

    def batch_s(self, *, prompt_tokens: float = 0.0, sequences: float = 0.0, context_tokens: float = 0.0) -> float:
        """Seconds for one batch, hop apart."""
        return (
            self.fixed_s
            + self.per_prompt_token_s * prompt_tokens
            + self.per_sequence_s * sequences
            + self.per_context_token_s * context_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTiming:
    """Seconds to move a prompt's KV cache from a prefill to a decode instance: ``fixed_s + per_token_s * tokens``."""

    fixed_s: float
    per_token_s: float

    def __post_init__(self) -> None:
        checks = Checks("transfer_timing")
        checks.not_negative(fixed_s=self.fixed_s, per_token_s=self.per_token_s)
        checks.raise_if_any()


class TimingSource(Protocol):
    """Gives the timing of a node, or None where the source knows nothing of it."""

    def stage_timing(
        self, *, model: ModelId, phase: Phase, configuration: NodeConfigurationId, num_layers: int
    ) -> StageTiming | None:
        """Timing of a node of ``configuration`` that holds ``num_layers`` layers of ``model``."""
        ...
