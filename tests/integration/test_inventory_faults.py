"""Availability from agents when one is silent or talks nonsense: real sockets with keys, one real agent beside them."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import zmq

sys.path.insert(0, str(Path(__file__).parent))
from agent_bench import Bench, bench, free_ports

from coral_tasks.dispatch.inventory import write_endpoints
from coral_tasks.domain.errors import SourceFault
from coral_tasks.domain.names import Market
from coral_tasks.ingestion.batch import SourceBatch
from coral_tasks.protocol.keyfiles import Role, read_key_pair
from coral_tasks.protocol.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    NodeReport,
    Observe,
    Report,
    SlotState,
    decode_for_agent,
    encode_message,
)
from coral_tasks.settings import Settings
from coral_tasks.tasks.dispatching import make_missing_keys
from coral_tasks.tasks.inputs import ingest_table
from coral_tasks.tasks.sources import configured_source
from data_contracts.contract import GateContext
from data_contracts.gate import check_table
from data_contracts.registry import contract_of

pytestmark = [pytest.mark.integration]
Answer = Callable[[str, Observe], list[list[bytes]]]
"""Messages, each of some frames, that a false agent of that name sends for one question."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One real agent with two nodes."""
    with bench(tmp_path_factory.mktemp("agents"), {"a": ["a1", "a2"]}) as made:
        yield made


def honest(name: str, question: Observe, node: str = "") -> Report:
    """What a real agent with one idle L40S would say."""
    one = NodeReport(
        node=node or f"{name}-node",
        region="aws/us-east-2",
        configuration="L40Sx1",
        market=Market.ON_DEMAND,
        engine="simulated",
        address="127.0.0.1",
        master_port=29500,
        state=SlotState.EMPTY,
    )
    return Report(request=question.request, agent=name, incarnation="i", epoch=0, round=0, accepted=True, nodes=(one,))


def whole(name: str, question: Observe) -> bytes:
    """The honest answer on the wire."""
    return encode_message(honest(name, question))


def changed(name: str, question: Observe, **fields: object) -> bytes:
    """The honest answer with fields of another kind, or with fields that no report has."""
    values = {**msgspec.msgpack.decode(whole(name, question)[1:]), **fields}
    return bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(values)


BAD: dict[str, Answer] = {
    "silent": lambda _name, _: [],
    "empty": lambda _name, _: [[b""]],
    "garbage": lambda _name, _: [[bytes(range(256))]],
    "flood": lambda _name, _: [[b"\x01garbage"]] * 2000,
    "text": lambda _name, _: [[b"HTTP/1.1 200 OK\r\n\r\n"]],
    "version": lambda name, question: [[b"\x63" + whole(name, question)[1:]]],
    "cut": lambda name, question: [[whole(name, question)[:-3]]],
    "tail": lambda name, question: [[whole(name, question) + b"\x00"]],
    "frames": lambda name, question: [[whole(name, question), whole(name, question)]],
    "no-nodes": lambda name, question: [[changed(name, question, nodes="none")]],
    "negative": lambda name, question: [[changed(name, question, epoch=-1)]],
    "new-field": lambda name, question: [[changed(name, question, extra=1)]],
    "no-name": lambda name, question: [[changed(name, question, agent="")]],
    "huge": lambda _name, _: [[b"\x01" * (MAX_MESSAGE_BYTES + 1)]],
    "other-question": lambda name, _: [[whole(name, Observe(request="of yesterday"))]],
    "echo": lambda _name, question: [[encode_message(question)]],
}
GOOD: dict[str, Answer] = {
    "honest": lambda name, question: [[whole(name, question)]],
    "stammers": lambda name, question: [[b"\x01garbage"], [b""], [whole(name, question)]],
}


@contextmanager
def false_agents(keys: Path, answers: Mapping[str, Answer]) -> Iterator[dict[str, str]]:
    """Agents with listed keys, each of which takes questions and sends what its answer says; addresses by name."""
    make_missing_keys(keys, list(answers))
    context, poller, stop = zmq.Context(), zmq.Poller(), threading.Event()
    sockets: dict[zmq.Socket[bytes], str] = {}
    addresses = {}
    for name, port in zip(answers, free_ports(len(answers)), strict=True):
        router = context.socket(zmq.ROUTER)
        pair = read_key_pair(keys, Role.AGENT, name)
        router.curve_server, router.linger = True, 0
        router.curve_secretkey, router.curve_publickey = pair.secret.encode(), pair.public.encode()
        router.bind(f"tcp://127.0.0.1:{port}")
        poller.register(router, zmq.POLLIN)
        sockets[router], addresses[name] = name, f"tcp://127.0.0.1:{port}"

    def serve() -> None:
        while not stop.is_set():
            for router, _ in poller.poll(50):
                peer, data = router.recv_multipart()
                question = decode_for_agent(data)
                if isinstance(question, Observe):
                    for frames in answers[sockets[router]](sockets[router], question):
                        router.send_multipart([peer, *frames])

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield addresses
    finally:
        stop.set()
        server.join()
        context.destroy(linger=0)


