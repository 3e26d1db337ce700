"""A batch: what a source delivered, as it came, with its age and completeness. Owns no rule on values.

A source is a callable ``(now) -> SourceBatch``. It raises SourceFault when the outside hung, refused or answered
half; an answer that is bad is not its matter but the gate's.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from data_contracts.files import RawTable, read_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBatch:
    """``data``: bytes of a CSV or Parquet file, kept as they came. ``suffix``: ".csv" or ".parquet".

    ``observed_at``: when the source says its content held. ``expected``, ``received``: parts (series, pages, pools)
    that a whole answer has and that came; ``notes`` says what is missing or was left out.
    """

    table: str
    data: bytes
    suffix: str
    source: str
    observed_at: datetime
    expected: int | None = None
    received: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def completeness(self) -> float | None:
        """Share of the expected parts that came; None if the source cannot tell."""
        if self.expected is None or self.received is None:
            return None
        return 1.0 if self.expected == 0 else self.received / self.expected

    def age_s(self, now: datetime) -> float:
        """Seconds between the content's time and ``now``."""
        return (now - self.observed_at).total_seconds()

    def raw(self) -> RawTable:
        """The batch as the gate takes it."""
        return read_bytes(self.data, f"{self.source}{'' if self.source.endswith(self.suffix) else self.suffix}")


class Source(Protocol):
    """Where a table comes from."""

    def __call__(self, now: datetime) -> SourceBatch:
        """Fetch the newest batch. Raises SourceFault, never for the content's own faults."""


def parquet_bytes(table: pa.Table) -> bytes:
    """One Parquet file of ``table``, the same bytes for the same table."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def batch_of(
    table_name: str,
    table: pa.Table,
    *,
    source: str,
    observed_at: datetime,
    expected: int | None = None,
    received: int | None = None,
    notes: tuple[str, ...] = (),
) -> SourceBatch:
    """A batch from a table that a source built itself."""
    return SourceBatch(
        table=table_name,
        data=parquet_bytes(table),
        suffix=".parquet",
        source=source,
        observed_at=observed_at,
        expected=expected,
        received=received,
        notes=notes,
    )
