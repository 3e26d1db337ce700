"""Measured rows: fit of layers against the constant part, interpolation, and the runner's handling of its child."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
import pytest

from coral_tasks.catalog import load_catalog
from coral_tasks.domain.errors import EngineFault, StorageFault, UnknownName, ValidationFailed
from coral_tasks.domain.names import ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.profiling import build_profile_tables
from coral_tasks.profiling.costs import Work
from coral_tasks.profiling.measured import MeasuredRow, MeasuredSource, fit_measurements, newest_runs, rows_from_records
from coral_tasks.profiling.memory import Parallelism
from coral_tasks.profiling.model_files import model_config
from coral_tasks.profiling.runner import as_records, plan_run, run_plan
from coral_tasks.tasks.profiling import build_profiles, read_measured, read_profiles, read_request, run_measurement
from data_contracts.measurements import read_measurements, write_measurements

CATALOG = load_catalog()
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def row(
    layers: int, seconds: float | None, *, phase: Phase = Phase.DECODE, sequences: int = 1, tokens: int = 128
) -> MeasuredRow:
    """A row of the toy model on cpu; None: the point failed."""
    return MeasuredRow(
        model=ModelId("tiny"),
        configuration=NodeConfigurationId("cpu"),
        phase=phase,
        num_layers=layers,
        tp_degree=1,
        sequences=sequences,
        tokens=tokens,
        status="failed" if seconds is None else "ok",
        median_s=seconds,
        spread_s=None if seconds is None else 0.0,
        num_repeats=0 if seconds is None else 3,
        detail="" if seconds is not None else "gone",
        vllm="0.32.0",
        torch="2.13",
        driver="",
        device="x86_64",
        measured_at=NOW.isoformat(),
        code_version="1",
    )


def decode_work(sequences: tuple[float, ...], context: float) -> Work:
    """A decode grid on cpu."""
    return Work(
        model=CATALOG.model("tiny"),
        configuration=CATALOG.configuration("cpu"),
        split=Parallelism(tp=1),
        phase=Phase.DECODE,
        context_tokens=context,
        sequences=sequences,
    )


def test_the_fit_tells_layers_from_the_constant_part() -> None:
    """5 ms with 2 layers and 7 ms with 4 are 3 ms and 1 ms per layer, without residual."""
    (fit,) = fit_measurements([row(2, 5e-3), row(4, 7e-3)])
    assert (fit.constant_s, fit.layer_s) == (pytest.approx(3e-3), pytest.approx(1e-3))
    assert fit.residual == pytest.approx(0, abs=1e-9)


def test_residuals_are_kept() -> None:
    """10, 11 and 13 ms for 2, 4 and 6 layers lie on no line: the largest relative miss of the best line is kept."""
    (fit,) = fit_measurements([row(2, 10e-3), row(4, 11e-3), row(6, 13e-3)])
    line = np.polyfit([2, 4, 6], [10e-3, 11e-3, 13e-3], 1)
    expected = max(abs(np.polyval(line, x) / y - 1) for x, y in ((2, 10e-3), (4, 11e-3), (6, 13e-3)))
    assert fit.residual == pytest.approx(expected)
    assert fit.num_layer_counts == 3


@pytest.mark.parametrize(("first", "second"), [(2e-3, 5e-3), (5e-3, 4e-3)])
def test_neither_part_is_ever_negative(first: float, second: float) -> None:
    """A line through negative time, or layers that would save time, become zero with a residual that tells."""
    (fit,) = fit_measurements([row(2, first), row(4, second)])
    assert fit.constant_s >= 0
    assert fit.layer_s >= 0
    assert fit.residual > 0


def test_failed_points_and_lone_layer_counts_are_never_fitted() -> None:
    """A point that failed at one of two layer counts gives no fit, and no cost is invented for it."""
    assert fit_measurements([row(2, 5e-3), row(4, None)]) == ()
    assert MeasuredSource.of([row(2, 5e-3)]).costs(decode_work((1,), 128)) is None


def test_between_points_time_is_interpolated_and_beyond_marked() -> None:
    """1 ms per layer at 2 sequences, 3 ms at 6: 2 ms at 4, not marked; 5 ms at 10, along the line and marked."""
    rows = [
        row(layers, layers * per_layer, sequences=sequences)
        for sequences, per_layer in ((2, 1e-3), (6, 3e-3))
        for layers in (2, 4)
    ]
    costs = MeasuredSource.of(rows).costs(decode_work((1, 2, 4, 10), 128))
    assert costs is not None
    assert costs.layer_s[:, 0].tolist() == pytest.approx([0.5e-3, 1e-3, 2e-3, 5e-3])
    assert costs.extrapolated.tolist() == [True, False, False, True]
    assert costs.source is ProfileSource.MEASURED
    assert "vLLM 0.32.0" in costs.provenance


def test_another_length_is_interpolated_and_beyond_marked() -> None:
    """1 ms per layer at 100 tokens, 2 ms at 200: 1.5 ms at 150; at 400 tokens 4 ms and marked."""
    rows = [
        row(layers, layers * per_layer, tokens=tokens)
        for tokens, per_layer in ((100, 1e-3), (200, 2e-3))
        for layers in (2, 4)
    ]
    source = MeasuredSource.of(rows)
    for context, expected, marked in ((150, 1.5e-3, False), (400, 4e-3, True)):
        costs = source.costs(decode_work((1,), context))
        assert costs is not None
        assert costs.layer_s[0, 0] == pytest.approx(expected)
        assert costs.extrapolated.tolist() == [marked]


def test_measurements_come_before_other_sources() -> None:
    """A table for cpu is built from measured rows and says so."""
    rows = [
        row(layers, 1e-3 + layers * 1e-4, phase=phase, sequences=sequences, tokens=tokens)
        for phase in (Phase.PREFILL, Phase.DECODE)
        for sequences in (1, 4)
        for tokens in (64, 256)
        for layers in (2, 4)
    ]
    prefill, decode = build_profile_tables(CATALOG.setup("cpu"), sources=[MeasuredSource.of(rows)])
    assert decode.configurations == ("cpu",)
    assert decode.sources == (ProfileSource.MEASURED,)
    assert prefill.throughput[0, -1, -1] > 0
    assert decode.extrapolated is not None
    assert decode.extrapolated[0, -1, -1]  # the best batch is larger than any that was measured


def test_rows_survive_the_file(tmp_path: Path) -> None:
    """What was written is read back, failures included."""
    rows = (row(2, 5e-3), row(4, None))
    write_measurements(tmp_path / "rows.parquet", as_records(rows))
    assert rows_from_records(read_measurements(tmp_path / "rows.parquet"), "rows") == rows
    assert read_measured(tmp_path / "rows.parquet") == rows


@pytest.mark.parametrize("content", [b"", b"PAR1 nonsense", b"model,phase\n"])
def test_a_file_that_is_no_measurement_is_a_storage_fault(tmp_path: Path, content: bytes) -> None:
    """Truncated or foreign bytes are refused with the file's name."""
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    with pytest.raises(StorageFault, match=r"rows\.parquet"):
        read_measured(path)


