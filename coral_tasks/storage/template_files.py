"""Template sets as Parquet bytes and back, in the columns of ``data_contracts.templates``.

Owns the mapping between columns of a TemplateSet and of the file; bitwise exact both ways, same set → same bytes.
"""

from __future__ import annotations

import io
import json
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from coral_tasks.domain.errors import StorageFault, ValidationFailed
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import LatencySplit, ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.profiles import LimitedBy, ProfileSource
from coral_tasks.domain.template_set import RUNTIME_CODES, TemplateSet
from data_contracts.templates import CONTRACT, PARTITION_COLUMNS

SET_KEY: Final = b"coral.template_set"
"""Schema metadata that says what the whole set has in common; JSON."""

ROW_GROUP: Final = 65_536


def to_parquet(templates: TemplateSet) -> bytes:
    """Parquet bytes of a set; the partition columns (model, phase) are left to the folder names."""
    columns = _columns(templates)
    fields = [field for field in CONTRACT.schema if field.name not in PARTITION_COLUMNS]
    metadata = {**(CONTRACT.schema.metadata or {}), SET_KEY: _header(templates)}
    arrays = [
        pa.array(columns[f.name], f.type) if not isinstance(columns[f.name], pa.Array) else columns[f.name]
        for f in fields
    ]
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP)
    return sink.getvalue()


def from_parquet(data: bytes, source: str) -> TemplateSet:
    """The set in ``data``. Raises StorageFault, naming ``source``, for anything that is not such a file."""
    try:
        table = pq.read_table(io.BytesIO(data))
        header = json.loads((table.schema.metadata or {})[SET_KEY])
        return _rebuild(table, header)
    except (pa.ArrowException, OSError, KeyError, ValueError, IndexError, TypeError, ValidationFailed) as error:
        message = f"{source} is not a template file of this library: {error}"
        raise StorageFault(message) from error


def _header(templates: TemplateSet) -> bytes:
    text = {
        "model": templates.model,
        "phase": templates.phase.value,
        "slo": [templates.slo.ttft_s, templates.slo.tpot_s, templates.slo.percentile],
        "latency_split": templates.latency_split.value,
        "num_layers": templates.num_layers,
        "total_quanta": templates.total_quanta,
        "max_nodes": templates.slot_stage.shape[1],
        "configurations": list(templates.configurations),
        "sources": [source.value for source in templates.sources],
        "provenance": list(templates.provenance),
        "profile_version": templates.profile_version,
    }
    return json.dumps(text, sort_keys=True).encode()


def _columns(templates: TemplateSet) -> dict[str, Any]:
    rows = len(templates)
    num_nodes = templates.node_counts.sum(axis=1).astype(np.int64)
    # configuration of every node of every row, in name order
    codes = np.repeat(np.tile(np.arange(len(templates.configurations)), rows), templates.node_counts.ravel())
    names = np.array(templates.configurations, dtype=object)
    sources = np.array([source.value for source in templates.sources], dtype=object)
    stages = np.arange(templates.stage_layers.shape[1])[None, :] < templates.num_stages[:, None]
    runtimes = np.array([runtime.value for runtime in RUNTIME_CODES], dtype=object)
    limits = {code.value: code.name.lower() for code in LimitedBy}
    return {
        "template_id": list(templates.ids),
        "slo_ttft_s": np.full(rows, templates.slo.ttft_s),
        "slo_tpot_s": np.full(rows, templates.slo.tpot_s),
        "slo_percentile": np.full(rows, templates.slo.percentile),
        "throughput": templates.throughput,
        "runtime": list(runtimes[templates.runtime]),
        "latency_split": [templates.latency_split.value] * rows,
        "limited_by": [limits[int(code)] for code in templates.limited_by],
        "num_nodes": num_nodes,
        "num_stages": templates.num_stages.astype(np.int64),
        "num_layers": np.full(rows, templates.num_layers, dtype=np.int64),
        "total_quanta": np.full(rows, templates.total_quanta, dtype=np.int64),
        "nodes": _lists(num_nodes, pa.array(names[codes], pa.string())),
        "node_stage": _lists(num_nodes, pa.array(templates.slot_stage[templates.slot_stage >= 0], pa.int16())),
        "node_source": _lists(num_nodes, pa.array(sources[codes], pa.string())),
        "stage_layers": _lists(templates.num_stages, pa.array(templates.stage_layers[stages], pa.int16())),
        "stage_quanta": _lists(templates.num_stages, pa.array(templates.stage_quanta[stages], pa.int16())),
        "profile_version": [templates.profile_version] * rows,
    }


