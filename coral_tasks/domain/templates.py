"""Node combinations, placements and serving templates (paper 4.2, design 2.2 and 2.3).

Owns what a template is; which one is best is placement's matter, which ones are kept is templates'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import (
    LatencySplit,
    ModelId,
    NodeConfigurationId,
    Phase,
    Runtime,
    TemplateId,
)
from coral_tasks.domain.profiles import LimitedBy, ProfileSource
from coral_tasks.domain.validation import Checks


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCombination:
    """Multiset of node configurations: sorted pairs of configuration and count >= 1."""

    counts: tuple[tuple[NodeConfigurationId, int], ...]

    def __post_init__(self) -> None:
        checks = Checks("node_combination", str(self))
        checks.require(len(self.counts) > 0, "needs at least one node")
        checks.require(
            list(self.counts) == sorted(self.counts), "configurations must be sorted by name", repr(self.counts)
        )
        checks.unique("configuration", [name for name, _ in self.counts])
        for name, count in self.counts:
            checks.require(count >= 1, f"count of {name} must be at least 1", count)
        checks.raise_if_any()

    @classmethod
    def of(cls, nodes: Iterable[NodeConfigurationId] | Mapping[NodeConfigurationId, int]) -> NodeCombination:
        """Build from a list of nodes, or from a mapping of configuration to count."""
        return cls(counts=tuple(sorted(Counter(nodes).items())))

    @property
    def num_nodes(self) -> int:
        """Nodes in all."""
        return sum(count for _, count in self.counts)

    def __iter__(self) -> Iterator[NodeConfigurationId]:
        for name, count in self.counts:
            for _ in range(count):
                yield name

    def __str__(self) -> str:
        return "+".join(f"{count}*{name}" for name, count in self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers held by one or more nodes that share the load.

    ``num_quanta``: share of the latency budget, in 1/Q of it.
    """

    nodes: NodeCombination
    num_layers: int
    num_quanta: int

    def __post_init__(self) -> None:
        checks = Checks("stage", str(self.nodes))
        checks.positive(num_layers=self.num_layers, num_quanta=self.num_quanta)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Layers and nodes onto stages, in pipeline order. ``total_quanta`` is Q."""

    stages: tuple[Stage, ...]
    total_quanta: int

    def __post_init__(self) -> None:
        checks = Checks("placement")
        checks.require(len(self.stages) > 0, "needs at least one stage")
        used = sum(stage.num_quanta for stage in self.stages)
        checks.require(used <= self.total_quanta, f"latency shares exceed {self.total_quanta} quanta", used)
        checks.raise_if_any()

    @property
    def num_layers(self) -> int:
        """Layers in all."""
        return sum(stage.num_layers for stage in self.stages)

    @property
    def nodes(self) -> NodeCombination:
        """All nodes of all stages."""
        return NodeCombination.of([name for stage in self.stages for name in stage.nodes])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTemplate:
    """Model, phase, SLO, node combination and its best placement for one runtime.

    ``throughput``: prompt tokens/s in prefill, output tokens/s in decode, requests/s aggregated.
    ``limited_by``: what limits the slowest stage. ``sources``: profile source of each configuration used.
    """

    id: TemplateId
    model: ModelId
    phase: Phase
    slo: LatencySlo
    nodes: NodeCombination
    throughput: float
    placement: Placement
    latency_split: LatencySplit
    runtime: Runtime
    limited_by: LimitedBy
    sources: tuple[tuple[NodeConfigurationId, ProfileSource], ...]

    def __post_init__(self) -> None:
        checks = Checks("templates", self.id)
        checks.named(id=self.id)
        checks.positive(throughput=self.throughput)
        checks.require(self.placement.nodes == self.nodes, "placement must use exactly the template's nodes")
        checks.raise_if_any()


def template_id(
    *, model: ModelId, phase: Phase, slo: LatencySlo, nodes: NodeCombination, runtime: Runtime
) -> TemplateId:
    """Readable id, unique within a library: ``qwen3-32b/decode/100ms/2*L4x1+1*L40Sx4/vllm``."""
    limit_ms = f"{slo.limit_s(phase) * 1e3:g}ms"
    return TemplateId(f"{model}/{phase.value}/{limit_ms}/{nodes}/{runtime.value}")
