"""Inputs of one run: fetch, gate, keep; quarantine and release; what planning then reads.

Joins ingestion, contracts, catalogue and run store. Holds no rule on data and no planning logic. What lies where, under
``settings.home``: ``runs/<run>/inputs/<table>/batch.*`` and ``source.json`` (as it came), ``…/accepted.parquet``,
``runs/<run>/gate/report.html`` and ``<table>.json``; ``quarantine/<batch>/``; ``current/inputs/<table>.parquet``
(accepted last).

API::

    ingest_table(settings, run_id, table, now, source=None) -> path of source.json
    gate_inputs(settings, run_id, now, library=None) -> GateSummary      # raises InputsQuarantined via .require()
    load_inputs(settings, run_id) -> PlanningInputs(demand, prices, availability, fleet)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coral_tasks.domain.errors import SourceFault, StorageFault, ValidationFailed, Violation
from coral_tasks.domain.fleet import Fleet
from coral_tasks.domain.market import Demand, NodeAvailability, NodePrice
from coral_tasks.settings import Settings

if TYPE_CHECKING:
    from coral_tasks.ingestion.batch import Source, SourceBatch
    from coral_tasks.storage.runs import Run, RunStore
    from data_contracts.contract import GateContext, GateLimits
    from data_contracts.gate import GateReport

ArrowTable = Any
"""A pyarrow.Table; pyarrow itself stays below this package."""

INPUT_TABLES: Final = ("demand", "prices", "availability", "running")
_REFERENCE_INTERVAL_S: Final = 300.0
MAX_TOLD: Final = 1000
"""Violations of one table that an error message holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFacts:
    """What the gate compares inputs with: phases by model, configurations and ids of the library's templates."""

    template_phases: Mapping[str, frozenset[str]]
    template_configurations: frozenset[str]
    template_ids: frozenset[str]
    excluded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningInputs:
    """What one run plans on."""

    demand: tuple[Demand, ...]
    prices: tuple[NodePrice, ...]
    availability: tuple[NodeAvailability, ...]
    fleet: Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSummary:
    """Verdict by table, and where the page lies. ``violations``: what kept batches out."""

    accepted: bool
    verdicts: Mapping[str, str]
    violations: tuple[Violation, ...]
    quarantined: Mapping[str, str]
    page: Path

    def require(self) -> None:
        """Raise ValidationFailed with every violation unless all inputs were accepted: the last plan stays."""
        if not self.accepted:
            raise ValidationFailed(self.violations)


def run_store(settings: Settings) -> RunStore:
    """The runs of this home."""
    from coral_tasks.storage.runs import RunStore

    return RunStore(root=settings.home / "runs")


