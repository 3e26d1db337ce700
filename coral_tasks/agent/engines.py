"""Command lines of engines. Pure: from a StartSpec and a configuration to argv, environment and where it answers.

``vllm``: one server per instance; its head answers HTTP, the other nodes run headless under the head's address.
``simulated``: the head node runs one small HTTP process with the instance's timing; the other nodes of the instance
hold no process at all, only their slot, so that a laptop carries fleets of a hundred nodes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from coral_tasks.agent.config import AgentConfig, VllmConfig
from coral_tasks.domain.errors import EngineFault
from coral_tasks.domain.names import Phase
from coral_tasks.protocol.agent_machine import Slot
from coral_tasks.protocol.messages import StartSpec

_SIMULATED = Path(__file__).with_name("simulated_engine.py")
_KV_ROLE = {Phase.PREFILL: "kv_producer", Phase.DECODE: "kv_consumer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One engine process to be. ``argv`` is empty if this node needs none.

    ``endpoint``: base URL where it answers, "" if it answers nothing and lives as long as its process.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    endpoint: str


def build_launch(config: AgentConfig, slot: Slot) -> Launch:
    """The engine of ``slot``. Raises EngineFault if this agent's engine cannot carry the instance out."""
    spec = slot.spec
    if spec is None:
        raise EngineFault(f"slot {slot.node} has no instance")
    port = config.engine_port(slot.node)
    if config.engine == "vllm":
        own = {str(node.id) for node in config.nodes}
        together = config.vllm.colocate and own.issuperset(spec.nodes)
        return vllm_launch(
            spec, config.vllm, host=config.engine_host, port=port, advertise=config.advertise, together=together
        )
    return simulated_launch(
        spec, host=config.engine_host, port=port, advertise=config.advertise, time_scale=config.time_scale
    )


def simulated_launch(spec: StartSpec, *, host: str, port: int, advertise: str, time_scale: float) -> Launch:
    """The head's small HTTP server; nothing for followers.

    Run isolated and without site-packages: it needs the standard library only and starts in a third of the time.
    """
    if spec.rank != 0:
        return Launch(argv=(), environment={}, endpoint="")
    argv = [sys.executable, "-I", "-S", str(_SIMULATED), "--host", host, "--port", str(port), "--model", spec.model]
    argv += ["--phase", spec.phase.value, "--throughput", repr(spec.throughput), "--latency-s", repr(spec.latency_s)]
    argv += ["--time-scale", repr(time_scale)]
    return Launch(argv=tuple(argv), environment={}, endpoint=f"http://{advertise}:{port}")


def vllm_launch(
    spec: StartSpec, config: VllmConfig, *, host: str, port: int, advertise: str, together: bool = False
) -> Launch:
    """A vLLM server, or the headless part of one. ``together``: the head runs all stages, others need no process.

    Raises EngineFault for what stock vLLM cannot do: several nodes in one stage.
    """
    if any(len(stage.nodes) != 1 for stage in spec.stages):
        raise EngineFault(f"{spec.instance}: stock vLLM runs one node per stage; the template needs the hybrid runtime")
    if together and spec.rank != 0:
        return Launch(argv=(), environment={}, endpoint="")
    argv = [*config.command, spec.model_name]
    argv += ["--served-model-name", spec.model, "--tensor-parallel-size", str(spec.tp_degree)]
    argv += _pipeline_arguments(spec, together=together)
    if spec.rank == 0:
        argv += ["--host", host, "--port", str(port)]
    if spec.phase in _KV_ROLE:
        argv += ["--kv-transfer-config", kv_transfer_config(spec.phase, config.kv_connector)]
    if config.gpu_memory_utilization is not None:
        argv += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    environment = dict(config.environment)
    if len(spec.stages) > 1:
        environment["VLLM_PP_LAYER_PARTITION"] = ",".join(str(stage.num_layers) for stage in spec.stages)
    endpoint = f"http://{advertise}:{port}" if spec.rank == 0 else ""
    return Launch(argv=(*argv, *config.arguments), environment=environment, endpoint=endpoint)


def _pipeline_arguments(spec: StartSpec, *, together: bool) -> list[str]:
    """Pipeline over nodes: one stage per node; all but the head run headless and meet at the master address."""
    num_nodes = len(spec.stages)
    if num_nodes == 1:
        return []
    arguments = ["--pipeline-parallel-size", str(num_nodes)]
    if together:
        return arguments
    arguments += ["--nnodes", str(num_nodes), "--node-rank", str(spec.rank)]
    arguments += ["--master-addr", spec.master_address, "--master-port", str(spec.master_port)]
    return arguments + (["--headless"] if spec.rank else [])


def kv_transfer_config(phase: Phase, connector: str) -> str:
    """JSON of vLLM's ``--kv-transfer-config``: prefill produces KV blocks, decode consumes them."""
    return json.dumps({"kv_connector": connector, "kv_role": _KV_ROLE[phase]}, sort_keys=True)


def profile_launch(config: AgentConfig, request: Path, output: Path) -> Launch:
    """The configured profiling command with its file paths. Raises EngineFault if none is configured."""
    if not config.profile_command:
        raise EngineFault("this agent has no profile_command")
    paths = {"{request}": str(request), "{output}": str(output)}
    argv = [paths.get(word, word) for word in config.profile_command]
    return Launch(argv=tuple(argv), environment={}, endpoint="")
