"""A request log as the demand source of a run: from ``sources.json`` through the gate to what planning reads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from coral_tasks.domain.errors import SourceFault, ValidationFailed
from coral_tasks.settings import Settings
from coral_tasks.tasks.inputs import (
    INPUT_TABLES,
    GateSummary,
    gate_inputs,
    ingest_table,
    load_inputs,
    planning_demand,
    run_store,
)
from coral_tasks.tasks.sources import read_sources

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
NOW = NOON + timedelta(seconds=150)
PHI, GPT, QWEN = ("microsoft/phi-4", 1000, 200), ("gpt-oss-20b", 2000, 28), ("qwen3-32b", 600, 250)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A home of the core setup whose demand is a request log, in intervals of a minute."""
    home = tmp_path / "home"
    home.mkdir()
    named = {"kind": "trace", "path": str(tmp_path / "log.csv"), "interval_s": 60, "num_intervals": 2}
    (home / "sources.json").write_text(json.dumps({"demand": named}))
    return Settings(home=home, setup="core")


def steady(model: tuple[str, int, int], minute: int, per_minute: int) -> list[str]:
    """Equal requests, evenly from the minute's start on."""
    name, prompt, output = model
    times = [NOON + timedelta(minutes=minute, seconds=60 * k / per_minute) for k in range(per_minute)]
    return [f"{time.isoformat()},{name},{prompt},{output}" for time in times]


def write_log(settings: Settings, rows: Sequence[str], modified: datetime = NOW) -> Path:
    """The log that the home's source names."""
    path = settings.home.parent / "log.csv"
    path.write_text("\n".join(["TIMESTAMP,model,ContextTokens,GeneratedTokens", *rows, ""]))
    os.utime(path, (modified.timestamp(), modified.timestamp()))
    return path


def usual() -> list[str]:
    """Two minutes of demand and the beginning of a third: phi 2/s and 4/s, qwen 3/s, gpt-oss 1.5/s and then none."""
    parts = [(PHI, 0, 120), (GPT, 0, 90), (QWEN, 0, 180), (PHI, 1, 240), (QWEN, 1, 180), (PHI, 2, 120)]
    return [row for part in parts for row in steady(*part)][:-60]


def gated(settings: Settings, run: str, now: datetime = NOW) -> GateSummary:
    """One run's inputs, fetched and judged."""
    for table in INPUT_TABLES:
        ingest_table(settings, run, table, now)
    return gate_inputs(settings, run, now)


def test_requests_of_a_log_become_the_demand_that_is_planned_on(settings: Settings) -> None:
    """Rates and lengths by model and minute as sent; a quiet model is at zero; age and completeness are kept."""
    write_log(settings, usual())
    summary = gated(settings, "r1")
    summary.require()
    rows = {(str(row.model), row.interval_start): row for row in load_inputs(settings, "r1").demand}
    later = NOON + timedelta(minutes=1)
    rates = {key: row.requests_per_s for key, row in rows.items()}
    assert rates == pytest.approx(
        {
            ("phi-4-14b", NOON): 2.0,
            ("phi-4-14b", later): 4.0,
            ("gpt-oss-20b", NOON): 1.5,
            ("gpt-oss-20b", later): 0.0,
            ("qwen3-32b", NOON): 3.0,
            ("qwen3-32b", later): 3.0,
        }
    )
    shape = rows["gpt-oss-20b", later].shape
    assert (shape.mean_prompt_tokens, shape.p95_prompt_tokens) == (2000, 2000)
    assert (shape.mean_output_tokens, shape.p95_output_tokens) == (28, 28)
    assert planning_demand(settings, "r1", NOW).name == "accepted.parquet"
    record = run_store(settings).find("r1").get_json("inputs/demand/source.json")
    # phi's last request of the third minute is the 60th of 120: at 12:02:29.5
    assert (record["age_s"], record["completeness"]) == (0.5, 1.0)
    assert record["notes"][0].startswith("gpt-oss-20b: no request: 0 requests/s")
    assert record["notes"][1].startswith("nothing is known from 2026-11-29T12:02:00+00:00 on")


