"""Demand read back from a real Prometheus that scrapes the engines of real agents is what was sent to them."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "protocol"))
from agent_bench import Bench, bench
from fleet_builders import plan, template
from prometheus_bench import running_prometheus

from coral_tasks.dispatch.inventory import write_endpoints
from coral_tasks.domain.errors import SourceFault
from coral_tasks.ingestion.batch import SourceBatch
from coral_tasks.settings import Settings
from coral_tasks.tasks.sources import configured_source
from data_contracts.contract import GateContext
from data_contracts.gate import check_table
from data_contracts.registry import contract_of

pytestmark = pytest.mark.integration

INTERVAL_S = 10.0
PROMPT, OUTPUT = 150, 30
ONE = template("one", model="phi-4-14b", throughput=1000.0)


class Clients(threading.Thread):
    """Sends a request to each engine in turn, eight a second; when each was sent."""

    def __init__(self, endpoints: list[str]) -> None:
        super().__init__(daemon=True)
        self.endpoints, self.sent_at, self.stop = endpoints, list[float](), False

    def run(self) -> None:
        while not self.stop:
            self._ask(self.endpoints[len(self.sent_at) % len(self.endpoints)])
            self.sent_at.append(time.time())
            time.sleep(0.125)

    @staticmethod
    def _ask(endpoint: str) -> None:
        connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=20)
        body = json.dumps({"model": "phi-4-14b", "prompt": [1] * PROMPT, "max_tokens": OUTPUT})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert connection.getresponse().status == 200
        connection.close()


def fetched(agents: Bench, address: str) -> tuple[SourceBatch, dict[str, Any]]:
    """The newest interval's batch and its only row after the gate."""
    named = {"demand": {"kind": "prometheus", "address": address, "interval_s": INTERVAL_S}}
    (agents.root / "sources.json").write_text(json.dumps(named))
    found = configured_source(Settings(home=agents.root, setup="core"), "demand")
    assert found is not None
    now = datetime.now(UTC)
    batch = found[0](now)
    outcome = check_table(contract_of("demand"), batch.raw(), GateContext(now=now))
    assert outcome.table is not None, [str(one) for one in outcome.report.findings]
    (row,) = outcome.table.to_pylist()
    return batch, row


def test_demand_read_back_is_what_was_sent_to_the_engines_that_run(tmp_path: Path) -> None:
    """Rate and lengths of one interval; a stopped engine's share stays, and silent agents are no zero demand."""
    with bench(tmp_path, {"a": ["a1", "a2"]}, time_scale=50.0) as agents:
        write_endpoints(agents.root / "agents.toml", agents.endpoints)
        assert agents.dispatch(plan({"one": 2}, ONE)).converged
        endpoints = sorted(agents.see().endpoints.values())
        with running_prometheus(agents.root, [urlsplit(one).netloc for one in endpoints]) as address:
            clients = Clients(endpoints)
            clients.start()
            # a whole interval of the clock's grid with samples throughout, the first of them before it begins
            end = ((time.time() + 4.0) // INTERVAL_S + 2) * INTERVAL_S
            time.sleep(end + 1.0 - time.time())
            clients.stop = True
            clients.join()
            batch, row = fetched(agents, address)
            start = row["interval_start"].timestamp()
            sent = sum(start <= at < start + INTERVAL_S for at in clients.sent_at)
            assert start == end - INTERVAL_S
            assert sent > 20
            # counters are seen once a second, and increase() extrapolates to the window's ends
            assert row["requests_per_s"] == pytest.approx(sent / INTERVAL_S, rel=0.25)
            assert row["mean_prompt_tokens"] == pytest.approx(PROMPT)
            assert row["mean_output_tokens"] == pytest.approx(OUTPUT)
            # in the buckets (100, 200] and (20, 50], 95 % of the way through
            assert row["p95_prompt_tokens"] == pytest.approx(195)
            assert row["p95_output_tokens"] == pytest.approx(48.5)
            assert (batch.completeness, batch.notes) == (1.0, ())
            assert agents.dispatch(plan({"one": 1}, ONE)).converged
            _, after = fetched(agents, address)
            if after["interval_start"] == row["interval_start"]:
                assert after["requests_per_s"] == pytest.approx(row["requests_per_s"])
            agents.kill("a")
            with pytest.raises(SourceFault, match="no answer from agents a"):
                fetched(agents, address)
