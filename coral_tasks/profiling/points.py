"""End-to-end points of aggregated vLLM serving: reading and checking them, and which half the fit may see.

Owns the columns of such a file. It predicts nothing.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from coral_tasks.domain.errors import StorageFault, ValidationFailed, Violation

MEASURED_FOLDER = Path(__file__).parent / "data" / "measured"
POINTS_FILE = MEASURED_FOLDER / "vllm_agg_points.csv"
REQUIRED = ("id", "model", "system", "isl", "osl", "concurrency", "tp", "ttft_ms", "tpot_ms")
OPTIONAL = ("precision", "gemm_quant", "moe_quant", "moe_tp", "ep", "pp", "dp", "flag")


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatedPoint:
    """One measured serving run: ``concurrency`` requests of ``isl`` prompt and ``osl`` output tokens in flight.

    ``ttft_s``, ``tpot_s``: means over the run. ``system``: GPU system in aiconfigurator's words. ``flag``: why the row
    is doubtful, "" if it is not. ``moe_tp``, ``ep``: None for dense models.
    """

    id: str
    model: str
    system: str
    precision: str
    gemm_quant: str
    isl: int
    osl: int
    concurrency: int
    tp: int
    moe_tp: int | None
    ep: int | None
    ttft_s: float
    tpot_s: float
    flag: str

    @property
    def configuration_key(self) -> str:
        """What was run, without the run: repeats of one configuration share it."""
        parts = (self.model, self.system, self.tp, self.moe_tp, self.ep, self.isl, self.osl, self.concurrency)
        return "|".join(str(part) for part in parts)


def fit_half(points: Sequence[AggregatedPoint]) -> frozenset[str]:
    """Configuration keys that a fit may see: of each model and system, the first half by SHA-256 of the key.

    By configuration, so that a repeat never stands on both sides; by model and system, so that each has both sides.
    Flagged points are in neither half.
    """
    groups: dict[tuple[str, str], set[str]] = {}
    for point in points:
        if not point.flag:
            groups.setdefault((point.model, point.system), set()).add(point.configuration_key)
    chosen: set[str] = set()
    for keys in groups.values():
        ordered = sorted(keys, key=lambda key: hashlib.sha256(key.encode()).hexdigest())
        chosen.update(ordered[: (len(ordered) + 1) // 2])
    return frozenset(chosen)


@cache
def fitted_keys() -> frozenset[str]:
    """Configurations of the project's own file that the fits have seen; no report may count them."""
    return fit_half(read_points())


def read_points(path: Path = POINTS_FILE) -> tuple[AggregatedPoint, ...]:
    """Points in the file's order.

    Raises StorageFault if the file cannot be read, ValidationFailed naming every broken row and what is wrong with it.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns, rows = reader.fieldnames or (), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        message = f"points file {path} cannot be read: {error}"
        raise StorageFault(message) from error
    _require_columns(path.name, columns)
    violations = _ragged(path.name, rows)
    points = [_point(path.name, line, row, violations) for line, row in enumerate(rows, start=2)]
    violations += _repeated_ids(path.name, points)
    if not rows:
        violations.append(Violation(table=path.name, row="", value="", rule="must hold at least one point"))
    if violations:
        raise ValidationFailed(violations)
    return tuple(points)


def _require_columns(table: str, columns: Sequence[str]) -> None:
    missing = [column for column in REQUIRED if column not in columns]
    twice = sorted({column for column in columns if columns.count(column) > 1})
    needs = f"needs the columns {', '.join(REQUIRED)}"
    violations = [Violation(table=table, row="header", value=f"without {', '.join(missing)}", rule=needs)] * bool(
        missing
    )
    violations += [Violation(table=table, row="header", value=one, rule="column is there twice") for one in twice]
    if violations:
        raise ValidationFailed(violations)


def _ragged(table: str, rows: Sequence[dict[str, str | None]]) -> list[Violation]:
    """Rows with more or fewer cells than the header: their cells may stand in the wrong columns."""
    return [
        Violation(table=table, row=f"line {line}", value="", rule="must have as many cells as the header")
        for line, row in enumerate(rows, start=2)
        if None in row or None in row.values()
    ]


def _repeated_ids(table: str, points: Sequence[AggregatedPoint]) -> list[Violation]:
    seen: set[str] = set()
    found = []
    for line, point in enumerate(points, start=2):
        if point.id in seen:
            found.append(Violation(table=table, row=f"line {line}", value=point.id, rule="id is listed twice"))
        seen.add(point.id)
    return found


def _point(table: str, line: int, row: dict[str, str | None], violations: list[Violation]) -> AggregatedPoint:
    def reject(column: str, rule: str) -> None:
        violations.append(Violation(table=table, row=f"line {line}", value=repr(row.get(column)), rule=rule))

    def number(column: str) -> float:
        try:
            value = float(row.get(column) or "")
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            reject(column, f"{column} must be a finite number above zero")
            return 1.0
        return value

    def count(column: str) -> int:
        value = number(column)
        if not value.is_integer():
            reject(column, f"{column} must be a whole number")
        return max(1, round(value))

    def text(column: str) -> str:
        return (row.get(column) or "").strip()

    for column in ("id", "model", "system"):
        if not text(column):
            reject(column, f"{column} must not be empty")
    return AggregatedPoint(
        id=text("id"),
        model=text("model"),
        system=text("system"),
        precision=text("precision"),
        gemm_quant=text("gemm_quant"),
        isl=count("isl"),
        osl=count("osl"),
        concurrency=count("concurrency"),
        tp=count("tp"),
        moe_tp=count("moe_tp") if text("moe_tp") else None,
        ep=count("ep") if text("ep") else None,
        ttft_s=number("ttft_ms") / 1e3,
        tpot_s=number("tpot_ms") / 1e3,
        flag=text("flag"),
    )
