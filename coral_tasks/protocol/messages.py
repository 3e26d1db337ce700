"""Wire format between controller and node agent: every message, its limits, its bytes.

A message is one frame: one byte with the version, then msgpack. Owns no state and no socket. Anything that is not
exactly a message of this version raises ProtocolFault, which receivers count, log and drop.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from coral_tasks.domain.errors import ProtocolFault
from coral_tasks.domain.names import Market, Phase

PROTOCOL_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_INTEGER: Final = (1 << 53) - 1

Name = Annotated[str, Meta(min_length=1, max_length=300)]
Text = Annotated[str, Meta(max_length=4000)]
Number = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Count = Annotated[int, Meta(ge=1, le=4096)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[float, Meta(gt=0, lt=1e18)]
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]


class StageSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers of one stage and the nodes that hold them."""

    num_layers: Count
    nodes: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=64)]


class StartSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All an agent needs to run its part of one serving instance.

    ``rank``: place of the addressed node in pipeline order, 0 is the head, which answers requests.
    ``throughput``: the template's, in the phase's unit. ``latency_s``: the share of the SLO that the placement uses.
    ``model_name``: what the engine loads. ``master_address``, ``master_port``: where the head gathers its followers.
    """

    instance: Name
    template: Name
    model: Name
    model_name: Name
    phase: Phase
    region: Name
    market: Market
    throughput: Positive
    latency_s: Positive
    stages: Annotated[tuple[StageSpec, ...], Meta(min_length=1, max_length=64)]
    rank: Number
    tp_degree: Count
    master_address: Text = ""
    master_port: Port = 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes in pipeline order."""
        return tuple(node for stage in self.stages for node in stage.nodes)

    def same_run(self, other: StartSpec) -> bool:
        """Whether both are parts of one and the same instance, rank apart."""
        return msgspec.structs.replace(self, rank=0) == msgspec.structs.replace(other, rank=0)


class Start(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="start"):
    """Run an engine for ``spec`` on the addressed node."""

    spec: StartSpec


class Drain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="drain"):
    """Let requests in flight finish, ``timeout_s`` at most. The gateway must have stopped routing before."""

    instance: Name
    timeout_s: Seconds


class Stop(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stop"):
    """End the engine of ``instance`` and forget it."""

    instance: Name


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="profile"):
    """Run one profiling job on an empty node. ``request``: JSON text handed to the configured command."""

    job: Name
    request: Annotated[str, Meta(max_length=200_000)]
    timeout_s: Seconds


Action = Start | Drain | Stop | Profile


class Fence(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="fence"):
    """Take over: from now on refuse whatever is older than (epoch, round). Answered by Report."""

    request: Name
    epoch: Number
    round: Number
    owner: Name


class Observe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="observe"):
    """Ask for a Report; changes nothing. Serves as the heartbeat too."""

    request: Name


class FetchJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="fetch_job"):
    """Ask for the result of a profiling job. Answered by JobResult."""

    request: Name
    job: Name


class Command(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="command"):
    """One idempotent, fenced order for one node.

    ``id``: replays return the first outcome. ``incarnation``: the agent run that the sender observed; a restarted
    agent refuses, so that commands which lay in a queue while it was down are not carried out.
    """

    id: Name
    epoch: Number
    round: Number
    owner: Name
    incarnation: Name
    node: Name
    action: Action


class OutcomeStatus(StrEnum):
    """The one answer to a command. Only DONE changes anything."""

    DONE = "done"
    STALE = "stale"
    BUSY = "busy"
    RESTARTED = "restarted"
    UNKNOWN_NODE = "unknown_node"
    NOT_RECORDED = "not_recorded"


class Outcome(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="outcome"):
    """What became of a command. DONE: written to the journal; its progress is seen in reports.

    NOT_RECORDED: the journal could not be written, so nothing was done.
    """

    command: Name
    status: OutcomeStatus
    detail: Text = ""


class SlotState(StrEnum):
    """State of one node as its agent sees it (docs/protocol.md draws the machine)."""

    EMPTY = "empty"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    FAILED = "failed"
    PROFILING = "profiling"


class NodeReport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node as its agent sees it now.

    ``excluded``: why no new instance should start here, "" if nothing speaks against it.
    ``retired``: instance ids that ran here and must not be used again.
    ``endpoint``: where the engine of this node answers if it is the head of its instance.
    ``in_flight``: requests in the engine, None if not known.
    """

    node: Name
    region: Name
    configuration: Name
    market: Market
    engine: Name
    address: Text
    master_port: Port
    state: SlotState
    spec: StartSpec | None = None
    endpoint: Text = ""
    in_flight: Number | None = None
    restarts: Number = 0
    excluded: Text = ""
    detail: Text = ""
    retired: tuple[Name, ...] = ()


class Report(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="report"):
    """Everything an agent knows. ``request``: what it answers. ``accepted``: False if a Fence was too old."""

    request: Name
    agent: Name
    incarnation: Name
    epoch: Number
    round: Number
    accepted: bool
    nodes: tuple[NodeReport, ...]
    dropped_messages: Number = 0


class JobResult(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="job_result"):
    """State and, when it succeeded, rows (JSON text) of a profiling job."""

    request: Name
    job: Name
    status: Annotated[str, Meta(pattern="^(unknown|running|succeeded|failed)$")]
    rows: Annotated[str, Meta(max_length=900_000)] = ""
    detail: Text = ""


ToAgent = Fence | Observe | Command | FetchJob
ToController = Report | Outcome | JobResult

_ENCODER = msgspec.msgpack.Encoder()
_TO_AGENT: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_TO_CONTROLLER: msgspec.msgpack.Decoder[ToController] = msgspec.msgpack.Decoder(ToController)


def encode_message(message: ToAgent | ToController) -> bytes:
    """Bytes of ``message``. Raises ProtocolFault if they exceed MAX_MESSAGE_BYTES."""
    data = bytes([PROTOCOL_VERSION]) + _ENCODER.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolFault(f"message of {len(data)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return data


def decode_for_agent(data: bytes) -> ToAgent:
    """The message that a controller sent. Raises ProtocolFault for anything else."""
    return _decode(data, _TO_AGENT)


def decode_for_controller(data: bytes) -> ToController:
    """The message that an agent sent. Raises ProtocolFault for anything else."""
    return _decode(data, _TO_CONTROLLER)


def _decode[T](data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    if not 2 <= len(data) <= MAX_MESSAGE_BYTES:
        raise ProtocolFault(f"message of {len(data)} bytes")
    if data[0] != PROTOCOL_VERSION:
        raise ProtocolFault(f"protocol version {data[0]}, this side speaks {PROTOCOL_VERSION}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolFault(f"malformed message: {error}") from error
