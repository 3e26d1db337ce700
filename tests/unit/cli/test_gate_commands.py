"""``coral gate``, ``coral demand``, ``coral forecast``, ``coral replay``: output and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from coral_tasks.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of one call of the command line."""
    monkeypatch.setattr("sys.argv", ["coral", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    return tmp_path


def test_a_good_file_exits_with_0_and_a_bad_one_with_1(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed example is accepted; with a negative price it is refused, and the row and value are shown."""
    assert run(monkeypatch, "gate", "example", "prices") == 0
    text = capsys.readouterr().out
    file = home / "prices.csv"
    file.write_text(text)
    assert run(monkeypatch, "gate", "check", "prices", str(file)) == 0
    assert "prices: accepted (5 rows" in capsys.readouterr().out
    file.write_text(text.replace("0.8048", "-0.8048"))
    assert run(monkeypatch, "gate", "check", "prices", str(file), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "quarantined"
    assert (report["findings"][0]["rule"], report["findings"][0]["value"]) == ("price_usd_per_hour_range", "-0.8048")
    assert sorted(path.name for path in home.iterdir()) == ["prices.csv"]


def test_wrong_usage_and_unknown_names_have_their_codes(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown table, batch and run exit with 1 and list the known ones; a time without a zone is wrong usage, 2."""
    assert run(monkeypatch, "gate", "check", "price", str(home / "x")) == 1
    assert "known: availability, commands, demand" in capsys.readouterr().err
    assert run(monkeypatch, "gate", "check", "prices", str(home / "absent.csv")) == 1
    assert "cannot be read: No such file" in capsys.readouterr().out
    assert run(monkeypatch, "gate", "example", "prices", "--now", "2026-11-29T12:00:00") == 2
    assert "needs a time zone" in capsys.readouterr().err
    assert run(monkeypatch, "gate", "release", "demand-0", "--reason", "x") == 1
    assert run(monkeypatch, "replay", "r1") == 1
    assert "unknown run" in capsys.readouterr().err
    assert run(monkeypatch, "gate", "show", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_log_of_several_models_is_backtested_by_model(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Minutes of 6, 12, 6 and 12 requests of a, of 3, 3, 0 and 3 of b, as CSV and as Parquet; figures by hand.

    Last value for a expects 6, 12, 6 of 12, 6, 12: errors of 18 in 30 requests, 2 too few on average; planned are 6
    (no error yet), 12 + 6 and 6 + 6, enough in two of three, with 12 too many. Seasonal naive errs in minute 1 alone.
    """
    counts = {"a": (6, 12, 6, 12), "b": (3, 3, 0, 3)}
    rows = [
        (f"2023-11-16T18:{minute:02}:{60 * k / count:06.3f}Z", model, 10, 2)
        for model, numbers in counts.items()
        for minute, count in enumerate(numbers)
        for k in range(count)
    ]
    rows.append(("2023-11-16T18:04:00Z", "b", 10, 2))
    names = ["TIMESTAMP", "model", "ContextTokens", "GeneratedTokens"]
    frame = pd.DataFrame(rows, columns=names)
    frame.to_csv(home / "log.csv", index=False)
    frame.assign(TIMESTAMP=pd.to_datetime(frame["TIMESTAMP"], format="ISO8601")).to_parquet(home / "log.parquet")
    for name in ("log.csv", "log.parquet"):
        options = ("--warmup", "1", "--season", "2", "--json")
        assert run(monkeypatch, "forecast", "backtest", str(home / name), *options) == 0
        found = {(row["series"], row["method"]): row for row in json.loads(capsys.readouterr().out)}
        assert len(found) == 6
        last, season = found["a", "last_value"], found["a", "seasonal_naive"]
        assert last["num_forecasts"] == 3
        assert last["error_share"] == pytest.approx(18 / 30)
        assert last["bias"] == pytest.approx(-2 / 60)
        assert last["covered"] == pytest.approx(2 / 3)
        assert last["surplus_share"] == pytest.approx(12 / 30)
        assert season["error_share"] == pytest.approx(6 / 30)
        assert season["bias"] == pytest.approx(-2 / 60)
        assert found["b", "last_value"]["error_share"] == pytest.approx(6 / 6)


def test_a_trace_is_backtested_with_every_method(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request every ten seconds is forecast without error by all methods."""
    rows = [f"2023-11-16 18:{m:02}:{s:02}.0000000,10,2" for m in range(10) for s in range(0, 60, 10)]
    file = home / "trace.csv"
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert run(monkeypatch, "forecast", "backtest", str(file), "--warmup", "3", "--season", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in found] == ["last_value", "seasonal_naive", "smoothing"]
    assert [row["error_share"] for row in found] == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)
    assert [row["covered"] for row in found] == [1.0, 1.0, 1.0]
    assert run(monkeypatch, "forecast", "backtest", str(home / "absent")) == 3
    out = home / "day.csv"
    assert run(monkeypatch, "demand", "derive", "--trace", str(file), "--out", str(out)) == 1
    assert "exactly one trace whose name holds 'code'" in capsys.readouterr().err
    assert not out.exists()
