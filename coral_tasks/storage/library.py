"""The template library on disk or S3: finished parts, immutable versions, one pointer (design 2.3).

Layout under the store::

    parts/<key>.json, parts/<key>.parquet        finished template sets, for resuming and reuse
    work/<key>/…                                 chunks of unfinished sets
    versions/<version>/_manifest.json            written last: a version without it does not exist
    versions/<version>/model=…/phase=…/….parquet
    tighter/<version>/model=…/phase=…/….parquet  sets of the same version with an SLO one step tighter
    CURRENT.json                                 the pointer, replaced conditionally

Tighter sets have a folder of their own because readers take a version's folder as one table: some pass over names with
an underscore, but ``**/*.parquet`` in DuckDB and Polars does not, and would mix templates of two SLOs.

Owns publishing, reading, checking and retention. What is in a set is ``templates``' matter; when to publish is the
caller's, except that the regression gate is asked here, against exactly the version that would be replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import quote

from coral_tasks.domain.content import content_digest
from coral_tasks.domain.errors import PublicationRefused, StorageFault, UnknownName
from coral_tasks.domain.names import LibraryVersion, ModelId, Phase
from coral_tasks.domain.template_set import TemplateSet
from coral_tasks.storage.manifest import (
    FORMAT,
    SCHEMA_VERSION,
    Manifest,
    Pointer,
    Published,
    SetEntry,
    decode_manifest,
    decode_pointer,
    encode,
)
from coral_tasks.storage.objects import ObjectStore
from coral_tasks.storage.template_files import from_parquet, to_parquet
from data_contracts.templates import CONTRACT

POINTER: Final = "CURRENT.json"
PARTS: Final = "parts/"
VERSIONS: Final = "versions/"
TIGHTER: Final = "tighter/"
WORK: Final = "work/"
"""Folder names below the store. The manifest starts with an underscore: Parquet readers pass over such files."""
MANIFEST: Final = "_manifest.json"
MAX_HISTORY: Final = 100
POINTER_TRIES: Final = 10

Part = tuple[SetEntry, bytes]
"""A finished set: its entry and the bytes of its file."""

Judge = Callable[["Library | None", "Library"], Sequence[str]]
"""Regression gate: (current or None, new) → reasons not to publish."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Library:
    """One version in memory, its tighter sets apart (``read_tighter``)."""

    manifest: Manifest
    sets: tuple[TemplateSet, ...]

    @property
    def version(self) -> LibraryVersion:
        """Content version."""
        return LibraryVersion(self.manifest.version)


# Parts -----------------------------------------------------------------------------------------------------------


def write_part(store: ObjectStore, key: str, templates: TemplateSet, counts: Mapping[str, int]) -> SetEntry:
    """Keep a finished set under its key, the entry last; writing the same key again is harmless."""
    data = to_parquet(templates)
    entry = _entry(key, templates, counts, data)
    store.put(f"{PARTS}{key}.parquet", data)
    store.put(f"{PARTS}{key}.json", _encode_entry(entry))
    return entry


def read_part(store: ObjectStore, key: str) -> Part | None:
    """Entry and bytes of a finished set; None if it is absent or damaged, so that it is made again."""
    head, data = store.get(f"{PARTS}{key}.json"), store.get(f"{PARTS}{key}.parquet")
    if head is None or data is None:
        return None
    try:
        entry = _decode_entry(head)
    except StorageFault:
        return None
    return (entry, data) if entry.sha256 == hashlib.sha256(data).hexdigest() else None


def find_part(store: ObjectStore, key: str) -> Part | None:
    """A finished set from the parts, or else from the current version; None if it must be made (again).

    Raises StorageFault if the store is not a library, or one of a newer Coral: nothing may be built into it.
    """
    pointer = current_pointer(store)
    found = read_part(store, key)
    if found is not None or pointer is None:
        return found
    try:
        manifest = read_manifest(store, pointer.current.version)
        places = [(place, entry) for place, entry in _files(manifest).items() if entry.key == key]
        return (places[0][1], _checked_bytes(store, *places[0])) if places else None
    except StorageFault:
        return None


