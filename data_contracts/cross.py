"""Checks between tables that each passed on their own. Owns the rules that no single table can state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from data_contracts.contract import GateContext, Severity
from data_contracts.gate import Finding, GateReport

TABLE = "cross_table"
NUM_RULES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossContext:
    """What the checks need besides the tables.

    ``expected_models``: models that must have a demand row (missing is not zero). ``template_phases``: phases by
    model that the library has templates for; None when the library is not known here. ``template_configurations``:
    configurations that templates use. ``excluded``: configurations left out of planning, with the reason.
    """

    expected_models: frozenset[str] = frozenset()
    template_phases: Mapping[str, frozenset[str]] | None = None
    template_configurations: frozenset[str] = frozenset()
    excluded: Mapping[str, str] = field(default_factory=dict)


def check_tables(tables: Mapping[str, pa.Table], cross: CrossContext, context: GateContext) -> GateReport:
    """Judge accepted tables together. Absent tables are left out of the rules they would take part in."""
    findings = [
        *_demand_present(tables, cross),
        *_demand_servable(tables, cross),
        *_configurations_priced(tables, cross),
        *_pools_match(tables),
        *_held_available(tables),
        *_models_served(tables),
    ]
    return GateReport(
        table=TABLE,
        contract_version="1.0",
        source=", ".join(sorted(tables)),
        checked_at=context.now,
        num_rows=sum(table.num_rows for table in tables.values()),
        num_rules=NUM_RULES,
        findings=tuple(findings),
        unchecked=() if cross.template_phases is not None else ("demand_has_templates", "configuration_priced"),
    )


def _finding(rule: str, text: str, *, row: str = "", value: str = "", **options: bool) -> Finding:
    severity = Severity.WARNING if options.get("warning") else Severity.CRITICAL
    return Finding(
        table=TABLE,
        row=row,
        column="",
        value=value,
        rule=rule,
        text=text,
        severity=severity,
        releasable=options.get("releasable", False),
    )


def _column(tables: Mapping[str, pa.Table], table: str, column: str) -> list[str]:
    return tables[table].column(column).to_pylist() if table in tables else []


def _demand_present(tables: Mapping[str, pa.Table], cross: CrossContext) -> Iterable[Finding]:
    if "demand" not in tables:
        return
    missing = sorted(cross.expected_models - set(_column(tables, "demand", "model")))
    for model in missing:
        text = "demand has no row for a model on offer: missing is not zero"
        yield _finding("demand_present", text, row=model, releasable=True)


def _demand_servable(tables: Mapping[str, pa.Table], cross: CrossContext) -> Iterable[Finding]:
    """Every model with demand has templates for prefill and decode, or aggregated ones."""
    if cross.template_phases is None or "demand" not in tables:
        return
    rates: dict[str, float] = {}
    for row in tables["demand"].select(["model", "requests_per_s"]).to_pylist():
        rates[row["model"]] = max(rates.get(row["model"], 0.0), row["requests_per_s"])
    for model, rate in sorted(rates.items()):
        phases = cross.template_phases.get(model, frozenset())
        if rate > 0 and not ({"prefill", "decode"} <= phases or "aggregated" in phases):
            has = ", ".join(sorted(phases)) or "none"
            text = f"a model with demand has no templates that serve it (phases in the library: {has})"
            yield _finding("demand_has_templates", text, row=model, value=f"{rate:g} requests/s")


def _configurations_priced(tables: Mapping[str, pa.Table], cross: CrossContext) -> Iterable[Finding]:
    if cross.template_phases is None or "prices" not in tables:
        return
    priced = set(_column(tables, "prices", "configuration"))
    for name in sorted(cross.template_configurations - priced):
        reason = cross.excluded.get(name)
        if reason is None:
            text = "templates use a configuration that has no price and is not excluded"
            yield _finding("configuration_priced", text, row=name)
        else:
            yield _finding("configuration_excluded", f"left out of planning: {reason}", row=name, warning=True)


def _pools(tables: Mapping[str, pa.Table], table: str) -> set[tuple[str, str, str]]:
    if table not in tables:
        return set()
    rows = tables[table].select(["region", "configuration", "market"]).to_pylist()
    return {(row["region"], row["configuration"], row["market"]) for row in rows}


def _pools_match(tables: Mapping[str, pa.Table]) -> Iterable[Finding]:
    """Nodes without a price cannot be planned on; one warning for each region and market that has them."""
    if not {"prices", "availability"} <= set(tables):
        return
    lost = sorted(_pools(tables, "availability") - _pools(tables, "prices"))
    for region, configuration, market in lost:
        text = "available nodes have no price: not planned on"
        yield _finding("available_priced", text, row=f"{region} {configuration} {market}", warning=True)
    if not _pools(tables, "availability") & _pools(tables, "prices"):
        yield _finding("some_pool", "no region has a configuration with both a price and availability")


def _held_available(tables: Mapping[str, pa.Table]) -> Iterable[Finding]:
    """What we hold counts as available, so fewer available than held is a source that counts otherwise."""
    if not {"running", "availability"} <= set(tables):
        return
    held: dict[tuple[str, str, str], int] = {}
    for row in tables["running"].select(["region", "configuration", "market"]).to_pylist():
        pool = (row["region"], row["configuration"], row["market"])
        held[pool] = held.get(pool, 0) + 1
    for row in tables["availability"].to_pylist():
        pool = (row["region"], row["configuration"], row["market"])
        if held.get(pool, 0) > row["available_nodes"]:
            text = f"{held[pool]} nodes are held, more than are said to be available: held nodes count as available"
            yield _finding("held_available", text, row=" ".join(pool), value=str(row["available_nodes"]), warning=True)


def _models_served(tables: Mapping[str, pa.Table]) -> Iterable[Finding]:
    """Instances of a model without demand row: would be switched off on missing data."""
    if not {"running", "demand"} <= set(tables):
        return
    wanted = set(_column(tables, "demand", "model"))
    running = {model for model in _column(tables, "running", "model") if model is not None}
    for model in sorted(running - wanted):
        text = "instances of a model run that has no demand row: missing is not zero"
        yield _finding("running_has_demand", text, row=model, releasable=True)
