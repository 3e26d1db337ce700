"""Demand from a real Prometheus server that scrapes a small exporter with vLLM's metric names."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from prometheus_bench import running_prometheus

from coral_tasks.domain.errors import SourceFault
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import ModelId, Phase
from coral_tasks.ingestion.http import HttpLimits
from coral_tasks.ingestion.prometheus import MetricsTarget, PrometheusSource
from data_contracts.contract import GateContext
from data_contracts.gate import check_table
from data_contracts.registry import contract_of

pytestmark = pytest.mark.integration

RATE = 4.0
PROMPT, OUTPUT = 150.0, 30.0
SHAPE = RequestShape(mean_prompt_tokens=1, p95_prompt_tokens=1, mean_output_tokens=1, p95_output_tokens=1)


class Exporter(BaseHTTPRequestHandler):
    """Metrics of one engine whose requests finish at a steady rate since ``born``."""

    born = 0.0

    def do_GET(self) -> None:
        done = int((time.monotonic() - self.born) * RATE)
        labels = 'model_name="microsoft/phi-4"'
        lines = [f"vllm:num_requests_running{{{labels}}} 2", f"vllm:num_requests_waiting{{{labels}}} 0"]
        lines += [f'vllm:request_success_total{{{labels},finished_reason="stop"}} {done}']
        for metric, value in (("request_prompt_tokens", PROMPT), ("request_generation_tokens", OUTPUT)):
            lines += [
                f'vllm:{metric}_bucket{{{labels},le="{bound}"}} {done if value <= float(bound) else 0}'
                for bound in ("20", "100", "200", "+Inf")
            ]
            lines += [f"vllm:{metric}_sum{{{labels}}} {done * value}", f"vllm:{metric}_count{{{labels}}} {done}"]
        body = ("\n".join(lines) + "\n").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def exporters() -> Iterator[list[str]]:
    """Addresses of three engines."""
    Exporter.born = time.monotonic()
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Exporter) for _ in range(3)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"127.0.0.1:{server.server_port}" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def server(exporters: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running Prometheus that has scraped the engines for a while."""
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), exporters) as address:
        # two whole five-second intervals with samples throughout
        time.sleep(16)
        yield address


def source(address: str, targets: tuple[MetricsTarget, ...]) -> PrometheusSource:
    """Demand in intervals of five seconds."""
    return PrometheusSource(
        address=address,
        targets=targets,
        model_names={"microsoft/phi-4": ModelId("phi-4-14b")},
        shapes={"phi-4-14b": SHAPE},
        interval_s=5.0,
        max_sample_age_s=5.0,
        limits=HttpLimits(try_s=10, total_s=20),
    )


def test_rates_and_lengths_come_from_running_decode_instances(server: str, exporters: list[str]) -> None:
    """Requests are counted once (decode side), lengths are the histograms', and foreign instances are left out."""
    targets = (
        MetricsTarget(instance=exporters[0], model=ModelId("phi-4-14b"), phase=Phase.DECODE),
        MetricsTarget(instance=exporters[1], model=ModelId("phi-4-14b"), phase=Phase.PREFILL),
    )
    now = datetime.now(UTC)
    batch = source(server, targets)(now)
    outcome = check_table(contract_of("demand"), batch.raw(), GateContext(now=now))
    assert outcome.table is not None, [str(finding) for finding in outcome.report.findings]
    (row,) = outcome.table.to_pylist()
    # counters rise in whole requests and increase() extrapolates to the window's ends
    assert row["requests_per_s"] == pytest.approx(RATE, rel=0.3)
    assert row["mean_prompt_tokens"] == pytest.approx(PROMPT)
    assert row["mean_output_tokens"] == pytest.approx(OUTPUT)
    # all prompts lie in the bucket (100, 200]: 95 % of the way through; outputs in (20, 100]
    assert row["p95_prompt_tokens"] == pytest.approx(195)
    assert row["p95_output_tokens"] == pytest.approx(96)
    assert row["model"] == "phi-4-14b"
    assert batch.completeness == 1.0
    assert any("no longer run" in note and exporters[2] in note for note in batch.notes)


def test_an_instance_without_metrics_is_an_outage_and_not_zero(server: str, exporters: list[str]) -> None:
    """If half of the running instances give no metrics, there is no demand table at all."""
    targets = (
        MetricsTarget(instance=exporters[0], model=ModelId("phi-4-14b"), phase=Phase.DECODE),
        MetricsTarget(instance="127.0.0.1:1", model=ModelId("phi-4-14b"), phase=Phase.DECODE),
    )
    with pytest.raises(SourceFault, match=r"1 of 2 instances.* from 127\.0\.0\.1:1.*not zero demand"):
        source(server, targets)(datetime.now(UTC))


def test_a_wrong_query_is_a_fault_with_the_servers_words(server: str, exporters: list[str]) -> None:
    """A refusal by the server is passed on, not taken for an empty answer."""
    targets = (MetricsTarget(instance=exporters[0], model=ModelId("phi-4-14b"), phase=Phase.DECODE),)
    with pytest.raises(SourceFault, match="HTTP 400"):
        source(server, targets)._query("sum(", time.time())
