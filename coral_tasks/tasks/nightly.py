"""The nightly DAG's work, one function for each task: profiles, templates, publication.

Paths and ids in, paths and ids out; every function may run twice. Files of a run lie in ``runs/<run id>/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_tasks.domain.errors import Unavailable
from coral_tasks.settings import Settings
from coral_tasks.tasks import library
from coral_tasks.tasks.inputs import run_store

if TYPE_CHECKING:
    from coral_tasks.domain.profiles import ProfileTable


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


def profile(item: Mapping[str, str]) -> list[dict[str, str]]:
    """Write the profile tables of one model; for each phase the item with phase and path."""
    from dataclasses import replace

    from coral_tasks.catalog import load_catalog
    from coral_tasks.profiling import build_profile_tables
    from coral_tasks.storage.profile_files import profile_to_parquet

    setup = load_catalog().setup(item["setup"])
    wanted = tuple(one for one in setup.models if one.model.id == item["model"])
    run = run_store(Settings()).open(item["run"])
    written = []
    for table in build_profile_tables(replace(setup, models=wanted)):
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


def build_templates(item: Mapping[str, str]) -> dict[str, str]:
    """Build the template set of one profile table, unless the library has it; the item with its key."""
    settings = Settings()
    table = read_profile(Path(item["profile"]))
    keys, num_reused = library.build_parts(library_address(settings), [table], library.default_options())
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
    manifest = library.publish_parts(address, keys, library.default_options(), publication)
    remove_old(store, keep_versions=publication.keep_versions, now=datetime.now(UTC), grace=timedelta(days=1))
    return {
        "version": manifest.version,
        "changed": before is None or before.version != manifest.version,
        "num_templates": sum(entry.num_rows for entry in manifest.sets),
        "num_reused": sum(part["reused"] == "True" for part in parts),
        "address": address,
    }


def library_address(settings: Settings) -> str:
    """Where the template library lies: a folder or ``s3://bucket/prefix``."""
    return settings.library or str(settings.home / "library")


def read_profile(path: Path) -> ProfileTable:
    """The profile table in a file. Raises StorageFault."""
    from coral_tasks.domain.errors import StorageFault
    from coral_tasks.storage.profile_files import profile_from_parquet

    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageFault(f"profile {path} cannot be read: {error.strerror or error}") from error
    return profile_from_parquet(data, str(path))
