"""Requests through a real LiteLLM proxy that reads the published configuration, while the fleet changes."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "protocol"))
from agent_bench import bench
from fleet_builders import plan, template

from coral_tasks.dispatch.routing import read_routing

PROGRAM = Path(__file__).parents[2] / ".venv-gateway" / "bin" / "litellm"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PROGRAM.exists(), reason="needs LiteLLM in .venv-gateway"),
]
ONE = template("one", throughput=1000.0)
TWO = template("two", stages=(("L4x1",), ("L4x1",)), throughput=3000.0)
KEY = f"sk-{secrets.token_hex(16)}"  # LiteLLM does not start without one, or with a weak one


@contextmanager
def gateway(configuration: Path, log: Path) -> Iterator[str]:
    """Address of a LiteLLM proxy with this configuration."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    words = [str(PROGRAM), "--config", str(configuration), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("ab") as sink:
        process = subprocess.Popen([*words, "--telemetry", "False"], stdout=sink, stderr=sink, env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_up(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def wait_until_up(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health/liveliness", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text(encoding="utf-8")[-2000:])


def ask(address: str) -> str:
    """The instance that answered a chat request with three tokens."""
    body = {"model": "m", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 3}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 3
        return answer.headers["x-litellm-model-id"]


def keep_asking(address: str, seen: Counter[str], failures: list[str], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            seen[ask(address)] += 1
        except (OSError, AssertionError, urllib.error.HTTPError) as error:
            failures.append(repr(error))


def test_litellm_takes_the_published_configuration_and_loses_nothing(tmp_path: Path) -> None:
    """Shares match the weights 1 : 1 : 3 within four standard errors; while an instance is drained and stopped no
    request fails, although LiteLLM still has the table from before, nor where it lists four times the dead weight of
    the living; started anew it uses only the instances left.
    """
    with bench(tmp_path, {"a": ["a1", "a2"], "b": ["b1", "b2"]}, time_scale=5.0) as agents:
        assert agents.dispatch(plan({"one": 2, "two": 1}, ONE, TWO)).converged
        table, configuration = tmp_path / "routing" / "routing.json", tmp_path / "routing" / "litellm.yaml"
        before = read_routing(table).routes
        with gateway(configuration, tmp_path / "gateway.log") as address:
            seen = Counter(ask(address) for _ in range(300))
            for route in before:
                share = route.weight / 5000.0
                assert seen[route.instance] / 300 == pytest.approx(share, abs=4 * (share * (1 - share) / 300) ** 0.5)
            during, failures, stop = Counter[str](), list[str](), threading.Event()
            clients = [threading.Thread(target=keep_asking, args=(address, during, failures, stop)) for _ in range(3)]
            for client in clients:
                client.start()
            shrunk = agents.dispatch(plan({"one": 1, "two": 1}, ONE, TWO))
            time.sleep(2.0)
            stop.set()
            for client in clients:
                client.join()
            assert shrunk.converged, shrunk.problems
            assert failures == []
            assert during.total() > 20
            assert agents.dispatch(plan({"one": 1}, ONE)).converged  # of weights 1 : 1 : 3 only one instance is left
            left = {route.instance for route in read_routing(table).routes}
            assert {ask(address) for _ in range(60)} == left
            assert len(left) == 1
        assert agents.dispatch(plan({"one": 1, "two": 1}, ONE, TWO)).converged
        left = {route.instance for route in read_routing(table).routes}
        assert len(left) == 2
        with gateway(configuration, tmp_path / "gateway.log") as address:
            assert {ask(address) for _ in range(60)} == left
