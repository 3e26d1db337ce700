"""Profile tables as Parquet bytes and back: the columns of ``data_contracts.profile_cells`` and ``extrapolated``.

Owns the mapping of a table's cells to rows (sorted by configuration as in the table, layers, quanta); bitwise exact
both ways, same table → same bytes. What the table has in common lies in the schema metadata.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coral_tasks.domain.errors import StorageFault, ValidationFailed
from coral_tasks.domain.models import LatencySlo, RequestShape
from coral_tasks.domain.names import ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.profiles import LimitedBy, ProfileSource, ProfileTable
from data_contracts.profile_cells import CONTRACT

HEADER_KEY: Final = b"coral.profile_table"
EXTRAPOLATED: Final = pa.field(
    "extrapolated",
    pa.bool_(),
    metadata={"unit": "", "meaning": "the cell rests on a point outside what its source measured"},
)


def profile_to_parquet(table: ProfileTable) -> bytes:
    """Parquet bytes of one table: C × L × Q rows."""
    fields = [*CONTRACT.schema, EXTRAPOLATED]
    metadata = {**(CONTRACT.schema.metadata or {}), HEADER_KEY: _header(table)}
    columns = _columns(table)
    arrays = [pa.array(columns[field.name], field.type) for field in fields]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata)), sink, compression="zstd")
    return sink.getvalue()


def profile_from_parquet(data: bytes, source: str) -> ProfileTable:
    """The table in ``data``. Raises StorageFault, naming ``source``, for anything that is not such a file."""
    try:
        table = pq.read_table(io.BytesIO(data))
        header = json.loads((table.schema.metadata or {})[HEADER_KEY])
        return _rebuild(table, header)
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, ValidationFailed) as error:
        message = f"{source} is not a profile table of this project: {error}"
        raise StorageFault(message) from error


def _header(table: ProfileTable) -> bytes:
    text = {
        "model": table.model,
        "num_layers": table.num_layers,
        "checkpoint_bytes": table.checkpoint_bytes,
        "phase": table.phase.value,
        "slo": asdict(table.slo),
        "shape": asdict(table.shape),
        "configurations": list(table.configurations),
        "node_memory_bytes": list(table.node_memory_bytes),
        "tp_degree": list(table.tp_degree),
        "sources": [source.value for source in table.sources],
        "provenance": list(table.provenance),
        "version": table.version,
        "quanta": table.throughput.shape[2],
        "extrapolated": table.extrapolated is not None,
    }
    return json.dumps(text, sort_keys=True, allow_nan=False).encode()


def _columns(table: ProfileTable) -> dict[str, Any]:
    count, layers, quanta = table.throughput.shape
    cells = layers * quanta
    limits = {code.value: code.name.lower() for code in LimitedBy}
    rows = count * cells

    def each(values: tuple[Any, ...]) -> list[Any]:
        return [value for value in values for _ in range(cells)]

    return {
        "model": [table.model] * rows,
        "phase": [table.phase.value] * rows,
        "slo_ttft_s": np.full(rows, table.slo.ttft_s),
        "slo_tpot_s": np.full(rows, table.slo.tpot_s),
        "slo_percentile": np.full(rows, table.slo.percentile),
        "configuration": each(table.configurations),
        "num_layers": np.tile(np.repeat(np.arange(1, layers + 1), quanta), count),
        "num_quanta": np.tile(np.arange(1, quanta + 1), count * layers),
        "throughput": table.throughput.ravel(),
        "limited_by": [limits[int(code)] for code in table.limited_by.ravel()],
        "tp_degree": each(table.tp_degree),
        "source": each(tuple(source.value for source in table.sources)),
        "provenance": each(table.provenance),
        "profile_version": [table.version] * rows,
        "extrapolated": [None] * rows if table.extrapolated is None else table.extrapolated.ravel(),
    }


def _rebuild(table: pa.Table, header: dict[str, Any]) -> ProfileTable:
    shape = (len(header["configurations"]), int(header["num_layers"]), int(header["quanta"]))
    codes = {code.name.lower(): code.value for code in LimitedBy}
    limited = np.array([codes[name] for name in table.column("limited_by").to_pylist()], dtype=np.uint8)
    beyond = np.array(table.column("extrapolated").to_pylist(), dtype=bool) if header["extrapolated"] else None
    return ProfileTable(
        model=ModelId(header["model"]),
        num_layers=shape[1],
        checkpoint_bytes=float(header["checkpoint_bytes"]),
        phase=Phase(header["phase"]),
        slo=LatencySlo(**header["slo"]),
        shape=RequestShape(**header["shape"]),
        configurations=tuple(NodeConfigurationId(name) for name in header["configurations"]),
        node_memory_bytes=tuple(header["node_memory_bytes"]),
        tp_degree=tuple(header["tp_degree"]),
        throughput=np.array(table.column("throughput").to_numpy(), dtype=np.float64).reshape(shape),
        limited_by=limited.reshape(shape),
        extrapolated=None if beyond is None else beyond.reshape(shape),
        sources=tuple(ProfileSource(name) for name in header["sources"]),
        provenance=tuple(header["provenance"]),
        version=header["version"],
    )
