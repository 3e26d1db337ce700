"""Contract of measured profile points: one row per model, configuration, phase, layer count and point.

Owns the Arrow schema, its documentation, and reading and writing of one file. Failed and out-of-memory points are rows
too, with a status and no time. Imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

NAME: Final = "measurements"

COLUMNS: Final[tuple[tuple[str, pa.DataType, bool, str, str], ...]] = (
    ("model", pa.string(), False, "", "served model"),
    ("configuration", pa.string(), False, "", "node configuration that was measured"),
    ("phase", pa.string(), False, "", "prefill or decode"),
    ("num_layers", pa.int32(), False, "layers", "layers that the model was cut to"),
    ("tp_degree", pa.int32(), False, "GPUs", "tensor parallel degree of the engine"),
    ("sequences", pa.int32(), False, "", "sequences in the batch"),
    ("tokens", pa.int32(), False, "tokens", "prompt of each sequence (prefill), or context behind the step (decode)"),
    ("status", pa.string(), False, "", "ok, oom or failed"),
    ("median_s", pa.float64(), True, "s", "median of the repeats; null unless ok"),
    ("spread_s", pa.float64(), True, "s", "largest minus smallest repeat; null unless ok"),
    ("num_repeats", pa.int32(), False, "", "repeats behind the median, warm-up excluded"),
    ("detail", pa.string(), False, "", "why a point failed"),
    ("vllm", pa.string(), False, "", "version of vLLM"),
    ("torch", pa.string(), False, "", "version of torch"),
    ("driver", pa.string(), False, "", "version of the GPU runtime; empty without GPU"),
    ("device", pa.string(), False, "", "GPU or processor"),
    ("measured_at", pa.string(), False, "ISO 8601", "time of the run, UTC"),
    ("code_version", pa.string(), False, "", "version of the measuring code"),
)
"""Column, type, nullable, unit, meaning. Key: model to tokens."""

SCHEMA: Final = pa.schema(
    [
        pa.field(name, kind, nullable=nullable, metadata={"unit": unit, "meaning": meaning})
        for name, kind, nullable, unit, meaning in COLUMNS
    ]
)


def write_measurements(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records beside ``path`` and rename. Raises pyarrow's errors for a wrong type, OSError for the file."""
    table = pa.Table.from_pylist([dict(record) for record in records], schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)


def read_measurements(path: Path) -> list[dict[str, Any]]:
    """Records of one file. Raises ValueError naming the file if it is not one of this contract."""
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        message = f"{path.name}: not a whole Parquet file: {error}"
        raise ValueError(message) from error
    if not table.schema.equals(SCHEMA, check_metadata=False):
        message = f"{path.name}: columns differ from the contract of measurements"
        raise ValueError(message)
    records: list[dict[str, Any]] = table.to_pylist()
    return records
