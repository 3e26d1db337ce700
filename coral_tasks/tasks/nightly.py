"""The nightly DAG's work, one function for each task: measurements, profiles, templates, publication.

Paths and ids in, paths and ids out; every function may run twice. Files of a run lie in ``runs/<run id>/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_tasks.domain.errors import Unavailable
from coral_tasks.domain.names import Phase
from coral_tasks.settings import Settings
from coral_tasks.tasks import library
from coral_tasks.tasks.inputs import run_store
from coral_tasks.tasks.sharing import shared

if TYPE_CHECKING:
    from coral_tasks.domain.profiles import ProfileTable

_MEASURE_S = 6000.0
"""Time for the jobs of one measuring task, below its limit of two hours."""


@shared()
def plan_profiling(run_id: str, params: Mapping[str, Any]) -> list[dict[str, str]]:
    """One item for each model of the setup. Raises Unavailable if there is none: an empty mapping would turn green."""
    from coral_tasks.catalog import load_catalog

    settings = Settings()
    name = params.get("setup") or settings.setup
    setup = load_catalog().setup(name)
    run_store(settings).open(run_id)
    if not setup.models:
        raise Unavailable(f"setup {name} has no model to profile")
    return [{"run": run_id, "setup": name, "model": str(one.model.id)} for one in setup.models]


@shared("measurements")
def plan_measurements(run_id: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One item for each node configuration that is due and has an idle node with real vLLM; often none.

    Due: a model of the setup was not measured on it within ``measurement_max_age_s``. An item holds as many models as
    there is time for in one task; the rest is due again the next night.
    """
    from dataclasses import asdict
    from datetime import UTC, datetime, timedelta

    from coral_tasks.catalog import load_catalog
    from coral_tasks.tasks import dispatching, measuring, profiling

    settings = Settings()
    setup = load_catalog().setup(params.get("setup") or settings.setup)
    fleet = measuring.Fleet.of(settings.home)
    if not fleet.agents.exists():
        return []
    rows = [row for run in profiling.read_measurements_of(settings.home) for row in run]
    oldest = datetime.now(UTC) - timedelta(seconds=settings.measurement_max_age_s)
    due = measuring.due_models(setup, rows, oldest=oldest)
    seen = dispatching.observe(fleet.agents, fleet.keys)
    most = max(1, int(_MEASURE_S // settings.measurement_timeout_s))
    return [
        {"run": run_id, "setup": setup.name, **asdict(one), "models": list(one.models[:most])}
        for one in measuring.plan_assignments(setup, seen, due)
    ]


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

    Files in ``home/measurements`` are the best source for what they cover. Raises StorageFault if one is corrupt.
    """
    from dataclasses import replace

    from coral_tasks.catalog import load_catalog
    from coral_tasks.profiling import build_profiles
    from coral_tasks.storage.profile_files import profile_to_parquet
    from coral_tasks.tasks import profiling

    settings = Settings()
    setup = load_catalog().setup(item["setup"])
    wanted = tuple(one for one in setup.models if one.model.id == item["model"])
    run = run_store(settings).open(item["run"])
    sources = profiling.measured_first(profiling.read_measurements_of(settings.home))
    report = build_profiles(replace(setup, models=wanted), sources=sources)
    run.put_json(_notes_file(item["model"]), profiling.notes_of(report), replace=True)
    written = []
    for table in report.tables:
        name = f"profiles/{table.model}-{table.phase.value}.parquet"
        path = run.put(name, profile_to_parquet(table), replace=True)
        written.append({**item, "phase": table.phase.value, "profile": str(path)})
    return written


def plan_templates(profiled: Sequence[Sequence[Mapping[str, str]]]) -> list[dict[str, str]]:
    """One item for each model and phase. Raises Unavailable if there is none."""
    items = [dict(item) for items in profiled for item in items]
    if not items:
        raise Unavailable("no profile table to build templates from")
    return items


@shared()
def build_templates(item: Mapping[str, str]) -> dict[str, str]:
    """Build the template set of one profile table, unless the library has it; the item with its key."""
    settings = Settings()
    table = read_profile(Path(item["profile"]))
    keys, num_reused = library.build_parts(library_address(settings), [table], library.options_for(table.phase))
    return {**item, "key": keys[0], "reused": str(bool(num_reused))}


def publish(parts: Sequence[Mapping[str, str]], *, force: bool = False) -> dict[str, Any]:
    """Join the sets to a version and make it current if the regression gate agrees; version and what changed."""
    from datetime import UTC, datetime, timedelta

    from coral_tasks.storage.library import current_manifest, remove_old
    from coral_tasks.storage.objects import open_store

    address = library_address(Settings())
    store = open_store(address)
    before = current_manifest(store)
    publication = library.Publication(force=force)
    keys = [part["key"] for part in parts]
    manifest = library.publish_parts(address, keys, {phase: library.options_for(phase) for phase in Phase}, publication)
    remove_old(store, keep_versions=publication.keep_versions, now=datetime.now(UTC), grace=timedelta(days=1))
    if parts:
        _publish_profiles(parts[0]["run"], parts)
    return {
        "version": manifest.version,
        "changed": before is None or before.version != manifest.version,
        "num_templates": sum(entry.num_rows for entry in manifest.sets),
        "num_reused": sum(part["reused"] == "True" for part in parts),
        "address": address,
    }


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
