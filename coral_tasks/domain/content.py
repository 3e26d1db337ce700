"""Content hashes: the same inputs give the same version id on any machine. Owns the canonical byte form."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from enum import Enum

import numpy as np


def content_digest(*parts: object) -> str:
    """SHA-256, first 16 hex digits, over the canonical form of ``parts``.

    Accepts nested dataclasses, enums, mappings, sequences, numbers, text, bytes, datetimes and numpy arrays; sets
    are refused (no order). Raises TypeError for anything else, ValueError for NaN or infinity outside arrays.
    """
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(json.dumps(_canonical(part), sort_keys=True, allow_nan=False).encode())
        hasher.update(b"\0")
    return hasher.hexdigest()[:16]


def _canonical(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    return _canonical_container(value)


def _canonical_container(value: object) -> object:
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value)
        return ["array", str(data.dtype), list(data.shape), hashlib.sha256(data.tobytes()).hexdigest()]
    if isinstance(value, bytes):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if isinstance(value, datetime):
        return ["datetime", value.isoformat()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _canonical(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return [type(value).__name__, fields]
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    message = f"no canonical form for {type(value).__name__}"
    raise TypeError(message)
