"""Stage timings for the simulator: from a timing source, from profile tables, or from a template's promise.

Owns how a throughput under a latency share becomes an affine batch time (the domain's ``StageTiming``), and says
what that assumes. Must not know the event loop.

The throughput T of a stage with a share tau of the latency budget means: the largest batch that fits, b = T * tau
tokens (prefill) or sequences (decode), takes tau. One such point fixes one line once the constant part is known:

- from a **profile table** the same layer count at other shares gives other points (b_q, tau_q); the line is the least
  squares fit through the latency-limited ones (the others only bound b).
- from the **template alone** (a plan without tables) the constant part is ``fixed_share`` of tau: an assumption, 0.1
  in prefill (compute-bound: time almost proportional to tokens) and 0.7 in decode (bound by reading the weights). A
  full stage then runs exactly at its promise; only lighter loads depend on the assumption.

Limits: a line has no memory/compute knee; time per token of context is 0 unless a source gives it; a table knows
nothing of KV capacity apart from its effect on T.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.profiles import LimitedBy, ProfileTable
from coral_tasks.domain.templates import ServingTemplate, Stage
from coral_tasks.domain.timing import StageTiming

PREFILL_FIXED_SHARE: Final = 0.1
DECODE_FIXED_SHARE: Final = 0.7
DEFAULT_BATCH_TOKENS: Final = 8192
"""vLLM's default token budget of one step on large GPUs (``--max-num-batched-tokens``)."""

_MAX_SEQUENCES: Final = 4096


def promised_timing(template: ServingTemplate, stage: Stage, shape: RequestShape) -> StageTiming:
    """Timing of one of the stage's nodes from the template alone; its nodes share the stage's load evenly."""
    tau = stage.num_quanta / template.placement.total_quanta * template.slo.limit_s(template.phase)
    rate = template.throughput / stage.nodes.num_nodes
    if template.phase is Phase.PREFILL:
        return _affine_prefill(tau=tau, rate=rate, fixed_share=PREFILL_FIXED_SHARE)
    if template.phase is Phase.DECODE:
        return _affine_decode(tau=tau, rate=rate, fixed_share=DECODE_FIXED_SHARE)
    return _affine_aggregated(tau=tau, rate=rate, shape=shape)


def _affine_prefill(*, tau: float, rate: float, fixed_share: float) -> StageTiming:
    return StageTiming(
        fixed_s=fixed_share * tau,
        per_prompt_token_s=(1 - fixed_share) / rate,
        per_sequence_s=0.0,
        max_batch_tokens=max(round(rate * tau), 1),
        max_batch_sequences=_MAX_SEQUENCES,
    )


def _affine_decode(*, tau: float, rate: float, fixed_share: float) -> StageTiming:
    return StageTiming(
        fixed_s=fixed_share * tau,
        per_prompt_token_s=(1 - fixed_share) / rate,  # a preempted sequence is computed again at decode's pace
        per_sequence_s=(1 - fixed_share) / rate,
        max_batch_tokens=DEFAULT_BATCH_TOKENS,
        max_batch_sequences=_whole_batch(rate * tau),
    )


def _affine_aggregated(*, tau: float, rate: float, shape: RequestShape) -> StageTiming:
    """Half of the variable part goes to prompts, half to sequences, at the promised mix of the request shape."""
    sequences = rate * shape.mean_output_tokens * tau
    prompt_tokens = rate * shape.mean_prompt_tokens * tau
    variable = (1 - DECODE_FIXED_SHARE) * tau / 2
    return StageTiming(
        fixed_s=DECODE_FIXED_SHARE * tau,
        per_prompt_token_s=variable / prompt_tokens,
        per_sequence_s=variable / sequences,
        max_batch_tokens=DEFAULT_BATCH_TOKENS,
        max_batch_sequences=_whole_batch(sequences),
    )


def _whole_batch(sequences: float) -> int:
    return min(max(math.ceil(sequences - 1e-9), 1), _MAX_SEQUENCES)


@dataclass(frozen=True, slots=True, eq=False)
class TableTimings:
    """A ``TimingSource`` from profile tables; knows the configurations, models and phases of its tables."""

    _tables: Mapping[tuple[ModelId, Phase], ProfileTable]

    @classmethod
    def of(cls, tables: Iterable[ProfileTable]) -> TableTimings:
        """Index tables by model and phase; one each."""
        return cls({(table.model, table.phase): table for table in tables})

    def stage_timing(
        self, *, model: ModelId, phase: Phase, configuration: NodeConfigurationId, num_layers: int
    ) -> StageTiming | None:
        """Line through the latency-limited cells of the layer count; None where no cell says anything."""
        table = self._tables.get((model, phase))
        if table is None or phase is Phase.AGGREGATED or configuration not in table.configurations:
            return None
        c = table.configurations.index(configuration)
        return timing_from_cells(table, table.throughput[c, num_layers - 1], table.limited_by[c, num_layers - 1])


def timing_from_cells(
    table: ProfileTable, rates: NDArray[np.float64], limited_by: NDArray[np.uint8]
) -> StageTiming | None:
    """Affine timing from one layer count's throughput at every latency share, shape (Q,)."""
    if not (rates > 0).any():
        return None
    tau = np.arange(1, len(rates) + 1) / len(rates) * table.slo.limit_s(table.phase)
    fixed, per_unit = _fit_line(rates, tau, limited_by)
    most = float((rates * tau).max())
    if table.phase is Phase.PREFILL:
        return StageTiming(
            fixed_s=fixed, per_prompt_token_s=per_unit, per_sequence_s=0.0, max_batch_tokens=DEFAULT_BATCH_TOKENS
        )
    return StageTiming(
        fixed_s=fixed, per_prompt_token_s=per_unit, per_sequence_s=per_unit, max_batch_sequences=_whole_batch(most)
    )


def _fit_line(
    rates: NDArray[np.float64], tau: NDArray[np.float64], limited_by: NDArray[np.uint8]
) -> tuple[float, float]:
    """Constant and slope of tau over b = T * tau, both not negative."""
    use = (rates > 0) & (limited_by == LimitedBy.LATENCY)
    if use.sum() < 2:
        use = rates > 0
    batch, times = (rates * tau)[use], tau[use]
    slope = 1 / float(rates.max())
    if len(batch) >= 2 and np.ptp(batch) > 0:
        slope = max(float(np.polyfit(batch, times, 1)[0]), 0.0)
    slope = min(slope, float((times / batch).min()))
    return max(float((times - slope * batch).mean()), 0.0), max(slope, 1e-12)
