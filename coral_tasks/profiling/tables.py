"""Reduction of costs and memory to T[j, q] and what limits each cell (design 2.1).

Owns the feasibility rules, Little's law and the monotone envelope. It neither reads files nor knows sources.

For a batch of b sequences, stage time l(b, j) and a share of q quanta of u seconds:

- latency: l(b, j) <= q u;
- memory: b <= N(j), the sequences whose KV fits beside j layers;
- Little's law: a sequence stays on the node while the whole pipeline works on it, at most l + (Q - q) u, since
  the other stages have no more than Q - q quanta. At r sequences/s that is r (l + (Q - q) u) <= N(j) residents;

so r = min(b / l, N / (l + (Q - q) u)), and T is the best r over the grid of batches times the tokens of a sequence.
With l = q u this is the Q / q micro-batches in flight of notes A5.7.

Prompts of a Poisson stream queue, and a limit at a percentile binds for long prompts that find others before them. So
above the 50th percentile prefill counts a batch only if a prompt of p95 length still meets the share after a wait, and
only QUEUE_SHARE of its rate (docs/decisions/2026-11-30-goodput.md has the measurements). Decode needs neither: a
batch that breathes is covered by the planner's headroom.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.domain.models import LatencySlo, RequestShape
from coral_tasks.domain.names import Phase
from coral_tasks.domain.profiles import NUM_QUANTA, LimitedBy
from coral_tasks.profiling.costs import LayerCosts, Work, hop_s
from coral_tasks.profiling.memory import MemoryParameters, StageMemory, stage_memory

LOG = logging.getLogger(__name__)

MAX_REPAIR = 0.2
"""Largest relative change the envelope may make to a cell; beyond it the costs are not believed."""

QUEUE_SHARE = 0.8
"""Share of a prefill node's batch rate that a queue may be filled to while its percentile holds, headroom apart."""

LONG_PROMPT_WAITS = 2.0
"""Mean service times that a long prompt waits in such a queue, and must have room for within the limit."""

MEAN_PERCENTILE = 50.0
"""At or below it tables are made for mean lengths and no queue, as the paper makes them."""

SIGNIFICANT_DIGITS = 6
"""Figures are rounded so that the last bits of different CPUs do not make different versions."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeTable:
    """One configuration's part of a table; shapes (L, Q).

    ``extrapolated``: the cell rests on a batch outside what its source measured. ``repaired``: largest relative change
    made by the envelope.
    """

    throughput: NDArray[np.float64]
    limited_by: NDArray[np.uint8]
    extrapolated: NDArray[np.bool_]
    repaired: float


def reduce_costs(
    work: Work, costs: LayerCosts, slo: LatencySlo, shape: RequestShape, parameters: MemoryParameters
) -> NodeTable:
    """T[j-1, q-1] of one node. Raises ValidationFailed if the costs break monotony by more than MAX_REPAIR."""
    room = sequence_room(work, shape, parameters)
    quantum_s = slo.limit_s(work.phase) / NUM_QUANTA
    stage_s = costs.stage_s() + hop_s(work)[:, None]
    rate, feasible = _rates(np.asarray(work.sequences, dtype=np.float64), stage_s, room, quantum_s)
    if work.phase is Phase.PREFILL and slo.percentile > MEAN_PERCENTILE:
        feasible &= long_prompts_fit(work, stage_s, shape, quantum_s)
        rate = np.where(feasible, QUEUE_SHARE * rate, 0.0)
    best = rate.argmax(axis=0)
    per_sequence = work.context_tokens if work.phase is Phase.PREFILL else 1.0
    raw = np.take_along_axis(rate, best[None], axis=0)[0] * per_sequence
    throughput, repaired = envelope(raw)
    if repaired > MAX_REPAIR:
        rule = f"monotony broken by {repaired:.0%}, more than the {MAX_REPAIR:.0%} that may be repaired"
        row = f"{work.model.id} {work.configuration.id} {work.phase}"
        raise ValidationFailed([Violation(table="profile costs", row=row, value="", rule=rule)])
    if repaired > 0:
        LOG.info(
            "%s %s %s: envelope changed cells by at most %.2g",
            work.model.id,
            work.configuration.id,
            work.phase,
            repaired,
        )
    return NodeTable(
        throughput=throughput,
        limited_by=limits(work, stage_s, room, quantum_s, best, feasible),
        extrapolated=costs.extrapolated[best] & (throughput > 0),
        repaired=repaired,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceRoom:
    """Sequences of mean length that fit beside j layers, shape (L,); 0 where the weights or a p95 request do not fit.

    ``weights_fit``: shape (L,).
    """

    sequences: NDArray[np.float64]
    weights_fit: NDArray[np.bool_]


def sequence_room(work: Work, shape: RequestShape, parameters: MemoryParameters) -> SequenceRoom:
    """KV room of one node in sequences: prompts in prefill, prompt and whole output in decode.

    A node that cannot hold one request of p95 length holds nothing, however many average ones would fit.
    """
    prefill = work.phase is Phase.PREFILL
    mean = shape.mean_prompt_tokens + (0 if prefill else shape.mean_output_tokens)
    long = shape.p95_prompt_tokens + (0 if prefill else shape.p95_output_tokens)
    memory = _memory(work, mean, parameters)
    holds_long = _memory(work, long, parameters).sequences() >= 1
    return SequenceRoom(sequences=memory.sequences() * holds_long, weights_fit=memory.free > 0)


def _memory(work: Work, tokens: float, parameters: MemoryParameters) -> StageMemory:
    return stage_memory(work.model, work.configuration, work.split, tokens, parameters)


def _rates(
    sequences: NDArray[np.float64], stage_s: NDArray[np.float64], room: SequenceRoom, quantum_s: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Sequences/s and feasibility of each batch, shapes (B, L, Q)."""
    share_s = quantum_s * np.arange(1, NUM_QUANTA + 1)
    others_s = quantum_s * (NUM_QUANTA - np.arange(1, NUM_QUANTA + 1))
    stay_s = stage_s[:, :, None] + others_s
    feasible = (stage_s[:, :, None] <= share_s) & (sequences[:, None] <= room.sequences)[:, :, None]
    rate = np.minimum((sequences[:, None] / stage_s)[:, :, None], room.sequences[None, :, None] / stay_s)
    return np.where(feasible, rate, 0.0), feasible


