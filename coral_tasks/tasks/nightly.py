"""The nightly DAG's work, one function for each task: measurements, profiles, templates, publication.

Paths and ids in, paths and ids out; every function may run twice. Files of a run lie in ``runs/<run id>/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from coral_tasks.domain.errors import Unavailable, ValidationFailed, Violation
from coral_tasks.domain.names import Phase
from coral_tasks.settings import Settings
from coral_tasks.tasks import library
from coral_tasks.tasks.inputs import run_store
from coral_tasks.tasks.run_parameters import LibraryParameters, read_library
from coral_tasks.tasks.sharing import shared

if TYPE_CHECKING:
    from coral_tasks.catalog.catalog import Setup
    from coral_tasks.domain.profiles import ProfileTable
    from coral_tasks.storage.manifest import Manifest
    from coral_tasks.storage.objects import ObjectStore
    from coral_tasks.storage.runs import Run

_MEASURE_S: Final = 6000.0
"""Time for the jobs of one measuring task, below its limit of two hours."""

MAX_MAPPED: Final = 200
"""Most tasks that one step spreads into: Airflow's scheduler slows down far below its own limit of 1,024."""

_RUN: Final = "nightly.json"
_RESULT: Final = "library.json"


@shared()
def plan_profiling(run_id: str, params: Mapping[str, Any]) -> list[dict[str, str]]:
    """One item for each model of the setup. Raises Unavailable if there is none: an empty mapping would turn green."""
    settings = Settings()
    given, setup = _given(settings, params)
    run = run_store(settings).open(run_id)
    run.put_json(_RUN, {"reason": given.reason, "setup": setup.name, "given": msgspec.to_builtins(given)}, replace=True)
    models = [str(one.model.id) for one in setup.models if not given.models or one.model.id in given.models]
    if not models:
        raise Unavailable(f"setup {setup.name} has no model to profile")
    return _bounded([{"run": run_id, "setup": setup.name, "model": model} for model in models], "models")


def _given(settings: Settings, params: Mapping[str, Any]) -> tuple[LibraryParameters, Setup]:
    """Parameters, checked, and their setup. Raises ValidationFailed, UnknownName."""
    from coral_tasks.catalog import load_catalog

    setup = load_catalog().setup(str(params.get("setup") or settings.setup))
    return read_library(params, [str(one.model.id) for one in setup.models]), setup


def _bounded[Item](items: list[Item], what: str) -> list[Item]:
    """The items of one mapped step. Raises ValidationFailed if there are too many for Airflow to spread."""
    if len(items) <= MAX_MAPPED:
        return items
    rule = f"more {what} than the {MAX_MAPPED} tasks that one run may spread into; use several setups"
    raise ValidationFailed([Violation(table="setup", row="", value=str(len(items)), rule=rule)])