def test_json_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    """A node agent reads JSON records, everything else Parquet: both give back the same rows, floats to the bit."""
    rows = (row(2, 0.1 + 0.2), row(4, 1 / 3), row(2, None, sequences=8))
    for name in ("rows.json", "rows.parquet"):
        write_measurements(tmp_path / name, as_records(rows))
        assert read_measured(tmp_path / name) == rows
    assert json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))[2]["median_s"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 2.5}, "row 1: num_layers must be a whole number, not 2.5"),
        ({"num_layers": True}, "num_layers must be a whole number, not True"),
        ({"num_layers": 2**40}, "num_layers must be a whole number"),
        ({"median_s": float("nan")}, "median_s must be a finite number or null, not nan"),
        ({"median_s": "fast"}, "median_s must be a finite number or null, not 'fast'"),
        ({"model": None}, "model must be a text, not None"),
        ({"speed": 3}, "unknown column speed"),
    ],
)
def test_a_json_cell_of_the_wrong_type_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    """JSON knows no column types, so each cell is held against the contract and named if it is wrong."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([as_records([row(2, 1e-3)])[0] | change]), encoding="utf-8")
    with pytest.raises(StorageFault, match=message):
        read_measured(path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "[" * 100_000, '[{"model": "tiny"}]', "PAR1", "\ud800"])
def test_json_that_holds_no_measurements_is_a_storage_fault(tmp_path: Path, text: str) -> None:
    """Whatever stands in the file, the message names it and no other exception comes out."""
    path = tmp_path / "rows.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(StorageFault, match=r"rows\.json"):
        read_measured(path)


def test_names_outside_the_catalogue_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    """A profile build does not pass over rows of a model or configuration that nobody knows."""
    path = tmp_path / "rows.parquet"
    strange = replace(row(2, 1e-3), model=ModelId("tinny"), configuration=NodeConfigurationId("L4x3"))
    write_measurements(path, as_records([row(2, 1e-3), strange]))
    with pytest.raises(ValidationFailed, match=r"unknown model; known: .*tiny") as failed:
        build_profiles("cpu", tmp_path, measured=[path])
    assert "unknown node configuration; known: " in str(failed.value)


def test_two_runs_are_never_fitted_together() -> None:
    """The latest run that timed anything counts; a later one that only failed does not hide it."""
    later, last = "2026-02-01T00:00:00+00:00", "2026-03-01T00:00:00+01:00"
    old = [row(2, 2e-3), row(4, 4e-3)]
    new = [replace(one, measured_at=later, median_s=2 * one.median_s) for one in old if one.median_s]
    lost = replace(row(2, None), measured_at=last)
    assert newest_runs([old, [lost], new]) == tuple(new)
    (fit,) = fit_measurements(newest_runs([new, old]))
    assert fit.layer_s == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "great"}, "status must be one of"),
        ({"median_s": None}, "only ok rows carry a time"),
        ({"status": "oom"}, "only ok rows carry a time"),
        ({"median_s": -1.0}, "median_s must be finite and above zero"),
        ({"num_layers": 0}, "num_layers must be finite and above zero"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    """Status and time must agree, and counts be positive."""
    with pytest.raises(ValidationFailed, match=message):
        replace(row(2, 5e-3), **change)


def test_a_plan_names_what_cannot_be() -> None:
    """Unknown names list the known ones; one layer count, too many layers or too long a context are refused."""
    with pytest.raises(UnknownName, match="qwen3-32b"):
        plan_run("qwen4", "cpu")
    with pytest.raises(UnknownName, match="L40Sx4"):
        plan_run("tiny", "L50x4")
    for options, message in (
        ({"layer_counts": (2,)}, "two or more layer counts"),
        ({"layer_counts": (2, 9)}, "the model has 8 layers"),
        ({"tokens": (5000,)}, "exceed the context"),
        ({"sequences": ()}, "sequences must be 1 or more"),
        ({"sequences": (1, 1)}, "sequences is listed twice"),
        ({"repeats": 0}, "repeats must be"),
    ):
        with pytest.raises(ValidationFailed, match=message):
            plan_run("tiny", "cpu", **options)


def interpreter(tmp_path: Path, body: str) -> Path:
    """An executable that stands in for the other environment's Python: gets script, job and output as arguments."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport json, os, subprocess, sys, time\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


