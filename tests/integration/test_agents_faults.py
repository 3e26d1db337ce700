"""Faults with real agents, sockets and engines on this machine: what holds, what is reported, nothing doubled."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "protocol"))
from agent_bench import FAST, POLICY, Bench, bench, free_ports
from fleet_builders import plan, template

from coral_tasks.agent.keys import make_key_pair, new_key_pair, rotate_key_pair
from coral_tasks.dispatch.dispatcher import DispatchOptions, dispatch_plan, observe
from coral_tasks.dispatch.transport import AgentLinks
from coral_tasks.domain.fleet import InstanceState
from coral_tasks.protocol.keyfiles import Role, public_path, read_public_key
from coral_tasks.protocol.messages import (
    MAX_MESSAGE_BYTES,
    FetchJob,
    JobResult,
    Observe,
    Outcome,
    OutcomeStatus,
    Profile,
    Report,
    SlotState,
    encode_message,
)
from coral_tasks.protocol.messages import Command as CommandMessage

pytestmark = [pytest.mark.integration]
ONE = template("one", throughput=10.0)
TWO = template("two", stages=(("L4x1",), ("L4x1",)), throughput=25.0)
NODES = {"a": ["a1", "a2"], "b": ["b1", "b2"]}


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Bench]:
    """Two agents with two nodes each."""
    with bench(tmp_path, NODES) as made:
        yield made


def states(agents: Bench) -> Counter[str]:
    return Counter(one.state.value for one in agents.see().fleet.instances)


def heads(agents: Bench) -> Counter[str]:
    """Live engine processes by node, out of their launch ids."""
    return Counter(launch.split("/")[1] for launch in agents.engines().values())


def test_a_dispatch_reaches_the_plan_and_a_second_one_sends_nothing(agents: Bench) -> None:
    """Engines run, the table is written, and the unchanged plan needs no command."""
    wanted = plan({"one": 2, "two": 1}, ONE, TWO)
    first = agents.dispatch(wanted)
    assert first.converged, first.problems
    assert len(first.routing.routes) == 3
    assert sum(heads(agents).values()) == 3
    second = agents.dispatch(wanted)
    assert (second.converged, second.num_commands) == (True, 0)


def test_a_killed_agent_adopts_its_engines(agents: Bench) -> None:
    """kill -9 of an agent leaves engines serving; the restarted agent takes them over and starts none."""
    agents.dispatch(plan({"one": 2, "two": 1}, ONE, TWO))
    before = agents.engines()
    agents.kill("a")
    assert agents.see(1.0).unreachable == ("a",)
    assert agents.engines() == before
    agents.start("a")
    agents.until(lambda: states(agents)["ready"] == 3, 20, "all ready again")
    assert agents.engines() == before
    again = agents.dispatch(plan({"one": 2, "two": 1}, ONE, TWO))
    assert (again.converged, again.num_commands) == (True, 0)


def test_a_killed_engine_comes_back_alone(agents: Bench) -> None:
    """The agent starts a crashed engine again after a back-off, once, and the fleet heals without a dispatch."""
    agents.dispatch(plan({"one": 2}, ONE, TWO))
    before = agents.engines()
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    agents.until(lambda: victim not in agents.engines() and len(agents.engines()) == 2, 20, "a new engine")
    agents.until(lambda: states(agents)["ready"] == 2, 20, "both ready")
    assert max(heads(agents).values()) == 1
    assert any(one.restarts == 1 for one in agents.see().nodes.values())
    told = "".join(path.read_text() for path in agents.root.glob("*.log"))
    assert told.count("ended, will be started again: engine process ended with code -9") == 1


def test_an_engine_that_keeps_crashing_is_reported_and_its_node_excluded(agents: Bench) -> None:
    """Its port is taken by a stranger: after the limit the node is excluded and another node serves instead."""
    taken = int(agents.see().nodes["a1"].endpoint.rpartition(":")[2])
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", taken))
        stranger.listen()
        result = agents.dispatch(plan({"one": 1}, ONE, TWO))
    assert result.converged, result.problems
    assert "a1" in result.excluded
    assert "engine ended" in result.excluded["a1"]
    assert any("a1" in problem for problem in result.problems)
    assert result.fleet.instances[0].nodes != ("a1",)
    assert len(agents.engines()) == 1


def test_a_controller_killed_in_the_middle_is_continued(agents: Bench) -> None:
    """The dispatching process is killed -9 at random moments; the rerun ends at the plan with one engine a head."""
    script = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:4]\n"
        "from fleet_builders import plan, template\n"
        "from coral_tasks.dispatch.dispatcher import dispatch_plan\n"
        "one = template('one', throughput=10.0)\n"
        "two = template('two', stages=(('L4x1',), ('L4x1',)), throughput=25.0)\n"
        "ends = dict(pair.split('=') for pair in sys.argv[5:])\n"
        "dispatch_plan(plan({'one': 2, 'two': 1}, one, two), ends, Path(sys.argv[1]), epoch=int(sys.argv[4]))\n"
    )
    pairs = [f"{name}={endpoint}" for name, endpoint in agents.endpoints.items()]
    for epoch, wait_s in enumerate((0.9, 1.3, 1.7), start=1):
        paths = [str(Path(__file__).parents[1] / "protocol"), str(Path(__file__).parents[2])]
        child = subprocess.Popen([sys.executable, "-c", script, str(agents.keys), *paths, str(epoch), *pairs])
        time.sleep(wait_s)
        child.kill()
        child.wait(10)
    wanted = plan({"one": 2, "two": 1}, ONE, TWO)
    options = DispatchOptions(policy=POLICY)
    result = dispatch_plan(wanted, agents.endpoints, agents.keys, epoch=9, options=options)
    assert result.converged, result.problems
    assert heads(agents).total() == 3
    assert max(heads(agents).values()) == 1


def test_an_old_controller_with_an_old_plan_changes_nothing(agents: Bench) -> None:
    """A dispatch with an older epoch is refused everywhere, says so, and sends no command."""
    options = DispatchOptions(policy=POLICY)
    new = dispatch_plan(plan({"one": 2}, ONE, TWO), agents.endpoints, agents.keys, epoch=7, options=options)
    assert new.converged
    before = agents.engines()
    old = dispatch_plan(plan({"two": 2}, ONE, TWO), agents.endpoints, agents.keys, epoch=6, options=options)
    assert (old.superseded, old.converged, old.num_commands) == (True, False, 0)
    assert "newer epoch is in force on a, b" in old.problems[0]
    assert agents.engines() == before


def test_of_two_controllers_at_once_the_newer_wins(agents: Bench) -> None:
    """Both dispatch at the same time; the one with the newer epoch reaches its plan, the other one gives up."""
    results = {}

    def run(epoch: int, rows: dict[str, int]) -> None:
        options = DispatchOptions(policy=POLICY, max_rounds=8)
        wanted = plan(rows, ONE, TWO)
        results[epoch] = dispatch_plan(wanted, agents.endpoints, agents.keys, epoch=epoch, options=options)

    threads = [
        threading.Thread(target=run, args=(3, {"two": 2})),
        threading.Thread(target=run, args=(4, {"one": 3})),
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    assert results[4].converged, results[4].problems
    assert not results[3].converged or results[3].epoch < 4
    assert Counter(one.template for one in agents.see().fleet.instances) == {"one": 3}
    assert heads(agents).total() == 3


def test_a_node_that_vanished_after_the_solve_is_reported(agents: Bench) -> None:
    """The plan needs four nodes, two are gone: what fits runs, what does not is named with its pool."""
    agents.kill("b")
    result = agents.dispatch(plan({"one": 4}, ONE, TWO))
    assert (result.converged, result.unreachable) == (False, ("b",))
    assert sum(one.count for one in result.unplaced) == 2
    assert "L4x1 in aws/us-east-2 (on_demand): 0 free" in result.unplaced[0].reason
    assert states(agents)["ready"] == 2
    agents.start("b")
    healed = agents.dispatch(plan({"one": 4}, ONE, TWO))
    assert healed.converged, healed.problems


def test_an_instance_whose_node_is_gone_is_replaced_whole(agents: Bench) -> None:
    """A pipeline loses its second node: the remaining part is stopped and the model runs elsewhere."""
    agents.dispatch(plan({"one": 1, "two": 1}, ONE, TWO))
    seen = agents.see()
    pipeline = next(one for one in seen.fleet.instances if one.template == "two")
    if {node[0] for node in pipeline.nodes} == {"a", "b"}:
        agents.kill("b")
        after = agents.see(1.0)
        broken = [one.state for one in after.fleet.instances if one.template == "two"]
        assert broken == [InstanceState.FAILED]
    result = agents.dispatch(plan({"one": 2}, ONE, TWO))
    assert result.fleet.instances
    assert all(one.template == "one" for one in result.fleet.instances)


def test_a_stopped_agent_gets_nothing_late(agents: Bench) -> None:
    """An agent that hangs (SIGSTOP) while the plan changes twice obeys only the newest plan when it wakes up."""
    agents.dispatch(plan({"one": 4}, ONE, TWO))
    agents.processes["b"].send_signal(signal.SIGSTOP)
    down = agents.dispatch(plan({"one": 1}, ONE, TWO))
    assert "b" in down.unreachable
    agents.processes["b"].send_signal(signal.SIGCONT)
    final = agents.dispatch(plan({"one": 3}, ONE, TWO))
    assert final.converged, final.problems
    time.sleep(1.0)
    assert heads(agents).total() == 3
    assert states(agents) == {"ready": 3}


def test_an_agent_that_slept_long_blames_no_engine(agents: Bench) -> None:
    """Stopped for longer than an engine may be silent, an agent that wakes up leaves its engines alone."""
    assert agents.dispatch(plan({"one": 4}, ONE, TWO)).converged
    before = agents.engines()
    agents.processes["b"].send_signal(signal.SIGSTOP)
    time.sleep(FAST["unhealthy_s"] + 1.0)
    agents.processes["b"].send_signal(signal.SIGCONT)
    agents.until(lambda: agents.see(1.0).unreachable == (), 20, "the agent answers")
    time.sleep(0.5)
    assert agents.engines() == before
    assert states(agents) == {"ready": 4}


class Cable:
    """A TCP relay in front of an agent that can be cut, healed and made slow."""

    def __init__(self, target: int) -> None:
        self.target, self.cut, self.delay_s = target, False, 0.0
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.pairs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.server.accept()
            except OSError:
                return
            if self.cut:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self.target))
            self.pairs += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                time.sleep(self.delay_s)
                if self.cut:
                    break
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            one.close()

    def sever(self) -> None:
        self.cut = True
        for one in self.pairs:
            one.close()
        self.pairs.clear()

    def close(self) -> None:
        self.server.close()
        self.sever()


def test_a_cut_network_is_reported_and_heals(agents: Bench) -> None:
    """The cable to one agent is cut in the middle of a dispatch: engines go on serving, the dispatch says who does not
    answer, and after healing a new dispatch ends at the plan without a doubled engine. A slow cable only takes longer.
    """
    cable = Cable(agents.ports["b"])
    endpoints = {**agents.endpoints, "b": f"tcp://127.0.0.1:{cable.port}"}
    options = DispatchOptions(policy=POLICY, observe_s=2.0)
    try:
        cable.delay_s = 0.1
        slow = dispatch_plan(plan({"one": 3}, ONE, TWO), endpoints, agents.keys, epoch=1, options=options)
        assert slow.converged, slow.problems
        threading.Timer(0.4, cable.sever).start()
        broken = dispatch_plan(plan({"one": 4}, ONE, TWO), endpoints, agents.keys, epoch=2, options=options)
        assert not broken.converged or heads(agents).total() == 4
        assert heads(agents).total() >= 3
        lost = observe(endpoints, agents.keys, wait_s=1.0)
        assert lost.unreachable == ("b",)
        cable.cut = False
        cable.delay_s = 0.0
        healed = dispatch_plan(plan({"one": 4}, ONE, TWO), endpoints, agents.keys, epoch=3, options=options)
        assert healed.converged, healed.problems
        assert heads(agents) == {"a1": 1, "a2": 1, "b1": 1, "b2": 1}
    finally:
        cable.close()


def test_a_stranger_gets_nothing(agents: Bench) -> None:
    """Keys that are not listed, an agent's own key, no CURVE at all, and a wrong server key: no answer to any."""
    context = zmq.Context()
    agent_key = read_public_key(agents.keys, Role.AGENT, "a").encode()
    own = new_key_pair()
    listed = make_key_pair(agents.keys, Role.CONTROLLER, "second")
    attempts = {
        "unlisted": (own.public.encode(), own.secret.encode(), agent_key),
        "no curve": None,
        "wrong server": (listed.public.encode(), listed.secret.encode(), own.public.encode()),
        "listed": (listed.public.encode(), listed.secret.encode(), agent_key),
    }
    answered = {}
    for name, keys in attempts.items():
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        if keys is not None:
            dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = keys
        dealer.connect(agents.endpoints["a"])
        dealer.send(encode_message(Observe(request="o")))
        answered[name] = bool(dealer.poll(1000))
        dealer.close()
    context.destroy(linger=0)
    assert answered == {"unlisted": False, "no curve": False, "wrong server": False, "listed": True}


