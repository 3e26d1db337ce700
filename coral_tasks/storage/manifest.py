"""The two small JSON documents of a library: a version's manifest and the pointer to the current version.

Owns their fields, their strict reading and the refusal of anything newer or foreign.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from coral_tasks.domain.errors import StorageFault

FORMAT: Final = "coral-template-library"
SCHEMA_VERSION: Final = 2
"""Raised when older readers would misunderstand a version; they refuse it by this number.

2: a version may hold tighter sets. Versions of schema 1 hold none and are read as such.
"""


class SetEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One template set of a version.

    ``key``: hash of everything the set was made from; equal keys have equal bytes. ``path``: inside the version's
    folder below ``versions/``, or below ``tighter/`` for a tighter set. ``counts``: combinations by what became of
    them.
    """

    key: str
    model: str
    phase: str
    slo_ttft_s: float
    slo_tpot_s: float
    slo_percentile: float
    path: str
    num_rows: int
    size_bytes: int
    sha256: str
    profile_version: str
    sources: dict[str, str]
    provenance: dict[str, str]
    counts: dict[str, int]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything in one version: files with hashes, parameters, lineage. Holds no time, so equal inputs give
    equal bytes.

    ``sets``: what plans are made of. ``tighter``: the same models and phases with an SLO one step tighter, to tell what
    that would cost; nothing is planned on them unasked. Left out where there is none, so that a manifest of schema 1
    keeps its bytes, and with them the hash in the pointer.
    """

    format: str
    schema_version: int
    contract_version: str
    version: str
    parameters: dict[str, str]
    sets: tuple[SetEntry, ...]
    tighter: tuple[SetEntry, ...] = ()


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One publication: which version, when (UTC, ISO), by a gate that passed or was overruled."""

    version: str
    published_at: str
    manifest_sha256: str
    forced: bool = False


class Pointer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pointer file: ``history[0]`` is the current version, older ones follow."""

    format: str
    schema_version: int
    history: tuple[Published, ...]

    @property
    def current(self) -> Published:
        """The publication in force."""
        return self.history[0]


def encode(document: Manifest | Pointer) -> bytes:
    """JSON bytes, readable and stable."""
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1) + b"\n"


def decode_manifest(data: bytes, source: str) -> Manifest:
    """Raises StorageFault, naming ``source``, for foreign, corrupt or newer content."""
    _check_kind(data, source)
    try:
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        message = f"{source} is corrupt: {error}"
        raise StorageFault(message) from error


def decode_pointer(data: bytes, source: str) -> Pointer:
    """Raises StorageFault, naming ``source``, for foreign, corrupt or newer content."""
    _check_kind(data, source)
    try:
        pointer = msgspec.json.decode(data, type=Pointer)
    except msgspec.MsgspecError as error:
        message = f"{source} is corrupt: {error}"
        raise StorageFault(message) from error
    if not pointer.history:
        message = f"{source} is corrupt: it names no version"
        raise StorageFault(message)
    return pointer


def _check_kind(data: bytes, source: str) -> None:
    try:
        document: Any = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        message = f"{source} is corrupt: not JSON ({error})"
        raise StorageFault(message) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        message = f"{source} does not belong to a template library"
        raise StorageFault(message)
    written = document.get("schema_version")
    if not isinstance(written, int) or isinstance(written, bool) or written < 1:
        message = f"{source} is corrupt: schema_version {written!r}"
        raise StorageFault(message)
    if written > SCHEMA_VERSION:
        message = f"{source} was written by a newer Coral (schema {written}, this one reads up to {SCHEMA_VERSION})"
        raise StorageFault(message)
