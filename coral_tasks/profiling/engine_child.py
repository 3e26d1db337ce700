"""What runs inside vLLM's own interpreter: times one engine over a grid of points and reports them as JSON lines.

The only module that imports ``vllm``; besides it only the standard library, since Coral is not installed there.
Started by ``runner`` as ``python engine_child.py JOB.json OUT.jsonl``; owns measuring, not planning what to measure.

JOB: {"model_dir", "tensor_parallel_size", "max_model_len", "max_sequences", "gpu_memory_fraction", "eager",
"warmup", "repeats", "decode_steps", "points": [{"phase", "sequences", "tokens"}]}.
OUT: one line of kind "engine" (versions), then one of kind "point" for each point, then one of kind "end".
A point: {"kind": "point", "phase", "sequences", "tokens", "status": "ok" | "oom" | "failed", "seconds": [...],
"detail"}. Only ``ok`` points carry seconds: one for each repeat.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
OUT_OF_MEMORY = ("out of memory", "kv cache", "can't allocate", "cannot allocate")


def main(job_path: str, out_path: str) -> int:
    """Measure every point of the job. Returns 0 if the engine started, whatever its points did."""
    end_with_parent()
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    # In this process, so that each step can be timed from here.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with Path(out_path).open("w", encoding="utf-8") as out:
        started = time.monotonic()
        engine = start_engine(job)
        report(out, {"kind": "engine", "load_s": time.monotonic() - started, **versions()})
        for number, point in enumerate(job["points"]):
            report(out, {"kind": "point", **point, **measure(engine, job, point, number)})
        report(out, {"kind": "end"})
    return 0


def end_with_parent() -> None:
    """Have the kernel end this process when the runner dies, even killed: an engine left behind holds the device."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def report(out: Any, line: dict[str, Any]) -> None:
    """Write one line at once: what was measured before a crash is kept."""
    out.write(json.dumps(line) + "\n")
    out.flush()


def versions() -> dict[str, Any]:
    """vLLM, torch, driver and device, for the provenance of every row."""
    import torch  # type: ignore[import-not-found]
    import vllm

    found: dict[str, Any] = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": platform.processor() or platform.machine(),
        "driver": "",
    }
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(0)
        found["driver"] = str(torch.version.cuda)
    return found


def start_engine(job: dict[str, Any]) -> Any:
    """An engine with dummy weights from a local config.json; no tokenizer, no download."""
    from vllm import LLM

    llm = LLM(
        model=job["model_dir"],
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=job["tensor_parallel_size"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["max_sequences"],
        max_num_batched_tokens=max(job["max_model_len"], job.get("max_batched_tokens", 0)),
        gpu_memory_utilization=job["gpu_memory_fraction"],
        enforce_eager=job["eager"],
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
    )
    return llm.llm_engine


def measure(engine: Any, job: dict[str, Any], point: dict[str, Any], number: int) -> dict[str, Any]:
    """Time one point; a failure is recorded as what it is and the engine is emptied for the next point."""
    seconds: list[float] = []
    try:
        for run in range(job["warmup"] + job["repeats"]):
            taken = run_once(engine, job, point, f"{number}-{run}")
            if run >= job["warmup"]:
                seconds.append(taken)
    except Exception as error:  # noqa: BLE001 - any failure of a point is a result to be recorded
        abort_all(engine)
        text = f"{type(error).__name__}: {error}"
        status = "oom" if any(sign in text.lower() for sign in OUT_OF_MEMORY) else "failed"
        return {"status": status, "seconds": [], "detail": text[:500]}
    return {"status": "ok", "seconds": seconds, "detail": ""}


def run_once(engine: Any, job: dict[str, Any], point: dict[str, Any], tag: str) -> float:
    """Seconds of one prefill of the whole batch, or the mean of a decode step behind ``tokens`` of context."""
    from vllm import SamplingParams

    decode = point["phase"] == "decode"
    steps = job["decode_steps"] if decode else 0
    parameters = SamplingParams(max_tokens=1 + steps, ignore_eos=True, detokenize=False, temperature=0.0)
    if point["tokens"] + 1 + steps > job["max_model_len"]:
        message = f"{point['tokens']} tokens and {1 + steps} more exceeds the engine's {job['max_model_len']}"
        raise ValueError(message)
    for sequence in range(point["sequences"]):
        # Different tokens in every sequence and run, so that nothing could be shared or cached.
        prompt = [(7 * position + 13 * sequence + len(tag)) % 200 + 2 for position in range(point["tokens"])]
        engine.add_request(f"{tag}-{sequence}", {"prompt_token_ids": prompt}, parameters)
    first: set[str] = set()
    started = time.perf_counter()
    prefill_s, decode_times = 0.0, []
    while engine.has_unfinished_requests():
        before = time.perf_counter()
        outputs = engine.step()
        after = time.perf_counter()
        if len(first) == point["sequences"]:
            decode_times.append(after - before)
            continue
        first |= {output.request_id for output in outputs if output.outputs and output.outputs[0].token_ids}
        prefill_s = after - started
    if not decode:
        return prefill_s
    # The first step after a prefill may still carry its tail, the last one may be short of sequences.
    kept = decode_times[1:-1] or decode_times
    return sum(kept) / len(kept)


def abort_all(engine: Any) -> None:
    """Take every unfinished request off the engine."""
    try:
        ids = list(engine.output_processor.request_states)
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()
    except Exception as error:  # noqa: BLE001 - the next point will show whether the engine still works
        sys.stderr.write(f"could not empty the engine: {error}\n")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
