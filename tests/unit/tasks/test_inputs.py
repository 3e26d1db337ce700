"""Inputs of a run from fetch to planning rows: nothing is planned on bad data, nothing is lost, release works."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coral_tasks.domain.errors import SourceFault, StorageFault, ValidationFailed
from coral_tasks.settings import Settings
from coral_tasks.storage.quarantine import Quarantine
from coral_tasks.tasks.gate import check_file, documentation, example_csv
from coral_tasks.tasks.inputs import (
    INPUT_TABLES,
    GateSummary,
    LibraryFacts,
    gate_inputs,
    ingest_table,
    load_inputs,
    planning_demand,
    run_store,
)
from coral_tasks.tasks.sources import aws_offers, read_sources
from data_contracts.registry import TABLES

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """An empty home of the core setup."""
    return Settings(home=tmp_path, setup="core")


def fetch_and_gate(
    settings: Settings, run: str, now: datetime = NOW, library: LibraryFacts | None = None
) -> GateSummary:
    """One run's inputs."""
    for table in INPUT_TABLES:
        ingest_table(settings, run, table, now)
    return gate_inputs(settings, run, now, library=library)


def drop(settings: Settings, name: str, text: str) -> Path:
    """A file in the drop folder."""
    path = settings.home / "inputs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_the_demo_inputs_of_a_fresh_home_are_accepted_and_kept(settings: Settings) -> None:
    """Demand, prices, availability and an empty fleet become planning rows; report and sources lie in the run."""
    summary = fetch_and_gate(settings, "r1")
    assert set(summary.verdicts.values()) == {"accepted"}
    found = load_inputs(settings, "r1", {"aws": 0.5})
    assert {row.model for row in found.demand} == {"phi-4-14b", "gpt-oss-20b", "qwen3-32b"}
    price = next(row for row in found.prices if (row.region, row.configuration) == ("aws/us-east-2", "L4x1"))
    assert price.price_usd_per_hour in (0.8048 / 2, 0.2599 / 2)
    assert found.fleet.nodes == ()
    run = run_store(settings).find("r1")
    source = run.get_json("inputs/demand/source.json")
    assert (source["source"], source["age_s"]) == ("demo: setup core", 0.0)
    assert "<h1>Gate, run r1</h1>" in run.get("gate/report.html").decode()
    assert run.get_json("gate/demand.json")["verdict"] == "accepted"


def test_a_bad_batch_is_quarantined_and_the_last_good_one_stays(settings: Settings) -> None:
    """A NaN in demand: the run stops with the row named, the batch is kept, and what was accepted last is untouched."""
    fetch_and_gate(settings, "r1").require()
    last = (settings.home / "current/inputs/demand.parquet").read_bytes()
    text = example_csv("demand", NOW).replace("10.0", "NaN", 1)
    drop(settings, "demand.csv", text)
    summary = fetch_and_gate(settings, "r2")
    assert summary.verdicts["demand"] == "quarantined"
    with pytest.raises(ValidationFailed, match=r"demand \(.*demand\.csv\), row 1 \(phi-4-14b.*found NaN"):
        summary.require()
    with pytest.raises(StorageFault, match="accepted"):
        load_inputs(settings, "r2")
    assert (settings.home / "current/inputs/demand.parquet").read_bytes() == last
    kept = Quarantine(root=settings.home / "quarantine").folder(summary.quarantined["demand"])
    assert (kept / "batch.csv").read_text() == text
    assert json.loads((kept / "origin.json").read_text())["run"] == "r2"


