"""Build, publish, show, compare and check the template library: what the command line and the DAGs call.

Joins profiling, templates and storage; holds no planning logic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from coral_tasks.domain.names import Phase

if TYPE_CHECKING:
    from coral_tasks.catalog.catalog import Setup
    from coral_tasks.domain.profiles import ProfileTable
    from coral_tasks.domain.template_set import TemplateSet
    from coral_tasks.storage.library import Part
    from coral_tasks.storage.manifest import Manifest, SetEntry
    from coral_tasks.storage.objects import ObjectStore
    from coral_tasks.storage.regression import RegressionLimits, SetDifference
    from coral_tasks.templates import BuildOptions, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSummary:
    """What a build did. ``num_sets``, ``num_templates``, ``counts``: of the sets that plans are made of.

    ``num_tighter``: sets of the tighter SLO; ``num_reused``: sets of both that nothing had changed for; ``removed``:
    keys deleted by retention.
    """

    version: str
    published: bool
    num_sets: int
    num_tighter: int
    num_reused: int
    num_templates: int
    counts: dict[str, dict[str, int]]
    removed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """How a version is published. ``force``: although the gate refuses; ``keep_versions``: publications to keep."""

    publish: bool = True
    force: bool = False
    keep_versions: int = 10
    limits: RegressionLimits | None = None

    def __post_init__(self) -> None:
        from coral_tasks.domain.validation import Checks

        checks = Checks("publication")
        checks.require(self.keep_versions >= 1, "keep_versions must be at least 1", self.keep_versions)
        checks.raise_if_any()


def profile_tables(setup: str, slo_step: float = 1.0) -> tuple[ProfileTable, ...]:
    """Profile tables of a setup of the catalogue, every SLO times ``slo_step``, from the best source there is."""
    from coral_tasks.catalog import load_catalog
    from coral_tasks.profiling import build_profile_tables

    found = load_catalog().setup(setup)
    return build_profile_tables(found if slo_step == 1 else tightened(found, slo_step))


def tightened(setup: Setup, slo_step: float) -> Setup:
    """The setup with both limits of every model times ``slo_step``. Raises ValidationFailed."""
    check_slo_step(slo_step)
    models = tuple(one._replace(slo=one.slo.times(slo_step)) for one in setup.models)
    return dataclasses.replace(setup, models=models)


def check_slo_step(slo_step: float) -> None:
    """Raise ValidationFailed unless it is 0 (no tighter sets) or a factor below 1."""
    from coral_tasks.domain.validation import Checks

    checks = Checks("library")
    checks.require(0 <= slo_step < 1, "the SLO step must be a factor between 0 and 1; 0 for none", slo_step)
    checks.raise_if_any()


def default_options(**changes: Any) -> BuildOptions:
    """Build options by name, as the command line and DAG parameters give them (texts for enums)."""
    from coral_tasks.domain.names import LatencySplit
    from coral_tasks.templates import BuildOptions, Reduction

    known: dict[str, Callable[[Any], Any]] = {"latency_split": LatencySplit, "reduction": Reduction}
    return BuildOptions(**{name: known.get(name, lambda one: one)(value) for name, value in changes.items()})


BY_PHASE = "by-phase"
"""Latency split: free shares in prefill, equal ones in decode and aggregated instances.

