"""Wire format: round trips, limits, and that no bytes whatever raise anything but ProtocolFault."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from coral_tasks.domain.errors import ProtocolFault
from coral_tasks.domain.names import Market, Phase
from coral_tasks.protocol.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Command,
    Drain,
    Fence,
    FetchJob,
    JobResult,
    NodeReport,
    Observe,
    Outcome,
    OutcomeStatus,
    Profile,
    Report,
    SlotState,
    StageSpec,
    Start,
    StartSpec,
    Stop,
    decode_for_agent,
    decode_for_controller,
    encode_message,
)

SPEC = StartSpec(
    instance="x",
    template="t",
    model="m",
    model_name="org/m",
    phase=Phase.DECODE,
    region="aws/us-east-2",
    market=Market.SPOT,
    throughput=12.5,
    latency_s=0.1,
    stages=(StageSpec(num_layers=3, nodes=("a",)), StageSpec(num_layers=5, nodes=("b", "c"))),
    rank=1,
    tp_degree=4,
    master_address="10.0.0.1",
    master_port=29500,
)
FIELDS = {"id": "c", "epoch": 3, "round": 1, "owner": "k", "incarnation": "i", "node": "a"}
TO_AGENT = [
    Fence(request="f", epoch=1, round=2, owner="k"),
    Observe(request="o"),
    FetchJob(request="o", job="j"),
    Command(**FIELDS, action=Start(spec=SPEC)),
    Command(**FIELDS, action=Drain(instance="x", timeout_s=3.0)),
    Command(**FIELDS, action=Stop(instance="x")),
    Command(**FIELDS, action=Profile(job="j", request="{}", timeout_s=60.0)),
]
NODE = NodeReport(
    node="a",
    region="r",
    configuration="L4x1",
    market=Market.SPOT,
    engine="vllm",
    address="h",
    master_port=7,
    state=SlotState.READY,
    spec=SPEC,
    in_flight=3,
    retired=("w",),
)
TO_CONTROLLER = [
    Outcome(command="c", status=OutcomeStatus.BUSY, detail="because"),
    Report(request="o", agent="a", incarnation="i", epoch=1, round=2, accepted=True, nodes=(NODE,)),
    JobResult(request="o", job="j", status="succeeded", rows="[]"),
]


@pytest.mark.parametrize("message", TO_AGENT, ids=lambda one: type(one).__name__)
def test_messages_to_agents_round_trip(message) -> None:
    """What was encoded comes back equal, and is not taken for a message of the other direction."""
    data = encode_message(message)
    assert decode_for_agent(data) == message
    with pytest.raises(ProtocolFault, match="malformed"):
        decode_for_controller(data)


@pytest.mark.parametrize("message", TO_CONTROLLER, ids=lambda one: type(one).__name__)
def test_messages_to_controllers_round_trip(message) -> None:
    """What was encoded comes back equal, and is not taken for a message of the other direction."""
    data = encode_message(message)
    assert decode_for_controller(data) == message
    with pytest.raises(ProtocolFault, match="malformed"):
        decode_for_agent(data)


def raw(**fields: object) -> bytes:
    return bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(fields)


FENCE = {"type": "fence", "request": "f", "epoch": 1, "round": 0, "owner": "k"}
START = {"type": "command", **FIELDS, "action": {"type": "start", "spec": msgspec.to_builtins(SPEC)}}


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": 2**53},
        {"epoch": 1.5},
        {"epoch": "1"},
        {"epoch": True},
        {"epoch": None},
        {"owner": ""},
        {"owner": "k" * 301},
        {"type": "unknown"},
        {"extra": 1},
    ],
)
def test_fields_outside_their_limits_are_refused(change: dict) -> None:
    """Wrong types, numbers out of range, empty or long names, unknown kinds and unknown fields."""
    assert decode_for_agent(raw(**FENCE)) == Fence(request="f", epoch=1, round=0, owner="k")
    with pytest.raises(ProtocolFault, match="malformed"):
        decode_for_agent(raw(**{**FENCE, **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"throughput": math.nan},
        {"throughput": math.inf},
        {"throughput": 0.0},
        {"latency_s": -1.0},
        {"latency_s": math.nan},
        {"stages": []},
        {"stages": [{"num_layers": 0, "nodes": ["a"]}]},
        {"stages": [{"num_layers": 1, "nodes": []}]},
        {"stages": [{"num_layers": 1, "nodes": ["a"]}] * 65},
        {"tp_degree": 0},
        {"master_port": 65536},
        {"phase": "both"},
        {"market": "stolen"},
        {"rank": -1},
    ],
)
def test_start_specs_outside_their_limits_are_refused(change: dict) -> None:
    """NaN, infinity, zero layers, no nodes, too many stages and unknown words never reach the state machine."""
    fields = {**START, "action": {"type": "start", "spec": {**msgspec.to_builtins(SPEC), **change}}}
    with pytest.raises(ProtocolFault, match="malformed"):
        decode_for_agent(raw(**fields))


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -1.0])
def test_a_drain_without_a_bound_is_refused(timeout_s: float) -> None:
    """A drain must end: its limit is a finite number."""
    with pytest.raises(ProtocolFault, match="malformed"):
        decode_for_agent(raw(**{**START, "action": {"type": "drain", "instance": "x", "timeout_s": timeout_s}}))


def test_other_versions_and_sizes_are_refused() -> None:
    """An unknown version, an empty frame and too large a frame each have their own message."""
    data = encode_message(TO_AGENT[0])
    with pytest.raises(ProtocolFault, match="protocol version 2, this side speaks 1"):
        decode_for_agent(bytes([2]) + data[1:])
    with pytest.raises(ProtocolFault, match="message of 0 bytes"):
        decode_for_agent(b"")
    with pytest.raises(ProtocolFault, match=f"message of {MAX_MESSAGE_BYTES + 1} bytes"):
        decode_for_agent(bytes([1]) * (MAX_MESSAGE_BYTES + 1))
    nodes = (NODE,) * 20_000
    with pytest.raises(ProtocolFault, match="exceeds"):
        encode_message(Report(request="o", agent="a", incarnation="i", epoch=1, round=2, accepted=True, nodes=nodes))


def test_deep_nesting_is_refused() -> None:
    """A bomb of nested lists ends in a refusal, not in a stack overflow."""
    with pytest.raises(ProtocolFault, match="malformed"):
        decode_for_agent(bytes([1]) + b"\x91" * 100_000 + b"\xc0")


def test_a_hundred_thousand_random_and_mutated_frames_raise_nothing_else() -> None:
    """Fuzz: random bytes, flipped bits, cut and joined messages either decode or raise ProtocolFault."""
    rng = random.Random(7)
    good = [encode_message(message) for message in (*TO_AGENT, *TO_CONTROLLER)]
    accepted = 0
    for _ in range(100_000):
        data = bytearray(rng.choice(good)) if rng.random() < 0.8 else bytearray(rng.randbytes(rng.randrange(200)))
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data) + 1)]
        for decode in (decode_for_agent, decode_for_controller):
            try:
                decode(bytes(data))
                accepted += 1
            except ProtocolFault:
                pass
    assert 0 < accepted < 100_000
