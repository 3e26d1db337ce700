"""Regression gate of the template library: how a version differs from the one before, and whether that is too much.

Owns the comparison and its limits; whether a refusal is overruled is the caller's matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.names import NodeConfigurationId
from coral_tasks.domain.template_set import TemplateSet
from coral_tasks.domain.validation import Checks
from coral_tasks.storage.library import Library

MAX_NAMED: Final = 20
"""Templates named one by one in a difference; the counts are complete."""

SetName = tuple[str, str, str]
"""Model, phase and latency limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionLimits:
    """What a new version may change without being told to.

    ``max_lost_share``: share of a set's templates that may vanish. ``max_shift``: largest change, up or down, of the
    median throughput of the templates with one GPU type, as a share (0.25 = 25 %). ``may_drop_sets``: whether a
    (model, phase, latency limit) may vanish.
    """

    max_lost_share: float = 0.5
    max_shift: float = 0.25
    may_drop_sets: bool = False

    def __post_init__(self) -> None:
        checks = Checks("regression_limits")
        for name in ("max_lost_share", "max_shift"):
            value = getattr(self, name)
            checks.require(math.isfinite(value) and value >= 0, f"{name} must be finite and not negative", value)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Change of throughput, new over old, over the templates in both versions that use one GPU type."""

    gpu_type: str
    num_templates: int
    median: float
    smallest: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDifference:
    """One (model, phase, latency limit) in two versions; a count of 0 on one side says that it is missing there.

    ``tighter``: whether it is compared as a tighter set, which the gate does not judge: no plan rests on it.
    """

    name: SetName
    num_before: int
    num_after: int
    num_gained: int
    num_lost: int
    gained: tuple[str, ...]
    lost: tuple[str, ...]
    shifts: tuple[Shift, ...]
    tighter: bool = False

    @property
    def changed(self) -> bool:
        """Whether anything differs."""
        return bool(self.num_gained or self.num_lost or any((s.smallest, s.largest) != (1.0, 1.0) for s in self.shifts))


def compare_libraries(before: Library, after: Library) -> tuple[SetDifference, ...]:
    """Differences of every set in either version that plans are made of, sorted by name."""
    return compare_sets(before.sets, after.sets)


def compare_sets(
    before: Sequence[TemplateSet], after: Sequence[TemplateSet], *, tighter: bool = False
) -> tuple[SetDifference, ...]:
    """Differences of every set on either side, sorted by name. ``tighter``: they are tighter sets."""
    old = {_name(one): one for one in before}
    new = {_name(one): one for one in after}
    names = sorted({*old, *new})
    return tuple(replace(_compare(name, old.get(name), new.get(name)), tighter=tighter) for name in names)


def reasons_against(differences: Sequence[SetDifference], limits: RegressionLimits) -> tuple[str, ...]:
    """Every limit that is broken, in words; empty if the new version may be published."""
    found: list[str] = []
    for one in differences:
        label = " ".join(one.name)
        if one.num_before and not one.num_after:
            if not limits.may_drop_sets:
                found.append(f"{label}: all {one.num_before} templates are gone")
            continue
        lost = one.num_lost / one.num_before if one.num_before else 0.0
        if lost > limits.max_lost_share:
            found.append(f"{label}: {lost:.0%} of the templates are lost, more than {limits.max_lost_share:.0%}")
        for shift in one.shifts:
            if abs(shift.median - 1.0) > limits.max_shift:
                text = f"throughput with {shift.gpu_type} moved by {shift.median - 1.0:+.1%} in the median"
                found.append(f"{label}: {text}, more than {limits.max_shift:.0%}")
    return tuple(found)


def _name(templates: TemplateSet) -> SetName:
    limit_ms = templates.slo.limit_s(templates.phase) * 1e3
    return (str(templates.model), templates.phase.value, f"{limit_ms:g}ms")


def _compare(name: SetName, before: TemplateSet | None, after: TemplateSet | None) -> SetDifference:
    old = {} if before is None else {template: row for row, template in enumerate(before.ids)}
    new = {} if after is None else {template: row for row, template in enumerate(after.ids)}
    gained, lost = [t for t in new if t not in old], [t for t in old if t not in new]
    common = [(row, new[t]) for t, row in old.items() if t in new]
    shifts: tuple[Shift, ...] = ()
    if before is not None and after is not None and common:
        rows = np.array(common)
        ratio = after.throughput[rows[:, 1]] / before.throughput[rows[:, 0]]
        shifts = _shifts(before.configurations, before.node_counts[rows[:, 0]], ratio)
    return SetDifference(
        name=name,
        num_before=len(old),
        num_after=len(new),
        num_gained=len(gained),
        num_lost=len(lost),
        gained=tuple(gained[:MAX_NAMED]),
        lost=tuple(lost[:MAX_NAMED]),
        shifts=shifts,
    )


def _shifts(
    configurations: Sequence[NodeConfigurationId], counts: NDArray[np.int16], ratio: NDArray[np.float64]
) -> tuple[Shift, ...]:
    gpu_types = [name.rpartition("x")[0] or name for name in configurations]
    found = []
    for gpu_type in sorted(set(gpu_types)):
        columns = [c for c, name in enumerate(gpu_types) if name == gpu_type]
        values = ratio[(counts[:, columns] > 0).any(axis=1)]
        if values.size:
            found.append(
                Shift(
                    gpu_type=gpu_type,
                    num_templates=len(values),
                    median=float(np.median(values)),
                    smallest=float(values.min()),
                    largest=float(values.max()),
                )
            )
    return tuple(found)
