"""Measuring through real agents: a job runs once, its rows land in Parquet, tables and templates rest on them.

The job is a stand-in that computes times instead of measuring (the runner itself is proved in
``tests/unit/profiling/test_engine.py``); the last test has the real runner and real vLLM.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
from agent_bench import Bench, bench

from coral_tasks.cli import app
from coral_tasks.dispatch.inventory import write_endpoints
from coral_tasks.domain.errors import EngineFault, UnknownName, ValidationFailed
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.tasks import measuring, nightly
from coral_tasks.tasks.profiling import build_profiles, read_measured, read_profiles
from coral_tasks.templates import BuildOptions, build_template_set

pytestmark = pytest.mark.integration

INTERPRETER = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"

# Time of a step: 1 ms and, for each layer, 0.2 ms and 0.1 us per token (prefill) or sequence (decode).
STAND_IN = """
import json, sys
from pathlib import Path
request, output, log, broken = sys.argv[1:5]
job = json.loads(Path(request).read_text())
with open(log, "a") as file:
    file.write(job["model"] + "\\n")
if job["model"] == broken:
    sys.exit(3)
rows = []
for phase in ("prefill", "decode"):
    for layers in job["layer_counts"]:
        for tokens in job["tokens"]:
            for sequences in job["sequences"]:
                work = sequences * (tokens if phase == "prefill" else 1)
                rows.append({
                    "model": job["model"], "configuration": job["configuration"], "phase": phase, "num_layers": layers,
                    "tp_degree": 1, "sequences": sequences, "tokens": tokens, "status": "ok",
                    "median_s": 1e-3 + layers * (2e-4 + work * 1e-7), "spread_s": 0.0, "num_repeats": 3, "detail": "",
                    "vllm": "stand-in", "torch": "", "driver": "", "device": "none",
                    "measured_at": WHEN, "code_version": "1"})
Path(output).write_text(json.dumps(rows))
"""
FRESH = "__import__('datetime').datetime.now(__import__('datetime').UTC).isoformat()"
OLD = "'2020-01-01T00:00:00+00:00'"


def stand_in(home: Path, *, when: str = FRESH, broken: str = "-") -> list[str]:
    """The agent's ``profile_command``; ``broken``: model whose job fails."""
    script = STAND_IN.replace("WHEN", when)
    return [sys.executable, "-c", script, "{request}", "{output}", str(home / "started.log"), broken]


def started(home: Path) -> list[str]:
    """Models of all jobs that were started, in order."""
    return (home / "started.log").read_text(encoding="utf-8").split()


def agents(home: Path, monkeypatch, **fields: object):
    """One agent of the home ``home`` with two nodes."""
    monkeypatch.setenv("CORAL_HOME", str(home))
    monkeypatch.setattr(measuring, "SEQUENCES", (1, 8))
    return bench(home, {"a": ["n1", "n2"]}, **{"engine": "vllm", **fields})


def enlist(made: Bench) -> None:
    """Write the inventory that the pipeline reads."""
    write_endpoints(made.root / "agents.toml", made.endpoints)


def test_a_night_measures_what_is_due_once_and_tables_rest_on_it(tmp_path: Path, monkeypatch) -> None:
    """One idle L4x1 node is found and measured with all three models; a repeated task fetches the same jobs; the next
    night nothing is due; the table and a template of L4x1 say they were measured, the other configurations do not.
    """
    with agents(tmp_path, monkeypatch, profile_command=stand_in(tmp_path)) as made:
        enlist(made)
        (item,) = nightly.plan_measurements("night", {})
        assert (item["configuration"], item["node"]) == ("L4x1", "n1")
        assert item["models"] == ["qwen3-32b", "gpt-oss-20b", "phi-4-14b"]
        files = nightly.measure(item)
        assert sorted(started(tmp_path)) == sorted(item["models"])
        assert nightly.measure(item) == files
        assert len(started(tmp_path)) == 3
        assert nightly.plan_measurements("next night", {}) == []
    rows = read_measured(Path(files[0]))
    assert {row.status for row in rows} == {"ok"}
    written = nightly.profile({"run": "night", "setup": "core", "model": "phi-4-14b"})
    for one in written:
        table = nightly.read_profile(Path(one["profile"]))
        sources = dict(zip(table.configurations, table.sources, strict=True))
        assert {name for name, source in sources.items() if source is ProfileSource.MEASURED} == {"L4x1"}
        built = build_template_set(table, BuildOptions(max_nodes=2)).templates
        sources = [dict(built.template(number).sources) for number in range(len(built))]
        assert any(one.get("L4x1") is ProfileSource.MEASURED for one in sources)
    kept = json.loads((tmp_path / "runs" / "night" / "measurements" / "L4x1.json").read_text(encoding="utf-8"))
    assert (kept["files"], kept["not_measured"]) == (files, {})


def test_a_failed_job_leaves_its_reason_and_the_others_are_measured(tmp_path: Path, monkeypatch) -> None:
    """The job of one model fails: its reason is kept, it is not started again in this run, and it is due the next
    night; measurements beyond their age are due too.
    """
    command = stand_in(tmp_path, when=OLD, broken="gpt-oss-20b")
    with agents(tmp_path, monkeypatch, profile_command=command) as made:
        enlist(made)
        (item,) = nightly.plan_measurements("night", {})
        assert len(nightly.measure(item)) == 2
        assert len(nightly.measure(item)) == 2
        assert started(tmp_path).count("gpt-oss-20b") == 1
        kept = json.loads((tmp_path / "runs" / "night" / "measurements" / "L4x1.json").read_text(encoding="utf-8"))
        assert "code 3" in kept["not_measured"]["gpt-oss-20b"]
        (again,) = nightly.plan_measurements("next night", {})
        assert again["models"] == item["models"]
        monkeypatch.setenv("CORAL_MEASUREMENT_MAX_AGE_S", "1e10")
        (again,) = nightly.plan_measurements("next night", {})
        assert again["models"] == ["gpt-oss-20b"]


