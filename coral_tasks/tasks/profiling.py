"""Profiles as paths in, paths out: build and read the tables of a setup, validate, run measurements.

Joins catalogue, profiling and the profile contract; holds no arithmetic of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coral_tasks.domain.content import content_digest
from coral_tasks.domain.errors import StorageFault, ValidationFailed, Violation
from coral_tasks.domain.profiles import ProfileTable

if TYPE_CHECKING:
    from coral_tasks.profiling import BuildReport
    from coral_tasks.profiling.costs import CostSource
    from coral_tasks.profiling.measured import MeasuredRow

FOLDER = "profiles"
MEASUREMENTS = "measurements"
MANIFEST = "manifest.json"
CURRENT = "current.json"


def build_profiles(setup_name: str, home: Path, *, measured: Sequence[Path] = ()) -> Path:
    """Build all tables of a setup and write them into ``home/profiles/<version>``; the folder.

    ``measured``: files of the measured runner, best source for what they cover, beside those in ``home/measurements``.
    The version is a hash over the tables' own versions, so the same inputs give the same folder, which is then left as
    it is. ``current.json`` names it. Raises UnknownName, ValidationFailed, Unavailable, StorageFault.
    """
    from coral_tasks.catalog import load_catalog
    from coral_tasks.profiling import build_profiles as build

    sources = measured_first([*read_measurements_of(home), *(read_known(path) for path in measured)])
    report = build(load_catalog().setup(setup_name), sources=sources)
    return write_profiles(report.tables, notes_of(report), setup_name, home)


def measured_first(runs: Sequence[Sequence[MeasuredRow]]) -> tuple[CostSource, ...]:
    """All sources, best first: the latest run of each model and configuration, then database and roofline."""
    from coral_tasks.profiling import default_sources
    from coral_tasks.profiling.measured import MeasuredSource, newest_runs

    return (*([MeasuredSource.of(newest_runs(runs))] if runs else []), *default_sources())


def read_measurements_of(home: Path) -> list[tuple[MeasuredRow, ...]]:
    """Rows of each file in ``home/measurements``; none if there are none. Raises ValidationFailed, StorageFault."""
    return [read_measured(path) for path in sorted((home / MEASUREMENTS).glob("*.parquet"))]


def read_known(path: Path) -> tuple[MeasuredRow, ...]:
    """Rows of a file, all of models and configurations of the catalogue.

    Raises ValidationFailed listing the known names for every other name, StorageFault.
    """
    from coral_tasks.catalog import load_catalog

    rows, catalog = read_measured(path), load_catalog()
    violations = [
        Violation(table=path.name, row="", value=repr(name), rule=f"unknown {kind}; known: {', '.join(sorted(known))}")
        for kind, known, names in (
            ("model", catalog.models, {str(row.model) for row in rows}),
            ("node configuration", catalog.configurations, {str(row.configuration) for row in rows}),
        )
        for name in sorted(names)
        if name not in known
    ]
    if violations:
        raise ValidationFailed(violations)
    return rows


def read_measured(path: Path) -> tuple[MeasuredRow, ...]:
    """Rows of a file that ``run_measurement`` wrote, Parquet or JSON. Raises ValidationFailed, StorageFault."""
    from coral_tasks.profiling.measured import rows_from_records
    from data_contracts.measurements import read_measurements

    try:
        return rows_from_records(read_measurements(path), path.name)
    except ValueError as error:
        message = f"measurements {path} cannot be read: {error}"
        raise StorageFault(message) from error


def notes_of(report: BuildReport) -> dict[str, list[dict[str, Any]]]:
    """What a build has to say beside its tables, as JSON values: missing, unreachable, repairs."""
    return {
        "missing": [asdict(one) for one in report.missing],
        "unreachable": [asdict(one) for one in report.unreachable],
        "repairs": [
            {"model": model, "phase": phase, "configuration": configuration, "largest_change": change}
            for (model, phase, configuration), change in sorted(report.repairs.items())
        ],
    }


def write_profiles(
    tables: Sequence[ProfileTable], notes: Mapping[str, list[dict[str, Any]]], setup_name: str, home: Path
) -> Path:
    """Write tables, manifest and the pointer to them; the version's folder. Raises StorageFault."""
    version = content_digest([table.version for table in tables])
    folder = home / FOLDER / version
    named = [(f"{table.model}-{table.phase}.parquet", table) for table in tables]
    entries = [{"file": name, "version": table.version} for name, table in named]
    try:
        if not (folder / MANIFEST).exists():
            for name, table in named:
                write_table(folder / name, table)
            _write_json(folder / MANIFEST, {"version": version, "setup": setup_name, "tables": entries, **notes})
        _write_json(home / FOLDER / CURRENT, {"version": version, "setup": setup_name})
    except OSError as error:
        message = f"profiles cannot be written to {folder}: {error}"
        raise StorageFault(message) from error
    return folder