def test_a_released_batch_is_accepted_with_warnings(settings: Settings) -> None:
    """Sixty times the demand is refused; after a person released these bytes the next run takes them and says so."""
    fetch_and_gate(settings, "r1").require()
    drop(settings, "demand.csv", example_csv("demand", NOW).replace("10.0", "600.0"))
    refused = fetch_and_gate(settings, "r2")
    Quarantine(root=settings.home / "quarantine").release(
        refused.quarantined["demand"], by="ann", reason="launch day", at=NOW
    )
    taken = fetch_and_gate(settings, "r3")
    taken.require()
    assert taken.verdicts["demand"] == "accepted_with_warnings"
    assert {row.requests_per_s for row in load_inputs(settings, "r3").demand} == {600.0}
    notes = run_store(settings).find("r3").get_json("gate/demand.json")["notes"]
    assert notes == [f"released by ann at {NOW.isoformat()}: launch day"]


def test_a_model_without_a_row_is_not_planned_at_zero(settings: Settings) -> None:
    """Leaving a model out of demand stops the run: missing is not zero."""
    lines = example_csv("demand", NOW).splitlines()
    drop(settings, "demand.csv", "\n".join(lines[:-1]) + "\n")
    with pytest.raises(ValidationFailed, match=r"cross_table.*, qwen3-32b: .*missing is not zero"):
        fetch_and_gate(settings, "r1").require()


def test_demand_needs_templates_and_templates_need_prices(settings: Settings) -> None:
    """A model whose decode templates are gone, and a configuration nobody prices, are each named."""
    facts = LibraryFacts(
        template_phases={
            "phi-4-14b": frozenset({"prefill"}),
            "gpt-oss-20b": frozenset({"aggregated"}),
            "qwen3-32b": frozenset({"prefill", "decode"}),
        },
        template_configurations=frozenset({"L4x1", "T4x1", "V100x1"}),
        template_ids=frozenset(),
        excluded={"V100x1": "no longer sold"},
    )
    summary = fetch_and_gate(settings, "r1", library=facts)
    assert [(one.row, one.rule.partition(" (")[0]) for one in summary.violations] == [
        ("phi-4-14b", "a model with demand has no templates that serve it"),
        ("T4x1", "templates use a configuration that has no price and is not excluded"),
    ]
    warnings = run_store(settings).find("r1").get_json("gate/cross_table.json")["findings"]
    assert "no longer sold" in next(one["text"] for one in warnings if one["severity"] == "warning")


def test_fetching_and_gating_twice_changes_nothing(settings: Settings) -> None:
    """A retried task finds the first answer, even when the source has changed since."""
    drop(settings, "demand.csv", example_csv("demand", NOW))
    fetch_and_gate(settings, "r1").require()
    before = run_store(settings).find("r1").digests()
    drop(settings, "demand.csv", "broken")
    fetch_and_gate(settings, "r1").require()
    assert run_store(settings).find("r1").digests() == before


def test_the_newest_whole_file_of_the_drop_folder_counts(settings: Settings) -> None:
    """Temporaries and other tables' files are passed over."""
    drop(settings, "demand-2.csv", example_csv("demand", NOW).replace("10.0", "12.0"))
    for name in (".demand.csv", "demand.csv.tmp", "demand.part", "_demand.csv", "prices.txt"):
        drop(settings, name, "broken")
    fetch_and_gate(settings, "r1").require()
    assert {row.requests_per_s for row in load_inputs(settings, "r1").demand} == {12.0}


def test_limits_are_the_homes_and_a_bad_file_is_named(settings: Settings) -> None:
    """A wider jump lets the same batch in; a misspelt limit stops the gate with the known names."""
    path = settings.home / "demand.csv"
    path.write_text(example_csv("demand", NOW).replace("10.0", "600.0"))
    assert not check_file(settings, "demand", path, NOW).accepted
    (settings.home / "gate_limits.json").write_text('{"max_jump": 100}')
    assert check_file(settings, "demand", path, NOW).accepted
    (settings.home / "gate_limits.json").write_text('{"max_jmp": 100}')
    with pytest.raises(ValidationFailed, match="unknown gate limits: max_jmp"):
        check_file(settings, "demand", path, NOW)
    (settings.home / "gate_limits.json").write_text("{")
    with pytest.raises(ValidationFailed, match=r"gate_limits\.json"):
        check_file(settings, "demand", path, NOW)


