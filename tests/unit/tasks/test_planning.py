"""``coral plan``, ``explain``, ``whatif`` and ``verify allocation`` on files."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coral_tasks.cli import app
from coral_tasks.domain.errors import ExpectedOutcome, StorageFault, Unavailable, UnknownName, ValidationFailed
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import LatencySplit, Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.domain.template_set import TemplateSet
from coral_tasks.storage.library import publish_version, read_part, write_part, write_version
from coral_tasks.storage.objects import open_store
from coral_tasks.tasks import planning

NOW = datetime(2026, 11, 29, tzinfo=UTC)
CASES = Path(__file__).parents[2] / "data" / "allocation_cases"
EAST = "aws/us-east-2"


def library(folder: Path, *, tighter: float | None = None) -> str:
    """A published library: one model, aggregated, 1 request/s on one L4x1 or on one H100x1.

    ``tighter``: requests/s of both at 0.8 times the limits, 0 for templates of neither; None: no such sets.
    """
    counts = np.array([[1, 0], [0, 1]], dtype=np.int16)
    one = np.ones((2, 1), dtype=np.int16)
    templates = TemplateSet(
        model="m",
        phase=Phase.AGGREGATED,
        slo=LatencySlo(ttft_s=1.0, tpot_s=0.1),
        latency_split=LatencySplit.FREE,
        num_layers=8,
        total_quanta=60,
        configurations=("H100x1", "L4x1"),
        sources=(ProfileSource.ANALYTIC,) * 2,
        provenance=("by hand",) * 2,
        profile_version="p",
        node_counts=counts,
        throughput=np.array([1.0, 1.0]),
        runtime=np.zeros(2, dtype=np.uint8),
        limited_by=np.full(2, 3, dtype=np.uint8),
        num_stages=np.ones(2, dtype=np.uint8),
        slot_stage=np.zeros((2, 1), dtype=np.int8),
        stage_layers=one * 8,
        stage_quanta=one * 60,
    )
    store = open_store(str(folder))
    write_part(store, "part", templates, {})
    aside = []
    if tighter is not None:
        write_part(store, "aside", _tightened(templates, tighter), {})
        aside.append(read_part(store, "aside"))
    manifest = write_version(store, [read_part(store, "part")], {}, tighter=aside)
    publish_version(store, manifest, now=NOW)
    return str(folder)


def _tightened(templates: TemplateSet, throughput: float) -> TemplateSet:
    rows = 2 if throughput else 0
    names = ("node_counts", "runtime", "limited_by", "num_stages", "slot_stage", "stage_layers", "stage_quanta")
    columns = {name: getattr(templates, name)[:rows] for name in names}
    return replace(templates, slo=templates.slo.times(0.8), throughput=np.full(rows, throughput), **columns)


@pytest.fixture
def files(tmp_path):
    """Options of ``coral plan`` for 3 requests/s, two L4x1 at 1 USD and nine H100x1 at 5 USD."""
    stamp = NOW.isoformat()
    tables = {
        "demand": "model,origin,interval_start,interval_s,requests_per_s,mean_prompt_tokens,p95_prompt_tokens,"
        f"mean_output_tokens,p95_output_tokens\nm,,{stamp},300,3,100,200,10,20\n",
        "prices": "region,configuration,market,price_usd_per_hour,observed_at,source\n"
        f"{EAST},L4x1,on_demand,1,{stamp},test\n{EAST},H100x1,on_demand,5,{stamp},test\n",
        "availability": "region,configuration,market,available_nodes,observed_at,source\n"
        f"{EAST},L4x1,on_demand,2,{stamp},test\n{EAST},H100x1,on_demand,9,{stamp},test\n",
    }
    given = ["--library", library(tmp_path / "library")]
    for name, text in tables.items():
        (tmp_path / f"{name}.csv").write_text(text)
        given += [f"--{name}", str(tmp_path / f"{name}.csv")]
    return given


def call(*arguments):
    """Output of a command that must succeed."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_plan_explain_and_what_if(files, tmp_path):
    """Two cheap and one dear instance cost 7; one more cheap node saves 4; without L4 everything is dear: 15."""
    out = tmp_path / "out"
    plan = json.loads(call("plan", *files, "--in-process", "--gap", "0", "--out", str(out), "--json"))
    assert plan["certificate"]["cost_usd_per_hour"] == 7.0
    assert planning.read_plan(out / "plan.json").id == plan["id"]
    told = call("explain", str(out / "plan.json"))
    assert f"All 2 L4x1 in {EAST} are used; one more would save 4.00 USD/h." in told
    more = json.loads(call("whatif", str(out / "plan.json"), "--nodes", f"{EAST}/L4x1=+1", "--json"))
    assert (more["cost_before"], more["cost_after"]) == (7.0, 3.0)
    none = json.loads(call("whatif", str(out / "plan.json"), "--without-configuration", "L4x1", "--json"))
    assert none["cost_after"] == 15.0