def ingest_table(
    settings: Settings,
    run_id: str,
    table: str,
    now: datetime,
    source: Source | None = None,
    *,
    overrides: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Fetch one table and keep it as it came; path of its ``source.json``.

    ``source`` None: the one that ``<home>/sources.json`` names, else the drop folder if it holds a file of the table,
    else the setup's demo data. ``overrides``: laid over it before anything judges it; what came is kept beside. A
    second call finds the first call's batch and fetches nothing. Raises SourceFault, ValidationFailed for an override
    that names no row.
    """
    from coral_tasks.ingestion.overrides import with_overrides

    run = run_store(settings).open(run_id)
    name = f"inputs/{table}/source.json"
    if run.path(name).exists():
        return run.path(name)
    fetched = _fetch(settings, table, now, source)
    batch = with_overrides(fetched, overrides)
    if batch is not fetched:
        run.put(f"inputs/{table}/fetched{fetched.suffix}", fetched.data, replace=True)
    run.put(f"inputs/{table}/batch{batch.suffix}", batch.data)
    return run.put_json(name, _source_record(batch, now))


def _fetch(settings: Settings, table: str, now: datetime, source: Source | None = None) -> SourceBatch:
    from coral_tasks.tasks.sources import configured_source

    configured = None if source is not None else configured_source(settings, table)
    chosen, minimum = configured or (source or default_source(settings, table), 0.0)
    batch = chosen(now)
    require_source(batch, minimum)
    return batch


def fetch_again(
    settings: Settings, now: datetime, overrides: Mapping[str, Sequence[Mapping[str, Any]]], run_id: str = ""
) -> PlanningInputs:
    """What the sources say at ``now``, through the gate's rules for each table; nothing is kept, the fleet is left out.

    ``run_id``: bytes that a person released for this run may come again.

    Raises SourceFault, ValidationFailed with what the gate refuses.
    """
    from coral_tasks.ingestion import rows
    from coral_tasks.ingestion.overrides import with_overrides
    from data_contracts.gate import check_table
    from data_contracts.registry import contract_of

    found: dict[str, ArrowTable] = {}
    for table in ("demand", "prices", "availability"):
        batch = with_overrides(_fetch(settings, table, now), overrides.get(table, ()))
        outcome = check_table(contract_of(table), batch.raw(), gate_context(settings, table, now))
        taken = outcome.table
        if taken is None and outcome.report.releasable and _is_released(settings, run_id, batch.data):
            taken = outcome.readable
        if taken is None:
            raise ValidationFailed(violations_of(outcome.report))
        found[table] = taken
    return PlanningInputs(
        demand=rows.demand_rows(found["demand"]),
        prices=rows.price_rows(found["prices"]),
        availability=rows.availability_rows(found["availability"]),
        fleet=Fleet(nodes=(), instances=()),
    )


def _source_record(batch: SourceBatch, now: datetime) -> dict[str, Any]:
    return {
        "table": batch.table,
        "file": f"inputs/{batch.table}/batch{batch.suffix}",
        "source": batch.source,
        "observed_at": batch.observed_at.isoformat(),
        "fetched_at": now.isoformat(),
        "age_s": batch.age_s(now),
        "completeness": batch.completeness,
        "expected": batch.expected,
        "received": batch.received,
        "notes": list(batch.notes),
    }


def default_source(settings: Settings, table: str) -> Source:
    """Drop folder ``<home>/inputs`` if it holds a file of the table, else the demo data of the setup."""
    from coral_tasks.ingestion.files import FolderSource, is_whole_name

    folder = settings.home / "inputs"
    dropped = folder.is_dir() and any(
        path.name.startswith(table) and is_whole_name(path.name) for path in folder.iterdir()
    )
    return FolderSource(table=table, folder=folder) if dropped else demo_source(settings, table)


def demo_source(settings: Settings, table: str) -> Source:
    """The setup's shipped data for ``table``, dated as at the moment it is asked."""
    makers: dict[str, Callable[[str, datetime], ArrowTable]] = {
        "demand": _demo_demand,
        "prices": _demo_prices,
        "availability": _demo_availability,
        "running": _demo_running,
    }

    def fetch(now: datetime) -> SourceBatch:
        from coral_tasks.ingestion.batch import batch_of

        made = makers[table](settings.setup, now)
        return batch_of(table, made, source=f"demo: setup {settings.setup}", observed_at=now)

    return fetch


def _demo_demand(setup: str, now: datetime) -> ArrowTable:
    from coral_tasks.ingestion.demand_day import demand_at, read_demand_day
    from coral_tasks.ingestion.rows import demand_table

    return demand_table(demand_at(read_demand_day(setup), now))


def _demo_prices(setup: str, now: datetime) -> ArrowTable:
    from coral_tasks.catalog import load_catalog
    from coral_tasks.ingestion.rows import price_table

    catalog = load_catalog()
    prices = catalog.prices(catalog.setup(setup))
    return price_table([price.as_node_price(now) for price in prices], "catalogue list prices")


def _demo_availability(setup: str, now: datetime) -> ArrowTable:
    from coral_tasks.ingestion.demand_day import read_demo_availability
    from coral_tasks.ingestion.rows import availability_table

    return availability_table(read_demo_availability(setup, now), "demo assumption")


def _demo_running(setup: str, now: datetime) -> ArrowTable:
    del setup, now
    from data_contracts.registry import contract_of

    return contract_of("running").table([])


def fleet_source(fleet: Fleet) -> Source:
    """Observed fleet as a source of the running table; the dispatcher's observation is passed in."""

    def fetch(now: datetime) -> SourceBatch:
        from coral_tasks.ingestion.batch import batch_of
        from coral_tasks.ingestion.rows import running_table

        return batch_of("running", running_table(fleet, now), source="node agents", observed_at=now)

    return fetch


def gate_inputs(
    settings: Settings,
    run_id: str,
    now: datetime,
    *,
    tables: Sequence[str] = INPUT_TABLES,
    library: LibraryFacts | None = None,
    limits: GateLimits | None = None,
    forget: Collection[str] = (),
) -> GateSummary:
    """Judge all fetched tables, alone and together; keep reports, quarantine what is bad, accept what is good.

    Nothing becomes "accepted last" unless everything passed, and no table that ``forget`` names. Raises StorageFault
    if a table was never fetched.
    """
    from data_contracts.cross import check_tables
    from data_contracts.gate import check_table
    from data_contracts.registry import contract_of

    run = run_store(settings).open(run_id)
    reports: list[GateReport] = []
    accepted: dict[str, ArrowTable] = {}
    quarantined: dict[str, str] = {}
    for table in tables:
        batch = _kept_batch(run, table)
        context = gate_context(settings, table, now, library, limits)
        context = replace(context, previous=_pinned_previous(settings, run, table))
        outcome = check_table(contract_of(table), batch.raw, context)
        outcome = _with_release(settings, run, batch, outcome)
        reports.append(outcome.report)
        if outcome.table is not None:
            accepted[table] = outcome.table
        else:
            quarantined[table] = _quarantine(settings, run, batch, outcome.report)
    context = gate_context(settings, "", now, library, limits)
    reports.append(check_tables(accepted, cross_context(settings, library), context))
    page = _keep_reports(run, reports)
    if all(report.accepted for report in reports):
        _use_releases(settings, run, set(accepted) - set(forget))
        _accept(settings, run, accepted, forget)
    return _summary(reports, quarantined, page)


def _pinned_previous(settings: Settings, run: Run, table: str) -> ArrowTable | None:
    """The batch accepted last when this run was first gated: kept in the run, so that a second gating judges alike."""
    name, marker = f"inputs/{table}/previous.parquet", f"inputs/{table}/previous.json"
    current = settings.home / "current" / "inputs" / f"{table}.parquet"
    if not run.path(marker).exists():
        there = current.exists()
        if there:
            run.put(name, current.read_bytes(), replace=True)
        run.put_json(marker, {"there": there})
    return _read_parquet(run.path(name)) if run.get_json(marker)["there"] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    table: str
    data: bytes
    suffix: str
    raw: Any
    record: Mapping[str, Any]


def _kept_batch(run: Run, table: str) -> _Kept:
    from data_contracts.files import read_bytes

    record = run.get_json(f"inputs/{table}/source.json")
    data = run.get(record["file"])
    suffix = Path(record["file"]).suffix
    source = record["source"] if str(record["source"]).endswith(suffix) else f"{record['source']}{suffix}"
    return _Kept(table=table, data=data, suffix=suffix, raw=read_bytes(data, source), record=record)


def gate_context(
    settings: Settings,
    table: str,
    now: datetime,
    library: LibraryFacts | None = None,
    limits: GateLimits | None = None,
) -> GateContext:
    """What the gate knows for one table: the setup's names, the batch accepted last, the catalogue's figures."""
    from coral_tasks.catalog import load_catalog
    from data_contracts.contract import GateContext

    setup = load_catalog().setup(settings.setup)
    known = {
        "model": frozenset(str(one.model.id) for one in setup.models),
        "region": frozenset(map(str, setup.regions)),
        "configuration": frozenset(str(one.id) for one in setup.configurations),
    }
    if library is not None:
        known["template"] = library.template_ids
    return GateContext(
        now=now,
        known=known,
        max_context_tokens={str(one.model.id): one.model.max_context_tokens for one in setup.models},
        previous=accepted_last(settings, table),
        reference=_reference(settings, table, now),
        limits=limits or load_limits(settings),
    )


def load_limits(settings: Settings) -> GateLimits:
    """Limits from ``<home>/gate_limits.json`` laid over the defaults. Raises ValidationFailed for a bad file."""
    from data_contracts.contract import GateLimits

    path = settings.home / "gate_limits.json"
    if not path.exists():
        return GateLimits()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return GateLimits.from_mapping(values)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValidationFailed([Violation(table=str(path), row="", value="", rule=str(error))]) from error


def accepted_last(settings: Settings, table: str) -> ArrowTable | None:
    """The batch of ``table`` accepted last, None if there is none. Raises StorageFault if it is corrupt."""
    path = settings.home / "current" / "inputs" / f"{table}.parquet"
    return _read_parquet(path) if path.exists() else None


def _read_parquet(path: Path) -> ArrowTable:
    from data_contracts.files import read_file

    raw = read_file(path)
    if raw.table is None:
        message = f"{path}: {raw.flaws[0].text}"
        raise StorageFault(message)
    return raw.table


def _reference(settings: Settings, table: str, now: datetime) -> ArrowTable | None:
    """What to expect when nothing was accepted before: the setup's mean rates, the catalogue's prices."""
    if table == "prices":
        return _demo_prices(settings.setup, now)
    return _reference_demand(settings.setup, now) if table == "demand" else None


def _reference_demand(setup: str, now: datetime) -> ArrowTable:
    from coral_tasks.catalog import load_catalog
    from coral_tasks.ingestion.rows import demand_table

    rows = [
        Demand(
            model=one.model.id,
            requests_per_s=one.requests_per_s,
            shape=one.shape,
            interval_start=now,
            interval_s=_REFERENCE_INTERVAL_S,
        )
        for one in load_catalog().setup(setup).models
    ]
    return demand_table(rows)


def cross_context(settings: Settings, library: LibraryFacts | None) -> Any:
    """Context of the checks between tables."""
    from coral_tasks.catalog import load_catalog
    from data_contracts.cross import CrossContext

    models = frozenset(str(one.model.id) for one in load_catalog().setup(settings.setup).models)
    if library is None:
        return CrossContext(expected_models=models)
    return CrossContext(
        expected_models=models,
        template_phases=library.template_phases,
        template_configurations=library.template_configurations,
        excluded=library.excluded,
    )


def _with_release(settings: Settings, run: Run, batch: _Kept, outcome: Any) -> Any:
    """The outcome after a person's release of this very batch, if there is one that may count; kept in the run.

    A release counts for one run: the first that plans on it.
    """
    from coral_tasks.storage.quarantine import Quarantine

    if outcome.report.accepted or not outcome.report.releasable or outcome.readable is None:
        return outcome
    release = Quarantine(root=settings.home / "quarantine").release_of(batch.data)
    if release is None:
        return outcome
    said = f"released by {release['by']} at {release['at']}: {release['reason']}"
    if release["used_by"] not in ("", run.id):
        note = f"{said}; run {release['used_by']} has planned on that release, and it counts once"
        return outcome._replace(report=replace(outcome.report, notes=(*outcome.report.notes, note)))
    kept = {name: release[name] for name in ("batch", "by", "at", "reason")}
    run.put_json(_release_name(batch.table), kept, replace=True)
    return outcome._replace(report=outcome.report.released(said), table=outcome.readable)


def _is_released(settings: Settings, run_id: str, data: bytes) -> bool:
    """Whether a person released these bytes and this run planned on them."""
    from coral_tasks.storage.quarantine import Quarantine

    release = Quarantine(root=settings.home / "quarantine").release_of(data)
    return release is not None and bool(run_id) and release["used_by"] == run_id


def _release_name(table: str) -> str:
    return f"inputs/{table}/release.json"


def _use_releases(settings: Settings, run: Run, tables: Collection[str]) -> None:
    """Note that this run planned on what was released for it. Raises StorageFault if another did so before."""
    from coral_tasks.storage.quarantine import Quarantine

    quarantine = Quarantine(root=settings.home / "quarantine")
    for table in sorted(tables):
        if run.path(_release_name(table)).exists():
            quarantine.use(run.get_json(_release_name(table))["batch"], str(run.id))


def _quarantine(settings: Settings, run: Run, batch: _Kept, report: GateReport) -> str:
    from coral_tasks.storage.quarantine import Quarantine
    from data_contracts.page import render_page

    return Quarantine(root=settings.home / "quarantine").keep(
        table=batch.table,
        data=batch.data,
        suffix=batch.suffix,
        report=report.as_json(),
        page=render_page(f"Quarantined {batch.table}, run {run.id}", [report]),
        origin={"run": run.id, **batch.record},
    )


def _keep_reports(run: Run, reports: Sequence[GateReport]) -> Path:
    from data_contracts.page import render_page

    for report in reports:
        run.put_json(f"gate/{report.table}.json", report.as_json(), replace=True)
    return run.put("gate/report.html", render_page(f"Gate, run {run.id}", reports).encode(), replace=True)


def _accept(settings: Settings, run: Run, tables: Mapping[str, ArrowTable], forget: Collection[str]) -> None:
    from coral_tasks.ingestion.batch import parquet_bytes
    from coral_tasks.storage.runs import write_whole

    for name, table in tables.items():
        data = parquet_bytes(table)
        run.put(f"inputs/{name}/accepted.parquet", data)
        if name in forget:
            continue
        try:
            write_whole(settings.home / "current" / "inputs" / f"{name}.parquet", data)
        except OSError as error:
            message = f"accepted {name} cannot be kept: {error.strerror or error}"
            raise StorageFault(message) from error


def _summary(reports: Sequence[GateReport], quarantined: Mapping[str, str], page: Path) -> GateSummary:
    return GateSummary(
        accepted=all(report.accepted for report in reports),
        verdicts={report.table: report.verdict.value for report in reports},
        violations=tuple(violation for report in reports for violation in violations_of(report)),
        quarantined=dict(quarantined),
        page=page,
    )


def violations_of(report: GateReport) -> list[Violation]:
    """Critical findings as the domain's violations; the table goes with its source, a file's name most often.

    A message holds the first ``MAX_TOLD`` and says how many more there are; the report has all.
    """
    table = f"{report.table} ({report.source})" if report.source else report.table
    critical = [one for one in report.findings if one.severity.value == "critical"]
    told = [Violation(table=table, row=one.row, value=one.value, rule=one.text) for one in critical[:MAX_TOLD]]
    more = len(critical) - len(told)
    rule = f"and {more} more violations, all in the gate's report"
    return [*told, Violation(table=table, row="", value="", rule=rule)] if more else told


def load_inputs(settings: Settings, run_id: str, multipliers: Mapping[str, float] | None = None) -> PlanningInputs:
    """What the gate accepted in this run, as domain rows. Raises StorageFault if it accepted nothing.

    ``multipliers``: price factor by provider ("aws" → 0.9 is a tenth off).
    """
    from coral_tasks.ingestion import rows

    run = run_store(settings).find(run_id)
    table = {name: _read_parquet(run.path(f"inputs/{name}/accepted.parquet")) for name in INPUT_TABLES}
    return PlanningInputs(
        demand=rows.demand_rows(table["demand"]),
        prices=rows.price_rows(table["prices"], multipliers),
        availability=rows.availability_rows(table["availability"]),
        fleet=rows.fleet_of(table["running"]),
    )


def planning_demand(settings: Settings, run_id: str, now: datetime) -> Path:
    """Demand to plan on: the accepted table, or its forecast if ``<home>/forecast.json`` is there.

    The file holds ``method``, ``quantile``, ``season``, ``max_gap`` (see ``ingestion.forecast``). Raises StaleInput if
    a series has too long a gap before now, ValidationFailed for a bad file.
    """
    import msgspec

    from coral_tasks.ingestion.batch import parquet_bytes
    from coral_tasks.ingestion.forecast import ForecastSettings, forecast_demand
    from coral_tasks.ingestion.rows import demand_rows, demand_table
    from coral_tasks.tasks.strict_json import decode_strictly

    run = run_store(settings).find(run_id)
    accepted, config = run.path("inputs/demand/accepted.parquet"), settings.home / "forecast.json"
    if not config.exists():
        rows = demand_rows(_read_parquet(accepted))
        require_whole(rows, max(row.interval_start for row in rows))
        return accepted
    try:
        wanted = decode_strictly(config.read_bytes(), ForecastSettings, str(config))
    except (OSError, msgspec.DecodeError) as error:
        raise ValidationFailed([Violation(table=str(config), row="", value="", rule=str(error))]) from error
    planned, notes = forecast_demand(demand_rows(_read_parquet(accepted)), now, wanted)
    run.put_json("inputs/demand/forecast.json", {"notes": {name: list(text) for name, text in notes.items()}})
    return run.put("inputs/demand/planned.parquet", parquet_bytes(demand_table(planned)))


def require_whole(rows: Sequence[Demand], at: datetime) -> None:
    """Raise ValidationFailed for models and origins of ``rows`` that have none for the interval that starts at ``at``.

    Without a forecast one interval is planned for; who has no row in it would be planned at nothing.
    """
    there = {(row.model, row.origin) for row in rows if row.interval_start == at}
    lost = sorted({(str(row.model), str(row.origin or "")) for row in rows if (row.model, row.origin) not in there})
    rule = f"has no row for the interval of {at.isoformat()}: missing is not zero (a forecast would bridge it)"
    if lost:
        raise ValidationFailed(
            Violation(table="demand", row=" ".join(part for part in key if part), value="", rule=rule) for key in lost
        )


def require_source(batch: SourceBatch, minimum: float) -> None:
    """Raise SourceFault if the source says that less than ``minimum`` of its answer came."""
    share = batch.completeness
    if share is not None and share < minimum:
        message = f"{batch.table}: {batch.source} answered {batch.received} of {batch.expected} parts"
        raise SourceFault(message)


def utc_now() -> datetime:
    """The clock, in UTC."""
    return datetime.now(UTC)