def _entry(key: str, templates: TemplateSet, counts: Mapping[str, int], data: bytes) -> SetEntry:
    slo = templates.slo
    limit_ms = f"{slo.limit_s(templates.phase) * 1e3:g}ms"
    folder = f"model={quote(templates.model, safe='')}/phase={templates.phase.value}"
    named = templates.configurations
    return SetEntry(
        key=key,
        model=templates.model,
        phase=templates.phase.value,
        slo_ttft_s=slo.ttft_s,
        slo_tpot_s=slo.tpot_s,
        slo_percentile=slo.percentile,
        path=f"{folder}/{limit_ms}-{key}.parquet",
        num_rows=len(templates),
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        profile_version=templates.profile_version,
        sources={name: source.value for name, source in zip(named, templates.sources, strict=True)},
        provenance=dict(zip(named, templates.provenance, strict=True)),
        counts=dict(counts),
    )


def _encode_entry(entry: SetEntry) -> bytes:
    return encode(_manifest_of([entry], [], {}))


def _decode_entry(data: bytes) -> SetEntry:
    return decode_manifest(data, "part").sets[0]


# Publishing ------------------------------------------------------------------------------------------------------


def _manifest_of(sets: Sequence[SetEntry], tighter: Sequence[SetEntry], parameters: Mapping[str, str]) -> Manifest:
    ordered, aside = (tuple(sorted(entries, key=lambda entry: entry.path)) for entries in (sets, tighter))
    # keys, not file hashes: another Parquet writer may give other bytes for the same content
    named = [[(entry.path, entry.key) for entry in entries] for entries in (ordered, aside)]
    version = content_digest(SCHEMA_VERSION, CONTRACT.version, dict(parameters), *named)
    return Manifest(
        format=FORMAT,
        schema_version=SCHEMA_VERSION,
        contract_version=CONTRACT.version,
        version=version,
        parameters=dict(parameters),
        sets=ordered,
        tighter=aside,
    )


def write_version(
    store: ObjectStore, parts: Sequence[Part], parameters: Mapping[str, str], *, tighter: Sequence[Part] = ()
) -> Manifest:
    """Write an immutable version from finished sets; the manifest last. Does not make it current.

    ``tighter``: sets with an SLO one step tighter, kept apart. Writing a version that exists already and is whole
    changes nothing; a damaged one is written anew. Raises StorageFault if two sets collide.
    """
    _check_names(parts, tighter)
    manifest = _manifest_of([entry for entry, _ in parts], [entry for entry, _ in tighter], parameters)
    existing = _whole_version(store, manifest.version)
    if existing is not None:
        return existing
    bytes_of = {entry.key: data for entry, data in (*parts, *tighter)}
    for place, entry in _files(manifest).items():
        store.put(place, bytes_of[entry.key])
    store.put(f"{VERSIONS}{manifest.version}/{MANIFEST}", encode(manifest))
    return manifest


def _check_names(parts: Sequence[Part], tighter: Sequence[Part]) -> None:
    if not parts:
        message = "a version needs at least one template set"
        raise StorageFault(message)
    for group in (parts, tighter):
        paths = [entry.path for entry, _ in group]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            message = f"a version holds each template set only once: {', '.join(twice)}"
            raise StorageFault(message)


def _files(manifest: Manifest) -> dict[str, SetEntry]:
    """Every template file of a version by its name in the store."""
    groups = ((VERSIONS, manifest.sets), (TIGHTER, manifest.tighter))
    return {f"{top}{manifest.version}/{entry.path}": entry for top, entries in groups for entry in entries}


def _whole_version(store: ObjectStore, version: str) -> Manifest | None:
    """Manifest of a version that is there with all its bytes, else None."""
    try:
        manifest = read_manifest(store, version)
        for place, entry in _files(manifest).items():
            _checked_bytes(store, place, entry)
    except StorageFault:
        return None
    return manifest


