"""Building the profile tables of a setup from the best source for each node configuration.

Owns the order of sources, the fixed choice of parallelism and the version of a table. Arithmetic is in ``tables``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from coral_tasks.catalog import Setup, SetupModel
from coral_tasks.domain.content import content_digest
from coral_tasks.domain.errors import Unavailable
from coral_tasks.domain.hardware import NodeConfiguration
from coral_tasks.domain.names import ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.profiles import ProfileTable
from coral_tasks.profiling.costs import CostSource, LayerCosts, Work, work_for
from coral_tasks.profiling.database import DatabaseSource
from coral_tasks.profiling.memory import MemoryParameters, choose_parallelism
from coral_tasks.profiling.roofline import RooflineSource
from coral_tasks.profiling.tables import NodeTable, reduce_costs

LOG = logging.getLogger(__name__)
PHASES = (Phase.PREFILL, Phase.DECODE)
CODE_SCHEMA = 2
"""Part of every version: raise it when the meaning of a table changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingProfile:
    """A configuration that no source can time for a model and phase; it is never planned on."""

    model: ModelId
    phase: Phase
    configuration: NodeConfigurationId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableSlo:
    """A limit below what one lone request needs on the fastest configuration, memory left aside.

    ``needed_s``: all layers of the model on ``configuration``, alone and without hops.
    """

    model: ModelId
    phase: Phase
    limit_s: float
    needed_s: float
    configuration: NodeConfigurationId


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuildReport:
    """Tables with what is missing, and the largest repair per (model, phase, configuration) where there was one.

    ``unreachable``: models and phases that no placement can serve because of their SLO, whatever memory there is.
    """

    tables: tuple[ProfileTable, ...]
    missing: tuple[MissingProfile, ...]
    unreachable: tuple[UnreachableSlo, ...] = ()
    repairs: dict[tuple[ModelId, Phase, NodeConfigurationId], float] = field(default_factory=dict)


def default_sources() -> tuple[CostSource, ...]:
    """Database, where its package is installed, then roofline. Measured profiles are put in front by the caller."""
    database = DatabaseSource.load()
    return (RooflineSource.load(),) if database is None else (database, RooflineSource.load())


def build_profile_tables(
    setup: Setup,
    *,
    sources: Sequence[CostSource] | None = None,
    parameters: MemoryParameters | None = None,
) -> tuple[ProfileTable, ...]:
    """One table per model and phase (prefill, decode), in the setup's order.

    ``sources``: best first; default: database where it knows GPU type and model, roofline otherwise. A configuration
    that no source knows is left out of the table and logged. Raises Unavailable if none is left for a model.
    """
    return build_profiles(setup, sources=sources, parameters=parameters).tables


def build_profiles(
    setup: Setup,
    *,
    sources: Sequence[CostSource] | None = None,
    parameters: MemoryParameters | None = None,
) -> BuildReport:
    """As ``build_profile_tables``, with what is missing and what was repaired."""
    chosen = default_sources() if sources is None else tuple(sources)
    memory = parameters or MemoryParameters()
    tables: list[ProfileTable] = []
    missing: list[MissingProfile] = []
    unreachable: list[UnreachableSlo] = []
    repairs: dict[tuple[ModelId, Phase, NodeConfigurationId], float] = {}
    for entry in setup.models:
        for phase in PHASES:
            rows, lost = _rows(entry, phase, setup.configurations, chosen, memory)
            missing += lost
            tables.append(_table(entry, phase, rows, memory))
            unreachable += _unreachable(entry, phase, rows)
            for row in rows:
                if row.node.repaired > 0:
                    repairs[entry.model.id, phase, row.work.configuration.id] = row.node.repaired
    return BuildReport(tables=tuple(tables), missing=tuple(missing), unreachable=tuple(unreachable), repairs=repairs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    work: Work
    costs: LayerCosts
    node: NodeTable


def _rows(
    entry: SetupModel,
    phase: Phase,
    configurations: Sequence[NodeConfiguration],
    sources: Sequence[CostSource],
    memory: MemoryParameters,
) -> tuple[list[_Row], list[MissingProfile]]:
    rows: list[_Row] = []
    missing: list[MissingProfile] = []
    for configuration in configurations:
        split = choose_parallelism(entry.model, configuration)
        work = work_for(entry.model, configuration, split, phase, entry.shape, memory)
        costs = best_costs(work, sources)
        if costs is None:
            reason = "no measured, database or analytic profile"
            LOG.warning("%s %s %s: %s; left out", entry.model.id, phase, configuration.id, reason)
            missing.append(
                MissingProfile(model=entry.model.id, phase=phase, configuration=configuration.id, reason=reason)
            )
            continue
        rows.append(_Row(work=work, costs=costs, node=reduce_costs(work, costs, entry.slo, entry.shape, memory)))
    return rows, missing


def _unreachable(entry: SetupModel, phase: Phase, rows: Sequence[_Row]) -> list[UnreachableSlo]:
    """The SLO's verdict on one lone request: a list of one if even the fastest configuration is too slow."""
    needed, fastest = min((float(row.costs.stage_s()[0, -1]), row.work.configuration.id) for row in rows)
    limit = entry.slo.limit_s(phase)
    if needed <= limit:
        return []
    found = UnreachableSlo(model=entry.model.id, phase=phase, limit_s=limit, needed_s=needed, configuration=fastest)
    LOG.warning("%s %s: infeasible by SLO: %s", entry.model.id, phase, found)
    return [found]


def best_costs(work: Work, sources: Sequence[CostSource]) -> LayerCosts | None:
    """Costs from the first source that knows the work."""
    for source in sources:
        costs = source.costs(work)
        if costs is not None:
            return costs
    return None


def _table(entry: SetupModel, phase: Phase, rows: Sequence[_Row], memory: MemoryParameters) -> ProfileTable:
    model = entry.model
    if not rows:
        message = f"{model.id}, {phase}: no node configuration of the setup has a profile"
        raise Unavailable(message)
    configurations = [row.work.configuration for row in rows]
    throughput = np.stack([row.node.throughput for row in rows])
    limited_by = np.stack([row.node.limited_by for row in rows])
    extrapolated = np.stack([row.node.extrapolated for row in rows])
    provenance = tuple(_provenance(row) for row in rows)
    splits = tuple(row.work.split for row in rows)
    version = content_digest(
        CODE_SCHEMA,
        model,
        phase,
        entry.slo,
        entry.shape,
        configurations,
        splits,
        memory,
        provenance,
        throughput,
        limited_by,
    )
    return ProfileTable(
        model=model.id,
        num_layers=model.num_layers,
        checkpoint_bytes=model.checkpoint_bytes,
        phase=phase,
        slo=entry.slo,
        shape=entry.shape,
        configurations=tuple(configuration.id for configuration in configurations),
        node_memory_bytes=tuple(configuration.memory_bytes for configuration in configurations),
        tp_degree=tuple(split.tp for split in splits),
        throughput=throughput,
        limited_by=limited_by,
        extrapolated=extrapolated,
        sources=tuple(row.costs.source for row in rows),
        provenance=provenance,
        version=version,
    )


def _provenance(row: _Row) -> str:
    beyond = int(row.costs.extrapolated.sum())
    note = f"; {beyond} of {len(row.costs.extrapolated)} batches extrapolated" if beyond else ""
    return f"{row.costs.provenance}{note}"
