"""Requests through the published routing table while transitions run, and provisioning in the loop."""

from __future__ import annotations

import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "protocol"))
from agent_bench import Bench, bench
from fleet_builders import REGION, node, plan, template

from coral_tasks.cli import app
from coral_tasks.dispatch.inventory import write_endpoints
from coral_tasks.dispatch.routing import read_routing
from coral_tasks.domain.errors import Unavailable
from coral_tasks.domain.names import Market, NodeConfigurationId, NodeId
from coral_tasks.domain.transition import NodeRequest, ProvisionedNode, StepKind
from coral_tasks.tasks.dispatching import write_plan

pytestmark = [pytest.mark.integration]
ONE = template("one", throughput=1000.0)
TWO = template("two", stages=(("L4x1",), ("L4x1",)), throughput=3000.0)
POOL = (REGION, NodeConfigurationId("L4x1"), Market.ON_DEMAND)


class Traffic:
    """Clients that read the table as a gateway does, every half second, and pick instances by weight."""

    def __init__(self, table: Path, seed: int) -> None:
        self.table, self.rng = table, random.Random(seed)
        self.sent: Counter[str] = Counter()
        self.failures: list[str] = []
        self.stop = False
        self.threads = [threading.Thread(target=self._work, args=(random.Random(seed + n),)) for n in range(4)]

    def _work(self, rng: random.Random) -> None:
        routes, read_at = read_routing(self.table).routes, time.monotonic()
        while not self.stop:
            if time.monotonic() - read_at > 0.1:
                routes, read_at = read_routing(self.table).routes, time.monotonic()
            route = rng.choices(routes, [one.weight for one in routes])[0]
            self.sent[route.instance] += 1
            try:
                self._ask(route.endpoint)
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.failures.append(f"{route.instance}: {error!r}")

    @staticmethod
    def _ask(endpoint: str) -> None:
        connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=20)
        body = json.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": 3})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 3
        connection.close()

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop = True
        for thread in self.threads:
            thread.join()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Bench]:
    """Two agents with three nodes each; simulated engines answer 5 times faster."""
    with bench(tmp_path, {"a": ["a1", "a2", "a3"], "b": ["b1", "b2", "b3"]}, time_scale=5.0) as made:
        yield made


def test_no_request_fails_while_the_fleet_changes_shape(agents: Bench) -> None:
    """Traffic runs through three transitions (grow, change templates, shrink); every request is answered."""
    assert agents.dispatch(plan({"one": 2}, ONE, TWO)).converged
    with Traffic(agents.root / "routing" / "routing.json", 1) as traffic:
        for rows in ({"one": 2, "two": 1}, {"one": 1, "two": 2}, {"two": 1}):
            result = agents.dispatch(plan(rows, ONE, TWO))
            assert result.converged, result.problems
            assert result.dips == ()
            time.sleep(0.3)
    assert traffic.failures == []
    assert traffic.sent.total() > 50


