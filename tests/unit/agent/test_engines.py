"""Exact command lines of engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace as with_

from coral_tasks.agent.config import VllmConfig, agent_config
from coral_tasks.agent.engines import build_launch, profile_launch, simulated_launch, vllm_launch
from coral_tasks.domain.errors import EngineFault
from coral_tasks.domain.names import Market, Phase
from coral_tasks.protocol.agent_machine import Slot
from coral_tasks.protocol.messages import StageSpec, StartSpec

HERE = {"host": "10.0.0.5", "port": 21000, "advertise": "node-a.internal"}
SERVE = ("vllm", "serve", "Qwen/Qwen3-32B", "--served-model-name", "qwen3-32b")


def spec(*layers: int, phase: Phase = Phase.AGGREGATED, rank: int = 0, tp: int = 4) -> StartSpec:
    return StartSpec(
        instance="x",
        template="t",
        model="qwen3-32b",
        model_name="Qwen/Qwen3-32B",
        phase=phase,
        region="aws/us-east-2",
        market=Market.ON_DEMAND,
        throughput=120.5,
        latency_s=0.05,
        stages=tuple(StageSpec(num_layers=count, nodes=(f"n{index}",)) for index, count in enumerate(layers)),
        rank=rank,
        tp_degree=tp,
        master_address="10.0.0.5",
        master_port=21001,
    )


def test_one_node_with_tensor_parallelism() -> None:
    """All GPUs of the node work together; no pipeline argument, no partition."""
    launch = vllm_launch(spec(64), VllmConfig(), **HERE)
    assert launch.argv == (*SERVE, "--tensor-parallel-size", "4", "--host", "10.0.0.5", "--port", "21000")
    assert launch.environment == {}
    assert launch.endpoint == "http://node-a.internal:21000"


def test_the_head_of_a_pipeline_over_nodes() -> None:
    """One stage per node with the template's uneven layers; the head answers HTTP."""
    launch = vllm_launch(spec(24, 40), VllmConfig(), **HERE)
    pipeline = ("--pipeline-parallel-size", "2", "--nnodes", "2", "--node-rank", "0")
    meeting = ("--master-addr", "10.0.0.5", "--master-port", "21001")
    http = ("--host", "10.0.0.5", "--port", "21000")
    assert launch.argv == (*SERVE, "--tensor-parallel-size", "4", *pipeline, *meeting, *http)
    assert launch.environment == {"VLLM_PP_LAYER_PARTITION": "24,40"}


def test_a_follower_of_a_pipeline_runs_headless() -> None:
    """The second node has its rank, the same master and partition, and no HTTP server."""
    launch = vllm_launch(spec(24, 40, rank=1), VllmConfig(), **HERE)
    pipeline = ("--pipeline-parallel-size", "2", "--nnodes", "2", "--node-rank", "1")
    meeting = ("--master-addr", "10.0.0.5", "--master-port", "21001", "--headless")
    assert launch.argv == (*SERVE, "--tensor-parallel-size", "4", *pipeline, *meeting)
    assert launch.environment == {"VLLM_PP_LAYER_PARTITION": "24,40"}
    assert launch.endpoint == ""


@pytest.mark.parametrize(("phase", "role"), [(Phase.PREFILL, "kv_producer"), (Phase.DECODE, "kv_consumer")])
def test_prefill_and_decode_transfer_their_kv_cache(phase: Phase, role: str) -> None:
    """Prefill produces KV blocks, decode consumes them, through the configured connector."""
    launch = vllm_launch(spec(64, phase=phase), VllmConfig(kv_connector="P2pNcclConnector"), **HERE)
    value = launch.argv[launch.argv.index("--kv-transfer-config") + 1]
    assert json.loads(value) == {"kv_connector": "P2pNcclConnector", "kv_role": role}


