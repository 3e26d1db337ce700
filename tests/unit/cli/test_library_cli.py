"""``coral library``: build, show, diff and verify from the outside, with exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coral_tasks.cli.library import app
from coral_tasks.domain.errors import ExpectedOutcome, PublicationRefused, StorageFault
from coral_tasks.domain.models import LatencySlo, RequestShape
from coral_tasks.domain.names import ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.profiles import LimitedBy, ProfileSource, ProfileTable
from coral_tasks.tasks import library as tasks


def _table(scale: float, phase: Phase, slo_step: float = 1.0) -> ProfileTable:
    """8 layers that take 5 quanta each on an L4 at the usual SLO, and more at a tighter one."""
    layers, quanta = np.arange(1, 9)[:, None], np.arange(1, 61)[None, :] * slo_step
    speed = np.array([1.0, 2.5])[:, None, None] * scale
    values = np.where(quanta >= 5 * layers / speed, 100.0 * speed / layers, 0.0)
    return ProfileTable(
        model=ModelId("toy"),
        num_layers=8,
        checkpoint_bytes=10.0,
        phase=phase,
        slo=LatencySlo(ttft_s=1.0, tpot_s=0.05).times(slo_step),
        shape=RequestShape(mean_prompt_tokens=9, p95_prompt_tokens=9, mean_output_tokens=9, p95_output_tokens=9),
        configurations=(NodeConfigurationId("L4x1"), NodeConfigurationId("L40Sx1")),
        node_memory_bytes=(10, 20),
        tp_degree=(1, 1),
        throughput=values,
        limited_by=np.full(values.shape, LimitedBy.LATENCY.value, np.uint8),
        sources=(ProfileSource.ANALYTIC,) * 2,
        provenance=("made up",) * 2,
        version=f"v{scale} {slo_step}",
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch):
    """Run ``coral library`` on a library of its own; ``scale`` of the profiles can be set."""
    runner = CliRunner()
    state = {"scale": 1.0}
    monkeypatch.setattr(
        tasks,
        "profile_tables",
        lambda _, step=1.0: tuple(_table(state["scale"], phase, step) for phase in (Phase.PREFILL, Phase.DECODE)),
    )
    monkeypatch.delenv("CORAL_SLO_STEP", raising=False)

    def call(*arguments: str, scale: float | None = None):
        state["scale"] = state["scale"] if scale is None else scale
        return runner.invoke(app, [*arguments, "--library", str(tmp_path / "library")])

    return call


def test_build_show_diff_verify(run, tmp_path: Path) -> None:
    """A library is built, shown, rebuilt unchanged, changed, compared and checked."""
    built = run("build", "--max-nodes", "3", "--json")
    assert built.exit_code == 0, built.output
    summary = json.loads(built.stdout)
    assert (summary["num_sets"], summary["num_tighter"], summary["num_reused"]) == (2, 2, 0)
    again = json.loads(run("build", "--max-nodes", "3", "--json").stdout)
    assert (again["version"], again["num_reused"]) == (summary["version"], 4)

    shown = run("show")
    assert summary["version"] in shown.output
    assert "memory_ratio: 12.0" in shown.output
    overview = json.loads(run("show", "--json").stdout)
    assert [one["phase"] for one in overview["sets"]] == ["decode", "prefill"]

    changed = run("build", "--max-nodes", "3", scale=1.1)
    assert changed.exit_code == 0, changed.output
    assert "published" in changed.output
    compared = run("diff")
    assert compared.exit_code == 1
    assert "median +10.00%" in compared.output
    same = run("diff", summary["version"], summary["version"])
    assert same.exit_code == 0
    assert "unchanged" in same.output
    verified = run("verify")
    assert verified.exit_code == 0
    assert "whole" in verified.output


def test_a_tighter_slo_is_built_beside_the_own_one(run) -> None:
    """By default both limits times 0.8: shown apart, drawn, and compared; another step changes these sets only."""
    run("build", "--max-nodes", "2")
    overview = json.loads(run("show", "--json").stdout)
    assert overview["parameters"]["slo_step"] == "0.8"
    assert [(one["slo_ttft_s"], one["slo_tpot_s"]) for one in overview["sets"]] == [(1.0, 0.05)] * 2
    assert [(one["slo_ttft_s"], one["slo_tpot_s"]) for one in overview["tighter"]] == [(0.8, 0.04)] * 2
    assert "One SLO step tighter" in run("show").output
    # 8 layers at 5 quanta each need 40 of 60; at 0.8 times the limits 60 quanta last as long as 48 did.
    assert "TPOT 40 ms at 99 %" in run("show", "toy/decode/40ms/1*L4x1/vllm").output
    other = json.loads(run("build", "--max-nodes", "2", "--slo-step", "0.7", "--json").stdout)
    assert (other["num_tighter"], other["num_reused"]) == (2, 2)
    changed = [line for line in run("diff").output.splitlines() if "templates" in line and "unchanged" not in line]
    assert all("(tighter SLO)" in line for line in changed)
    assert {line.split(" (")[0] for line in changed} == {
        f"toy {phase}ms" for phase in ("decode 35", "decode 40", "prefill 700", "prefill 800")
    }
    assert run("verify").exit_code == 0


def test_without_a_step_there_is_no_tighter_set(run, monkeypatch) -> None:
    """``--slo-step 0``, or the setting, builds one SLO alone; the option goes before the setting."""
    alone = json.loads(run("build", "--max-nodes", "2", "--slo-step", "0", "--json").stdout)
    assert (alone["num_sets"], alone["num_tighter"]) == (2, 0)
    overview = json.loads(run("show", "--json").stdout)
    assert (overview["tighter"], overview["parameters"]["slo_step"]) == ([], "none")
    monkeypatch.setenv("CORAL_SLO_STEP", "0")
    assert json.loads(run("build", "--max-nodes", "2", "--json").stdout)["version"] == alone["version"]
    assert json.loads(run("build", "--max-nodes", "2", "--slo-step", "0.5", "--json").stdout)["num_tighter"] == 2


def test_a_tighter_slo_that_nothing_holds_is_a_result(run) -> None:
    """At a twentieth of the limits nothing fits; the library is published with empty tighter sets, and is whole."""
    built = json.loads(run("build", "--max-nodes", "2", "--slo-step", "0.05", "--json").stdout)
    assert built["published"]
    overview = json.loads(run("show", "--json").stdout)
    assert [one["num_templates"] for one in overview["tighter"]] == [0, 0]
    assert all(one["num_templates"] > 0 for one in overview["sets"])
    assert run("verify").exit_code == 0


def test_a_template_is_drawn(run) -> None:
    """The drawing names every stage with its layers, nodes and latency share, and what limits the template."""
    run("build", "--max-nodes", "2", "--reduction", "none")
    drawn = run("show", "toy/decode/50ms/1*L40Sx1+1*L4x1/vllm").output
    assert "output tokens/s, limited by latency" in drawn
    assert "TPOT 50 ms at 99 %" in drawn
    assert "stage 1: layers 1–" in drawn
    assert "stage 2: layers" in drawn
    assert "–8 (" in drawn
    assert "quanta = " in drawn
    assert "L4x1 analytic" in drawn


def test_an_unknown_template_names_close_ones(run) -> None:
    """A wrong template id is answered with the nearest known ones."""
    run("build", "--max-nodes", "2")
    answer = run("show", "toy/decode/50ms/1*L40Sx2/vllm")
    assert isinstance(answer.exception, ExpectedOutcome)
    assert "unknown template" in str(answer.exception)
    assert "toy/decode/50ms/1*L40Sx1/vllm" in str(answer.exception)


def test_the_gate_refuses_from_the_command_line(run) -> None:
    """A build whose throughput collapses is refused and the current version stays; --force publishes it."""
    run("build", "--max-nodes", "2")
    before = json.loads(run("show", "--json").stdout)["version"]
    refused = run("build", "--max-nodes", "2", scale=0.5)
    assert isinstance(refused.exception, PublicationRefused)
    assert json.loads(run("show", "--json").stdout)["version"] == before
    assert run("build", "--max-nodes", "2", "--force").exit_code == 0
    assert json.loads(run("show", "--json").stdout)["version"] != before


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-nodes", "0", "N_max must be"),
        ("--rho", "0", "rho must be"),
        ("--rho", "-3", "rho must be"),
        ("--max-nodes", "9", "N_max must be"),
        ("--rho", "nan", "rho must be"),
        ("--processes", "0", "processes must be at least 1"),
        ("--keep-versions", "0", "keep_versions must be at least 1"),
        ("--keep-versions", "-1", "keep_versions must be at least 1"),
        *(("--slo-step", value, "factor between 0 and 1") for value in ("1", "1.25", "-0.8", "nan", "inf")),
    ],
)
def test_wrong_options_are_refused(run, option: str, value: str, message: str, tmp_path: Path) -> None:
    """Options out of range are refused by name, before anything is written."""
    answer = run("build", option, value)
    assert message in str(answer.exception)
    assert not (tmp_path / "library").exists()


def test_an_unknown_word_is_wrong_usage(run) -> None:
    """A latency split that does not exist is wrong usage."""
    assert run("build", "--latency-split", "fair").exit_code == 2


def test_a_damaged_library_is_a_fault(run, tmp_path: Path) -> None:
    """Verify names the damage and exits with 3; showing where nothing was published is a fault."""
    missing = run("show")
    assert isinstance(missing.exception, StorageFault)
    run("build", "--max-nodes", "2")
    victim = next((tmp_path / "library" / "versions").rglob("*.parquet"))
    victim.write_bytes(b"?")
    answer = run("verify")
    assert answer.exit_code == 3
    assert "corrupt" in answer.output


def test_an_interrupted_build_leaves_no_chunks_behind(run, tmp_path: Path) -> None:
    """After a finished build the work folder is empty."""
    run("build", "--max-nodes", "2")
    assert not (tmp_path / "library" / "work").exists()
