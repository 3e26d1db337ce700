"""Measured source: rows of the runner, the fit of layers against the constant part, and interpolation between points.

Owns the row of a measurement and what may be made of it. It starts nothing (``runner`` does) and never invents a
point: failed and out-of-memory rows stay rows and take no part in a fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.domain.names import ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.domain.validation import Checks
from coral_tasks.profiling.costs import LayerCosts, Work

STATUSES = ("ok", "oom", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One point of one engine: ``sequences`` of ``tokens`` each, on a model cut to ``num_layers`` layers.

    Prefill: one pass over prompts of ``tokens``; decode: one step behind ``tokens`` of context. ``median_s`` and
    ``spread_s`` (largest minus smallest of the repeats) are None unless ``status`` is "ok". ``measured_at``: ISO 8601.
    """

    model: ModelId
    configuration: NodeConfigurationId
    phase: Phase
    num_layers: int
    tp_degree: int
    sequences: int
    tokens: int
    status: str
    median_s: float | None
    spread_s: float | None
    num_repeats: int
    detail: str
    vllm: str
    torch: str
    driver: str
    device: str
    measured_at: str
    code_version: str

    def __post_init__(self) -> None:
        checks = Checks("measurements", f"{self.model} {self.configuration} {self.phase} {self.num_layers} layers")
        checks.positive(
            num_layers=self.num_layers, tp_degree=self.tp_degree, sequences=self.sequences, tokens=self.tokens
        )
        checks.require(self.status in STATUSES, f"status must be one of {', '.join(STATUSES)}", self.status)
        timed = self.median_s is not None
        checks.require(timed == (self.status == "ok"), "only ok rows carry a time, and every one does", self.median_s)
        if self.median_s is not None:
            checks.positive(median_s=self.median_s)
        if self.spread_s is not None:
            checks.not_negative(spread_s=self.spread_s)
        checks.not_negative(num_repeats=self.num_repeats)
        checks.require(_has_zone(self.measured_at), "measured_at must be an ISO time with a zone", self.measured_at)
        checks.raise_if_any()

    @property
    def moment(self) -> datetime:
        """When the run was."""
        return datetime.fromisoformat(self.measured_at)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """From a record of the measurement contract."""
        return cls(**{**record, "phase": Phase(record["phase"])})