@shared("measurements")
def plan_measurements(run_id: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One item for each node configuration that is due and has an idle node with real vLLM; often none.

    Due: a model of the setup was not measured on it within ``measurement_max_age_s``. An item holds as many models as
    there is time for in one task; the rest is due again the next night.
    """
    from dataclasses import asdict, replace
    from datetime import UTC, datetime, timedelta

    from coral_tasks.tasks import dispatching, measuring, profiling

    settings = Settings()
    given, setup = _given(settings, params)
    fleet = measuring.Fleet.of(settings.home)
    if not fleet.agents.exists():
        return []
    rows = [row for run in profiling.read_measurements_of(settings.home) for row in run]
    oldest = datetime.now(UTC) - timedelta(seconds=settings.measurement_max_age_s)
    chosen = tuple(one for one in setup.models if not given.models or one.model.id in given.models)
    setup = replace(setup, models=chosen)
    due = measuring.due_models(setup, rows, oldest=oldest)
    seen = dispatching.observe(fleet.agents, fleet.keys)
    most = max(1, int(_MEASURE_S // settings.measurement_timeout_s))
    return [
        {"run": run_id, "setup": setup.name, **asdict(one), "models": list(one.models[:most])}
        for one in measuring.plan_assignments(setup, seen, due)
    ]


def measurements_by_gpu_type(run_id: str, params: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The items of ``plan_measurements`` for every GPU type of the catalogue: each type has a pool of its own."""
    from coral_tasks.catalog import load_catalog

    catalog = load_catalog()
    found: dict[str, list[dict[str, Any]]] = {str(name): [] for name in catalog.gpu_types}
    for item in plan_measurements(run_id, params):
        found[str(catalog.configuration(item["configuration"]).gpu.name)].append(item)
    return {name: _bounded(items, f"configurations with {name}") for name, items in found.items()}


@shared("measurements")
def measure(item: Mapping[str, Any]) -> list[str]:
    """Measure an item's models on its node; paths of the files written.

    What a busy node or a failed job leaves unmeasured is logged and kept in the run with its reason; the tables then
    rest on the next source and say so. Raises StorageFault.
    """
    from dataclasses import asdict

    from coral_tasks.catalog import load_catalog
    from coral_tasks.tasks import measuring

    settings = Settings()
    assignment = measuring.Assignment(
        configuration=item["configuration"], node=item["node"], models=tuple(item["models"])
    )
    result = measuring.measure_assignment(
        assignment,
        load_catalog().setup(item["setup"]),
        home=settings.home,
        fleet=measuring.Fleet.of(settings.home),
        run_id=item["run"],
        timeout_s=settings.measurement_timeout_s,
    )
    run = run_store(settings).open(item["run"])
    run.put_json(f"measurements/{assignment.configuration}.json", {**item, **asdict(result)}, replace=True)
    return result.files


@shared("measurements")
def profile(item: Mapping[str, str]) -> list[dict[str, str]]:
    """Write the profile tables of one model; for each phase the item with phase and path.

    ``tighter`` is the path of the same table with both limits times the setting ``slo_step``, empty where that is 0:
    one item carries both through all later steps, so that the second SLO adds work to the night's tasks and no tasks.
    Files in ``home/measurements`` are the best source for what they cover. Raises StorageFault if one is corrupt.
    """
    from dataclasses import replace

    from coral_tasks.catalog import load_catalog
    from coral_tasks.profiling import build_profiles
    from coral_tasks.tasks import profiling

    settings = Settings()
    setup = load_catalog().setup(item["setup"])
    wanted = tuple(one for one in setup.models if one.model.id == item["model"])
    run = run_store(settings).open(item["run"])
    sources = profiling.measured_first(profiling.read_measurements_of(settings.home))
    setup = replace(setup, models=wanted)
    report = build_profiles(setup, sources=sources)
    run.put_json(_notes_file(item["model"]), profiling.notes_of(report), replace=True)
    step = settings.slo_step
    aside = build_profiles(library.tightened(setup, step), sources=sources).tables if step else ()
    paths, tighter = _write_tables(run, report.tables, ""), _write_tables(run, aside, "-tighter")
    return [
        {**item, "phase": phase, "profile": path, "tighter": tighter.get(phase, "")} for phase, path in paths.items()
    ]


def _write_tables(run: Run, tables: Sequence[ProfileTable], ending: str) -> dict[str, str]:
    """Path of each table's file by its phase."""
    from coral_tasks.storage.profile_files import profile_to_parquet

    return {
        one.phase.value: str(
            run.put(f"profiles/{one.model}-{one.phase.value}{ending}.parquet", profile_to_parquet(one), replace=True)
        )
        for one in tables
    }


def plan_templates(profiled: Sequence[Sequence[Mapping[str, str]]]) -> list[dict[str, str]]:
    """One item for each model and phase. Raises Unavailable if there is none."""
    items = [dict(item) for items in profiled for item in items]
    if not items:
        raise Unavailable("no profile table to build templates from")
    return _bounded(items, "models and phases")


def plan_large(items: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The items with a set that is large enough to be solved chunk by chunk on several workers; often none."""
    return [dict(item) for item in items if _chunks(item)]


@shared()
def keep_smaller(item: Mapping[str, str]) -> list[dict[str, Any]]:
    """Solve what all chunks of an item's large sets rest on; one item for each chunk of the largest combinations."""
    for table in _tables(item):
        library.keep_chunk(library_address(Settings()), table, library.options_for(table.phase), None)
    return [{**item, "first": first, "last": last} for first, last in _chunks(item)]


def plan_chunks(prepared: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One item for each chunk of all large sets."""
    return _bounded([dict(item) for items in prepared for item in items], "chunks of combinations")


@shared()
def keep_chunk(item: Mapping[str, Any]) -> None:
    """Solve one chunk, of both SLOs, and keep it in the library's store, where ``build_templates`` finds it."""
    chunk = (int(item["first"]), int(item["last"]))
    for table in _tables(item):
        library.keep_chunk(library_address(Settings()), table, library.options_for(table.phase), chunk)


@shared()
def _chunks(item: Mapping[str, str]) -> list[tuple[int, int]]:
    """Chunks of an item's sets that the library does not have. Both SLOs have the same combinations, so the same."""
    address = library_address(Settings())
    found = [library.chunks_to_spread(address, one, library.options_for(one.phase)) for one in _tables(item)]
    return sorted({chunk for chunks in found for chunk in chunks})


def _tables(item: Mapping[str, Any]) -> list[ProfileTable]:
    """An item's profile table and, where there is one, that of the tighter SLO."""
    return [read_profile(Path(item[name])) for name in ("profile", "tighter") if item.get(name)]


@shared()
def build_templates(item: Mapping[str, str]) -> dict[str, str]:
    """Build the template sets of an item's profile tables, unless the library has them; the item with their keys."""
    tables = _tables(item)
    keys, num_reused = library.build_parts(
        library_address(Settings()), tables, {table.phase: library.options_for(table.phase) for table in tables}
    )
    return {**item, "key": keys[0], "tighter_key": "".join(keys[1:]), "reused": str(num_reused == len(keys))}


def publish(parts: Sequence[Mapping[str, str]], params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Join the sets to a version and make it current if the regression gate agrees; version and what changed.

    After a run for some models the others keep the sets of the version in force, those of the tighter SLO included. A
    dry run publishes nothing and says what the gate would. Raises PublicationRefused, Unavailable if there is no
    version to keep sets from.
    """
    from datetime import UTC, datetime, timedelta

    from coral_tasks.storage.library import current_manifest, remove_old
    from coral_tasks.storage.objects import open_store

    settings = Settings()
    given, setup = _given(settings, params or {})
    address = library_address(settings)
    store = open_store(address)
    before = current_manifest(store)
    publication = library.Publication(force=given.force, publish=not given.dry_run)
    kept, kept_tighter = _kept_keys(before, given.models, setup)
    manifest = library.publish_parts(
        address,
        [*(part["key"] for part in parts), *kept],
        {phase: library.options_for(phase) for phase in Phase},
        publication,
        tighter=[*(part["tighter_key"] for part in parts if part.get("tighter_key")), *kept_tighter],
        slo_step=settings.slo_step,
    )
    if not given.dry_run:
        remove_old(store, keep_versions=publication.keep_versions, now=datetime.now(UTC), grace=timedelta(days=1))
    if parts and not given.dry_run and not given.models:  # tables of some models would replace those of all
        _publish_profiles(parts[0]["run"], parts)
    result = {
        "version": manifest.version,
        "changed": before is None or before.version != manifest.version,
        "published": not given.dry_run,
        "num_templates": sum(entry.num_rows for entry in manifest.sets),
        "num_tighter": sum(entry.num_rows for entry in manifest.tighter),
        "num_reused": sum(part["reused"] == "True" for part in parts),
        "address": address,
    }
    return result | ({"objections": _objections(store, before, manifest)} if given.dry_run else {})


@shared("profiles")
def _publish_profiles(run_id: str, parts: Sequence[Mapping[str, str]]) -> None:
    """Make the tables behind the published sets those that ``coral profile show`` reads."""
    from coral_tasks.tasks import profiling

    run = run_store(Settings()).open(run_id)
    notes: dict[str, list[dict[str, Any]]] = {}
    for model in dict.fromkeys(part["model"] for part in parts):
        for kind, entries in run.get_json(_notes_file(model)).items():
            notes.setdefault(kind, []).extend(entries)
    tables = [read_profile(Path(part["profile"])) for part in parts]
    profiling.write_profiles(tables, notes, parts[0]["setup"], Settings().home)


def _notes_file(model: str) -> str:
    return f"profiles/{model}.json"


def _kept_keys(before: Manifest | None, models: Sequence[str], setup: Setup) -> tuple[list[str], list[str]]:
    """Sets, and tighter sets, of the models that were left out; those that the setup no longer has go."""
    if not models:
        return [], []
    if before is None:
        raise Unavailable("no library version is in force to keep the other models' sets from: run for all models")
    others = {str(one.model.id) for one in setup.models} - set(models)
    sets, tighter = ([one.key for one in group if one.model in others] for group in (before.sets, before.tighter))
    return sets, tighter


def _objections(store: ObjectStore, before: Manifest | None, manifest: Manifest) -> list[str]:
    """What the regression gate would say of a version that is not published."""
    from coral_tasks.storage.library import read_version
    from coral_tasks.storage.regression import RegressionLimits, compare_libraries, reasons_against

    if before is None:
        return []
    pair = compare_libraries(read_version(store, before.version), read_version(store, manifest.version))
    return list(reasons_against(pair, RegressionLimits()))


@shared()
def note_result(run_id: str, result: Mapping[str, Any]) -> None:
    """Keep beside the run what its publication, or dry run, came to."""
    run_store(Settings()).open(run_id).put_json(_RESULT, dict(result), replace=True)


def library_address(settings: Settings) -> str:
    """Where the template library lies: a folder or ``s3://bucket/prefix``."""
    beside_runs = f"{settings.shared.rstrip('/')}/library" if settings.shared else str(settings.home / "library")
    return settings.library or beside_runs


def read_profile(path: Path) -> ProfileTable:
    """The profile table in a file. Raises StorageFault."""
    from coral_tasks.domain.errors import StorageFault
    from coral_tasks.storage.profile_files import profile_from_parquet

    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageFault(f"profile {path} cannot be read: {error.strerror or error}") from error
    return profile_from_parquet(data, str(path))
