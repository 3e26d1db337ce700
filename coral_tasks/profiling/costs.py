"""The form in which every source states time: seconds per layer and constant part, over a grid of batches.

Owns the grids, the hop between nodes and the sum over a stage. Where the figures come from is the sources' matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.hardware import NodeConfiguration
from coral_tasks.domain.models import RequestShape, ServedModel
from coral_tasks.domain.names import Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.profiling.memory import BYTES_16BIT, MemoryParameters, Parallelism, window_max

PREFILL_PROMPTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Prompts of mean length in one prefill batch."""

DECODE_SEQUENCES = (
    *(1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128),
    *(160, 192, 224, 256, 320, 384, 448, 512),
)
"""Sequences in one decode batch. Dense, since a coarse grid exaggerates what free latency shares gain (notes A4)."""

HALF_ROUND_TRIP_S = 1e-4
"""Half a round trip between machines of one region: 0.2 ms round trip within an availability zone, rounded up."""

TENSORS_PER_HOP = 2
"""vLLM hands hidden states and residual to the next stage (``IntermediateTensors`` of its Llama-like models)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one node is asked to time: batches of ``sequences`` with ``context_tokens`` each.

    Prefill: prompts of ``context_tokens``. Decode: one new token each, behind a context of ``context_tokens``.
    """

    model: ServedModel
    configuration: NodeConfiguration
    split: Parallelism
    phase: Phase
    context_tokens: float
    sequences: tuple[float, ...]

    @property
    def tokens(self) -> NDArray[np.float64]:
        """Tokens of each batch, shape (B,)."""
        per_sequence = self.context_tokens if self.phase is Phase.PREFILL else 1.0
        return np.asarray(self.sequences, dtype=np.float64) * per_sequence


def work_for(
    model: ServedModel,
    configuration: NodeConfiguration,
    split: Parallelism,
    phase: Phase,
    shape: RequestShape,
    parameters: MemoryParameters,
) -> Work:
    """The grid of a table: mean prompt in prefill; mean prompt and half the mean output as context in decode.

    Prefill batches stay within the engine's batched tokens; one prompt always stands (the engine cuts it in chunks).
    """
    prefill = phase is Phase.PREFILL
    context = shape.mean_prompt_tokens if prefill else shape.mean_prompt_tokens + shape.mean_output_tokens / 2
    limit = parameters.batched_tokens(configuration.gpu)
    prompts = tuple(count for count in PREFILL_PROMPTS if count == 1 or count * context <= limit)
    sequences = tuple(count for count in DECODE_SEQUENCES if count <= parameters.max_sequences)
    return Work(
        model=model,
        configuration=configuration,
        split=split,
        phase=phase,
        context_tokens=context,
        sequences=prompts if prefill else sequences,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCosts:
    """Seconds of one engine step on one node.

    ``layer_s``: shape (B, L), each layer by itself; ``constant_s``: shape (B,), embedding, head, sampling and the
    engine's own step overhead; ``extrapolated``: shape (B,), where the source had to leave what it measured.
    ``provenance``: versions and dates. B: the batches of the Work it was asked for.
    """

    layer_s: NDArray[np.float64]
    constant_s: NDArray[np.float64]
    extrapolated: NDArray[np.bool_]
    source: ProfileSource
    provenance: str

    def stage_s(self) -> NDArray[np.float64]:
        """Seconds of the slowest j consecutive layers with the constant part, shape (B, L)."""
        return self.constant_s[:, None] + window_max(self.layer_s)


class CostSource(Protocol):
    """A way to time a node. Returns None for what it does not know; never a guess."""

    @property
    def source(self) -> ProfileSource:
        """Which of the three sources this is."""
        ...

    def costs(self, work: Work) -> LayerCosts | None:
        """Time of every batch of ``work``, or None if this source knows nothing about it."""
        ...


def hop_s(work: Work) -> NDArray[np.float64]:
    """Seconds of a stage for receiving and sending activations, shape (B,).

    The slower of two networks decides a hop, but a table knows only its own node. So a stage is charged both its
    incoming and its outgoing transfer at its own rate, and half a round trip: over a pipeline that is never less
    than the true sum, whatever the neighbours are.
    """
    transfer = TENSORS_PER_HOP * BYTES_16BIT * work.model.hidden_size * work.tokens
    return np.asarray(2 * transfer / work.configuration.network_bytes_per_s + HALF_ROUND_TRIP_S, dtype=np.float64)
