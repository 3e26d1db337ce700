"""All kept templates of one (model, phase, SLO) in columns, as the library stores and the allocation reads them.

Owns the columnar form and its way back to ``ServingTemplate``; decides nothing about which templates are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import LatencySplit, ModelId, NodeConfigurationId, Phase, Runtime, TemplateId
from coral_tasks.domain.profiles import LimitedBy, ProfileSource
from coral_tasks.domain.templates import NodeCombination, Placement, ServingTemplate, Stage, template_id
from coral_tasks.domain.validation import Checks

RUNTIME_CODES: Final = (Runtime.VLLM, Runtime.HYBRID)
"""Meaning of the codes in ``TemplateSet.runtime``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TemplateSet:
    """N templates of one model, phase and SLO over C configurations, at most M nodes each.

    ``configurations``: sorted by name; ``sources``, ``provenance``: profile source and lineage of each.
    ``node_counts``: int16 [N, C], nodes of each configuration.
    ``throughput``: float64 [N], unit by phase (``Phase.throughput_unit``).
    ``runtime``: uint8 [N], index into RUNTIME_CODES; a combination whose best placement is hybrid may have a second
    row with its best vLLM-realisable placement.
    ``limited_by``: uint8 [N], codes of LimitedBy: what limits the slowest stage.
    ``num_stages``: uint8 [N].
    ``slot_stage``: int8 [N, M], stage of each node; nodes in configuration order, -1 beyond the last node.
    ``stage_layers``, ``stage_quanta``: int16 [N, M], by stage in pipeline order, 0 beyond the last stage.
    ``profile_version``: version of the profile table it was made from.
    Rows are sorted by (number of nodes, nodes in configuration order, runtime). Arrays are read-only.
    """

    model: ModelId
    phase: Phase
    slo: LatencySlo
    latency_split: LatencySplit
    num_layers: int
    total_quanta: int
    configurations: tuple[NodeConfigurationId, ...]
    sources: tuple[ProfileSource, ...]
    provenance: tuple[str, ...]
    profile_version: str
    node_counts: NDArray[np.int16]
    throughput: NDArray[np.float64]
    runtime: NDArray[np.uint8]
    limited_by: NDArray[np.uint8]
    num_stages: NDArray[np.uint8]
    slot_stage: NDArray[np.int8]
    stage_layers: NDArray[np.int16]
    stage_quanta: NDArray[np.int16]

    def __post_init__(self) -> None:
        checks = Checks("template_set", f"{self.model} {self.phase}")
        checks.unique("configuration", self.configurations)
        checks.require(list(self.configurations) == sorted(self.configurations), "configurations must be sorted")
        for name in ("sources", "provenance"):
            checks.require(len(getattr(self, name)) == len(self.configurations), f"{name} needs one per configuration")
        for name, shape in self._shapes().items():
            found = getattr(self, name).shape
            checks.require(found == shape, f"{name} must have shape {shape}", str(found))
        positive = bool(np.isfinite(self.throughput).all() and (self.throughput > 0).all())
        checks.require(positive, "throughput must be finite and above zero")
        checks.raise_if_any()
        for name in self._shapes():
            getattr(self, name).setflags(write=False)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        rows, slots = len(self.throughput), self.slot_stage.shape[1]
        flat = dict.fromkeys(("throughput", "runtime", "limited_by", "num_stages"), (rows,))
        wide = dict.fromkeys(("slot_stage", "stage_layers", "stage_quanta"), (rows, slots))
        return {**flat, **wide, "node_counts": (rows, len(self.configurations))}

    def __len__(self) -> int:
        return len(self.throughput)

    def nodes(self, row: int) -> NodeCombination:
        """Node combination of one row."""
        used = np.flatnonzero(self.node_counts[row])
        return NodeCombination.of({self.configurations[c]: int(self.node_counts[row, c]) for c in used})

    def placement(self, row: int) -> Placement:
        """Placement of one row."""
        counts = self.node_counts[row]
        slots = np.repeat(np.arange(len(counts)), counts)
        stages = self.slot_stage[row, : len(slots)]
        return Placement(
            stages=tuple(
                Stage(
                    nodes=NodeCombination.of([self.configurations[c] for c in slots[stages == stage]]),
                    num_layers=int(self.stage_layers[row, stage]),
                    num_quanta=int(self.stage_quanta[row, stage]),
                )
                for stage in range(int(self.num_stages[row]))
            ),
            total_quanta=self.total_quanta,
        )

    @cached_property
    def ids(self) -> tuple[TemplateId, ...]:
        """Template id of each row."""
        return tuple(self.id_of(row) for row in range(len(self)))

    def id_of(self, row: int) -> TemplateId:
        """Template id of one row, without those of all the others."""
        runtime = RUNTIME_CODES[int(self.runtime[row])]
        return template_id(model=self.model, phase=self.phase, slo=self.slo, nodes=self.nodes(row), runtime=runtime)

    @cached_property
    def _rows(self) -> dict[TemplateId, int]:
        return {name: row for row, name in enumerate(self.ids)}

    def row_of(self, wanted: TemplateId) -> int:
        """Row of that template id; KeyError if there is none."""
        return self._rows[wanted]

    def template(self, row: int) -> ServingTemplate:
        """One row as a ServingTemplate."""
        used = np.flatnonzero(self.node_counts[row])
        return ServingTemplate(
            id=self.id_of(row),
            model=self.model,
            phase=self.phase,
            slo=self.slo,
            nodes=self.nodes(row),
            throughput=float(self.throughput[row]),
            placement=self.placement(row),
            latency_split=self.latency_split,
            runtime=RUNTIME_CODES[int(self.runtime[row])],
            limited_by=LimitedBy(int(self.limited_by[row])),
            sources=tuple((self.configurations[c], self.sources[c]) for c in used),
        )
