"""From one profile table to the reduced template set: enumerate, solve, reduce, check, write down.

Owns which templates are kept; the search is placement's matter, files are storage's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.names import LatencySplit
from coral_tasks.domain.profiles import LimitedBy, ProfileTable
from coral_tasks.domain.template_set import TemplateSet
from coral_tasks.domain.validation import Checks
from coral_tasks.placement.check import check_solutions, stage_throughputs
from coral_tasks.placement.combinations import CombinationTree, build_tree
from coral_tasks.placement.patterns import pattern_tables
from coral_tasks.placement.search import MAX_LAYERS, Solutions, complete_placements, solve_tree, solve_vllm
from coral_tasks.templates.kernel_reduce import (
    INFEASIBLE,
    KEPT,
    REPLACED_BY_ONE,
    REPLACED_BY_TWO,
    mark_reducible,
)
from coral_tasks.templates.options import BuildOptions, Reduction, TemplateCounts

REDUCTION_TOLERANCE: Final = 1e-9
"""A replacement may fall short by this share: sums of the same numbers in another order differ in the last bits."""

VLLM, HYBRID = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """The reduced templates of one (model, phase, SLO) and what became of the other combinations."""

    templates: TemplateSet
    counts: TemplateCounts


def in_name_order(table: ProfileTable) -> ProfileTable:
    """The same table with configurations sorted by name, so that equal inputs in any order give equal bytes."""
    order = sorted(range(len(table.configurations)), key=lambda c: table.configurations[c])
    return replace(
        table,
        configurations=tuple(table.configurations[c] for c in order),
        node_memory_bytes=tuple(table.node_memory_bytes[c] for c in order),
        tp_degree=tuple(table.tp_degree[c] for c in order),
        sources=tuple(table.sources[c] for c in order),
        provenance=tuple(table.provenance[c] for c in order),
        throughput=np.ascontiguousarray(table.throughput[order]),
        limited_by=np.ascontiguousarray(table.limited_by[order]),
    )


def check_table(table: ProfileTable) -> None:
    """Rules of a build beyond those of the table itself; raises ValidationFailed with every violation."""
    checks = Checks("profile_table", f"{table.model} {table.phase}")
    checks.require(table.num_layers <= MAX_LAYERS, f"at most {MAX_LAYERS} layers", table.num_layers)
    checks.positive(checkpoint_bytes=table.checkpoint_bytes)
    for name, memory, degree in zip(table.configurations, table.node_memory_bytes, table.tp_degree, strict=True):
        checks.require(memory > 0, f"node_memory_bytes of {name} must be above zero", memory)
        checks.require(degree >= 1, f"tp_degree of {name} must be at least 1", degree)
    known = np.isin(table.limited_by, [code.value for code in LimitedBy])
    checks.require(bool(known.all()), "limited_by must hold codes of LimitedBy only")
    checks.raise_if_any()


def tree_of(table: ProfileTable, options: BuildOptions) -> CombinationTree:
    """Every combination of the table within N_max and rho."""
    ratio = options.memory_ratio
    return build_tree(
        max_nodes=options.max_nodes,
        num_configurations=len(table.configurations),
        node_memory=np.array(table.node_memory_bytes, dtype=np.float64),
        memory_limit=np.inf if ratio is None else ratio * table.checkpoint_bytes,
    )


def build_template_set(table: ProfileTable, options: BuildOptions) -> BuildResult:
    """Solve every combination of ``table`` in this process and reduce; see ``finish_template_set``."""
    check_table(table)
    ordered = in_name_order(table)
    tree = tree_of(ordered, options)
    return finish_template_set(ordered, options, tree, solve_tree(ordered.throughput, tree, options.latency_split))


def finish_template_set(
    table: ProfileTable, options: BuildOptions, tree: CombinationTree, best: Solutions
) -> BuildResult:
    """Choose what is kept, check every kept placement against the table, and write it in columns.

    ``best``: optimum by id, placements completed in place. Rows kept: combinations that nothing smaller replaces;
    and, since a plan may be limited to stock vLLM, vLLM-realisable placements that no smaller vLLM-realisable ones
    replace. Where the best placement is realisable it is one row. Raises SolverFault if a placement is wrong.
    """
    degrees = np.array(table.tp_degree, dtype=np.int64)
    vllm = solve_vllm(table.throughput, tree, options.latency_split, degrees)
    complete_placements(table.throughput, tree, best)
    wanted = _requested(table, options, tree)
    verdict = _verdict(tree, options, best.throughput)
    keep_best = (verdict == KEPT) | (wanted & (best.throughput > 0))
    keep_vllm = (_verdict(tree, options, vllm.throughput) == KEPT) | (wanted & (vllm.throughput > 0))
    same = vllm.throughput == best.throughput
    hybrid = np.flatnonzero(keep_best & ~same)
    realisable = np.flatnonzero(keep_vllm | (keep_best & same & (best.throughput > 0)))
    rows = _Rows.of(tree, (hybrid, best, HYBRID), (realisable, vllm, VLLM))
    counts = _count(tree, verdict, num_on_request=int((keep_best & (verdict != KEPT)).sum()), num_rows=len(rows.slots))
    return BuildResult(templates=rows.as_set(table, options.latency_split), counts=counts)


def _verdict(tree: CombinationTree, options: BuildOptions, values: NDArray[np.float64]) -> NDArray[np.uint8]:
    verdict = np.zeros(tree.total, dtype=np.uint8)
    if options.reduction is Reduction.NONE:
        verdict[values > 0] = KEPT
        return verdict
    tables = pattern_tables(tree.max_nodes)
    splits = (tables.entry, tables.split_ptr, tables.split_block, tables.split_rest)
    chain = options.reduction is Reduction.CHAIN
    mark_reducible(tree.slots, tree.child, tree.offsets, splits, values, REDUCTION_TOLERANCE, chain, verdict)
    return verdict


def irreducible_ids(tree: CombinationTree, values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Ids of what one or two smaller combinations cannot replace. ``values``: optimum by id."""
    return np.flatnonzero(_verdict(tree, BuildOptions(max_nodes=tree.max_nodes), values) == KEPT)