def test_a_rotated_controller_key_counts_at_once_and_the_old_one_until_finished(agents: Bench) -> None:
    """After a rotation the controller still gets in; a key taken off the list is refused on its next connection."""
    rotate_key_pair(agents.keys, Role.CONTROLLER, "controller")
    assert agents.see().unreachable == ()
    public_path(agents.keys, Role.CONTROLLER, "controller").unlink()
    assert agents.see(1.0).unreachable == ("a", "b")


def test_a_flood_of_garbage_stops_no_agent(tmp_path: Path) -> None:
    """Malformed, huge, extra and too many frames: counted, dropped, and the agent still works."""
    with bench(tmp_path, {"a": ["a1"]}, messages_per_s=500.0, message_burst=1000) as agents:
        rng = random.Random(3)
        good = encode_message(Observe(request="o"))
        with AgentLinks(agents.endpoints, agents.keys) as links:
            raw = links._sockets["a"]
            raw.send(good)
            for number in range(100_000):
                data = bytearray(good if number % 2 else rng.randbytes(rng.randrange(60)))
                if data:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                if number % 1000 == 0:
                    raw.send_multipart([bytes(data), b"", b"more"])
                raw.send(bytes(data))
            raw.send(b"\1" * (MAX_MESSAGE_BYTES + 1))
        agents.until(lambda: agents.see(1.0).unreachable == (), 20, "the agent answers")
        with AgentLinks(agents.endpoints, agents.keys) as links:
            reports = [one for _, one in _ask(links, Observe(request="counted"))]
        assert reports[0].dropped_messages > 10_000
        assert agents.dispatch(plan({"one": 1}, ONE)).converged