OF_M = "An SLO one step tighter (0.8 times: 0.8 s and 80 ms) for m would"


def test_the_price_of_a_tighter_slo(files, tmp_path):
    """At half the rate 3 requests/s take 2 L4x1 and 4 H100x1, 22 USD/h instead of 7: told, and planned on request."""
    library(tmp_path / "library", tighter=0.5)
    out = str(tmp_path / "out" / "plan.json")
    plan = json.loads(call("plan", *files, "--in-process", "--gap", "0", "--out", str(tmp_path / "out"), "--json"))
    assert plan["certificate"]["cost_usd_per_hour"] == 7.0
    assert f"{OF_M} cost 15.00 USD/h more." in call("explain", out)
    for name in ("m", "all"):
        asked = json.loads(call("whatif", out, "--slo-step", name, "--json"))
        assert (asked["cost_before"], asked["cost_after"]) == (7.0, 22.0)
    with_nodes = json.loads(call("whatif", out, "--slo-step", "all", "--nodes", f"{EAST}/L4x1=+4", "--json"))
    assert with_nodes["cost_after"] == 6.0
    told = call("whatif", out, "--slo-step", "m")
    assert "cost 7.0000 -> 22.0000 USD/h" in told
    assert f"keep 2 x m/aggregated/100ms/1*L4x1/vllm in {EAST} on_demand as m/aggregated/80ms/1*L4x1/vllm" in told


def test_an_old_plan_is_explained_by_the_version_it_was_made_from(files, tmp_path):
    """A library without tighter sets says how to get them; asking for a plan with them is an expected no."""
    out = str(tmp_path / "out" / "plan.json")
    call("plan", *files, "--in-process", "--out", str(tmp_path / "out"))
    assert "coral library build --slo-step 0.8" in call("explain", out)
    for name in ("m", "all"):
        with pytest.raises(Unavailable, match="no templates of a tighter SLO for m; build it with"):
            call("whatif", out, "--slo-step", name)
    with pytest.raises(UnknownName, match="known: m"):
        call("whatif", out, "--slo-step", "n")


def test_a_tighter_slo_that_nothing_holds_is_planned_as_shortage(files, tmp_path):
    """No template at 0.8 times the limits: explained as such, and the plan asked for serves nothing of 3 requests/s."""
    library(tmp_path / "library", tighter=0.0)
    out = str(tmp_path / "out" / "plan.json")
    call("plan", *files, "--in-process", "--out", str(tmp_path / "out"))
    assert "No template holds m at 0.8 times its limits (0.8 s and 80 ms)." in call("explain", out)
    asked = json.loads(call("whatif", out, "--slo-step", "m", "--json"))
    assert (asked["cost_after"], asked["shortfall_after"]) == (0.0, pytest.approx(3.0))


def test_damaged_tighter_files_leave_the_rest_of_the_explanation(files, tmp_path):
    """No plan rests on them: the fault is named in its place, everything else is still told."""
    library(tmp_path / "library", tighter=0.5)
    call("plan", *files, "--in-process", "--gap", "0", "--out", str(tmp_path / "out"))
    (victim,) = (tmp_path / "library" / "tighter").rglob("*.parquet")
    victim.write_bytes(b"?")
    told = call("explain", str(tmp_path / "out" / "plan.json"))
    assert "What an SLO one step tighter would cost is not known: tighter/" in told
    assert f"All 2 L4x1 in {EAST} are used; one more would save 4.00 USD/h." in told


def test_equal_files_give_equal_plans(files):
    """The same files give the same bytes."""
    first = call("plan", *files, "--in-process", "--json")
    assert call("plan", *files, "--in-process", "--json") == first


