"""Contract of measured profile points: one row per model, configuration, phase, layer count and point.

Owns the Arrow schema, its documentation, and reading and writing of one file. Failed and out-of-memory points are rows
too, with a status and no time. Imports nothing of ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from data_contracts.contract import LARGEST_FLOAT, Broken, Column, Contract, GateContext
from data_contracts.rules import EARLIEST, between, derived, form, known, one_of, seconds

PHASES: Final = ("prefill", "decode")
STATUSES: Final = ("ok", "oom", "failed")
JSON_SUFFIX: Final = ".json"
_ISO: Final = (
    "[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.][0-9]{1,9})?)? ?(?:Z|UTC|[+-][0-9]{2}:?[0-9]{2})"
)
_INT32: Final = 2**31


def _text(name: str, meaning: str) -> Column:
    return Column(name=name, type=pa.string(), words=True, blank=True, meaning=meaning)


COLUMNS: Final = (
    Column(name="model", type=pa.string(), meaning="served model"),
    Column(name="configuration", type=pa.string(), meaning="node configuration that was measured"),
    Column(name="phase", type=pa.string(), meaning="prefill or decode"),
    Column(name="num_layers", type=pa.int32(), unit="layers", meaning="layers that the model was cut to"),
    Column(name="tp_degree", type=pa.int32(), unit="GPUs", meaning="tensor parallel degree of the engine"),
    Column(name="sequences", type=pa.int32(), meaning="sequences in the batch"),
    Column(
        name="tokens",
        type=pa.int32(),
        unit="tokens",
        meaning="prompt of each sequence (prefill), or context behind the step (decode)",
    ),
    Column(name="status", type=pa.string(), meaning="ok, oom or failed"),
    Column(name="median_s", type=pa.float64(), unit="s", nullable=True, meaning="median repeat; null unless ok"),
    Column(name="spread_s", type=pa.float64(), unit="s", nullable=True, meaning="largest minus smallest repeat"),
    Column(name="num_repeats", type=pa.int32(), meaning="repeats behind the median, warm-up excluded"),
    _text("detail", "why a point failed; empty if it did not"),
    _text("vllm", "version of vLLM; empty if no engine started"),
    _text("torch", "version of torch"),
    _text("driver", "version of the GPU runtime; empty without GPU"),
    _text("device", "GPU or processor"),
    Column(name="measured_at", type=pa.string(), unit="ISO 8601, UTC", meaning="time of the run"),
    Column(name="code_version", type=pa.string(), meaning="version of the measuring code"),
)


def _example(now: datetime) -> Sequence[Mapping[str, Any]]:
    shared = {
        "model": "qwen3-32b",
        "configuration": "L40Sx4",
        "phase": "decode",
        "tp_degree": 4,
        "tokens": 512,
        "vllm": "0.32.0",
        "torch": "2.13.0",
        "driver": "13.0",
        "device": "NVIDIA L40S",
        "measured_at": now.astimezone(UTC).isoformat(timespec="seconds"),
        "code_version": "1",
    }
    ok = {"status": "ok", "median_s": 0.004, "spread_s": 0.0002, "num_repeats": 5, "detail": ""}
    lost = {"status": "oom", "median_s": None, "spread_s": None, "num_repeats": 0, "detail": "CUDA out of memory"}
    points = ((2, 1, ok), (4, 1, ok | {"median_s": 0.006}), (2, 8, ok | {"median_s": 0.005}), (4, 8, lost))
    return [{**shared, "num_layers": layers, "sequences": count, **rest} for layers, count, rest in points]


def _age_if_dated(frame: pd.DataFrame, context: GateContext) -> pd.Series:
    """Seconds since the measurement; below any limit where it has no date, or one before ``EARLIEST``."""
    at = pd.to_datetime(frame["measured_at"], utc=True, format="ISO8601", errors="coerce")
    age = seconds(context.now_utc - at)
    return age.where(at.notna() & (at >= EARLIEST), -LARGEST_FLOAT)


def _time_where_none_belongs(frame: pd.DataFrame, _: GateContext) -> pd.Series:
    """1 where a row has a time without being ok, or is ok without one; 0 elsewhere."""
    return pd.Series(np.where((frame["status"] == "ok") != frame["median_s"].notna(), 1.0, 0.0), index=frame.index)


RULES: Final = (
    one_of("phase", PHASES),
    one_of("status", STATUSES),
    known("model", "model"),
    known("configuration", "configuration"),
    between("num_layers", 1.0, 10_000.0, "num_layers must be at least 1", broken=0),
    between("tp_degree", 1.0, 1024.0, "tp_degree must be at least 1", broken=0),
    between("sequences", 1.0, 1e6, "sequences must be at least 1", broken=0),
    between("tokens", 1.0, 1e7, "tokens must be at least 1", broken=0),
    between("num_repeats", 0.0, 1e6, "num_repeats must not be negative", broken=-1),
    between("median_s", 0.0, 1e5, "median_s must be above zero", strict_minimum=True, broken=0.0),
    between("spread_s", 0.0, 1e5, "spread_s must not be negative", broken=-1.0),
    form("measured_at", _ISO, "measured_at must be an ISO 8601 time with a zone", broken="2026-11-29T12:00:00"),
    derived(
        "measured_at_dated",
        "measured_at lies in the future, before 2020 or on no calendar",
        ("measured_at",),
        _age_if_dated,
        minimum=lambda context: -context.limits.future_tolerance_s,
        broken=Broken(cells={0: {"measured_at": "2099-01-01T00:00:00Z"}}),
    ),
    derived(
        "time_only_if_ok",
        "a row has a time if and only if it is ok",
        ("status", "median_s"),
        _time_where_none_belongs,
        maximum=0.0,
        broken=Broken(cells={3: {"median_s": 0.01}}),
    ),
)

CONTRACT: Final = Contract(
    name="measurements",
    version="1.0",
    meaning="Measured time of one engine step: a row per model, configuration, phase, layer count and point.",
    columns=COLUMNS,
    key=("model", "configuration", "phase", "num_layers", "tp_degree", "sequences", "tokens"),
    rules=RULES,
    example=_example,
)
SCHEMA: Final = CONTRACT.schema


def write_measurements(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records beside ``path`` and rename; JSON if the name ends in ``.json``, else Parquet.

    Raises pyarrow's errors for a wrong type, OSError for the file.
    """
    table = pa.Table.from_pylist([dict(record) for record in records], schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    if path.suffix == JSON_SUFFIX:
        # one record a line and no blanks: a node agent carries the text in one message of limited size
        lines = [json.dumps(record, separators=(",", ":"), allow_nan=False) for record in table.to_pylist()]
        temporary.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    else:
        pq.write_table(table, temporary, compression="zstd")
    temporary.replace(path)


def read_measurements(path: Path) -> list[dict[str, Any]]:
    """Records of one file, JSON or Parquet by its name. Raises ValueError naming the file if it breaks the contract."""
    if path.suffix == JSON_SUFFIX:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"{path.name}: cannot be read: {error}"
            raise ValueError(message) from error
        return parse_measurements(text, path.name)
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


def parse_measurements(text: str, name: str) -> list[dict[str, Any]]:
    """Records in JSON text: a list of objects with exactly the contract's columns.

    Raises ValueError that begins with ``name`` and names every cell that is wrong.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"{name}: not JSON: {error}"
        raise ValueError(message) from error
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        message = f"{name}: must be a JSON list of objects"
        raise ValueError(message)
    problems = [f"row {number}: {text}" for number, record in enumerate(found, start=1) for text in _problems(record)]
    if problems:
        raise ValueError("\n".join([f"{name}: {len(problems)} cells break the contract of measurements", *problems]))
    return found


def _problems(record: Mapping[str, Any]) -> list[str]:
    known = {column.name for column in COLUMNS}
    found = [f"unknown column {key}" for key in record if key not in known]
    found += [f"{column.name} is missing" for column in COLUMNS if column.name not in record]
    present = [column for column in COLUMNS if column.name in record]
    return found + [
        f"{column.name} must be {_type_words(column)}, not {record[column.name]!r}"
        for column in present
        if not _fits(column, record[column.name])
    ]


def _type_words(column: Column) -> str:
    words = {pa.int32(): "a whole number", pa.float64(): "a finite number", pa.string(): "a text"}[column.type]
    return f"{words} or null" if column.nullable else words


def _fits(column: Column, value: object) -> bool:
    if value is None:
        return column.nullable
    if column.type == pa.string():
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if column.type == pa.int32():
        return isinstance(value, int) and abs(value) < _INT32
    return math.isfinite(value)