PLAN = plan_run("tiny", "cpu", layer_counts=(2, 4), sequences=(1, 2), tokens=(64,), repeats=2)

HONEST = """
job = json.load(open(sys.argv[2])); out = open(sys.argv[3], "w")
layers = json.load(open(job["model_dir"] + "/config.json"))["num_hidden_layers"]
out.write(json.dumps({"kind": "engine", "vllm": "9", "torch": "8", "device": "stub", "driver": ""}) + "\\n")
for point in job["points"]:
    seconds = [0.001 * layers * point["sequences"], 0.003 * layers * point["sequences"]]
    out.write(json.dumps({"kind": "point", **point, "status": "ok", "seconds": seconds, "detail": ""}) + "\\n")
"""


def test_every_point_gives_a_row_with_median_and_spread(tmp_path: Path) -> None:
    """Two layer counts, two phases, two batches: eight rows; repeats of 2 and 6 ms are 4 ms with a spread of 4 ms."""
    rows = run_plan(PLAN, interpreter(tmp_path, HONEST), now=NOW)
    assert len(rows) == 8
    first = rows[0]
    assert (first.num_layers, first.median_s, first.spread_s) == (2, pytest.approx(4e-3), pytest.approx(4e-3))
    assert (first.vllm, first.device, first.measured_at) == ("9", "stub", "2026-01-02T03:04:05+00:00")