def test_configured_arguments_come_last_and_the_environment_is_kept() -> None:
    """What the operator adds wins over what is built; memory share and environment are passed on."""
    config = VllmConfig(
        command=("/opt/vllm/bin/vllm", "serve"),
        arguments=("--load-format", "dummy"),
        environment={"HF_HUB_OFFLINE": "1"},
        gpu_memory_utilization=0.85,
    )
    launch = vllm_launch(spec(30, 34), config, **HERE)
    assert launch.argv[:2] == ("/opt/vllm/bin/vllm", "serve")
    assert launch.argv[-4:] == ("--gpu-memory-utilization", "0.85", "--load-format", "dummy")
    assert launch.environment == {"HF_HUB_OFFLINE": "1", "VLLM_PP_LAYER_PARTITION": "30,34"}


def test_stages_of_several_nodes_need_the_hybrid_runtime() -> None:
    """Stock vLLM has no data parallelism inside a pipeline stage: refused, not half started."""
    wide = with_(spec(64), stages=(StageSpec(num_layers=64, nodes=("n0", "n1")),))
    with pytest.raises(EngineFault, match="one node per stage; the template needs the hybrid runtime"):
        vllm_launch(wide, VllmConfig(), **HERE)


def config(tmp_path: Path, **fields: object):
    node = {"region": "r", "configuration": "L4x4", "market": "spot"}
    base = {"name": "a", "bind": "tcp://127.0.0.1:7400", "state": str(tmp_path), "keys": str(tmp_path)}
    return agent_config({**base, "nodes": [{"id": f"n{i}", **node} for i in range(2)], **fields}, source="test")


def test_logical_nodes_of_one_machine_share_a_server(tmp_path: Path) -> None:
    """With ``colocate`` the head runs both stages; the other node needs no process. Without it both run."""
    together = config(tmp_path, engine="vllm", vllm={"colocate": True})
    head = build_launch(together, Slot(node="n0", spec=spec(3, 5)))
    assert head.argv == (
        *SERVE, "--tensor-parallel-size", "4", "--pipeline-parallel-size", "2", "--host", "127.0.0.1", "--port", "21000"
    )  # fmt: skip
    assert head.environment == {"VLLM_PP_LAYER_PARTITION": "3,5"}
    assert build_launch(together, Slot(node="n1", spec=spec(3, 5, rank=1))).argv == ()
    apart = config(tmp_path, engine="vllm")
    assert "--headless" in build_launch(apart, Slot(node="n1", spec=spec(3, 5, rank=1))).argv


def test_the_simulated_head_answers_with_the_templates_timing(tmp_path: Path) -> None:
    """Throughput, latency and speed come from template and configuration; the port is the node's own."""
    made = config(tmp_path, time_scale=20.0, first_engine_port=30000)
    launch = build_launch(
        made, Slot(node="n1", spec=with_(spec(64), stages=(StageSpec(num_layers=64, nodes=("n1",)),)))
    )
    assert launch.argv[:3] == (sys.executable, "-I", "-S")
    assert launch.argv[4:] == (
        "--host", "127.0.0.1", "--port", "30002", "--model", "qwen3-32b", "--phase", "aggregated",
        "--throughput", "120.5", "--latency-s", "0.05", "--time-scale", "20.0",
    )  # fmt: skip
    assert launch.endpoint == "http://127.0.0.1:30002"


def test_simulated_followers_need_no_process() -> None:
    """Only the head of an instance is a process."""
    assert simulated_launch(spec(3, 5, rank=1), time_scale=1.0, **HERE).argv == ()


def test_profiling_runs_the_configured_command_with_its_files(tmp_path: Path) -> None:
    """File paths replace the placeholders; without a command the job is refused."""
    made = config(tmp_path, profile_command=["prof", "--in", "{request}", "--out", "{output}"])
    launch = profile_launch(made, Path("r.json"), Path("o.json"))
    assert launch.argv == ("prof", "--in", "r.json", "--out", "o.json")
    with pytest.raises(EngineFault, match="no profile_command"):
        profile_launch(config(tmp_path), Path("r"), Path("o"))
