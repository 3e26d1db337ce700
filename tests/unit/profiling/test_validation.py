"""Points, the formula of aggregated serving, the report, and the fits' separation of seen and unseen points."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coral_tasks.catalog import load_catalog
from coral_tasks.cli import app
from coral_tasks.domain.errors import StorageFault, Unavailable, ValidationFailed
from coral_tasks.domain.names import Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.profiling.aggregated import (
    AggregatedFit,
    family_of,
    load_corrections,
    load_fit,
    planning_correction,
    predict,
)
from coral_tasks.profiling.calibration import load_calibration
from coral_tasks.profiling.helix import (
    GROUPED_KV_FACTOR,
    KvCapacity,
    LayerTime,
    predict_kv_blocks,
    predict_layer_times,
    read_kv_capacities,
    read_layer_times,
)
from coral_tasks.profiling.memory import MemoryParameters
from coral_tasks.profiling.points import POINTS_FILE, AggregatedPoint, fit_half, fitted_keys, read_points
from coral_tasks.profiling.search import coordinate_descent
from coral_tasks.profiling.validate import (
    NotPredicted,
    Prediction,
    predict_points,
    roofline_predictor,
    summary,
    validate_helix,
)
from coral_tasks.profiling.validation_page import validation_page

CATALOG = load_catalog()


def point(
    name: str = "p", ttft: float = 0.1, tpot: float = 0.01, flag: str = "", concurrency: int = 7777
) -> AggregatedPoint:
    """A point of a configuration that no fit has seen (nobody measured 7777 requests in flight)."""
    return AggregatedPoint(
        id=name,
        model="meta-llama/Llama-3.1-70B",
        system="h100_sxm",
        precision="fp8",
        gemm_quant="fp8",
        isl=1024,
        osl=1024,
        concurrency=concurrency,
        tp=4,
        moe_tp=None,
        ep=None,
        ttft_s=ttft,
        tpot_s=tpot,
        flag=flag,
    )


def prediction(one: AggregatedPoint, ttft: float, tpot: float) -> Prediction:
    """A prediction of the database source."""
    return Prediction(point=one, source=ProfileSource.DATABASE, ttft_s=ttft, tpot_s=tpot)


def test_the_formula_of_waiting_and_mixing() -> None:
    """P 100 ms, D 10 ms, 5 in flight, 100 tokens: TTFT 100 (1 + 0.5 x 2), TPOT 10 + 4 x 100 / 100."""
    fit = AggregatedFit(prefill_step_s=0, decode_step_s=0, queue=0.5, power=0.5, mixing=1.0)
    ttft, tpot = predict(*(np.asarray([value]) for value in (0.1, 0.01, 5.0, 100.0)), fit)
    assert (ttft[0], tpot[0]) == (pytest.approx(0.2), pytest.approx(0.014))


def test_a_lone_request_waits_for_nobody() -> None:
    """With one request in flight TTFT is its prefill and TPOT a decode step."""
    ttft, tpot = predict(*(np.asarray([value]) for value in (0.1, 0.01, 1.0, 100.0)), load_fit())
    assert ttft[0] == pytest.approx(0.1 + load_fit().prefill_step_s)
    assert tpot[0] == pytest.approx(0.01 + load_fit().decode_step_s)


def test_errors_are_absolute_and_relative_with_median_and_p90() -> None:
    """Misses of 0, 10 and 40 % have the median 10 % and the 90th percentile 34 %."""
    done = [prediction(point(str(i)), 0.1 * (1 + miss), 0.01) for i, miss in enumerate((0.0, -0.1, 0.4))]
    report = summary(done, [], ProfileSource.DATABASE)
    assert report["ttft"] == {"median": 0.1, "p90": 0.34, "count": 3}
    assert report["tpot"] == {"median": 0.0, "p90": 0.0, "count": 3}
    assert report["by"][0] | {"ttft": 0, "tpot": 0} == {
        "gpu": "H100",
        "model": "meta-llama/Llama-3.1-70B",
        "source": "database",
        "ttft": 0,
        "tpot": 0,
    }
    assert [one["id"] for one in report["worst"]] == ["2", "1", "0"]


def test_flagged_points_are_counted_apart() -> None:
    """A flagged point is in no figure but that of the flagged ones."""
    done = [prediction(point("a"), 0.1, 0.01), prediction(point("b", flag="queueing"), 0.9, 0.09)]
    report = summary(done, [], ProfileSource.DATABASE)
    assert report["ttft"]["count"] == 1
    assert report["ttft"]["median"] == 0
    assert report["flagged"]["ttft"] == {"median": 8.0, "p90": 8.0, "count": 1}


def test_points_that_a_fit_has_seen_are_counted_apart() -> None:
    """A point of the fit half stands under fit, also if it comes in a file of another name."""
    seen = next(one for one in read_points() if one.configuration_key in fitted_keys())
    report = summary([prediction(replace(seen, id="other", flag=""), 1.0, 1.0)], [], ProfileSource.DATABASE)
    assert report["ttft"] == {"median": None, "p90": None, "count": 0}
    assert report["fit"]["ttft"]["count"] == 1


def test_a_point_that_cannot_be_predicted_is_listed_with_the_reason() -> None:
    """A model that the catalogue lacks is no silent gap."""
    known, unknown = point("a"), replace(point("b"), model="someone/unknown")
    done, lost = predict_points([known, unknown], ProfileSource.ANALYTIC, roofline_predictor())
    assert [one.point.id for one in done] == ["a"]
    assert lost[0].point.id == "b"
    assert "someone/unknown is not in the catalogue; known: Qwen/" in lost[0].reason
    assert summary(done, lost, ProfileSource.ANALYTIC)["not_predicted"][0]["id"] == "b"


def test_the_split_never_parts_repeats_and_leaves_both_sides_something() -> None:
    """Of each model and system about half of the configurations are fitted on; repeats stand together."""
    points = [one for one in read_points() if not one.flag]
    half = fit_half(points)
    groups: dict[tuple[str, str], set[str]] = {}
    for one in points:
        groups.setdefault((one.model, one.system), set()).add(one.configuration_key)
    for keys in groups.values():
        assert len(keys & half) == (len(keys) + 1) // 2


def test_the_projects_own_points_are_read_whole() -> None:
    """The file holds 254 points in seconds, 74 of them flagged."""
    points = read_points()
    assert len(points) == 254
    assert points[0].ttft_s == pytest.approx(0.116072)
    assert points[0].tpot_s == pytest.approx(0.0157362)
    assert sum(bool(one.flag) for one in points) == 74


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1024,1024,16,4,", "1024,1024,0,4,", "line 2: concurrency must be a finite number above zero"),
        ("1024,1024,16,4,", "1024,1024,1.5,4,", "concurrency must be a whole number"),
        ("116.072", "nan", "ttft_ms must be a finite number"),
        ("116.072", "-5", "ttft_ms must be a finite number"),
        ("15.7362", "", "tpot_ms must be a finite number"),
        ("id,model", "name,model", "without id"),
        ("MiniMaxAI/MiniMax-M2.5,h200_sxm", ",h200_sxm", "model must not be empty"),
        ("_c8_cfg606", "_c16_cfg606", "id is listed twice"),
    ],
)
def test_a_broken_points_file_is_refused_by_row(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Each broken cell is named with file, line and rule."""
    path = tmp_path / "points.csv"
    text = POINTS_FILE.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValidationFailed, match=message):
        read_points(path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_an_unreadable_points_file_is_a_storage_fault(tmp_path: Path, content: bytes | None) -> None:
    """A missing file or one that is no text is named."""
    path = tmp_path / "points.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StorageFault, match=r"points\.csv"):
        read_points(path)


def test_cells_that_may_stand_in_the_wrong_column_are_refused(tmp_path: Path) -> None:
    """A row of another width than the header, or a column that is there twice, is named and never guessed at."""
    lines = POINTS_FILE.read_text(encoding="utf-8").splitlines()[:3]
    path = tmp_path / "points.csv"
    path.write_text("\n".join([lines[0], lines[1] + ",1", lines[2].rpartition(",")[0]]), encoding="utf-8")
    with pytest.raises(ValidationFailed, match=r"line 2: must have as many cells as the header") as failed:
        read_points(path)
    assert "line 3: must have as many cells as the header" in str(failed.value)
    path.write_text("\n".join([lines[0] + ",isl", lines[1] + ",1"]), encoding="utf-8")
    with pytest.raises(ValidationFailed, match=r"header: column is there twice \(found isl\)"):
        read_points(path)


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    """Spreadsheets put one in front of the header."""
    path = tmp_path / "points.csv"
    path.write_bytes(b"\xef\xbb\xbf" + POINTS_FILE.read_bytes())
    assert read_points(path) == read_points()


def test_a_points_file_without_rows_is_refused(tmp_path: Path) -> None:
    """A header alone is no measurement."""
    path = tmp_path / "points.csv"
    path.write_text(POINTS_FILE.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    with pytest.raises(ValidationFailed, match="at least one point"):
        read_points(path)


def test_families_fall_back_to_the_default_of_their_kind() -> None:
    """A dense model without a family is planned like Llama 70B, a sparse one like GPT-OSS; few points do not count."""
    assert family_of("openai/gpt-oss-20b", sparse=True) == "gpt-oss"
    assert family_of("microsoft/phi-4", sparse=False) == "llama-70b"
    assert family_of("Qwen/Qwen3-30B-A3B", sparse=True) == "gpt-oss"
    assert load_corrections()["llama-8b"].num_points < 6
    assert planning_correction("meta-llama/Llama-3.1-8B-Instruct", sparse=False).family == "llama-70b"


def test_helix_files_are_read_whole() -> None:
    """1221 layer times and 178 KV capacities, in seconds and blocks."""
    times, capacities = read_layer_times(), read_kv_capacities()
    assert (len(times), len(capacities)) == (1221, 178)
    assert times[0] == LayerTime(
        model="LLaMA-1-30B", gpu="A100-40GB", num_gpus=1, phase=Phase.PREFILL, tokens=250, seconds=1e-3
    )


def test_kv_blocks_follow_the_memory_left() -> None:
    """One layer of LLaMA-1 30B (1.07 GB) on an A100-40GB: what is left of 38.65 GB, in blocks of 425,984 bytes."""
    row = KvCapacity(model="LLaMA-1-30B", gpu="A100-40GB", num_gpus=1, layers=1, blocks=80613, prompts=3)
    parameters = MemoryParameters(overhead_bytes=2e9, activation_factor=0.0)
    layer = 2 * (4 * 6656**2 + 3 * 6656 * 17920)
    expected = (0.9 * 40 * 2**30 - 2e9 - layer) / (16 * 2 * 6656 * 2)
    assert predict_kv_blocks([row], CATALOG, parameters)[0] == pytest.approx(expected, rel=1e-3)


def test_layer_times_are_predicted_in_the_rows_order() -> None:
    """Each row gets the time of its own machine and batch, wherever it stands."""
    rows = list(read_layer_times()[::97])
    forward = predict_layer_times(rows, CATALOG, load_calibration(), GROUPED_KV_FACTOR)
    backward = predict_layer_times(rows[::-1], CATALOG, load_calibration(), GROUPED_KV_FACTOR)
    assert forward.tolist() == backward[::-1].tolist()


def test_the_helix_report_counts_unseen_rows_only() -> None:
    """Layer times of the unseen half, KV capacities of LLaMA-2 70B; the targets of the issue are met by the median."""
    report = validate_helix(CATALOG)
    assert report["layer_times"]["count"] == sum(not row.for_fit for row in read_layer_times())
    assert report["kv_blocks"]["count"] == sum(row.model == "LLaMA-2-70B" for row in read_kv_capacities())
    assert report["layer_times"]["median"] <= 0.20
    assert report["kv_blocks"]["median"] <= 0.05


def test_the_search_finds_a_minimum() -> None:
    """Least absolute deviation from (2, 0.5) ends there."""
    best = coordinate_descent(lambda x: float(abs(x[0] - 2) + abs(x[1] - 0.5)), np.asarray([1.0, 1.0]))
    assert best.tolist() == pytest.approx([2, 0.5], abs=0.01)


def test_the_page_shows_figures_and_escapes_names() -> None:
    """Figures stand as percentages, and a name from a file is text, never markup."""
    bad = replace(point("<b>x</b>"), model="<script>")
    report = summary(
        [prediction(point("a"), 0.11, 0.01)],
        [NotPredicted(point=bad, source=ProfileSource.ANALYTIC, reason="<i>")],
        ProfileSource.DATABASE,
    )
    page = validation_page(report | {"helix": validate_helix(CATALOG)})
    assert "10.0%" in page
    assert "<script>" not in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page


def test_validate_prints_the_agreed_json(tmp_path: Path) -> None:
    """`coral profile validate --points FILE --json` prints TTFT, TPOT and groups, and writes the report on demand."""
    pytest.importorskip("aiconfigurator_core")
    path = tmp_path / "points.csv"
    lines = POINTS_FILE.read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines[1:] if "Llama-3.1-70B,h200_sxm" in line][:12]
    path.write_text("\n".join([lines[0], *wanted]) + "\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["profile", "validate", "--points", str(path), "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report["ttft"]) == {"median", "p90", "count"}
    total = report["tpot"]["count"] + report["fit"]["tpot"]["count"] + report["flagged"]["tpot"]["count"]
    assert total == 12
    assert {one["source"] for one in report["by"]} == {"database", "analytic"}
    assert report["tpot"]["median"] < 0.25
    assert json.loads((tmp_path / "validation.json").read_text(encoding="utf-8")) == report
    assert "Held-out points" in (tmp_path / "validation.html").read_text(encoding="utf-8")


def test_a_missing_points_file_ends_the_command_with_a_fault(tmp_path: Path) -> None:
    """The exception reaches main, which turns it into a message and exit code 3."""
    result = CliRunner().invoke(app, ["profile", "validate", "--points", str(tmp_path / "none.csv")])
    assert isinstance(result.exception, StorageFault)


def test_without_calibration_the_roofline_says_so() -> None:
    """A system that has no GPU type in the catalogue cannot be predicted."""
    with pytest.raises(Unavailable, match="no GPU type in the catalogue; known: a100_sxm"):
        roofline_predictor()(replace(point(), system="tpu"))
