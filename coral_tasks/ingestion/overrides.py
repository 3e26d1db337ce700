"""Values that a person set for one run, laid over a fetched batch before the gate sees it.

Owns which row an override names. Judges no value: the gate does, as for any batch. A batch that cannot be read is left
as it is, so that the gate names its flaws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.ingestion.batch import SourceBatch, parquet_bytes
from data_contracts.coerce import coerce
from data_contracts.registry import contract_of

KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "demand": ("model", "origin"),
    "prices": ("region", "configuration", "market"),
    "availability": ("region", "configuration", "market"),
}
"""Columns that name rows; every other column of an override is a new value."""


def with_overrides(batch: SourceBatch, overrides: Sequence[Mapping[str, Any]]) -> SourceBatch:
    """The batch with the values of ``overrides`` in every row that their key columns name; its source says so.

    An override without a market (or origin) holds for all. Raises ValidationFailed for one that names no row.
    """
    raw = batch.raw().table if overrides else None
    if raw is None:
        return batch
    table, flaws = coerce(contract_of(batch.table), raw)
    if table is None or any(not flaw.warning for flaw in flaws):
        return batch
    rows: list[dict[str, Any]] = table.to_pylist()
    lost = [violation for one in overrides if (violation := _apply(batch.table, rows, one)) is not None]
    if lost:
        raise ValidationFailed(lost)
    data = parquet_bytes(contract_of(batch.table).table(rows))
    source = f"{batch.source}, with {len(overrides)} override{'' if len(overrides) == 1 else 's'} of this run"
    return replace(batch, data=data, suffix=".parquet", source=source)


def _apply(table: str, rows: Sequence[dict[str, Any]], override: Mapping[str, Any]) -> Violation | None:
    keys = {name: override[name] for name in KEYS[table] if name in override}
    values = {name: value for name, value in override.items() if name not in KEYS[table]}
    found = [row for row in rows if all(row.get(name) == wanted for name, wanted in keys.items())]
    for row in found:
        row.update(values)
    if found:
        return None
    wanted = " ".join(str(value) for value in keys.values())
    known = sorted({" ".join(str(row.get(name)) for name in keys) for row in rows})
    shown = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    return Violation(table=f"override of {table}", row="", value=wanted, rule=f"no such row; there are: {shown}")
