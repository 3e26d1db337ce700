"""Agent configuration, key files, journal, rate limit and ZAP: all without sockets or processes."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from zmq.utils import z85

from coral_tasks.agent.config import agent_config, read_agent_config
from coral_tasks.agent.health import requests_in_flight
from coral_tasks.agent.journal import Journal
from coral_tasks.agent.keys import KeyExists, finish_rotation, make_key_pair, rotate_key_pair
from coral_tasks.agent.transport import RateLimit, ZapHandler
from coral_tasks.domain.errors import StorageFault, UnknownName, ValidationFailed
from coral_tasks.protocol.agent_machine import Changes, FenceState, Slot
from coral_tasks.protocol.keyfiles import (
    Role,
    list_public_keys,
    public_path,
    read_key_pair,
    read_public_key,
    secret_path,
)
from coral_tasks.protocol.messages import Outcome, OutcomeStatus, SlotState

NODE = {"id": "n", "region": "r", "configuration": "L4x1", "market": "spot"}
BASE = {"name": "a", "bind": "tcp://127.0.0.1:7400", "state": "s", "keys": "k", "nodes": [NODE]}


def test_a_toml_file_with_overrides_makes_a_configuration(tmp_path: Path) -> None:
    """Fields of the file are read, options of the command line win, node i has two ports of its own."""
    file = tmp_path / "agent.toml"
    file.write_text(
        'name = "a"\nbind = "tcp://127.0.0.1:7400"\nstate = "s"\nkeys = "k"\n[policy]\nmax_restarts = 2\n'
        '[[nodes]]\nid = "n"\nregion = "r"\nconfiguration = "L4x1"\nmarket = "spot"\n'
        '[[nodes]]\nid = "o"\nregion = "r"\nconfiguration = "L4x1"\nmarket = "spot"\n'
    )
    made = read_agent_config(file, overrides={"time_scale": 10.0})
    assert (made.policy.max_restarts, made.time_scale, made.engine_port("o")) == (2, 10.0, 21002)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bind": "tcp://*:7400"}, "never all interfaces"),
        ({"bind": "tcp://0.0.0.0:7400"}, "never all interfaces"),
        ({"bind": "tcp://[::]:7400"}, "never all interfaces"),
        ({"bind": "127.0.0.1:7400"}, "bind must be tcp"),
        ({"engine_host": "0.0.0.0"}, "engine_host must not be all interfaces"),
        ({"nodes": []}, "needs at least one node"),
        ({"nodes": [NODE, NODE]}, "node is listed twice"),
        ({"engine": "magic"}, "Invalid enum value 'magic'"),
        ({"name": "../a"}, "letters, digits"),
        ({"first_engine_port": 80}, "engine ports must lie in"),
        ({"tick_s": 0.0}, "tick_s must be finite and above zero"),
        ({"time_scale": float("nan")}, "time_scale must be finite and above zero"),
        ({"bid": "x"}, "unknown field `bid`"),
        ({"nodes": [{**NODE, "market": "stolen"}]}, "Invalid enum value 'stolen'"),
    ],
)
def test_a_wrong_configuration_is_refused_with_its_reason(change: dict, message: str) -> None:
    """Each mistake has its own message; an agent never listens on all interfaces."""
    with pytest.raises(ValidationFailed, match=message):
        agent_config({**BASE, **change}, source="test")


def test_key_files_are_private_and_complete(tmp_path: Path) -> None:
    """Secret 0600 from the first moment, whatever the umask; public readable; a second make is refused."""
    old = os.umask(0)
    try:
        pair = make_key_pair(tmp_path / "keys", Role.AGENT, "node-1")
    finally:
        os.umask(old)
    secret = secret_path(tmp_path / "keys", Role.AGENT, "node-1")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert read_key_pair(tmp_path / "keys", Role.AGENT, "node-1") == pair
    assert read_public_key(tmp_path / "keys", Role.AGENT, "node-1") == pair.public
    assert pair.secret not in repr(pair)
    with pytest.raises(KeyExists, match="use rotate"):
        make_key_pair(tmp_path / "keys", Role.AGENT, "node-1")


def test_unusable_keys_are_refused(tmp_path: Path) -> None:
    """Readable by others, malformed, missing, and names that would leave the folder."""
    make_key_pair(tmp_path, Role.AGENT, "a")
    secret_path(tmp_path, Role.AGENT, "a").chmod(0o640)
    with pytest.raises(StorageFault, match="may be read by others"):
        read_key_pair(tmp_path, Role.AGENT, "a")
    secret_path(tmp_path, Role.AGENT, "a").chmod(0o600)
    secret_path(tmp_path, Role.AGENT, "a").write_text("short\n")
    with pytest.raises(StorageFault, match="does not hold a key pair"):
        read_key_pair(tmp_path, Role.AGENT, "a")
    with pytest.raises(UnknownName, match="unknown agent key; known: a"):
        read_key_pair(tmp_path, Role.AGENT, "b")
    for name in ("../x", "", "a/b", "a@1", "-", "x" * 101, "a\n"):
        with pytest.raises(ValidationFailed, match="letters, digits"):
            make_key_pair(tmp_path, Role.AGENT, name)


def test_rotation_keeps_the_old_key_until_it_is_finished(tmp_path: Path) -> None:
    """Both keys are accepted while a rotation runs, only the new one afterwards."""
    first = make_key_pair(tmp_path, Role.CONTROLLER, "c")
    second = rotate_key_pair(tmp_path, Role.CONTROLLER, "c")
    third = rotate_key_pair(tmp_path, Role.CONTROLLER, "c")
    listed = list_public_keys(tmp_path, Role.CONTROLLER)
    assert listed == {"c": third.public, "c@1": first.public, "c@2": second.public}
    assert finish_rotation(tmp_path, Role.CONTROLLER, "c") == 2
    assert list_public_keys(tmp_path, Role.CONTROLLER) == {"c": third.public}


def zap(tmp_path: Path, key: bytes, **change: bytes) -> list[bytes]:
    frames = {"version": b"1.0", "id": b"7", "domain": b"d", "address": b"", "identity": b"", "mechanism": b"CURVE"}
    handler = ZapHandler(context=zmq.asyncio.Context.instance(), folders={"d": tmp_path})
    return handler.answer([*{**frames, **change}.values(), key])


def test_only_listed_controllers_are_let_in(tmp_path: Path) -> None:
    """A listed controller gets 200 with its name; agents, strangers, other mechanisms and domains get 400."""
    known = z85.decode(make_key_pair(tmp_path, Role.CONTROLLER, "c").public)
    agent = z85.decode(make_key_pair(tmp_path, Role.AGENT, "a").public)
    assert zap(tmp_path, known)[2:5] == [b"200", b"OK", b"c"]
    refused = [zap(tmp_path, agent), zap(tmp_path, b"\0" * 32), zap(tmp_path, b"short")]
    refused += [zap(tmp_path, known, mechanism=b"NULL"), zap(tmp_path, known, domain=b"other")]
    refused += [zap(tmp_path, known, version=b"2.0")]
    assert [one[2] for one in refused] == [b"400"] * 6
    public_path(tmp_path, Role.CONTROLLER, "c").unlink()
    assert zap(tmp_path, known)[2] == b"400"


def test_a_broken_key_file_locks_nobody_else_out(tmp_path: Path) -> None:
    """One malformed allow-list entry is skipped, the others still count."""
    known = z85.decode(make_key_pair(tmp_path, Role.CONTROLLER, "c").public)
    public_path(tmp_path, Role.CONTROLLER, "b").write_bytes(b"\xff\xfe nonsense")
    assert zap(tmp_path, known)[2] == b"200"


def test_the_rate_limit_is_per_peer_and_refills() -> None:
    """A burst of 3, then one per half second; another peer is not affected; many peers cost bounded memory."""
    limit = RateLimit(rate_per_s=2.0, burst=3)
    assert [limit.admits(b"p", 0.0) for _ in range(4)] == [True, True, True, False]
    assert limit.admits(b"q", 0.0)
    assert [limit.admits(b"p", 0.5), limit.admits(b"p", 0.5)] == [True, False]
    assert not limit.admits(b"p", -100.0)
    for number in range(1000):
        limit.admits(str(number).encode(), 1.0)
    assert len(limit._buckets) <= 256


def test_the_journal_returns_what_was_written(tmp_path: Path) -> None:
    """Slots, fence and outcomes come back after a reopen; a second agent on the folder is refused."""
    slot = Slot(node="n", state=SlotState.READY, launch="l", in_flight=3, deadline_s=9.0)
    fence = FenceState(epoch=3, round=1, owner="k")
    outcome = Outcome(command="c", status=OutcomeStatus.DONE)
    with Journal(tmp_path) as journal:
        journal.write(Changes(slots=(slot,), fence=fence, outcome=outcome))
        journal.write(Changes(outcome=Outcome(command="c", status=OutcomeStatus.BUSY)))
        with pytest.raises(StorageFault, match="another agent uses"):
            Journal(tmp_path)
    with Journal(tmp_path) as journal:
        assert journal.read_slots()["n"].state is SlotState.READY
        assert journal.read_slots()["n"].in_flight is None
        assert journal.read_fence() == fence
        assert journal.read_outcomes() == {"c": outcome}


def test_a_full_journal_writes_nothing_and_recovers(tmp_path: Path) -> None:
    """When the database cannot grow the whole change is refused; once there is room, writing works again."""
    with Journal(tmp_path) as journal:
        pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
        journal._database.execute(f"PRAGMA max_page_count = {pages}")
        big = tuple(Slot(node=f"n{i}", detail="x" * 1000) for i in range(50))
        with pytest.raises(StorageFault, match="full"):
            journal.write(Changes(slots=big, fence=FenceState(epoch=2)))
        assert journal.read_fence() == FenceState()
        journal._database.execute("PRAGMA max_page_count = 100000")
        journal.write(Changes(slots=big, fence=FenceState(epoch=2)))
        assert len(journal.read_slots()) == 50


def test_a_corrupt_journal_is_a_fault_not_a_crash(tmp_path: Path) -> None:
    """Garbage instead of a database is named as such."""
    (tmp_path / "journal.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StorageFault, match="not a database"):
        Journal(tmp_path)
    assert sqlite3.sqlite_version


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'vllm:num_requests_running{engine="0",model_name="m"} 2.0\nvllm:num_requests_waiting{a="b"} 1.0\n', 3),
        (b"vllm:num_requests_running 0.0\n", 0),
        (b'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1"} 4.0\n', 5),
        (b"# HELP vllm:num_requests_running none\nother 3\n", None),
        (b"vllm:num_requests_running nan\n", None),
        (b"vllm:num_requests_running 1e999\n", None),
        (b"\xff\x00", None),
    ],
)
def test_requests_in_flight_are_read_from_metrics(text: bytes, expected: int | None) -> None:
    """Running and waiting of all ranks add up; what cannot be read is unknown, not zero."""
    assert requests_in_flight(text) == expected