def test_a_machine_without_gpu_is_measured_with_the_servers_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU server keeps one core for its front end, so a measurement computes with one less too; a GPU does not
    care, and what the caller has set stays.
    """
    told = HONEST.replace("seconds = [", 'seconds = [float(os.environ.get("OMP_NUM_THREADS", "99"))] or [')
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    rows = run_plan(PLAN, interpreter(tmp_path, told), now=NOW)
    assert {one.median_s for one in rows} == {float(max(1, cores - 1))}
    on_gpu = plan_run("tiny", "L4x1", layer_counts=(2, 4), sequences=(1,), tokens=(64,))
    assert {one.median_s for one in run_plan(on_gpu, interpreter(tmp_path, told), now=NOW)} == {99.0}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert {one.median_s for one in run_plan(PLAN, interpreter(tmp_path, told), now=NOW)} == {7.0}


def test_points_lost_in_a_crash_are_rows_that_say_so(tmp_path: Path) -> None:
    """If the engine dies after the first point, the others are failed rows with the end of the log."""
    body = (
        HONEST.replace("for point in job", "for point in job", 1)
        + "    out.flush(); sys.stderr.write('worker died'); os._exit(1)"
    )
    rows = run_plan(PLAN, interpreter(tmp_path, body), now=NOW)
    assert [one.status for one in rows if one.num_layers == 2] == ["ok", "failed", "failed", "failed"]
    assert "worker died" in rows[1].detail
    assert rows[1].median_s is None


def test_an_engine_without_memory_gives_rows_out_of_memory(tmp_path: Path) -> None:
    """If the engine cannot start for want of memory, every point is out of memory: a finding, not a fault."""
    body = "sys.stderr.write('torch.OutOfMemoryError: CUDA out of memory'); sys.exit(1)"
    assert {one.status for one in run_plan(PLAN, interpreter(tmp_path, body), now=NOW)} == {"oom"}


def test_an_engine_that_cannot_start_is_a_fault_with_its_log(tmp_path: Path) -> None:
    """Any other failure to start is an engine fault that shows the end of the log."""
    with pytest.raises(EngineFault, match="No module named 'vllm'"):
        run_plan(PLAN, interpreter(tmp_path, "sys.exit(\"No module named 'vllm'\")"), now=NOW)


def test_a_missing_interpreter_is_a_fault(tmp_path: Path) -> None:
    """Without the environment of vLLM there is a fault that names the path."""
    with pytest.raises(EngineFault, match="no interpreter"):
        run_plan(PLAN, tmp_path / "python", now=NOW)


def test_a_hanging_engine_is_ended_with_all_its_workers(tmp_path: Path) -> None:
    """After the time limit the whole process group is gone, and what was measured before is kept."""
    pid_file = tmp_path / "worker.pid"
    body = HONEST.replace(
        'for point in job["points"]:',
        f"worker = subprocess.Popen(['sleep', '300']); open({str(pid_file)!r}, 'w').write(str(worker.pid))\n"
        'for point in job["points"][:1]:',
    )
    body += "out.flush(); time.sleep(300)"
    plan = replace(PLAN, timeout_s=2.0)
    rows = run_plan(plan, interpreter(tmp_path, body), now=NOW)
    assert [one.status for one in rows[:2]] == ["ok", "failed"]
    assert "stopped after 2 s" in rows[1].detail
    assert not is_alive(int(pid_file.read_text(encoding="utf-8")))


def is_alive(pid: int) -> bool:
    """Whether a process still runs, waiting a moment for it to be reaped."""
    for _ in range(50):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


def test_a_truncated_model_keeps_its_first_layers() -> None:
    """GPT-OSS cut to three layers lists sliding, full, sliding; nothing else changes."""
    model = CATALOG.model("gpt-oss-20b")
    config = model_config(model, 3)
    assert config["num_hidden_layers"] == 3
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config["hidden_size"] == 2880


def test_each_architecture_gets_the_keys_that_engines_read() -> None:
    """GPT-OSS carries its quantization and rope, DeepSeek-V3 its latent ranks and no single head size."""
    oss, deepseek = model_config(CATALOG.model("gpt-oss-20b")), model_config(CATALOG.model("deepseek-v3"))
    assert oss["quantization_config"]["quant_method"] == "mxfp4"
    assert (oss["num_local_experts"], oss["experts_per_token"], oss["sliding_window"]) == (32, 4, 128)
    assert deepseek["kv_lora_rank"] + deepseek["qk_rope_head_dim"] == 576
    assert (deepseek["first_k_dense_replace"], deepseek["n_routed_experts"]) == (3, 256)
    assert "head_dim" not in deepseek
    assert model_config(CATALOG.model("qwen3-235b"))["architectures"] == ["Qwen3MoeForCausalLM"]
    assert model_config(CATALOG.model("phi-4-14b"))["architectures"] == ["LlamaForCausalLM"]


def test_a_profiling_request_becomes_a_plan(tmp_path: Path) -> None:
    """The JSON that an agent hands over names model, configuration and options."""
    path = tmp_path / "request.json"
    path.write_text(
        json.dumps({"model": "tiny", "configuration": "cpu", "tokens": [64], "repeats": 2}), encoding="utf-8"
    )
    model, configuration, options = read_request(path)
    plan = plan_run(model, configuration, **options)
    assert (plan.tokens, plan.repeats) == ((64,), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[1]", "must be a JSON object"),
        ('{"model": "tiny"}', "configuration is missing"),
        ('{"model": "tiny", "configuration": "cpu", "tokens": "64"}', "must be a list of whole numbers"),
        ('{"model": "tiny", "configuration": "cpu", "tokens": [6.5]}', "must be a list of whole numbers"),
        ('{"model": "tiny", "configuration": "cpu", "repeats": "3"}', "must be a whole number"),
        ('{"model": "tiny", "configuration": "cpu", "repeats": 2.5}', "must be a whole number"),
        ('{"model": "tiny", "configuration": "cpu", "warmup": true}', "must be a whole number"),
        ('{"model": "tiny", "configuration": "cpu", "timeout_s": true}', "must be a number"),
        ('{"model": "tiny", "configuration": "cpu", "eager": 7}', "must be true or false"),
        ("[" * 100_000, "must be JSON"),
        ('{"model": "tiny", "configuration": "cpu", "shell": "rm"}', "unknown key; known: "),
        ('{"model": 3, "configuration": "cpu"}', "must be a text"),
    ],
)
def test_a_broken_request_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """Each kind of broken request has its own message."""
    path = tmp_path / "request.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValidationFailed, match=message):
        read_request(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_fraction": 3}, "gpu_memory_fraction must not exceed 1"),
        ({"gpu_memory_fraction": float("nan")}, "gpu_memory_fraction must be finite and above zero"),
        ({"sequences": (1, 10**9)}, "sequences must not exceed 100000"),
        ({"layer_counts": (1, -2)}, "layer_counts must be 1 or more"),
        ({"timeout_s": float("inf")}, "timeout_s must be finite and above zero"),
    ],
)
def test_a_plan_that_no_engine_could_run_is_refused(options: dict[str, object], message: str) -> None:
    """What only fails after an engine has started, or when the rows are written, is refused before."""
    with pytest.raises(ValidationFailed, match=message):
        plan_run("tiny", "cpu", **options)


@pytest.mark.parametrize(("name", "reason"), [("folder", "it is a folder"), ("file/rows.parquet", "exists|directory")])
def test_an_output_that_cannot_be_written_is_told_before_the_measurement(
    tmp_path: Path, name: str, reason: str
) -> None:
    """No engine starts for rows that would have nowhere to go (the interpreter does not even exist here)."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StorageFault, match=f"measurements cannot be written to .*{name}: .*({reason})"):
        run_measurement("tiny", "cpu", interpreter=tmp_path / "python", out=tmp_path / name, options={})