def test_simulated_engines_and_agents_without_a_command(tmp_path: Path, monkeypatch) -> None:
    """A simulated engine is never measured; an agent without profile_command says so and writes nothing."""
    with agents(tmp_path, monkeypatch, engine="simulated") as made:
        enlist(made)
        assert nightly.plan_measurements("night", {}) == []
        fleet = measuring.Fleet.of(tmp_path)
        with pytest.raises(EngineFault, match="this agent has no profile_command"):
            measuring.measure_now("n2", "phi-4-14b", "L4x1", {}, fleet=fleet, job_id="j", timeout_s=30.0)
    assert not (tmp_path / "measurements").exists()


def test_the_command_measures_a_node_and_comes_back_to_its_job(tmp_path: Path, monkeypatch) -> None:
    """``coral profile measure`` writes Parquet that the next build uses first; ``--job`` fetches without starting."""
    words = ["profile", "measure", "--node", "n2", "--model", "tiny", "--sequences", "1,2", "--tokens", "64,200"]
    words += ["--timeout-s", "30", "--json", "--job"]
    with agents(tmp_path, monkeypatch, configuration="cpu", profile_command=stand_in(tmp_path)) as made:
        enlist(made)
        for _ in range(2):
            done = CliRunner().invoke(app, [*words, "first"], catch_exceptions=False)
            assert done.exit_code == 0
            result = json.loads(done.stdout)
            assert (result["points"], result["ok"], result["failed"]) == (16, 16, 0)
        assert started(tmp_path) == ["tiny"]
        with pytest.raises(UnknownName, match="unknown node; known: n1, n2"):
            CliRunner().invoke(app, [*words, "second", "--node", "n7"], catch_exceptions=False)
        with pytest.raises(UnknownName, match=r"unknown model; known: .*tiny"):
            CliRunner().invoke(app, [*words, "second", "--model", "tinny"], catch_exceptions=False)
        request = tmp_path / "request.json"
        request.write_text(json.dumps({"model": "tiny", "configuration": "L4x1"}), encoding="utf-8")
        with pytest.raises(ValidationFailed, match="node n2 is a cpu"):
            CliRunner().invoke(
                app, ["profile", "measure", "--node", "n2", "--request", str(request)], catch_exceptions=False
            )
        assert started(tmp_path) == ["tiny"]
    assert Path(result["out"]) == tmp_path / "measurements" / "cpu-tiny.parquet"
    build_profiles("cpu", tmp_path)
    assert [table.sources for table in read_profiles(tmp_path)] == [(ProfileSource.MEASURED,)] * 2


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("open(sys.argv[2], 'w').write('[]')", "brought back no row"),
        ("open(sys.argv[2], 'w').write('{\"rows\": 1}')", "brought back no measurements: .*must be a JSON list"),
        ("open(sys.argv[2], 'w').write('x' * 1_000_000)", "rows exceed 900000 bytes"),
        ("open(sys.argv[2], 'wb').write(bytes([0xff]))", "rows cannot be read"),
        ("pass", "failed: .*code 0"),
    ],
)
def test_what_is_no_measurement_is_a_fault(tmp_path: Path, monkeypatch, script: str, message: str) -> None:
    """Whatever a profile_command leaves behind, the caller gets a fault with the reason and no file is written."""
    command = [sys.executable, "-c", f"import sys; {script}", "{request}", "{output}"]
    with agents(tmp_path, monkeypatch, configuration="cpu", profile_command=command) as made:
        enlist(made)
        fleet = measuring.Fleet.of(tmp_path)
        with pytest.raises(EngineFault, match=message):
            measuring.measure_now("n1", "tiny", "cpu", {}, fleet=fleet, job_id="j", timeout_s=30.0)


@pytest.mark.engine
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not INTERPRETER.exists(), reason="needs vLLM's own environment, .venv-vllm")
def test_real_vllm_is_measured_through_an_agent(tmp_path: Path, monkeypatch) -> None:
    """The agent runs the real runner on this machine: ok rows with vLLM's version, a measured table, a template."""
    command = [sys.executable, "-m", "coral_tasks.cli", "profile", "run", "--request", "{request}", "--out", "{output}"]
    command += ["--interpreter", str(INTERPRETER)]
    options = {"sequences": [1, 2], "tokens": [64, 160], "warmup": 1, "repeats": 3, "decode_steps": 8}
    with agents(tmp_path, monkeypatch, configuration="cpu", profile_command=command) as made:
        enlist(made)
        fleet = measuring.Fleet.of(tmp_path)
        rows = measuring.measure_now("n1", "tiny", "cpu", options, fleet=fleet, job_id="real", timeout_s=1400.0)
        assert measuring.measure_now("n1", "tiny", "cpu", options, fleet=fleet, job_id="real", timeout_s=1400.0) == rows
    assert len(rows) == 16
    assert {row.status for row in rows} == {"ok"}
    assert all(row.vllm and row.torch for row in rows)
    measuring.write_rows(measuring.measurement_file(tmp_path, "cpu", "tiny"), rows)
    build_profiles("cpu", tmp_path)
    for table in read_profiles(tmp_path):
        assert table.sources == (ProfileSource.MEASURED,)
        assert len(build_template_set(table, BuildOptions(max_nodes=2, memory_ratio=None)).templates) >= 1
