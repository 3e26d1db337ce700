"""Configuration of one agent process, from a TOML file or arguments. Owns its fields and their check.

In production one agent owns one node, the machine it runs on. A laptop has one machine and many logical nodes, so an
agent may own several: each has its own slot, state machine, journal row, lock and log; they share socket and process.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.domain.fleet import Node
from coral_tasks.domain.validation import Checks
from coral_tasks.protocol.agent_machine import AgentPolicy
from coral_tasks.protocol.keyfiles import checked_name

_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")  # noqa: S104 - compared with, never bound to


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How real vLLM servers are started on this node.

    ``command``: what starts the server, in vLLM's own environment. ``arguments``: appended as they stand, last, so that
    they win. ``kv_connector``: of prefill and decode instances. ``colocate``: if all nodes of an instance belong to
    this agent (one machine cut into several logical nodes), its head runs all stages in one server.
    """

    command: tuple[str, ...] = ("vllm", "serve")
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    kv_connector: str = "NixlConnector"
    gpu_memory_utilization: float | None = None
    colocate: bool = False


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one engine process; None leaves the system's own. ``address_space_bytes`` does not suit CUDA."""

    open_files: int | None = None
    address_space_bytes: int | None = None
    nice: int = 0
    oom_score_adj: int = 300
    log_bytes: int = 16 << 20
    log_files: int = 3


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an agent process needs to know.

    ``bind``: address of the command socket, never all interfaces. ``advertise``: host under which engines of this
    machine are reached by gateway and followers. ``first_engine_port``: node i uses two ports from here, 2i and 2i+1.
    ``time_scale``: simulated engines answer this many times faster than their profile.
    ``key``: name of the key pair if machines share one, else the agent's own name.
    ``profile_command``: argv of a profiling job, with ``{request}`` and ``{output}`` replaced by file paths.
    """

    name: str
    bind: str
    state: Path
    keys: Path
    nodes: tuple[Node, ...]
    key: str = ""
    advertise: str = "127.0.0.1"
    engine_host: str = "127.0.0.1"
    first_engine_port: int = 21000
    engine: Literal["simulated", "vllm"] = "simulated"
    time_scale: float = 1.0
    vllm: VllmConfig = VllmConfig()
    limits: LimitsConfig = LimitsConfig()
    policy: AgentPolicy = AgentPolicy()
    profile_command: tuple[str, ...] = ()
    tick_s: float = 0.2
    health_s: float = 1.0
    kill_grace_s: float = 10.0
    messages_per_s: float = 200.0
    message_burst: int = 400
    stop_engines_on_exit: bool = False

    def __post_init__(self) -> None:
        checks = Checks("agent", self.name)
        checked_name(self.name)
        checks.unique("node", [node.id for node in self.nodes])
        checks.require(len(self.nodes) > 0, "an agent needs at least one node")
        host = self.bind.removeprefix("tcp://").rpartition(":")[0]
        ok = self.bind.startswith(("tcp://", "ipc://")) and host not in _WILDCARDS
        checks.require(ok, "bind must be tcp://HOST:PORT or ipc://PATH with a host, never all interfaces", self.bind)
        checks.require(self.engine_host not in _WILDCARDS, "engine_host must not be all interfaces", self.engine_host)
        last_port = self.first_engine_port + 2 * len(self.nodes)
        checks.require(1024 <= self.first_engine_port <= last_port <= 65535, "engine ports must lie in 1024 to 65535")
        checks.positive(
            time_scale=self.time_scale,
            tick_s=self.tick_s,
            health_s=self.health_s,
            kill_grace_s=self.kill_grace_s,
            messages_per_s=self.messages_per_s,
            message_burst=self.message_burst,
        )
        checks.raise_if_any()

    def engine_port(self, node: str) -> int:
        """HTTP port of the engine on ``node``; the next one is its master port."""
        return self.first_engine_port + 2 * [one.id for one in self.nodes].index(node)  # type: ignore[arg-type]


def read_agent_config(path: Path, *, overrides: Mapping[str, object] | None = None) -> AgentConfig:
    """The configuration in a TOML file; ``overrides`` replace its fields. Raises ValidationFailed if it is wrong."""
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValidationFailed([Violation(table="agent", row=str(path), value="", rule=str(error))]) from error
    return agent_config({**fields, **(overrides or {})}, source=str(path))


def agent_config(fields: Mapping[str, object], *, source: str) -> AgentConfig:
    """Check and convert plain values. Raises ValidationFailed if they are wrong."""
    try:
        return msgspec.convert(dict(fields), AgentConfig, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise ValidationFailed([Violation(table="agent", row=source, value="", rule=str(error))]) from error


def _decode(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise NotImplementedError(kind)  # how msgspec wants to hear that a hook does not know a type