def _write_json(path: Path, value: dict[str, Any]) -> None:
    from coral_tasks.storage.runs import write_whole

    write_whole(path, json.dumps(value, indent=1, sort_keys=True).encode())


def write_table(path: Path, table: ProfileTable) -> None:
    """One profile table as a file of the contract ``profile_cells``."""
    from coral_tasks.storage.profile_files import profile_to_parquet
    from coral_tasks.storage.runs import write_whole

    write_whole(path, profile_to_parquet(table))


def read_table(path: Path) -> ProfileTable:
    """The table in such a file. Raises StorageFault if the file is not one, whole and consistent."""
    from coral_tasks.storage.profile_files import profile_from_parquet

    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        message = f"profile table {path} cannot be read: {error}"
        raise StorageFault(message) from error
    return profile_from_parquet(data, str(path))


def read_profiles(home: Path) -> tuple[ProfileTable, ...]:
    """Tables that ``current.json`` points to, in the manifest's order. Raises StorageFault if there are none."""
    try:
        current = json.loads((home / FOLDER / CURRENT).read_text(encoding="utf-8"))
        folder = home / FOLDER / current["version"]
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        paths = [folder / entry["file"] for entry in manifest["tables"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"no profiles in {home / FOLDER}: {error}; build them with: coral profile build"
        raise StorageFault(message) from error
    return tuple(read_table(path) for path in paths)


def summarize(tables: Sequence[ProfileTable]) -> list[dict[str, Any]]:
    """One row per model, phase and configuration: source, layers that fit, best figures, what limits.

    ``max_layers``: most layers with any throughput at the whole latency budget; ``limit``: what stops one layer more
    there; ``best``: the most of throughput x layers / all layers at a sixth of the budget, a rough worth of the node.
    """
    from coral_tasks.domain.profiles import LimitedBy

    rows = []
    for table in tables:
        for c, configuration in enumerate(table.configurations):
            whole = table.throughput[c, :, -1]
            most = int((whole > 0).sum())
            share = table.throughput[c, :, table.throughput.shape[2] // 6 - 1]
            limit = LimitedBy(int(table.limited_by[c, min(most, table.num_layers - 1), -1]))
            layers = range(1, table.num_layers + 1)
            rows.append(
                {
                    "model": table.model,
                    "phase": table.phase.value,
                    "configuration": configuration,
                    "source": table.sources[c].value,
                    "tp": table.tp_degree[c],
                    "max_layers": most,
                    "num_layers": table.num_layers,
                    "limit": limit.name.lower(),
                    "one_layer": float(whole[0]),
                    "best": round(max(float(share[j - 1]) * j / table.num_layers for j in layers), 3),
                    "unit": table.phase.throughput_unit,
                    "provenance": table.provenance[c],
                }
            )
    return rows


def validate_profiles(points: Path | None, out: Path | None) -> dict[str, Any]:
    """The validation report; written to ``out`` as ``validation.json`` and ``validation.html`` if given.

    ``points``: file in the columns of ``vllm_agg_points.csv``; None: the project's own. Raises StorageFault,
    ValidationFailed.
    """
    from coral_tasks.profiling.points import POINTS_FILE, read_points
    from coral_tasks.profiling.validate import validate, validate_helix
    from coral_tasks.profiling.validation_page import validation_page

    report = validate(read_points(points or POINTS_FILE))
    report["helix"] = validate_helix()
    if out is not None:
        try:
            _write_json(out / "validation.json", report)
            (out / "validation.html").write_text(validation_page(report), encoding="utf-8")
        except OSError as error:
            message = f"the report cannot be written to {out}: {error}"
            raise StorageFault(message) from error
    return report


REQUEST_LISTS = ("layer_counts", "sequences", "tokens")
REQUEST_COUNTS = ("warmup", "repeats", "decode_steps")
REQUEST_NUMBERS = ("gpu_memory_fraction", "timeout_s")


def read_request(path: Path) -> tuple[str, str, dict[str, Any]]:
    """Model, configuration and options of a profiling request (JSON object). Raises ValidationFailed, StorageFault."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        message = f"profiling request {path} cannot be read: {error}"
        raise StorageFault(message) from error
    except (ValueError, RecursionError) as error:
        raise ValidationFailed([Violation(table=path.name, row="", value=str(error), rule="must be JSON")]) from error
    if not isinstance(value, dict):
        raise ValidationFailed([Violation(table=path.name, row="", value=repr(value), rule="must be a JSON object")])
    violations = [_request_violation(path.name, key, item) for key, item in value.items()]
    violations += [
        Violation(table=path.name, row=key, value="", rule=f"{key} is missing")
        for key in ("model", "configuration")
        if key not in value
    ]
    found = [violation for violation in violations if violation is not None]
    if found:
        raise ValidationFailed(found)
    options = {
        key: tuple(item) if key in REQUEST_LISTS else item
        for key, item in value.items()
        if key not in ("model", "configuration")
    }
    return value["model"], value["configuration"], options


def _request_violation(table: str, key: str, item: object) -> Violation | None:
    if key in ("model", "configuration"):
        rule = "" if isinstance(item, str) else "must be a text"
    elif key in REQUEST_LISTS:
        rule = (
            "" if isinstance(item, list) and all(_is_whole(one) for one in item) else "must be a list of whole numbers"
        )
    elif key in REQUEST_COUNTS:
        rule = "" if _is_whole(item) else "must be a whole number"
    elif key in REQUEST_NUMBERS:
        rule = "" if _is_whole(item) or isinstance(item, float) else "must be a number"
    elif key == "eager":
        rule = "" if isinstance(item, bool) else "must be true or false"
    else:
        known = ("model", "configuration", *REQUEST_LISTS, *REQUEST_COUNTS, *REQUEST_NUMBERS, "eager")
        rule = f"unknown key; known: {', '.join(sorted(known))}"
    return Violation(table=table, row=key, value=repr(item), rule=rule) if rule else None


def _is_whole(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def require_writable(out: Path) -> None:
    """Raise StorageFault if ``out`` cannot be written: said before the hours of a measurement, not after."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        refusal = "it is a folder" if out.is_dir() else "" if os.access(out.parent, os.W_OK) else "permission denied"
    except OSError as error:
        refusal = error.strerror or str(error)
    if refusal:
        raise StorageFault(f"measurements cannot be written to {out}: {refusal}")


def run_measurement(
    model: str, configuration: str, *, interpreter: Path, out: Path, options: dict[str, Any]
) -> dict[str, Any]:
    """Profile this machine with real vLLM and write the rows to ``out``; what was measured, in short.

    ``out``: JSON records if it ends in ``.json`` (what a node agent reads), else Parquet.

    ``options``: see ``profiling.runner.RunPlan``. Raises UnknownName, ValidationFailed, EngineFault, StorageFault.
    """
    from coral_tasks.profiling.runner import as_records, plan_run, run_plan
    from data_contracts.measurements import write_measurements

    plan = plan_run(model, configuration, **options)
    require_writable(out)
    rows = run_plan(plan, interpreter)
    try:
        write_measurements(out, as_records(rows))
    except OSError as error:
        message = f"measurements cannot be written to {out}: {error}"
        raise StorageFault(message) from error
    return summary_of_rows(rows, out)


def summary_of_rows(rows: Sequence[MeasuredRow], out: Path) -> dict[str, Any]:
    """What was measured, in short: points by status and the line over layers of each."""
    from coral_tasks.profiling.measured import fit_measurements

    fits = fit_measurements(rows)
    counts = {status: sum(row.status == status for row in rows) for status in ("ok", "oom", "failed")}
    return {"out": str(out), "points": len(rows), **counts, "fits": [fit.as_row() for fit in fits]}