def publish_version(
    store: ObjectStore, manifest: Manifest, *, now: datetime, judge: Judge | None = None, force: bool = False
) -> Published:
    """Make a written version current.

    The gate is asked against the version that would be replaced; if another build publishes meanwhile it is asked
    again against that one. Publishing what is current changes nothing. Raises PublicationRefused with the gate's
    reasons unless ``force``; StorageFault if the pointer cannot be replaced.
    """
    for _ in range(POINTER_TRIES):
        found = store.get_with_token(POINTER)
        pointer = None if found is None else decode_pointer(found[0], f"{store.address}/{POINTER}")
        digest = hashlib.sha256(encode(manifest)).hexdigest()
        if pointer is not None and pointer.current.manifest_sha256 == digest:
            return pointer.current
        reasons = _reasons(store, pointer, manifest, judge)
        if reasons and not force:
            raise PublicationRefused(_refusal(manifest, pointer, reasons))
        entry = Published(
            version=manifest.version,
            published_at=now.astimezone(UTC).isoformat(timespec="seconds"),
            manifest_sha256=digest,
            forced=bool(reasons),
        )
        older = () if pointer is None else pointer.history
        new = Pointer(format=FORMAT, schema_version=SCHEMA_VERSION, history=(entry, *older)[:MAX_HISTORY])
        if store.put_if(POINTER, encode(new), None if found is None else found[1]):
            return entry
    message = f"other builds kept replacing {POINTER} in {store.address}"
    raise StorageFault(message)


def _reasons(store: ObjectStore, pointer: Pointer | None, manifest: Manifest, judge: Judge | None) -> tuple[str, ...]:
    if judge is None:
        return ()
    current = None if pointer is None else read_version(store, pointer.current.version)
    return tuple(judge(current, read_version(store, manifest.version)))


def _refusal(manifest: Manifest, pointer: Pointer | None, reasons: Sequence[str]) -> str:
    against = "nothing" if pointer is None else pointer.current.version
    lines = "\n".join(f"  {reason}" for reason in reasons)
    return f"version {manifest.version} is not published over {against}:\n{lines}"


# Reading ---------------------------------------------------------------------------------------------------------


def current_pointer(store: ObjectStore) -> Pointer | None:
    """The pointer, None for a store without a library. Raises StorageFault for a folder of something else."""
    data = store.get(POINTER)
    if data is not None:
        return decode_pointer(data, f"{store.address}/{POINTER}")
    foreign = [info.key for info in store.list("") if not info.key.startswith((PARTS, VERSIONS, TIGHTER, WORK))]
    if foreign:
        message = f"{store.address} is no template library: it has no {POINTER} but holds {foreign[0]}"
        raise StorageFault(message)
    return None


def current_manifest(store: ObjectStore) -> Manifest | None:
    """Manifest of the current version, checked against the pointer; None if nothing was published yet."""
    pointer = current_pointer(store)
    if pointer is None:
        return None
    manifest = read_manifest(store, pointer.current.version)
    if hashlib.sha256(encode(manifest)).hexdigest() != pointer.current.manifest_sha256:
        message = f"the manifest of version {manifest.version} in {store.address} is not the one that was published"
        raise StorageFault(message)
    return manifest


def read_manifest(store: ObjectStore, version: str) -> Manifest:
    """Manifest of a version. Raises StorageFault if it is missing, foreign, corrupt or newer."""
    source = f"{VERSIONS}{version}/{MANIFEST}"
    data = store.get(source)
    if data is None:
        message = f"{store.address} has no version {version}, or only half of it"
        raise StorageFault(message)
    manifest = decode_manifest(data, f"{store.address}/{source}")
    if manifest.version != version:
        message = f"{store.address}/{source} says it is version {manifest.version}"
        raise StorageFault(message)
    return manifest


def read_current(
    store: ObjectStore, *, models: Sequence[ModelId] | None = None, phases: Sequence[Phase] | None = None
) -> Library:
    """The current version, or only some models and phases of it. Raises StorageFault if there is none."""
    manifest = current_manifest(store)
    if manifest is None:
        message = f"{store.address} holds no published template library"
        raise StorageFault(message)
    return _load(store, manifest, models, phases)


def read_version(store: ObjectStore, version: str) -> Library:
    """Any complete version."""
    return _load(store, read_manifest(store, version), None, None)