def _requested(table: ProfileTable, options: BuildOptions, tree: CombinationTree) -> NDArray[np.bool_]:
    wanted = np.zeros(tree.total, dtype=np.bool_)
    index = {name: c for c, name in enumerate(table.configurations)}
    for combination in options.keep:
        if combination.num_nodes <= tree.max_nodes and all(name in index for name, _ in combination.counts):
            found = tree.id_of([index[name] for name in combination])
            if found > 0:
                wanted[found] = True
    return wanted


def _count(tree: CombinationTree, verdict: NDArray[np.uint8], *, num_on_request: int, num_rows: int) -> TemplateCounts:
    by_code = np.bincount(verdict[1:], minlength=4)
    kept = int(by_code[KEPT])
    return TemplateCounts(
        num_possible=tree.total - 1 + tree.num_beyond_limit,
        num_beyond_memory=tree.num_beyond_limit,
        num_infeasible=int(by_code[INFEASIBLE]),
        num_replaced_by_one=int(by_code[REPLACED_BY_ONE]),
        num_replaced_by_two=int(by_code[REPLACED_BY_TWO]),
        num_kept=kept,
        num_kept_on_request=num_on_request,
        num_vllm_extra=num_rows - kept - num_on_request,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Chosen rows, in library order."""

    slots: NDArray[np.int16]
    found: Solutions
    runtime: NDArray[np.uint8]

    @classmethod
    def of(cls, tree: CombinationTree, *parts: tuple[NDArray[np.int64], Solutions, int]) -> _Rows:
        """Join (ids, solutions by id, runtime code), sorted by id and runtime."""
        ids = np.concatenate([chosen for chosen, _, _ in parts])
        runtime = np.concatenate([np.full(len(chosen), code, dtype=np.uint8) for chosen, _, code in parts])
        order = np.lexsort((runtime, ids))

        found = Solutions(
            throughput=np.concatenate([found.throughput[chosen] for chosen, found, _ in parts])[order],
            slot_stage=np.concatenate([found.slot_stage[chosen] for chosen, found, _ in parts])[order],
            stage_layers=np.concatenate([found.stage_layers[chosen] for chosen, found, _ in parts])[order],
            stage_quanta=np.concatenate([found.stage_quanta[chosen] for chosen, found, _ in parts])[order],
        )
        return cls(slots=tree.slots[ids[order]], found=found, runtime=runtime[order])

    def as_set(self, table: ProfileTable, split: LatencySplit) -> TemplateSet:
        """Check every row against the table and write the columns."""
        equal = split is LatencySplit.EQUAL
        check_solutions(table.throughput, self.slots, self.found, equal_shares=equal)
        count = len(table.configurations)
        node_counts = np.stack([(self.slots == c).sum(axis=1) for c in range(count)], axis=1).astype(np.int16)
        return TemplateSet(
            model=table.model,
            phase=table.phase,
            slo=table.slo,
            latency_split=split,
            num_layers=table.num_layers,
            total_quanta=table.throughput.shape[2],
            configurations=table.configurations,
            sources=table.sources,
            provenance=table.provenance,
            profile_version=table.version,
            node_counts=node_counts,
            throughput=self.found.throughput,
            runtime=self.runtime,
            limited_by=self._limited_by(table),
            num_stages=(self.found.stage_layers > 0).sum(axis=1).astype(np.uint8),
            slot_stage=np.where(self.slots >= 0, self.found.slot_stage, -1).astype(np.int8),
            stage_layers=self.found.stage_layers,
            stage_quanta=self.found.stage_quanta,
        )

    def _limited_by(self, table: ProfileTable) -> NDArray[np.uint8]:
        """Code of the slowest stage's cell (first of equals), of its first node in configuration order."""
        index = np.arange(len(self.slots))
        slowest = stage_throughputs(table.throughput, self.slots, self.found).argmin(axis=1)
        node = (self.found.slot_stage == slowest[:, None]).argmax(axis=1)
        layers, quanta = self.found.stage_layers[index, slowest], self.found.stage_quanta[index, slowest]
        return np.asarray(table.limited_by[self.slots[index, node], layers - 1, quanta - 1])
