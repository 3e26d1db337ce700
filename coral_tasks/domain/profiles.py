"""Profile tables: what one node sustains with j layers inside a stage of q quanta (design 2.1).

Owns the table's shape and rules; where its figures come from is profiling's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.models import LatencySlo, RequestShape
from coral_tasks.domain.names import ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.validation import Checks

NUM_QUANTA = 60
"""Quanta of the latency budget: 60 / S is whole for one to six stages."""


class ProfileSource(StrEnum):
    """Where a profile's figures come from, best first."""

    MEASURED = "measured"
    DATABASE = "database"
    ANALYTIC = "analytic"


class LimitedBy(IntEnum):
    """What keeps a table cell, or a template, from doing more."""

    WEIGHTS = 1
    KV = 2
    LATENCY = 3
    LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileTable:
    """T[c, j-1, q-1] of one model, phase and SLO.

    ``throughput``: float64, shape (C, L, Q), prompt tokens/s in prefill, output tokens/s in decode, requests/s
    aggregated; 0 where weights, KV cache or latency do not fit; not rising in j, not falling in q.
    ``limited_by``: uint8, same shape, codes of LimitedBy.
    ``node_memory_bytes``: GPU memory of a whole node, per configuration (for rho).
    ``tp_degree``: tensor parallel degree used on a node, per configuration.
    ``sources``, ``provenance``: per configuration; the latter names versions and date.
    ``extrapolated``: bool, same shape, cells that rest on a point outside what their source measured; None if unknown.
    ``version``: hash of everything the table was made from.
    Raises ValidationFailed on construction if any of this is broken.
    """

    model: ModelId
    num_layers: int
    checkpoint_bytes: float
    phase: Phase
    slo: LatencySlo
    shape: RequestShape
    configurations: tuple[NodeConfigurationId, ...]
    node_memory_bytes: tuple[int, ...]
    tp_degree: tuple[int, ...]
    throughput: NDArray[np.float64]
    limited_by: NDArray[np.uint8]
    sources: tuple[ProfileSource, ...]
    provenance: tuple[str, ...]
    version: str
    extrapolated: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        checks = Checks("profile_table", f"{self.model} {self.phase}")
        self._check_names(checks)
        self._check_numbers(checks)
        checks.raise_if_any()
        self.throughput.setflags(write=False)
        self.limited_by.setflags(write=False)
        if self.extrapolated is not None:
            self.extrapolated.setflags(write=False)

    def _check_names(self, checks: Checks) -> None:
        checks.unique("configuration", self.configurations)
        checks.require(len(self.configurations) > 0, "needs at least one configuration")
        for name in ("node_memory_bytes", "tp_degree", "sources", "provenance"):
            count = len(getattr(self, name))
            checks.require(count == len(self.configurations), f"{name} needs one entry per configuration", count)

    def _check_numbers(self, checks: Checks) -> None:
        values = self.throughput
        expected = (len(self.configurations), self.num_layers)
        shape_ok = values.ndim == 3 and values.shape[:2] == expected and values.shape[2] >= 1
        checks.require(shape_ok and self.num_layers >= 1, "throughput must have shape (C, L, Q)", str(values.shape))
        checks.require(values.dtype == np.float64, "throughput must be float64", str(values.dtype))
        checks.require(self.limited_by.shape == values.shape, "limited_by must have the shape of throughput")
        marked_ok = self.extrapolated is None or self.extrapolated.shape == values.shape
        checks.require(marked_ok, "extrapolated must have the shape of throughput")
        if not shape_ok:
            return
        finite = bool(np.isfinite(values).all())
        checks.require(finite, "throughput must be finite", _first(self, ~np.isfinite(values)))
        if finite:
            checks.require(not (values < 0).any(), "throughput must not be negative", _first(self, values < 0))
            rising = np.diff(values, axis=1) > 0
            checks.require(not rising.any(), "throughput must not rise with layers", _first(self, rising))
            falling = np.diff(values, axis=2) < 0
            checks.require(not falling.any(), "throughput must not fall with the latency share", _first(self, falling))


def _first(table: ProfileTable, mask: NDArray[np.bool_]) -> str:
    """Name the first cell of ``mask`` for a message."""
    if not mask.any():
        return ""
    c, j, q = (int(i) for i in np.argwhere(mask)[0])
    name = table.configurations[c] if c < len(table.configurations) else c
    return f"{name}, {j + 1} layers, {q + 1} quanta"
