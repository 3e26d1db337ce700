"""A request log as the demand source of a run: from ``sources.json`` through the gate to what planning reads."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from coral_tasks.domain.errors import SourceFault, ValidationFailed
from coral_tasks.ingestion.rows import demand_rows
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
from data_contracts.files import read_file

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


def day_of_minutes(settings: Settings, phi: Sequence[int], gpt: Sequence[int]) -> datetime:
    """A rotated log of these requests each minute, qwen at 180, and the source of its intervals; the run's moment."""
    logs = settings.home.parent / "logs"
    logs.mkdir()
    header = "TIMESTAMP,model,ContextTokens,GeneratedTokens"
    minutes = [steady(PHI, k, n) + steady(QWEN, k, 180) for k, n in enumerate(phi)]
    minutes = [rows + (steady(GPT, k, n) if n else []) for k, (rows, n) in enumerate(zip(minutes, gpt, strict=True))]
    # the rotation falls into minute 15; the packed copy of the old file lies beside it
    old = [*(row for rows in minutes[:15] for row in rows), *sorted(minutes[15])[:100]]
    new = [
        *sorted(minutes[15])[100:],
        *(row for rows in minutes[16:] for row in rows),
        *steady(PHI, len(phi), 120)[:60],
    ]
    now = NOON + timedelta(minutes=len(phi), seconds=30)
    for name, rows, changed in (("requests.csv.1", old, NOON + timedelta(minutes=16)), ("requests.csv", new, now)):
        (logs / name).write_text("\n".join([header, *rows, ""]))
        os.utime(logs / name, (changed.timestamp(), changed.timestamp()))
    (logs / "requests.csv.1.gz").write_bytes(gzip.compress((logs / "requests.csv.1").read_bytes()))
    named = {"kind": "trace", "path": str(logs / "requests.csv*"), "interval_s": 60, "num_intervals": len(phi)}
    (settings.home / "sources.json").write_text(json.dumps({"demand": named}))
    return now


def forecast(settings: Settings, now: datetime, **wanted: object) -> dict[str, float]:
    """Planned rate of each model for minute 24, through source, gate and forecast as a run does it."""
    (settings.home / "forecast.json").write_text(json.dumps(wanted))
    if not (settings.home / "runs" / "r1").exists():
        gated(settings, "r1", now).require()
    for name in ("planned.parquet", "forecast.json"):
        # what a run wrote it never writes otherwise
        run_store(settings).find("r1").path(f"inputs/demand/{name}").unlink(missing_ok=True)
    path = planning_demand(settings, "r1", now)
    assert path.name == "planned.parquet"
    table = read_file(path).table
    assert table is not None
    rows = demand_rows(table)
    assert {row.interval_start for row in rows} == {NOON + timedelta(minutes=24)}
    return {str(row.model): row.requests_per_s for row in rows}


def test_a_seasonal_forecast_of_a_request_log_is_the_minute_a_season_ago_and_its_errors(settings: Settings) -> None:
    """phi swings between 2 and 4/s with one minute of 6: errors -4, twenty of 0, 2 and 4; gpt-oss has gone silent.

    Minute 24 is expected as minute 22 was, at 2/s. Of 23 errors the 0.95 quantile is the 22nd, 2; the 0.9 quantile the
    21st, 0.
    """
    phi = [120 if minute % 2 == 0 else 240 for minute in range(24)]
    phi[10] = 360
    now = day_of_minutes(settings, phi, [90] * 22 + [0, 0])
    found = forecast(settings, now, method="seasonal_naive", season=2, quantile=0.95)
    assert found == pytest.approx({"phi-4-14b": 4.0, "qwen3-32b": 3.0, "gpt-oss-20b": 0.0})
    found = forecast(settings, now, method="seasonal_naive", season=2, quantile=0.9)
    assert found["phi-4-14b"] == pytest.approx(2.0)
    # a season longer than the log: the last minute, 4/s, whose errors are 2 up or down
    found = forecast(settings, now, method="seasonal_naive", season=288, quantile=0.95)
    assert found["phi-4-14b"] == pytest.approx(4.0 + 2.0)


def test_a_smoothed_forecast_of_a_request_log_follows_a_step_with_its_quantile(settings: Settings) -> None:
    """phi steps from 2 to 4/s at minute 12: 2 too low there, then 1.8 by the weight 0.1 (all were equal till then),
    then by 0.9 a tenth of the error each minute: at the end 4/s is expected, and the 22nd of 23 errors is 1.8."""
    now = day_of_minutes(settings, [120] * 12 + [240] * 12, [90] * 24)
    found = forecast(settings, now, method="smoothing", quantile=0.95)
    assert found["phi-4-14b"] == pytest.approx(5.8)
    assert found["gpt-oss-20b"] == pytest.approx(1.5)
    # the 21st is the error of the third minute after the step, 0.02
    found = forecast(settings, now, method="smoothing", quantile=0.9)
    assert found["phi-4-14b"] == pytest.approx(4.02)
    # one error of 2 in 23 is above the quantile
    found = forecast(settings, now, method="last_value", quantile=0.95)
    assert found["phi-4-14b"] == pytest.approx(4.0)


def test_a_forecast_on_a_log_with_a_hole_takes_it_as_unknown(settings: Settings) -> None:
    """Three minutes are missing with their file: no zero enters the forecast, and the notes count them."""
    now = day_of_minutes(settings, [120] * 24, [90] * 24)
    for name in ("requests.csv.1", "requests.csv.1.gz"):
        (settings.home.parent / "logs" / name).unlink()
    rows = [row for k in range(12) for model, n in ((PHI, 120), (QWEN, 180), (GPT, 90)) for row in steady(model, k, n)]
    path = settings.home.parent / "logs" / "requests.csv.2"
    path.write_text("\n".join(["TIMESTAMP,model,ContextTokens,GeneratedTokens", *rows, ""]))
    found = forecast(settings, now, method="smoothing", quantile=0.95)
    assert found == pytest.approx({"phi-4-14b": 2.0, "qwen3-32b": 3.0, "gpt-oss-20b": 1.5})
    # minutes 11 and 15 are cut by the hole, 12 to 14 lie in it
    notes = run_store(settings).find("r1").get_json("inputs/demand/forecast.json")["notes"]
    assert notes["phi-4-14b"] == ["5 of 24 intervals unknown"]
    record = run_store(settings).find("r1").get_json("inputs/demand/source.json")
    assert (record["received"], record["expected"]) == (19, 24)
    assert any("a file may be missing" in note for note in record["notes"])


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