def test_sources_are_read_as_a_whole_and_mistakes_named(settings: Settings) -> None:
    """Kinds that a table cannot have, unknown fields and bad values are refused; a named file is used."""
    config = settings.home / "sources.json"
    for text, message in (
        ('{"demand": {"kind": "aws"}}', "aws"),
        ('{"demands": {"kind": "demo"}}', "demands"),
        ('{"prices": {"kind": "file"}}', "path"),
        ('{"prices": {"kind": "file", "path": "x", "cache_s": -1}}', "cache_s"),
        ("{", "sources.json"),
    ):
        config.write_text(text)
        with pytest.raises(ValidationFailed, match=message):
            read_sources(settings)
    config.write_text(json.dumps({"demand": {"kind": "file", "path": str(settings.home / "absent.csv")}}))
    with pytest.raises(SourceFault, match=r"absent\.csv cannot be read"):
        ingest_table(settings, "r1", "demand", NOW)
    (settings.home / "absent.csv").write_text(example_csv("demand", NOW))
    record = json.loads(ingest_table(settings, "r1", "demand", NOW).read_text())
    assert record["source"].endswith("absent.csv")


def test_an_answer_of_ten_minutes_ago_bridges_an_outage_with_its_true_age(settings: Settings) -> None:
    """With a cache the last answer is used while the source is down, dated as it was; without one the run stops."""
    path = settings.home / "prices.csv"
    path.write_text(example_csv("prices", NOW))
    kept = {"kind": "file", "path": str(path), "cache_s": 0, "keep_s": 3600}
    (settings.home / "sources.json").write_text(json.dumps({"prices": kept}))
    first = json.loads(ingest_table(settings, "r1", "prices", datetime.now(UTC)).read_text())
    path.unlink()
    later = datetime.now(UTC) + timedelta(minutes=10)
    record = json.loads(ingest_table(settings, "r2", "prices", later).read_text())
    assert record["observed_at"] == first["observed_at"]
    assert 600 <= record["age_s"] < 700
    assert "source failed" in record["notes"][0]
    with pytest.raises(SourceFault, match="cannot be read"):
        ingest_table(settings, "r3", "prices", later + timedelta(hours=2))


def test_a_forecast_is_planned_on_where_one_is_configured(settings: Settings) -> None:
    """Without a configuration the accepted table; with one, the next interval's rates."""
    fetch_and_gate(settings, "r1").require()
    accepted = planning_demand(settings, "r1", NOW)
    assert accepted.name == "accepted.parquet"
    (settings.home / "forecast.json").write_text('{"method": "last_value", "quantile": 0.9}')
    planned = planning_demand(settings, "r1", NOW + timedelta(minutes=5))
    assert planned.name == "planned.parquet"
    (settings.home / "forecast.json").write_text('{"method": "guess"}')
    with pytest.raises(ValidationFailed, match="guess"):
        planning_demand(settings, "r1", NOW)
    (settings.home / "forecast.json").write_text('{"method": "last_value", "quantil": 0.5, "seson": 3}')
    with pytest.raises(ValidationFailed, match=r"quantil: unknown name(.|\n)*seson: unknown name"):
        planning_demand(settings, "r1", NOW)


def test_every_example_passes_the_check_that_the_command_line_makes(settings: Settings) -> None:
    """What ``coral gate example`` prints, ``coral gate check`` accepts, for every table."""
    for table in ("demand", "prices", "availability", "running"):
        path = settings.home / f"{table}.csv"
        path.write_text(example_csv(table, NOW))
        report = check_file(settings, table, path, NOW, settings.home / "page.html")
        assert report.verdict.value == "accepted", (table, [str(one) for one in report.findings])
    assert "accepted" in (settings.home / "page.html").read_text()