MANIFESTS = ["{}", "[]", '{"tables": 5}', '{"tables": [{"file": 5}]}', '{"tables": [{"file": ""}]}', "[" * 50_000]


@pytest.mark.parametrize("text", [*MANIFESTS, '{"tables": ["a"]}', '{"tables": [{"file": "a\\u0000b"}]}'])
def test_a_damaged_manifest_is_a_storage_fault(tmp_path: Path, text: str) -> None:
    """Whatever stands in the manifest, reading profiles ends in a fault that names the place."""
    folder = tmp_path / "profiles" / "v"
    folder.mkdir(parents=True)
    (tmp_path / "profiles" / "current.json").write_text('{"version": "v"}', encoding="utf-8")
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(StorageFault, match=str(tmp_path)):
        read_profiles(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_an_engine_does_not_outlive_a_killed_runner() -> None:
    """A runner that is killed cannot clean up after itself; the kernel ends its engine."""
    engine = "from coral_tasks.profiling.engine_child import *; end_with_parent(); print(os.getpid(), flush=True); "
    runner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {engine + 'time.sleep(100)'!r}])"
    with subprocess.Popen([sys.executable, "-c", runner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = psutil.Process(int(process.stdout.readline()))
        process.kill()
        process.wait(10)
        psutil.wait_procs([found], timeout=30)
        assert not found.is_running() or found.status() == psutil.STATUS_ZOMBIE