A decode batch stays whole through the stages, so they run at one pace, and a free split promises rates that a pipeline
does not keep (docs/simulation.md); prefill keeps them.
"""


def options_for(phase: Phase, latency_split: str = BY_PHASE, **changes: Any) -> BuildOptions:
    """Build options of one phase. ``latency_split``: BY_PHASE, equal or free. Raises ValueError for another word."""
    if latency_split == BY_PHASE:
        latency_split = "free" if phase.value == "prefill" else "equal"
    return default_options(latency_split=latency_split, **changes)


def build_parts(
    address: str,
    tables: Sequence[ProfileTable],
    options: BuildOptions | Mapping[Phase, BuildOptions],
    *,
    processes: int = 1,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[list[str], int]:
    """Build every set that the library does not have yet; (key of each table in order, how many were there already).

    ``options``: one for all tables, or one for each phase. May run on several workers at once and again after an
    interruption: finished chunks and sets are kept in the library's store.
    """
    from coral_tasks.storage.chunks import StoredChunks
    from coral_tasks.storage.library import find_part, write_part
    from coral_tasks.storage.objects import open_store
    from coral_tasks.templates import build_template_sets, set_key

    store = open_store(address)
    chosen = [options[table.phase] if isinstance(options, Mapping) else options for table in tables]
    keys = [set_key(table, one) for table, one in zip(tables, chosen, strict=True)]
    missing = [number for number, key in enumerate(keys) if find_part(store, key) is None]
    keeper = StoredChunks(store)
    for one in dict.fromkeys(chosen[number] for number in missing):
        wanted = [tables[number] for number in missing if chosen[number] == one]
        for key, result in build_template_sets(
            wanted, one, processes=processes, keeper=keeper, on_progress=on_progress
        ):
            write_part(store, key, result.templates, dataclasses.asdict(result.counts))
            keeper.forget(key)
    return keys, len(tables) - len(missing)


def chunks_to_spread(address: str, table: ProfileTable, options: BuildOptions) -> list[tuple[int, int]]:
    """Chunks of a set that are worth a worker each; none for a small set or one that the library has."""
    from coral_tasks.storage.library import find_part
    from coral_tasks.storage.objects import open_store
    from coral_tasks.templates import large_chunks, set_key

    built = find_part(open_store(address), set_key(table, options)) is not None
    return [] if built else large_chunks(table, options)


def keep_chunk(address: str, table: ProfileTable, options: BuildOptions, chunk: tuple[int, int] | None) -> None:
    """Solve ``chunk``, or with None all that chunks rest on, and keep it in the store until the set is built.

    Does nothing for a set that the library has: nobody would take its chunks away again.
    """
    from coral_tasks.storage.chunks import StoredChunks
    from coral_tasks.storage.library import find_part
    from coral_tasks.storage.objects import open_store
    from coral_tasks.templates import keep_large_chunk, keep_smaller, set_key

    store = open_store(address)
    if find_part(store, set_key(table, options)) is not None:
        return
    keeper = StoredChunks(store)
    if chunk is None:
        keep_smaller(table, options, keeper)
    else:
        keep_large_chunk(table, options, keeper, *chunk)


def publish_parts(
    address: str,
    keys: Sequence[str],
    options: BuildOptions | Mapping[Phase, BuildOptions],
    publication: Publication,
    *,
    tighter: Sequence[str] = (),
    slo_step: float = 0.0,
    now: datetime | None = None,
) -> Manifest:
    """Join finished sets to a version and, if the regression gate lets it, make it current.

    ``tighter``: keys of the sets of the tighter SLO, which the gate does not judge; ``slo_step``: the factor that the
    manifest names. Raises StorageFault for a set that is not there, PublicationRefused with the gate's reasons.
    """
    from coral_tasks.storage.library import Library, publish_version, write_version
    from coral_tasks.storage.objects import open_store
    from coral_tasks.storage.regression import RegressionLimits, compare_libraries, reasons_against

    store = open_store(address)
    parameters = {**_parameters(options), "slo_step": f"{slo_step:g}" if slo_step else "none"}
    manifest = write_version(store, _parts(store, keys), parameters, tighter=_parts(store, tighter))
    chosen = publication.limits or RegressionLimits()

    def judge(current: Library | None, new: Library) -> Sequence[str]:
        return () if current is None else reasons_against(compare_libraries(current, new), chosen)

    if publication.publish:
        when = now or datetime.now(UTC)
        publish_version(store, manifest, now=when, judge=judge, force=publication.force)
    return manifest


def _parts(store: ObjectStore, keys: Sequence[str]) -> list[Part]:
    """Finished sets by their keys. Raises StorageFault for one that is not there."""
    from coral_tasks.domain.errors import StorageFault
    from coral_tasks.storage.library import find_part

    parts = []
    for key in keys:
        found = find_part(store, key)
        if found is None:
            message = f"template set {key} is not in {store.address}: build it first"
            raise StorageFault(message)
        parts.append(found)
    return parts


def build_library(
    address: str,
    tables: Sequence[ProfileTable],
    options: BuildOptions | Mapping[Phase, BuildOptions],
    *,
    tighter: Sequence[ProfileTable] = (),
    slo_step: float = 0.0,
    processes: int = 1,
    publication: Publication,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> BuildSummary:
    """Build, join and publish in one go; then delete versions beyond those to keep.

    ``tighter``: tables of the same models and phases with every SLO times ``slo_step``; none: no tighter sets.
    """
    from coral_tasks.storage.library import remove_old
    from coral_tasks.storage.objects import open_store

    both = (*tables, *tighter)
    keys, num_reused = build_parts(address, both, options, processes=processes, on_progress=on_progress)
    made, aside = keys[: len(tables)], keys[len(tables) :]
    manifest = publish_parts(address, made, options, publication, tighter=aside, slo_step=slo_step)
    removed: tuple[str, ...] = ()
    if publication.publish:
        keep, now = publication.keep_versions, datetime.now(UTC)
        removed = remove_old(open_store(address), keep_versions=keep, now=now, grace=timedelta(days=1))
    return BuildSummary(
        version=manifest.version,
        published=publication.publish,
        num_sets=len(manifest.sets),
        num_tighter=len(manifest.tighter),
        num_reused=num_reused,
        num_templates=sum(entry.num_rows for entry in manifest.sets),
        counts={f"{entry.model} {entry.phase}": dict(entry.counts) for entry in manifest.sets},
        removed=removed,
    )


def _parameters(options: BuildOptions | Mapping[Phase, BuildOptions]) -> dict[str, str]:
    """What the manifest says of the options; where phases differ, each with its phase."""
    if not isinstance(options, Mapping):
        return _parameters_of(options)
    by_phase = {phase.value: _parameters_of(one) for phase, one in sorted(options.items())}
    names = next(iter(by_phase.values()))
    return {name: _joined({phase: found[name] for phase, found in by_phase.items()}) for name in names}


def _joined(values: Mapping[str, str]) -> str:
    same = len(set(values.values())) == 1
    return next(iter(values.values())) if same else ", ".join(f"{text} ({phase})" for phase, text in values.items())


def _parameters_of(options: BuildOptions) -> dict[str, str]:
    ratio = options.memory_ratio
    return {
        "max_nodes": str(options.max_nodes),
        "memory_ratio": "none" if ratio is None else repr(ratio),
        "latency_split": options.latency_split.value,
        "reduction": options.reduction.value,
        "kept_on_request": ", ".join(str(one) for one in options.keep),
    }


def library_overview(address: str) -> dict[str, Any]:
    """The current version and its sets, as plain values for tables and JSON. Raises StorageFault if there is none."""
    from coral_tasks.domain.errors import StorageFault
    from coral_tasks.storage.library import current_manifest, current_pointer
    from coral_tasks.storage.objects import open_store

    store = open_store(address)
    manifest, pointer = current_manifest(store), current_pointer(store)
    if manifest is None or pointer is None:
        message = f"{store.address} holds no published template library"
        raise StorageFault(message)
    return {
        "version": manifest.version,
        "published_at": pointer.current.published_at,
        "parameters": manifest.parameters,
        "sets": [_set_overview(entry) for entry in manifest.sets],
        "tighter": [_set_overview(entry) for entry in manifest.tighter],
        "history": [f"{one.version} {one.published_at}" for one in pointer.history],
    }


def _set_overview(entry: SetEntry) -> dict[str, Any]:
    return {
        "model": entry.model,
        "phase": entry.phase,
        "slo_ttft_s": entry.slo_ttft_s,
        "slo_tpot_s": entry.slo_tpot_s,
        "num_templates": entry.num_rows,
        "num_configurations": len(entry.sources),
        "sources": sorted(set(entry.sources.values())),
        "profile_version": entry.profile_version,
        **entry.counts,
    }


def show_template(address: str, wanted: str) -> str:
    """One template of the current version, tighter sets included, drawn as a pipeline in text. Raises UnknownName."""
    from coral_tasks.domain.errors import UnknownName
    from coral_tasks.domain.names import TemplateId
    from coral_tasks.storage.library import read_current, read_tighter
    from coral_tasks.templates.drawing import draw_template

    store = _open(address)
    library = read_current(store)
    sets = (*library.sets, *read_tighter(store, library.version))
    for templates in sets:
        if wanted.startswith(f"{templates.model}/{templates.phase.value}/"):
            try:
                row = templates.row_of(TemplateId(wanted))
            except KeyError:
                continue
            return draw_template(templates, row)
    raise UnknownName(kind="template", name=wanted, known=_close_names(sets, wanted), table="templates")


def _close_names(sets: Sequence[TemplateSet], wanted: str) -> list[str]:
    from difflib import get_close_matches

    prefix = wanted.partition("/")[0]
    names = [str(name) for one in sets for name in one.ids if name.startswith(prefix)]
    names = names or sorted({str(one.model) for one in sets})
    return get_close_matches(wanted, names, n=5, cutoff=0.0)


def diff_versions(address: str, before: str, after: str | None) -> tuple[SetDifference, ...]:
    """Differences from version ``before`` to ``after`` (default: the current one); those of tighter sets come last."""
    from coral_tasks.storage.library import read_current, read_tighter, read_version
    from coral_tasks.storage.regression import compare_libraries, compare_sets

    store = _open(address)
    old, new = read_version(store, before), read_current(store) if after is None else read_version(store, after)
    aside = [read_tighter(store, one.version) for one in (old, new)]
    return (*compare_libraries(old, new), *compare_sets(*aside, tighter=True))


def previous_version(address: str) -> str:
    """The version published before the current one. Raises Unavailable if there is none."""
    from coral_tasks.domain.errors import Unavailable
    from coral_tasks.storage.library import current_pointer

    pointer = current_pointer(_open(address))
    if pointer is None or len(pointer.history) < 2:
        message = f"{address} has no version before the current one"
        raise Unavailable(message)
    return pointer.history[1].version


def verify_library(address: str) -> tuple[str, ...]:
    """Everything wrong with the current version; empty if it is whole."""
    from coral_tasks.storage.library import find_problems

    return find_problems(_open(address))


def _open(address: str) -> ObjectStore:
    from coral_tasks.storage.objects import open_store

    return open_store(address)