def _load(
    store: ObjectStore, manifest: Manifest, models: Sequence[ModelId] | None, phases: Sequence[Phase] | None
) -> Library:
    known = sorted({entry.model for entry in manifest.sets})
    for model in models or ():
        if model not in known:
            raise UnknownName(kind="model", name=model, known=known, table="templates")
    wanted = _places(manifest, VERSIONS, models, phases)
    return Library(manifest=manifest, sets=tuple(_read_set(store, manifest, place) for place in wanted))


def _places(
    manifest: Manifest, top: str, models: Sequence[ModelId] | None, phases: Sequence[Phase] | None
) -> list[str]:
    return [
        place
        for place, entry in _files(manifest).items()
        if place.startswith(top)
        and (models is None or entry.model in models)
        and (phases is None or Phase(entry.phase) in phases)
    ]


def read_tighter(
    store: ObjectStore, version: str, *, models: Sequence[ModelId] | None = None
) -> tuple[TemplateSet, ...]:
    """Sets of a version with an SLO one step tighter, of all or of some models.

    Empty where the version was built without. A model that nothing holds at its tighter SLO has sets without rows.
    """
    manifest = read_manifest(store, version)
    return tuple(_read_set(store, manifest, place) for place in _places(manifest, TIGHTER, models, None))


def _read_set(store: ObjectStore, manifest: Manifest, place: str) -> TemplateSet:
    """One set, its bytes checked against the manifest."""
    entry = _files(manifest)[place]
    source = f"{store.address}/{place}"
    templates = from_parquet(_checked_bytes(store, place, entry), source)
    if len(templates) != entry.num_rows or templates.model != entry.model or templates.phase.value != entry.phase:
        message = f"{source} does not hold what the manifest says"
        raise StorageFault(message)
    return templates


def _checked_bytes(store: ObjectStore, place: str, entry: SetEntry) -> bytes:
    data = store.get(place)
    if data is None:
        message = f"{place} is missing in {store.address}"
        raise StorageFault(message)
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        message = f"{place} in {store.address} is corrupt: its hash is not the manifest's"
        raise StorageFault(message)
    return data


def find_problems(store: ObjectStore) -> tuple[str, ...]:
    """Everything wrong with the current version; empty if it is whole. Reads every byte."""
    try:
        manifest = current_manifest(store)
    except StorageFault as fault:
        return (str(fault),)
    if manifest is None:
        return (f"{store.address} holds no published template library",)
    problems = []
    places = _files(manifest)
    for place in places:
        try:
            _read_set(store, manifest, place)
        except StorageFault as fault:
            problems.append(str(fault))
    expected = {*places, f"{VERSIONS}{manifest.version}/{MANIFEST}"}
    present = [info.key for top in (VERSIONS, TIGHTER) for info in store.list(f"{top}{manifest.version}/")]
    problems += [f"{key} in {store.address} is not in the manifest" for key in present if key not in expected]
    return tuple(problems)


# Retention -------------------------------------------------------------------------------------------------------


def remove_old(store: ObjectStore, *, keep_versions: int, now: datetime, grace: timedelta) -> tuple[str, ...]:
    """Delete versions beyond the newest ``keep_versions`` publications, and parts and leftovers of builds.

    Nothing younger than ``grace`` is touched: another build may be writing it, a reader may just have followed the
    pointer. Never deletes the current version. Returns the deleted keys. Raises StorageFault without a pointer.
    """
    pointer = current_pointer(store)
    if pointer is None:
        message = f"{store.address} holds no published template library"
        raise StorageFault(message)
    kept = {published.version for published in pointer.history[: max(1, keep_versions)]}
    recent = (now - grace).astimezone(UTC)
    old = [info.key for prefix in (PARTS, WORK) for info in store.list(prefix) if info.modified < recent]
    versions: dict[str, list[str]] = {}
    fresh = set()
    for info in (*store.list(VERSIONS), *store.list(TIGHTER)):
        version = info.key.split("/")[1]
        versions.setdefault(version, []).append(info.key)
        if info.modified >= recent:
            fresh.add(version)
    for version, keys in sorted(versions.items()):
        if version not in kept and version not in fresh:
            # the manifest first: from then on the version does not exist for any reader
            old += sorted(keys, key=lambda key: not key.endswith(f"/{MANIFEST}"))
    for key in old:
        store.delete(key)
    return tuple(old)