def test_a_model_that_the_log_never_saw_stops_the_run(settings: Settings) -> None:
    """Missing is not zero: the gate's check between tables names the model."""
    write_log(settings, [row for row in usual() if "qwen" not in row])
    with pytest.raises(ValidationFailed, match=r"cross_table.*, qwen3-32b: .*missing is not zero"):
        gated(settings, "r1").require()


def test_a_model_that_the_catalogue_lacks_stops_the_run(settings: Settings) -> None:
    """A name that the setup does not know goes through the source and is refused by the gate, with the name."""
    write_log(settings, [*usual(), *steady(("gpt-5", 10, 10), 1, 60)])
    with pytest.raises(ValidationFailed, match="found 'gpt-5'"):
        gated(settings, "r1").require()


def test_a_log_that_stopped_growing_stops_the_run_and_the_last_demand_stays(settings: Settings) -> None:
    """Half an hour later the same log is stale, by the gate's own limit."""
    write_log(settings, usual())
    gated(settings, "r1").require()
    last = (settings.home / "current/inputs/demand.parquet").read_bytes()
    with pytest.raises(ValidationFailed, match="interval_start is stale"):
        gated(settings, "r2", NOW + timedelta(minutes=30)).require()
    assert (settings.home / "current/inputs/demand.parquet").read_bytes() == last


def test_a_log_that_steps_back_in_time_stops_the_run(settings: Settings) -> None:
    """After the log of 12:00 to 12:02 another of an hour before is older than what was accepted."""
    write_log(settings, usual())
    gated(settings, "r1").require()
    write_log(settings, [row.replace("T12:", "T11:") for row in usual()])
    with pytest.raises(ValidationFailed, match="interval_start is older than in the batch accepted before"):
        gated(settings, "r2").require()


def test_a_log_that_was_just_rotated_is_bridged_by_the_last_answer(settings: Settings) -> None:
    """With ``keep_s`` the last answer is used with its true age; without, the run stops at the fault."""
    write_log(settings, usual())
    config = json.loads((settings.home / "sources.json").read_text())
    config["demand"]["keep_s"] = 600
    (settings.home / "sources.json").write_text(json.dumps(config))
    gated(settings, "r1").require()
    write_log(settings, steady(PHI, 3, 60)[:3], modified=NOW + timedelta(minutes=1))
    later = NOW + timedelta(minutes=1)
    record = json.loads(ingest_table(settings, "r2", "demand", later).read_text())
    assert record["age_s"] == 60.5
    assert "source failed (demand: " in record["notes"][-1]
    assert "covers no whole interval of 60 s" in record["notes"][-1]
    with pytest.raises(SourceFault, match="covers no whole interval"):
        ingest_table(settings, "r3", "demand", NOW + timedelta(minutes=20))


def test_less_than_the_stated_share_of_intervals_is_a_fault(settings: Settings) -> None:
    """A log of two minutes is a fifth of the ten that are asked for."""
    write_log(settings, usual())
    config = json.loads((settings.home / "sources.json").read_text())
    config["demand"]["num_intervals"] = 10
    (settings.home / "sources.json").write_text(json.dumps(config))
    with pytest.raises(SourceFault, match="answered 2 of 10 parts"):
        ingest_table(settings, "r1", "demand", NOW)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "path"),
        ({"path": "x", "start": "2026-11-29T12:00:00"}, "start"),
        ({"path": "x", "start": 3}, "start"),
        ({"path": "x", "interval_s": 0}, "interval_s"),
        ({"path": "x", "num_intervals": 0}, "num_intervals"),
        ({"path": "x", "quiet_after_s": -1}, "quiet_after_s"),
        ({"path": "x", "settle_s": -1}, "settle_s"),
        ({"path": "x", "models": "a"}, "models"),
    ],
)
def test_mistakes_in_the_source_are_named(settings: Settings, fields: dict[str, Any], message: str) -> None:
    """A path is needed, a start has an offset, lengths of time are none below zero, fields are spelt as known."""
    (settings.home / "sources.json").write_text(json.dumps({"demand": {"kind": "trace", **fields}}))
    with pytest.raises(ValidationFailed, match=message):
        read_sources(settings)
    (settings.home / "sources.json").write_text(json.dumps({"prices": {"kind": "trace", "path": "x"}}))
    with pytest.raises(ValidationFailed, match="trace"):
        read_sources(settings)
