"""What a library build is asked for, and what it counted. Owns these values and their rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from coral_tasks.domain.names import LatencySplit
from coral_tasks.domain.templates import NodeCombination
from coral_tasks.domain.validation import Checks
from coral_tasks.placement.combinations import MAX_NODES


class Reduction(StrEnum):
    """Which templates the lossless reduction drops: those that one or two smaller ones replace, or any number."""

    PAIRS = "pairs"
    CHAIN = "chain"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Parameters of a library.

    ``memory_ratio``: rho, most GPU memory of a combination over the bytes of the published checkpoint; None for no
    limit. ``keep``: combinations kept even if reducible, such as those running now.
    """

    max_nodes: int = 6
    memory_ratio: float | None = 12.0
    latency_split: LatencySplit = LatencySplit.FREE
    reduction: Reduction = Reduction.PAIRS
    keep: tuple[NodeCombination, ...] = ()

    def __post_init__(self) -> None:
        checks = Checks("build_options")
        whole = isinstance(self.max_nodes, int) and not isinstance(self.max_nodes, bool)
        in_range = whole and 1 <= self.max_nodes <= MAX_NODES
        checks.require(in_range, f"N_max must be a whole number from 1 to {MAX_NODES}", self.max_nodes)
        if self.memory_ratio is not None:
            good = math.isfinite(self.memory_ratio) and self.memory_ratio > 0
            checks.require(good, "rho must be finite and above zero (None for no limit)", self.memory_ratio)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCounts:
    """Combinations of one (model, phase, SLO) by what became of them; they add up to ``num_possible``.

    ``num_possible``: multisets of 1 to N_max nodes. ``num_vllm_extra``: second rows, for combinations whose best
    placement is hybrid or replaceable but whose best vLLM-realisable one is needed when only vLLM may be used.
    """

    num_possible: int
    num_beyond_memory: int
    num_infeasible: int
    num_replaced_by_one: int
    num_replaced_by_two: int
    num_kept: int
    num_kept_on_request: int
    num_vllm_extra: int