def test_a_dry_run_draws_the_steps_and_does_nothing(agents: Bench) -> None:
    """``coral dispatch --dry-run --picture`` lists and draws what a dispatch would do; no engine starts."""
    write_plan(agents.root / "plan.json", plan({"one": 1, "two": 1}, ONE, TWO))
    write_endpoints(agents.root / "agents.toml", agents.endpoints)
    words = ["dispatch", "--plan", str(agents.root / "plan.json"), "--agents", str(agents.root / "agents.toml")]
    drawn = agents.root / "drawn" / "steps.html"
    words += ["--keys", str(agents.keys), "--dry-run", "--picture", str(drawn)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "wait_ready" in result.output
    html = drawn.read_text(encoding="utf-8")
    assert "stage 2 of 2" in html
    assert "3 stay free" in html
    assert agents.engines() == {}


def test_shares_match_the_weights(agents: Bench) -> None:
    """Two instances of 1000 and one of 3000: shares of 1/5, 1/5 and 3/5 within four standard errors."""
    assert agents.dispatch(plan({"one": 2, "two": 1}, ONE, TWO)).converged
    table = agents.root / "routing" / "routing.json"
    with Traffic(table, 2) as traffic:
        deadline = time.monotonic() + 30
        while traffic.sent.total() < 400 and time.monotonic() < deadline:
            time.sleep(0.1)
    assert traffic.failures == []
    total = traffic.sent.total()
    for route in read_routing(table).routes:
        share = route.weight / 5000.0
        error = (share * (1 - share) / total) ** 0.5
        assert traffic.sent[route.instance] / total == pytest.approx(share, abs=4 * error)


class LateMachine:
    """A provisioner whose machines are agents of the bench that start when asked for."""

    agent_key = ""

    def __init__(self, agents: Bench, *, stock: int) -> None:
        self.agents, self.stock, self.asked = agents, stock, []
        self.ours: dict[str, str] = {}
        self.notices: frozenset[NodeId] = frozenset()

    def obtainable(self):
        return {POOL: 2 - len(self.ours)}

    def provision(self, request: NodeRequest) -> tuple[ProvisionedNode, ...]:
        self.asked.append(request)
        if self.stock < request.count:
            raise Unavailable("InsufficientInstanceCapacity")
        self.stock -= request.count
        self.agents.start("b1")
        self.ours = {"b1": "b1"}
        return (ProvisionedNode(node=node("b1"), machine="i-1", address="127.0.0.1"),)

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        for name in nodes:
            self.agents.processes[self.ours.pop(name)].terminate()

    def releasable(self) -> frozenset[NodeId]:
        return frozenset(NodeId(name) for name in self.ours)

    def booting(self) -> frozenset[NodeId]:
        return frozenset()

    def interrupted(self) -> frozenset[NodeId]:
        return self.notices

    def endpoints(self) -> dict[str, str]:
        return {"b1": f"tcp://127.0.0.1:{self.agents.ports['b1']}"} if self.ours else {}


def only_a(agents: Bench) -> None:
    """Take agent b1 out of the inventory: it exists only once it has been provisioned."""
    agents.processes["b1"].terminate()
    agents.processes["b1"].wait(20)
    agents.hidden = {"b1"}


def test_a_missing_node_is_provisioned_used_and_released(tmp_path: Path) -> None:
    """A plan that needs one more node gets it, waits for its agent, runs on it, and gives it back once drained."""
    with bench(tmp_path, {"a": ["a1"], "b1": ["b1"]}) as agents:
        only_a(agents)
        cloud = LateMachine(agents, stock=1)
        grown = agents.dispatch(plan({"one": 2}, ONE), provisioner=cloud)
        assert grown.converged, grown.problems
        assert len(cloud.asked) == 1
        assert {one.nodes for one in grown.fleet.instances} == {("a1",), ("b1",)}
        shrunk = agents.dispatch(plan({"one": 1}, ONE), provisioner=cloud)
        kinds = [step.kind for step in shrunk.steps_done]
        if cloud.ours:
            assert {one.nodes for one in shrunk.fleet.instances} == {("b1",)}
        else:
            assert kinds.index(StepKind.STOP) < kinds.index(StepKind.RELEASE)
            assert shrunk.converged, shrunk.problems


def test_missing_capacity_ends_the_dispatch_before_anything_changed(tmp_path: Path) -> None:
    """The cloud has none: the result names the shortage for one more solve, and what runs is left as it was."""
    with bench(tmp_path, {"a": ["a1"], "b1": ["b1"]}) as agents:
        only_a(agents)
        assert agents.dispatch(plan({"one": 1}, ONE)).converged
        before = agents.engines()
        short = agents.dispatch(plan({"two": 1}, ONE, TWO), provisioner=LateMachine(agents, stock=0))
        assert not short.converged
        assert [one.configuration for one in short.shortage] == ["L4x1"]
        assert any("InsufficientInstanceCapacity" in text for text in short.problems)
        assert agents.engines() == before


def test_a_spot_notice_moves_the_instance_before_the_machine_goes(tmp_path: Path) -> None:
    """A node is about to be taken back: the same plan starts a replacement, then drains the old instance, no dip."""
    with bench(tmp_path, {"a": ["a1"], "b1": ["b1"]}) as agents:
        cloud = LateMachine(agents, stock=0)
        first = agents.dispatch(plan({"one": 1}, ONE), provisioner=cloud)
        assert first.converged
        (before,) = first.fleet.instances
        cloud.notices = frozenset(before.nodes)
        moved = agents.dispatch(plan({"one": 1}, ONE), provisioner=cloud)
        assert (moved.converged, moved.dips) == (True, ())
        (after,) = moved.fleet.instances
        assert set(after.nodes).isdisjoint(before.nodes)
        kinds = [step.kind for step in moved.steps_done]
        assert kinds.index(StepKind.START) < kinds.index(StepKind.DRAIN)
