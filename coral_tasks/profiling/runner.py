"""The measured runner: drives real vLLM, in its own interpreter, over a grid of points and layer counts.

Owns the plan of a run, the child processes and the rows that come of it. The child (``engine_child``) is started as
a process group of its own and the whole group ends with it, also when it hangs. Usable by hand and by a node agent's
PROFILE command alike: it needs a plan, an interpreter and a clock, nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coral_tasks.catalog import load_catalog
from coral_tasks.domain.errors import EngineFault
from coral_tasks.domain.hardware import CPU_ARCHITECTURE, NodeConfiguration
from coral_tasks.domain.models import ServedModel
from coral_tasks.domain.names import Phase
from coral_tasks.domain.validation import Checks
from coral_tasks.profiling.measured import MeasuredRow, read_json_lines
from coral_tasks.profiling.memory import choose_parallelism
from coral_tasks.profiling.model_files import write_model_config

CHILD = Path(__file__).with_name("engine_child.py")
CODE_VERSION = "1"
"""Raise it when what a row means changes."""

KILL_WAIT_S = 10.0
DECODE_STEPS = 16
MOST_SEQUENCES = 100_000
OUT_OF_MEMORY = ("out of memory", "no available memory", "kv cache", "cannot allocate")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What one run measures on this machine.

    ``layer_counts``: two or more, so that cost per layer and constant part can be told apart. ``sequences`` and
    ``tokens``: the grid of both phases. ``decode_steps``: steps averaged in one decode repeat. ``timeout_s``: of one
    engine with its start. ``eager``: without compilation (the CPU build needs it for pipeline parallel only).
    """

    model: ServedModel
    configuration: NodeConfiguration
    layer_counts: tuple[int, ...] = (2, 4)
    sequences: tuple[int, ...] = (1, 2, 4, 8)
    tokens: tuple[int, ...] = (128, 512)
    warmup: int = 2
    repeats: int = 5
    decode_steps: int = DECODE_STEPS
    gpu_memory_fraction: float = 0.9
    timeout_s: float = 1800.0
    eager: bool = False

    def __post_init__(self) -> None:
        checks = Checks("profile_run", f"{self.model.id} {self.configuration.id}")
        checks.require(len(set(self.layer_counts)) >= 2, "needs two or more layer counts", repr(self.layer_counts))
        for name in ("layer_counts", "sequences", "tokens"):
            values = getattr(self, name)
            checks.unique(name, values)
            checks.require(
                bool(values) and all(value >= 1 for value in values), f"{name} must be 1 or more", repr(values)
            )
        most = max(self.layer_counts, default=0)
        checks.require(most <= self.model.num_layers, f"the model has {self.model.num_layers} layers", most)
        longest = max(self.tokens, default=0) + 1 + self.decode_steps
        checks.require(longest <= self.model.max_context_tokens, "tokens and decode steps exceed the context", longest)
        checks.positive(repeats=self.repeats, decode_steps=self.decode_steps, timeout_s=self.timeout_s)
        checks.positive(gpu_memory_fraction=self.gpu_memory_fraction)
        checks.require(self.gpu_memory_fraction <= 1, "gpu_memory_fraction must not exceed 1", self.gpu_memory_fraction)
        most = max(self.sequences, default=0)
        checks.require(most <= MOST_SEQUENCES, f"sequences must not exceed {MOST_SEQUENCES}", most)
        checks.not_negative(warmup=self.warmup)
        checks.raise_if_any()

    def points(self) -> list[dict[str, Any]]:
        """Grid in a fixed order."""
        return [
            {"phase": phase.value, "sequences": sequences, "tokens": tokens}
            for phase in (Phase.PREFILL, Phase.DECODE)
            for tokens in sorted(self.tokens)
            for sequences in sorted(self.sequences)
        ]

    def job(self, model_folder: Path) -> dict[str, Any]:
        """The child's job (see ``engine_child``) for a model written to ``model_folder``."""
        return {
            "model_dir": str(model_folder),
            "tensor_parallel_size": choose_parallelism(self.model, self.configuration).tp,
            "max_model_len": min(self.model.max_context_tokens, max(self.tokens) + 1 + self.decode_steps),
            "max_batched_tokens": max(self.tokens) * max(self.sequences),
            "max_sequences": max(self.sequences),
            "gpu_memory_fraction": self.gpu_memory_fraction,
            "eager": self.eager,
            "warmup": self.warmup,
            "repeats": self.repeats,
            "decode_steps": self.decode_steps,
            "points": self.points(),
        }


def plan_run(model: str, configuration: str, **options: Any) -> RunPlan:
    """Plan from names. Raises UnknownName with the known ones, ValidationFailed for options that cannot be."""
    catalog = load_catalog()
    return RunPlan(model=catalog.model(model), configuration=catalog.configuration(configuration), **options)