def inventory(home: Path, addresses: Mapping[str, str], **fields: object) -> Settings:
    """A home whose availability is what these agents say."""
    write_endpoints(home / "agents.toml", addresses)
    (home / "sources.json").write_text(json.dumps({"availability": {"kind": "agents", **fields}}))
    return Settings(home=home, setup="core")


def counted(settings: Settings) -> tuple[SourceBatch, dict[str, int]]:
    """The batch, and nodes by configuration after the gate."""
    found = configured_source(settings, "availability")
    assert found is not None
    now = datetime.now(UTC)
    batch = found[0](now)
    outcome = check_table(contract_of("availability"), batch.raw(), GateContext(now=now))
    assert outcome.table is not None, [str(one) for one in outcome.report.findings]
    return batch, {row["configuration"]: row["available_nodes"] for row in outcome.table.to_pylist()}


def test_what_bad_agents_say_counts_for_nothing_and_hides_no_good_agent(real: Bench) -> None:
    """A real agent's two L4, and two L40S of agents that answer well in the end. Sixteen bad ones, one whose port is
    closed, one that never shakes hands and one with another key give no node, are named, and lower the completeness."""
    with (
        false_agents(real.keys, BAD | GOOD) as addresses,
        false_agents(real.keys, {"other": GOOD["honest"]}) as imposed,
        socket.socket() as mute,
    ):
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        make_missing_keys(real.keys, ["closed", "mute", "impostor"])
        strange = {
            "closed": f"tcp://127.0.0.1:{free_ports(40)[-1]}",
            "mute": f"tcp://127.0.0.1:{mute.getsockname()[1]}",
            # the endpoint of an agent whose key is not the listed one
            "impostor": imposed["other"],
        }
        settings = inventory(real.root, {**real.endpoints, **addresses, **strange})
        batch, nodes = counted(settings)
        with pytest.raises(SourceFault, match="node agents answered 3 of 22 parts"):
            ingest_table(settings, "r1", "availability", datetime.now(UTC))
    assert nodes == {"L4x1": 2, "L40Sx1": 2}
    assert (batch.received, batch.expected) == (3, 22)
    silent = sorted([*BAD, *strange])
    assert list(batch.notes) == [f"no answer from agent {name}: its nodes are unknown" for name in silent]


def test_an_agent_gone_mad_does_not_fill_the_log(real: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Of thousands of malformed messages the 1st, 2nd, 4th, 8th, … are told, with the agent's name."""
    with false_agents(real.keys, {"flood": BAD["flood"]}) as addresses:
        counted(inventory(real.root, {**real.endpoints, **addresses}))
    told = [record.getMessage() for record in caplog.records if record.name == "coral.dispatch"]
    assert [one.partition(": malformed message no. ")[2].partition(":")[0] for one in told[:4]] == ["1", "2", "4", "8"]
    assert all(one.startswith("agent flood: ") for one in told)
    assert len(told) <= 16


def test_a_node_that_two_agents_claim_counts_once(real: Bench) -> None:
    """An agent that says a1 is its own, and an L40S, is not believed over the first; the batch says so."""
    claims: dict[str, Answer] = {"z": lambda name, question: [[encode_message(honest(name, question, "a1"))]]}
    with false_agents(real.keys, claims) as addresses:
        batch, nodes = counted(inventory(real.root, {**real.endpoints, **addresses}))
    assert nodes == {"L4x1": 2}
    assert batch.notes == ("node a1 is reported by a and by z; the latter ignored",)


def test_agents_that_all_fail_are_no_empty_inventory(real: Bench) -> None:
    """Nobody answered: a fault even where any share would do, never zero nodes."""
    with false_agents(real.keys, {name: BAD[name] for name in ("silent", "cut")}) as addresses:
        settings = inventory(real.root, addresses, min_completeness=0)
        with pytest.raises(SourceFault, match="none of the agents answered; unknown is not zero"):
            ingest_table(settings, "r2", "availability", datetime.now(UTC))
