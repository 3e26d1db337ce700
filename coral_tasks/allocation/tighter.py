"""The same problem with the templates of a tighter SLO in place of some models' own (design 3.3).

Owns the exchange of template rows and what of the running fleet, or of a plan, carries over to the new rows. Solves
nothing and tells nothing; whether a library holds such templates is the caller's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.counts import Counts, counts_from_dict
from coral_tasks.allocation.problem import PHASES, AllocationProblem, Running, TemplateArrays
from coral_tasks.domain.names import ModelId, NodeConfigurationId, TemplateId
from coral_tasks.domain.template_set import TemplateSet
from coral_tasks.domain.templates import ServingTemplate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TightenedProblem:
    """``problem`` with rows exchanged; ``counts_of`` carries counts of the problem it was made from over to them."""

    problem: AllocationProblem
    _exchange: _Exchange

    def counts_of(self, counts: Counts) -> Counts:
        """Counts on the new rows; what the tighter templates do not hold is left out."""
        return counts_from_dict(self._exchange.carried(counts.as_dict()))


def with_tighter(
    problem: AllocationProblem, tighter: Sequence[TemplateSet], models: Sequence[ModelId]
) -> TightenedProblem:
    """``problem`` in which ``models`` are served by their sets in ``tighter`` alone; all other models stay as they are.

    Running instances of such a model are the same machines under a template id that names another SLO: where the
    tighter set has their node combination with the same runtime they count as running that row, so that keeping them
    is no start and costs no start-up charge, even if its layers lie otherwise. Where it has not, because the
    combination is too slow or smaller ones replace it, they cannot be kept: what starts instead is charged like every
    start. Templates that use a configuration unknown to ``problem`` are left out, and a note says so.
    """
    exchange = _Exchange.of(problem, tighter, set(models))
    running = problem.running
    held = exchange.carried(
        {(int(t), int(z)): int(n) for t, z, n in zip(running.template, running.zone, running.count, strict=True)}
    )
    rows = np.array(sorted((t, z, n) for (t, z), n in held.items()), dtype=np.int64).reshape(-1, 3)
    changed = replace(
        problem,
        templates=exchange.templates(),
        startable=exchange.startable(),
        running=Running(template=rows[:, 0], zone=rows[:, 1], count=rows[:, 2]),
        notes=(*problem.notes, *exchange.notes()),
    )
    return TightenedProblem(problem=changed, _exchange=exchange)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Exchange:
    """Rows of the new problem: ``kept`` rows of the old one, then the rows of each block."""

    old: AllocationProblem
    kept: NDArray[np.int64]
    blocks: tuple[_Block, ...]

    @classmethod
    def of(cls, problem: AllocationProblem, tighter: Sequence[TemplateSet], models: set[ModelId]) -> _Exchange:
        replaced = np.array([name in models for name in problem.models], dtype=np.bool_)
        kept = np.flatnonzero(~replaced[problem.templates.model])
        wanted = [one for one in tighter if one.model in models and one.model in problem.models]
        wanted.sort(key=lambda one: (problem.models.index(one.model), PHASES.index(one.phase)))
        blocks, first = [], len(kept)
        for one in wanted:
            blocks.append(_Block.of(problem, one, first))
            first += len(blocks[-1].rows)
        return cls(old=problem, kept=kept, blocks=tuple(blocks))

    def templates(self) -> TemplateArrays:
        """The template columns of the new problem."""
        old = self.old.templates
        lookup = _Lookup(old=old, kept=self.kept, blocks=self.blocks)
        return TemplateArrays(
            model=np.concatenate([old.model[self.kept], *(one.filled(one.model, np.int32) for one in self.blocks)]),
            phase=np.concatenate([old.phase[self.kept], *(one.filled(one.phase, np.int8) for one in self.blocks)]),
            runtime=np.concatenate([old.runtime[self.kept], *(one.runtime for one in self.blocks)]),
            nodes=np.concatenate([old.nodes[self.kept], *(one.nodes for one in self.blocks)]),
            throughput=np.concatenate(
                [old.throughput[self.kept], *(one.templates.throughput[one.rows] for one in self.blocks)]
            ),
            template_id=lookup.template_id,
            serving_template=lookup.serving_template,
        )

    def startable(self) -> NDArray[np.bool_] | None:
        """Which rows may start: as before, and every tighter template."""
        if self.old.startable is None:
            return None
        new = np.ones(sum(len(one.rows) for one in self.blocks), dtype=np.bool_)
        return np.concatenate([self.old.startable[self.kept], new])

    def carried(self, counts: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
        """(old row, zone) → count as (new row, zone) → count."""
        total: dict[tuple[int, int], int] = {}
        for (row, zone), count in counts.items():
            new = self._row_of(row)
            if new is not None:
                total[new, zone] = total.get((new, zone), 0) + count
        return total

    def _row_of(self, row: int) -> int | None:
        position = int(np.searchsorted(self.kept, row))
        if position < len(self.kept) and self.kept[position] == row:
            return position
        old = self.old.templates
        for block in self.blocks:
            if (block.model, block.phase) == (int(old.model[row]), int(old.phase[row])):
                return block.find(old.nodes[row], int(old.runtime[row]))
        return None

    def notes(self) -> tuple[str, ...]:
        """What was left out."""
        return tuple(
            f"{block.templates.model}: tighter templates for {block.templates.phase.value} that use"
            f" {', '.join(block.unknown)} are left out, since the plan knows no price of it"
            for block in self.blocks
            if block.unknown
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """The usable rows of one tighter set, from row ``first`` of the new problem on."""

    templates: TemplateSet
    model: int
    phase: int
    first: int
    rows: NDArray[np.int64]
    nodes: NDArray[np.int16]
    unknown: tuple[NodeConfigurationId, ...]

    @classmethod
    def of(cls, problem: AllocationProblem, one: TemplateSet, first: int) -> _Block:
        column = {name: c for c, name in enumerate(problem.configurations)}
        known = np.array([name in column for name in one.configurations], dtype=np.bool_)
        rows = np.flatnonzero(~(one.node_counts[:, ~known] > 0).any(axis=1))
        nodes = np.zeros((len(rows), len(column)), dtype=np.int16)
        names = [name for name in one.configurations if name in column]
        nodes[:, [column[name] for name in names]] = one.node_counts[rows][:, known]
        return cls(
            templates=one,
            model=problem.models.index(one.model),
            phase=PHASES.index(one.phase),
            first=first,
            rows=rows,
            nodes=nodes,
            unknown=tuple(one.configurations[c] for c in np.flatnonzero(~known & one.node_counts.any(axis=0))),
        )

    @property
    def runtime(self) -> NDArray[np.int8]:
        return self.templates.runtime[self.rows].astype(np.int8)

    def filled[Kind: np.generic](self, value: int, kind: type[Kind]) -> NDArray[Kind]:
        return np.full(len(self.rows), value, dtype=kind)

    def find(self, nodes: NDArray[np.int16], runtime: int) -> int | None:
        found = np.flatnonzero((self.nodes == nodes).all(axis=1) & (self.runtime == runtime))
        return self.first + int(found[0]) if len(found) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Lookup:
    """From a row of the new problem to its template."""

    old: TemplateArrays
    kept: NDArray[np.int64]
    blocks: tuple[_Block, ...]

    def _place(self, row: int) -> tuple[TemplateSet, int]:
        block = next(one for one in reversed(self.blocks) if row >= one.first)
        return block.templates, int(block.rows[row - block.first])

    def template_id(self, row: int) -> TemplateId:
        """Id of a row."""
        if row < len(self.kept):
            return self.old.template_id(int(self.kept[row]))
        templates, local = self._place(row)
        return templates.id_of(local)

    def serving_template(self, row: int) -> ServingTemplate:
        """The row as a ServingTemplate."""
        if row < len(self.kept):
            return self.old.serving_template(int(self.kept[row]))
        templates, local = self._place(row)
        return templates.template(local)