def _ask(links: AgentLinks, message) -> list[tuple[str, Report | Outcome | JobResult]]:
    """Send until it can be sent, then return what comes back."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if links.send(links.agents[0], message):
            break
        time.sleep(0.05)
    while time.monotonic() < deadline:
        if answers := links.receive(0.2):
            return answers
    return []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_refuses_commands_and_keeps_engines(tmp_path: Path) -> None:
    """The journal's disk is full: nothing is started, the refusal says why, running engines stay; with room again the
    dispatch goes through.
    """
    state = tmp_path / "a"
    state.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(state)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode()[:100]}")
    try:
        with bench(tmp_path, {"a": ["a1", "a2"]}) as agents:
            assert agents.dispatch(plan({"one": 1}, ONE)).converged
            before = agents.engines()
            _fill(state / "ballast")
            full = agents.dispatch(plan({"one": 2}, ONE))
            assert not full.converged
            assert agents.engines() == before
            (state / "ballast").unlink()
            assert agents.dispatch(plan({"one": 2}, ONE)).converged
            assert before.items() <= agents.engines().items()
    finally:
        subprocess.run(["umount", str(state)], check=False)


def _fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as ballast:
        for size in (65536, 4096, 512, 1):
            try:
                while ballast.write(b"x" * size) == size:
                    pass
            except OSError:
                continue


@pytest.mark.parametrize(("code", "status"), [(0, "succeeded"), (3, "failed")])
def test_a_profiling_job_runs_its_command_and_returns_rows(tmp_path: Path, code: int, status: str) -> None:
    """PROFILE runs the configured child process with the request and brings back what it wrote, or that it failed."""
    script = f"import sys; open(sys.argv[2], 'w').write(open(sys.argv[1]).read().upper()); sys.exit({code})"
    command = [sys.executable, "-c", script, "{request}", "{output}"]
    with (
        bench(tmp_path, {"a": ["a1"]}, profile_command=command) as agents,
        AgentLinks(agents.endpoints, agents.keys) as links,
    ):
        incarnation = _ask(links, Observe(request="o"))[0][1].incarnation
        job = Profile(job="j1", request='[{"layers": 2}]', timeout_s=30.0)
        fields = {"id": "p1", "epoch": 1, "round": 0, "owner": "k", "incarnation": incarnation, "node": "a1"}
        (_, outcome) = _ask(links, CommandMessage(**fields, action=job))[0]
        assert outcome.status is OutcomeStatus.DONE
        agents.until(lambda: agents.see().nodes["a1"].state is SlotState.EMPTY, 20, "the job ends")
        (_, result) = _ask(links, FetchJob(request="f", job="j1"))[0]
        assert (result.status, result.rows) == (status, '[{"LAYERS": 2}]')
        (_, unknown) = _ask(links, FetchJob(request="f", job="other"))[0]
        assert unknown.status == "unknown"


def test_clocks_that_jump_change_nothing(tmp_path: Path) -> None:
    """An agent in a time namespace of another century works with ours: nothing in the protocol compares clocks."""
    probe = ["unshare", "--time", "--boottime", "1000000", "--monotonic", "1000000", "true"]
    if os.geteuid() != 0 or subprocess.run(probe, check=False, capture_output=True).returncode != 0:
        pytest.skip("no time namespaces here")
    made = Bench(root=tmp_path, nodes={"a": ["a1"]})
    made.prepare()
    try:
        prefix = ["unshare", "--time", "--boottime", "1000000", "--monotonic", "1000000", "--fork", "--kill-child"]
        command = [*prefix, sys.executable, "-m", "coral_tasks.cli", "agent", "--config", str(tmp_path / "a.toml")]
        with (tmp_path / "a.log").open("ab") as log:
            made.processes["a"] = subprocess.Popen(command, stdout=log, stderr=log)
        made.until(lambda: made.see(1.0).unreachable == (), 30, "the agent answers")
        assert made.dispatch(plan({"one": 1}, ONE)).converged
        made.kill("a")
        made.start("a")
        made.until(lambda: states(made)["ready"] == 1, 20, "adopted under another clock")
        assert made.dispatch(plan({}, ONE)).converged
        assert made.engines() == {}
    finally:
        made.close()


def test_two_agents_cannot_share_a_journal(agents: Bench) -> None:
    """A second agent process on the same state folder ends with a fault instead of doing half the work."""
    command = [sys.executable, "-m", "coral_tasks.cli", "agent", "--config", str(agents.root / "a.toml")]
    port = free_ports(1)[0]
    done = subprocess.run([*command, "--bind", f"tcp://127.0.0.1:{port}"], check=False, capture_output=True, timeout=30)
    assert done.returncode == 3
    assert b"another agent uses" in done.stderr