def long_prompts_fit(
    work: Work, stage_s: NDArray[np.float64], shape: RequestShape, quantum_s: float
) -> NDArray[np.bool_]:
    """Whether a prompt of p95 length meets the limit after waiting, shape (B, L, Q).

    It waits once, at the pipeline's door, and may use what all stages leave of the budget: with this stage's share
    typical of the others, Q / q times what it leaves here.
    """
    share_s = quantum_s * np.arange(1, NUM_QUANTA + 1)
    left_s = (share_s - long_prompt_s(work, stage_s, shape)[:, None]) * (quantum_s * NUM_QUANTA / share_s)
    service_s = stage_s / np.asarray(work.sequences, dtype=np.float64)[:, None]
    return np.asarray(left_s >= LONG_PROMPT_WAITS * service_s[:, :, None], dtype=np.bool_)


def long_prompt_s(work: Work, stage_s: NDArray[np.float64], shape: RequestShape) -> NDArray[np.float64]:
    """Seconds of one prompt of p95 length, shape (L,): constant and slope of the grid's batches, in whole chunks.

    A prompt above the largest batch pays the constant once for each chunk. With a single batch all is slope.
    """
    tokens = work.tokens
    slope = stage_s[0] / tokens[0]
    if len(tokens) > 1:
        slope = np.maximum(stage_s[-1] - stage_s[0], 0.0) / (tokens[-1] - tokens[0])
    constant = np.maximum(stage_s[0] - slope * tokens[0], 0.0)
    chunks = max(1.0, np.ceil(shape.p95_prompt_tokens / tokens[-1]))
    return np.asarray(constant * chunks + slope * shape.p95_prompt_tokens, dtype=np.float64)


def envelope(raw: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Lower monotone envelope of T (L, Q), rounded, and the largest relative change.

    Lower, since a taller one would promise what no cell showed: falling in j by the least so far, rising in q by the
    least to come.
    """
    falling = np.minimum.accumulate(raw, axis=0)
    lower = np.minimum.accumulate(falling[:, ::-1], axis=1)[:, ::-1]
    change = np.divide(raw - lower, raw, out=np.zeros_like(raw), where=raw > 0)
    repaired = float(change.max())
    # Sums of floats in another order differ in the last bits; that is no repair.
    return round_significant(lower), repaired if repaired > 1e-9 else 0.0


def round_significant(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to SIGNIFICANT_DIGITS; monotone, so order is kept."""
    safe = np.where(values > 0, values, 1.0)
    scale = 10.0 ** (SIGNIFICANT_DIGITS - 1 - np.floor(np.log10(safe)))
    return np.where(values > 0, np.round(safe * scale) / scale, 0.0)


def limits(
    work: Work,
    stage_s: NDArray[np.float64],
    room: SequenceRoom,
    quantum_s: float,
    best: NDArray[np.intp],
    feasible: NDArray[np.bool_],
) -> NDArray[np.uint8]:
    """What keeps each cell from more, shape (L, Q).

    Infeasible cells: WEIGHTS if they do not fit, else KV if no request fits beside them, else LATENCY: even one lone
    request takes longer than the share. Feasible cells: what stops the next larger batch, or KV where Little's law
    binds; LAYERS where neither does, so that only fewer layers would make the node faster.
    """
    sequences = np.asarray(work.sequences, dtype=np.float64)
    share_s = quantum_s * np.arange(1, NUM_QUANTA + 1)
    last = len(sequences) - 1
    following = np.minimum(best + 1, last)
    next_stage = np.take_along_axis(stage_s[:, :, None], following[None], axis=0)[0]
    own_stage = np.take_along_axis(stage_s[:, :, None], best[None], axis=0)[0]
    stay_s = own_stage + quantum_s * NUM_QUANTA - share_s
    little = room.sequences[:, None] / stay_s < sequences[best] / own_stage
    more = best < last
    result = np.full(best.shape, LimitedBy.LAYERS, dtype=np.uint8)
    result[more & (next_stage > share_s)] = LimitedBy.LATENCY
    result[little | (more & (sequences[following] > room.sequences[:, None]))] = LimitedBy.KV
    nothing = ~feasible.any(axis=0)
    result[nothing] = LimitedBy.LATENCY
    result[nothing & (room.sequences < 1)[:, None]] = LimitedBy.KV
    result[nothing & ~room.weights_fit[:, None]] = LimitedBy.WEIGHTS
    return result