def test_options_file(files, tmp_path):
    """Options come from a JSON file: with a budget of 6 only two instances fit."""
    (tmp_path / "options.json").write_text('{"budget_usd_per_hour": 6.0}')
    plan = json.loads(call("plan", *files, "--in-process", "--options", str(tmp_path / "options.json"), "--json"))
    assert plan["certificate"]["cost_usd_per_hour"] <= 6.0
    assert plan["shortfalls"][0]["shortfall_requests_per_s"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"budget_usd_per_hour": "much"}', ValidationFailed),
        ("{", StorageFault),
        ('{"headroom": 2.0}', ExpectedOutcome),
    ],
)
def test_bad_options_file_is_refused(tmp_path, text, error):
    """A wrong type, broken JSON and a value out of range are refused, none of them with a traceback."""
    (tmp_path / "options.json").write_text(text)
    with pytest.raises(error):
        planning.read_options(str(tmp_path / "options.json"))


def test_bad_rows_are_all_named(files, tmp_path):
    """Two cells that are no numbers are two violations of the table."""
    path = tmp_path / "prices.csv"
    path.write_text(path.read_text().replace(",1,", ",cheap,").replace(",5,", ",dear,"))
    with pytest.raises(ValidationFailed) as caught:
        call("plan", *files, "--in-process")
    assert len(caught.value.violations) == 2


def test_interval_that_is_not_there_is_refused(files):
    """Planning for an interval without rows is refused and names those that exist."""
    with pytest.raises(ValidationFailed, match="no rows for that interval"):
        call("plan", *files, "--in-process", "--at", "2020-01-01T00:00:00+00:00")


@pytest.mark.parametrize("at", ["yesterday", "", "2026-11-29T00:00:00", "2026-13-01T00:00:00Z"])
def test_a_start_that_is_no_moment_is_refused(files, at):
    """No traceback, and no guess at a zone."""
    with pytest.raises(ValidationFailed, match="ISO 8601 time with a zone"):
        call("plan", *files, "--in-process", "--at", at)


def test_a_folder_that_cannot_be_made_is_a_fault(files, tmp_path):
    """A file stands where the folder should be."""
    with pytest.raises(StorageFault, match=r"demand\.csv cannot be made: File exists"):
        call("plan", *files, "--in-process", "--out", str(tmp_path / "demand.csv"))


def test_an_option_that_nobody_knows_is_refused_with_its_place(files, tmp_path):
    """A misspelt option would be passed over, and the plan would be another one than was wanted."""
    given = {"budget": 5, "headroom": 1.0, "model_rules": [{"model": "m"}, {"model": "n", "min_instance": 1}]}
    (tmp_path / "options.json").write_text(json.dumps(given))
    with pytest.raises(ValidationFailed, match="unknown name") as caught:
        call("plan", *files, "--in-process", "--options", str(tmp_path / "options.json"))
    assert [one.row for one in caught.value.violations] == ["budget", "model_rules[1].min_instance"]


@pytest.mark.parametrize("count", ["1.5", "1e30", "-1e7", "nan"])
def test_nodes_of_a_what_if_are_whole_and_not_beyond_measure(files, tmp_path, count):
    """Nothing is rounded, and no number overflows."""
    call("plan", *files, "--in-process", "--out", str(tmp_path / "out"))
    with pytest.raises(ValidationFailed, match="must be NAME="):
        call("whatif", str(tmp_path / "out" / "plan.json"), "--nodes", f"{EAST}/L4x1={count}")


def test_verify_allocation_agrees(tmp_path):
    """Right expectations give exit code 0; a wrong one is a difference, an expected no."""
    case = CASES / "single.json"
    assert "yes" in call("verify", "allocation", str(case))
    wrong = json.loads(case.read_text())
    wrong["expected"]["objective"] = 9.0
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    with pytest.raises(ExpectedOutcome, match="1 of 1 differ"):
        call("verify", "allocation", str(tmp_path / "wrong.json"))


def test_verify_allocation_takes_a_bare_instance(tmp_path):
    """An instance without expectation is solved and checked."""
    bare = json.loads((CASES / "single.json").read_text())["instance"]
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    verdict = json.loads(call("verify", "allocation", str(tmp_path / "bare.json"), "--json"))[0]
    assert (verdict["objective"], verdict["expected"]) == (10.0, None)