def run_plan(plan: RunPlan, interpreter: Path, *, now: datetime | None = None) -> list[MeasuredRow]:
    """Measure the whole plan, one engine for each layer count; one row for every point, whatever became of it.

    ``interpreter``: Python of the environment that has vLLM. Raises EngineFault if an engine cannot start for another
    reason than memory, or hangs before it has measured anything.
    """
    if not interpreter.exists():
        message = f"no interpreter {interpreter}; vLLM lives in an environment of its own, see docs/profiles.md"
        raise EngineFault(message)
    moment = now or datetime.now(UTC)
    rows: list[MeasuredRow] = []
    for count in sorted(set(plan.layer_counts)):
        with tempfile.TemporaryDirectory(prefix="coral-profile-") as folder:
            lines, tail = _run_child(plan, count, interpreter, Path(folder))
        rows += _rows(plan, count, lines, tail, moment)
    return rows


def _run_child(plan: RunPlan, num_layers: int, interpreter: Path, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Lines of the child's report and the end of its log."""
    model_folder = folder / "model"
    model_folder.mkdir()
    write_model_config(plan.model, model_folder, num_layers)
    job, out, log = folder / "job.json", folder / "out.jsonl", folder / "log.txt"
    job.write_text(json.dumps(plan.job(model_folder)), encoding="utf-8")
    out.touch()
    command = [str(interpreter), str(CHILD), str(job), str(out)]
    with log.open("wb") as stream:
        child = subprocess.Popen(  # noqa: S603 - our own script in the interpreter that the caller named
            command, stdout=stream, stderr=stream, cwd=folder, env=_profile_environment(plan), start_new_session=True
        )
        try:
            child.wait(timeout=plan.timeout_s)
        except subprocess.TimeoutExpired:
            stream.write(f"\nstopped after {plan.timeout_s:g} s".encode())
        finally:
            end_group(child)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    return read_json_lines(out), tail


def child_environment() -> dict[str, str]:
    """Environment of the child: no hub, no usage statistics, a small KV cache on machines without GPU."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    }


def _profile_environment(plan: RunPlan) -> dict[str, str]:
    """The child's environment; without a GPU with as many threads as vLLM's own server would compute with.

    The server leaves one core to its front end (vLLM's ``VLLM_CPU_NUM_OF_RESERVED_CPU``); an engine inside the
    measuring process takes all of them and looked twice as fast as the server on two cores.
    """
    environment = child_environment()
    if is_machine_without_gpu(plan.configuration):
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))
    return environment


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole process group: vLLM's workers must not outlive it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            break
        try:
            child.wait(timeout=KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            continue
    child.wait(timeout=KILL_WAIT_S)


def _rows(
    plan: RunPlan, num_layers: int, lines: Sequence[dict[str, Any]], tail: str, moment: datetime
) -> list[MeasuredRow]:
    """One row for each point: measured, failed, or never reached (failed, with the end of the log)."""
    engine = next((line for line in lines if line.get("kind") == "engine"), None)
    if engine is None and not any(sign in tail.lower() for sign in OUT_OF_MEMORY):
        message = f"{plan.model.id} with {num_layers} layers on {plan.configuration.id}: no engine; log ends: {tail}"
        raise EngineFault(message)
    found = {_point_key(line): line for line in lines if line.get("kind") == "point"}
    status = "oom" if engine is None else "failed"
    unreached: dict[str, Any] = {"status": status, "seconds": [], "detail": f"not reached: {tail[-300:]}"}
    rows = []
    for point in plan.points():
        line = found.get(_point_key(point), unreached)
        seconds = [float(value) for value in line["seconds"]]
        rows.append(
            MeasuredRow(
                model=plan.model.id,
                configuration=plan.configuration.id,
                phase=Phase(point["phase"]),
                num_layers=num_layers,
                tp_degree=choose_parallelism(plan.model, plan.configuration).tp,
                sequences=point["sequences"],
                tokens=point["tokens"],
                status=line["status"],
                median_s=statistics.median(seconds) if seconds else None,
                spread_s=max(seconds) - min(seconds) if seconds else None,
                num_repeats=len(seconds),
                detail=line["detail"],
                vllm=str((engine or {}).get("vllm", "")),
                torch=str((engine or {}).get("torch", "")),
                driver=str((engine or {}).get("driver", "")),
                device=str((engine or {}).get("device", "")),
                measured_at=moment.isoformat(timespec="seconds"),
                code_version=CODE_VERSION,
            )
        )
    return rows


def _point_key(point: dict[str, Any]) -> tuple[str, int, int]:
    return str(point["phase"]), int(point["sequences"]), int(point["tokens"])


def is_machine_without_gpu(configuration: NodeConfiguration) -> bool:
    """Whether the configuration is a machine that the CPU build of vLLM profiles."""
    return configuration.gpu.architecture == CPU_ARCHITECTURE


def as_records(rows: Sequence[MeasuredRow]) -> list[dict[str, Any]]:
    """Rows as plain records for the measurement contract."""
    return [{**asdict(row), "phase": row.phase.value} for row in rows]
