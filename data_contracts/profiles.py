"""Contract of profile tables: T[c, j, q] of one model and phase, one row per configuration and layer count.

Owns the Arrow schema, its documentation, and reading and writing of one file. A file holds one profile table; its
schema metadata carries what belongs to the table as a whole under the key ``coral.profile`` (JSON). Imports nothing
of ours, so that other teams can read the files with this module alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

NAME: Final = "profiles"
SCHEMA_VERSION: Final = 1
METADATA_KEY: Final = b"coral.profile"
LIMITED_BY: Final = {1: "weights", 2: "kv", 3: "latency", 4: "layers"}

COLUMNS: Final[tuple[tuple[str, pa.DataType, str, str], ...]] = (
    ("model", pa.string(), "", "served model, for example qwen3-32b"),
    ("phase", pa.string(), "", "prefill, decode or aggregated"),
    ("configuration", pa.string(), "", "node configuration, <GPU type>x<count>"),
    ("num_layers", pa.int32(), "layers", "layers that the node holds, 1 to those of the model"),
    ("tp_degree", pa.int32(), "GPUs", "tensor parallel degree of the engine on the node"),
    ("node_memory_bytes", pa.int64(), "bytes", "GPU memory of the whole node"),
    ("source", pa.string(), "", "measured, database or analytic"),
    ("provenance", pa.string(), "", "versions and dates of the source"),
    (
        "throughput",
        pa.list_(pa.float64()),
        "prompt tokens/s (prefill), output tokens/s (decode), requests/s (aggregated)",
        "most that the node sustains if its stage takes 1, 2, ... of the latency quanta; 0 where it does not fit",
    ),
    ("limited_by", pa.list_(pa.uint8()), "", "what limits each cell: 1 weights, 2 KV cache, 3 latency, 4 layers"),
    ("extrapolated", pa.list_(pa.bool_()), "", "whether a cell rests on a point outside what its source measured"),
)
"""Column, type, unit, meaning. Key: model, phase, configuration, num_layers."""

SCHEMA: Final = pa.schema(
    [
        pa.field(name, kind, nullable=False, metadata={"unit": unit, "meaning": meaning})
        for name, kind, unit, meaning in COLUMNS
    ]
)

TABLE_KEYS: Final = ("schema_version", "version", "model", "phase", "num_layers", "checkpoint_bytes", "slo", "shape")
"""What ``coral.profile`` holds: version is a hash of everything the table was made from; slo in seconds
(ttft_s, tpot_s, percentile); shape in tokens."""


def write_profile(path: Path, columns: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write one table beside ``path`` and rename it there, so that a reader never sees half a file.

    ``columns``: by name, in the order of COLUMNS. ``about``: TABLE_KEYS. Raises ValueError if a key is missing,
    pyarrow's errors if a column does not fit its type, OSError if the file cannot be written.
    """
    missing = [key for key in TABLE_KEYS if key not in about]
    if missing:
        message = f"profile metadata without {', '.join(missing)}"
        raise ValueError(message)
    text = json.dumps(about, sort_keys=True).encode()
    arrays = [pa.array(columns[name], type=kind) for name, kind, _, _ in COLUMNS]
    table = pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata({METADATA_KEY: text}))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)


def read_profile(path: Path) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Columns and metadata of one file.

    Raises ValueError naming the file and what is wrong: not Parquet, not this contract, or of another schema version.
    """
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        message = f"{path.name}: not a whole Parquet file: {error}"
        raise ValueError(message) from error
    about = _about(path, table)
    if not table.schema.equals(SCHEMA, check_metadata=False):
        message = f"{path.name}: columns differ from the contract of profiles"
        raise ValueError(message)
    return table.to_pydict(), about


def _about(path: Path, table: pa.Table) -> dict[str, Any]:
    text = (table.schema.metadata or {}).get(METADATA_KEY)
    if text is None:
        message = f"{path.name}: holds no {METADATA_KEY.decode()}, so it is no profile table"
        raise ValueError(message)
    about: dict[str, Any] = json.loads(text)
    if about.get("schema_version") != SCHEMA_VERSION:
        message = f"{path.name}: schema version {about.get('schema_version')}, this code reads {SCHEMA_VERSION}"
        raise ValueError(message)
    return about