def test_the_documentation_page_is_what_the_contracts_say() -> None:
    """docs/data_contracts.md is the generated text and names every table."""
    text = documentation()
    assert (ROOT / "docs/data_contracts.md").read_text() == text
    for table in TABLES:
        assert f"## {table} (version" in text


def test_aws_products_of_the_setup_are_its_configurations() -> None:
    """The core setup's nine sizes that AWS sells as machines."""
    assert {offer.configuration for offer in aws_offers("core")} == {
        f"{gpu}x{count}" for gpu in ("L4", "A10G", "L40S") for count in (1, 4, 8)
    }


def test_a_release_counts_for_one_run_and_both_runs_say_so(settings: Settings) -> None:
    """The run that planned on it may be gated again; the next is refused and told who used it; a new release counts."""
    old = example_csv("prices", NOW - timedelta(days=2))
    drop(settings, "prices.csv", old)
    quarantine = Quarantine(root=settings.home / "quarantine")
    batch = fetch_and_gate(settings, "r1").quarantined["prices"]
    quarantine.release(batch, by="ann", reason="list prices hold", at=NOW)
    assert quarantine.state(batch) == "by ann"
    for _ in range(2):
        fetch_and_gate(settings, "r2").require()
    kept = run_store(settings).find("r2").get_json("inputs/prices/release.json")
    assert (kept["by"], kept["batch"], kept["reason"]) == ("ann", batch, "list prices hold")
    assert quarantine.state(batch) == "by ann, used by run r2"
    assert fetch_and_gate(settings, "r3").verdicts["prices"] == "quarantined"
    notes = run_store(settings).find("r3").get_json("gate/prices.json")["notes"]
    assert len(notes) == 1
    assert notes[0].endswith("list prices hold; run r2 has planned on that release, and it counts once")
    with pytest.raises(StorageFault, match="used by run r2"):
        quarantine.use(batch, "r3")
    quarantine.release(batch, by="bob", reason="still", at=NOW + timedelta(minutes=5))
    fetch_and_gate(settings, "r4").require()


def test_a_release_is_not_used_up_by_a_run_that_stops(settings: Settings) -> None:
    """Another table's fault stops the run, so nothing was planned on the released batch: the next run may."""
    drop(settings, "prices.csv", example_csv("prices", NOW - timedelta(days=2)))
    batch = fetch_and_gate(settings, "r1").quarantined["prices"]
    Quarantine(root=settings.home / "quarantine").release(batch, by="ann", reason="x", at=NOW)
    bad = drop(settings, "demand.csv", example_csv("demand", NOW).replace("10.0", "-1"))
    assert not fetch_and_gate(settings, "r2").accepted
    bad.unlink()
    fetch_and_gate(settings, "r3").require()


def test_a_model_whose_newest_interval_is_missing_is_not_planned_at_nothing(settings: Settings) -> None:
    """A model a step behind the others passes the gate (a forecast may bridge it) and is never left out of a plan."""
    lines = example_csv("demand", NOW).splitlines()
    before = (NOW - timedelta(minutes=5)).isoformat()
    drop(settings, "demand.csv", "\n".join([*lines[:-1], lines[-1].replace(NOW.isoformat(), before)]) + "\n")
    fetch_and_gate(settings, "r1").require()
    with pytest.raises(
        ValidationFailed, match=r"demand, qwen3-32b: has no row for the interval of 2026-11-29T12:00:00.*missing is not"
    ):
        planning_demand(settings, "r1", NOW)
    (settings.home / "forecast.json").write_text('{"method": "last_value"}')
    assert planning_demand(settings, "r1", NOW + timedelta(minutes=5)).name == "planned.parquet"


def test_a_pipe_in_the_drop_folder_is_no_input(settings: Settings) -> None:
    """Reading it could wait for ever: it is named and refused."""
    (settings.home / "inputs").mkdir()
    os.mkfifo(settings.home / "inputs" / "demand.csv")
    with pytest.raises(SourceFault, match=r"demand\.csv is no plain file"):
        ingest_table(settings, "r1", "demand", NOW)