def _lists(lengths: NDArray[Any], values: pa.Array) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _rebuild(table: pa.Table, header: dict[str, Any]) -> TemplateSet:
    rows, slots = table.num_rows, int(header["max_nodes"])
    configurations = [str(name) for name in header["configurations"]]
    runtime_codes = {runtime.value: code for code, runtime in enumerate(RUNTIME_CODES)}
    limit_codes = {code.name.lower(): code.value for code in LimitedBy}
    return TemplateSet(
        model=ModelId(header["model"]),
        phase=Phase(header["phase"]),
        slo=LatencySlo(ttft_s=header["slo"][0], tpot_s=header["slo"][1], percentile=header["slo"][2]),
        latency_split=LatencySplit(header["latency_split"]),
        num_layers=int(header["num_layers"]),
        total_quanta=int(header["total_quanta"]),
        configurations=tuple(NodeConfigurationId(name) for name in configurations),
        sources=tuple(ProfileSource(name) for name in header["sources"]),
        provenance=tuple(str(text) for text in header["provenance"]),
        profile_version=str(header["profile_version"]),
        node_counts=_node_counts(table, configurations),
        throughput=table["throughput"].to_numpy().astype(np.float64),
        runtime=_codes(table["runtime"], runtime_codes),
        limited_by=_codes(table["limited_by"], limit_codes),
        num_stages=table["num_stages"].to_numpy().astype(np.uint8),
        slot_stage=_padded(table["node_stage"], (rows, slots), -1).astype(np.int8),
        stage_layers=_padded(table["stage_layers"], (rows, slots), 0),
        stage_quanta=_padded(table["stage_quanta"], (rows, slots), 0),
    )


def _codes(column: pa.ChunkedArray, known: dict[str, int]) -> NDArray[np.uint8]:
    """Text to codes; KeyError for an unknown word."""
    encoded = column.combine_chunks().dictionary_encode()
    meaning = np.array([known[word] for word in encoded.dictionary.to_pylist()], dtype=np.uint8)
    return np.asarray(meaning[encoded.indices.to_numpy()])


def _node_counts(table: pa.Table, configurations: list[str]) -> NDArray[np.int16]:
    lists = table["nodes"].combine_chunks()
    index = {name: c for c, name in enumerate(configurations)}
    encoded = lists.flatten().dictionary_encode()
    meaning = np.array([index[name] for name in encoded.dictionary.to_pylist()], dtype=np.int64)
    rows = np.repeat(np.arange(table.num_rows), np.diff(lists.offsets.to_numpy()))
    counts = np.zeros((table.num_rows, len(configurations)), dtype=np.int16)
    np.add.at(counts, (rows, meaning[encoded.indices.to_numpy()]), 1)
    return counts


def _padded(column: pa.ChunkedArray, shape: tuple[int, int], fill: int) -> NDArray[np.int16]:
    """Lists as rows of a matrix, ``fill`` beyond each list's end."""
    lists = column.combine_chunks()
    lengths = np.diff(lists.offsets.to_numpy())
    matrix = np.full(shape, fill, dtype=np.int16)
    matrix[np.arange(shape[1])[None, :] < lengths[:, None]] = lists.flatten().to_numpy()
    return matrix
