"""A plan as bare counts, and the solved result with its certificate. Owns the structure between solver and plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coral_tasks.allocation.columns import Columns
from coral_tasks.allocation.problem import AllocationProblem
from coral_tasks.domain.plan import SolveStatus


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counts:
    """``count[k]`` ≥ 1 instances of ``template[k]`` in ``zone[k]``; each pair once, sorted by (template, zone)."""

    template: NDArray[np.int64]
    zone: NDArray[np.int64]
    count: NDArray[np.int64]

    def as_dict(self) -> dict[tuple[int, int], int]:
        """(template, zone) → count."""
        pairs = zip(self.template.tolist(), self.zone.tolist(), self.count.tolist(), strict=True)
        return {(t, z): n for t, z, n in pairs}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """Counts with what is proved about them. Money in USD/h.

    ``objective``: what was minimised: cost + start-up, plus weighted shortage where the problem has weights.
    ``bound``: proved least objective (shortage as in the plan, where it is lexicographic). ``gap``: relative to the
    money spent, shortage apart. ``log``: one line for each step of the solve.
    """

    counts: Counts
    objective: float
    bound: float
    gap: float
    status: SolveStatus
    shortage_proved: bool
    log: tuple[str, ...] = ()


def counts_from_columns(columns: Columns, values: NDArray[np.int64]) -> Counts:
    """Kept and new instances of a pair added up."""
    total: dict[tuple[int, int], int] = {}
    for k in np.flatnonzero(values):
        key = (int(columns.template[k]), int(columns.zone[k]))
        total[key] = total.get(key, 0) + int(values[k])
    return counts_from_dict(total)


def counts_from_dict(total: dict[tuple[int, int], int]) -> Counts:
    """Counts of (template, zone) → number; zeros are left out."""
    keys = sorted(key for key, count in total.items() if count)
    return Counts(
        template=np.array([t for t, _ in keys], dtype=np.int64),
        zone=np.array([z for _, z in keys], dtype=np.int64),
        count=np.array([total[key] for key in keys], dtype=np.int64),
    )


def values_on_columns(columns: Columns, counts: Counts) -> NDArray[np.int64] | None:
    """The counts as column values, kept columns filled first; None where a pair has no column for all of it."""
    values = np.zeros(len(columns), dtype=np.int64)
    for (t, z), count in counts.as_dict().items():
        left = count
        rows = np.flatnonzero((columns.template == t) & (columns.zone == z))
        for k in rows[np.argsort(~columns.kept[rows], kind="stable")]:
            used = min(left, int(columns.upper[k]))
            values[k] = used
            left -= used
        if left:
            return None
    return values


def kept_of(problem: AllocationProblem, counts: Counts) -> NDArray[np.int64]:
    """How many of each count run already."""
    running = {
        (t, z): n
        for t, z, n in zip(
            problem.running.template.tolist(),
            problem.running.zone.tolist(),
            problem.running.count.tolist(),
            strict=True,
        )
    }
    return np.array([min(n, running.get(key, 0)) for key, n in counts.as_dict().items()], dtype=np.int64)