def _has_zone(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def newest_runs(runs: Iterable[Sequence[MeasuredRow]]) -> tuple[MeasuredRow, ...]:
    """Of each model and configuration the rows of the latest run that timed anything, in the order given.

    ``runs``: rows of one file each. Two runs are never fitted together: driver, engine or machine may have changed.
    """
    found = tuple(runs)
    newest: dict[tuple[str, str], tuple[datetime, int]] = {}
    for number, rows in enumerate(found):
        for row in rows:
            if row.status == "ok":
                key = (row.model, row.configuration)
                newest[key] = max(newest.get(key, (row.moment, number)), (row.moment, number))
    return tuple(
        row
        for number, rows in enumerate(found)
        for row in rows
        if newest.get((row.model, row.configuration), (None, -1))[1] == number
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFit:
    """Stage time = ``constant_s`` + layers x ``layer_s`` at one point; ``residual``: largest relative miss."""

    model: ModelId
    configuration: NodeConfigurationId
    phase: Phase
    sequences: int
    tokens: int
    constant_s: float
    layer_s: float
    residual: float
    num_layer_counts: int
    provenance: str

    def as_row(self) -> dict[str, Any]:
        """Plain values for tables and JSON."""
        return {**asdict(self), "phase": self.phase.value}


def fit_measurements(rows: Iterable[MeasuredRow]) -> tuple[PointFit, ...]:
    """Least squares over layer counts for every point that is ok at two or more of them.

    A cost per layer or a constant part below zero is noise of points that take no time; it is set to zero and the other
    refitted, and the residual says how well that holds. Sorted by model, configuration, phase, sequences, tokens.
    """
    groups: dict[tuple[str, str, Phase, int, int], list[MeasuredRow]] = {}
    for row in rows:
        if row.status == "ok":
            groups.setdefault((row.model, row.configuration, row.phase, row.sequences, row.tokens), []).append(row)
    return tuple(_fit(group) for _, group in sorted(groups.items()) if len({row.num_layers for row in group}) >= 2)


def _fit(rows: Sequence[MeasuredRow]) -> PointFit:
    layers = np.asarray([row.num_layers for row in rows], dtype=np.float64)
    seconds = np.asarray([row.median_s for row in rows], dtype=np.float64)
    slope, constant = (float(value) for value in np.polyfit(layers, seconds, 1))
    if constant < 0:
        constant, slope = 0.0, float((seconds * layers).sum() / (layers * layers).sum())
    if slope < 0:
        constant, slope = float(seconds.mean()), 0.0
    residual = float(np.abs((constant + slope * layers) / seconds - 1).max())
    first = rows[0]
    return PointFit(
        model=first.model,
        configuration=first.configuration,
        phase=first.phase,
        sequences=first.sequences,
        tokens=first.tokens,
        constant_s=constant,
        layer_s=slope,
        residual=residual,
        num_layer_counts=len(set(layers.tolist())),
        provenance=(
            f"vLLM {first.vllm}, torch {first.torch}, {first.device} {first.driver}".strip()
            + f", {first.measured_at}, code {first.code_version}"
        ),
    )


@dataclass(slots=True, kw_only=True)
class MeasuredSource:
    """CostSource over fitted measurements, by model, configuration and phase."""

    fits: Mapping[tuple[ModelId, NodeConfigurationId, Phase], tuple[PointFit, ...]]
    source: ProfileSource = field(default=ProfileSource.MEASURED)

    @classmethod
    def of(cls, rows: Iterable[MeasuredRow]) -> MeasuredSource:
        """From rows of the runner."""
        fits: dict[tuple[ModelId, NodeConfigurationId, Phase], list[PointFit]] = {}
        for fit in fit_measurements(rows):
            fits.setdefault((fit.model, fit.configuration, fit.phase), []).append(fit)
        return cls(fits={key: tuple(found) for key, found in fits.items()})

    def costs(self, work: Work) -> LayerCosts | None:
        """Interpolated time of every batch; None if the node was not measured with this model in this phase.

        Between measured points linearly; beyond them along the last line, and marked as extrapolated.
        """
        fits = self.fits.get((work.model.id, work.configuration.id, work.phase))
        if not fits:
            return None
        sequences = np.asarray(work.sequences, dtype=np.float64)
        layer, outside = interpolate(fits, "layer_s", sequences, work.context_tokens)
        constant, _ = interpolate(fits, "constant_s", sequences, work.context_tokens)
        worst = max(fit.residual for fit in fits)
        return LayerCosts(
            layer_s=np.repeat(layer[:, None], work.model.num_layers, axis=1),
            constant_s=constant,
            extrapolated=outside,
            source=ProfileSource.MEASURED,
            provenance=f"{fits[0].provenance}; {len(fits)} points, largest residual {worst:.1%}",
        )


def interpolate(
    fits: Sequence[PointFit], name: str, sequences: NDArray[np.float64], tokens: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Value of ``name`` at each number of sequences and one length, and whether that leaves the measured range.

    Linear in sequences for each measured length, then linear in length. Along an axis with one measured point the
    value is that point's, and any other place on the axis counts as outside. Never below zero.
    """
    lengths = sorted({fit.tokens for fit in fits})
    columns, outside = [], np.zeros(len(sequences), dtype=bool)
    for length in lengths:
        line = sorted((fit.sequences, float(getattr(fit, name))) for fit in fits if fit.tokens == length)
        xs, ys = (np.asarray(part, dtype=np.float64) for part in zip(*line, strict=True))
        columns.append(_linear(xs, ys, sequences))
        outside |= (sequences < xs[0]) | (sequences > xs[-1])
    grid = np.stack(columns)
    axis = np.asarray(lengths, dtype=np.float64)
    values = np.asarray([_linear(axis, grid[:, i], np.asarray([tokens]))[0] for i in range(len(sequences))])
    beyond = tokens < axis[0] or tokens > axis[-1]
    return np.maximum(values, 0.0), outside | beyond


def _linear(xs: NDArray[np.float64], ys: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Piecewise linear through (xs, ys), continued along the first and last piece."""
    if len(xs) == 1:
        return np.full(len(at), ys[0])
    piece = np.clip(np.searchsorted(xs, at, side="right") - 1, 0, len(xs) - 2)
    slope = (ys[piece + 1] - ys[piece]) / (xs[piece + 1] - xs[piece])
    return np.asarray(ys[piece] + slope * (at - xs[piece]))


def rows_from_records(records: Iterable[Mapping[str, Any]], table: str) -> tuple[MeasuredRow, ...]:
    """Rows of a file's records. Raises ValidationFailed with every broken record."""
    rows: list[MeasuredRow] = []
    violations: list[Violation] = []
    for number, record in enumerate(records, start=1):
        try:
            rows.append(MeasuredRow.from_record(record))
        except (TypeError, ValueError) as error:
            violations.append(Violation(table=table, row=f"row {number}", value="", rule=str(error)))
        except ValidationFailed as failure:
            violations += failure.violations
    if violations:
        raise ValidationFailed(violations)
    return tuple(rows)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of the child's report that are whole; a line cut off by a crash is dropped."""
    import json

    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
