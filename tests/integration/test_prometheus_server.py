"""Demand from a real Prometheus server that scrapes a small exporter with vLLM's metric names."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

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


def prometheus_binary(folder: Path) -> Path:
    """The server's program: installed, or unpacked from Debian's package; skips where there is neither."""
    found = shutil.which("prometheus")
    if found:
        return Path(found)
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip("no Prometheus here, and no Debian package tools to fetch it with")
    fetched = subprocess.run(
        ["apt-get", "download", "prometheus"], cwd=folder, capture_output=True, timeout=60, check=False
    )
    packages = list(folder.glob("prometheus_*.deb"))
    if fetched.returncode or not packages:
        pytest.skip(f"Debian's Prometheus package cannot be fetched: {fetched.stderr.decode()[-200:]}")
    subprocess.run(["dpkg", "-x", str(packages[0]), str(folder)], check=True, timeout=60)
    return folder / "usr/bin/prometheus"


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


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    folder = tmp_path_factory.mktemp("prometheus")
    program = prometheus_binary(folder)
    targets = ", ".join(f"'{name}'" for name in exporters)
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: [{targets}]}}]}}]\n"
    )
    port = free_port()
    command = [str(program), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_ready(address, process)
        # two whole five-second intervals with samples throughout
        time.sleep(16)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=20)


def wait_ready(address: str, process: subprocess.Popen[bytes]) -> None:
    """Until the server answers; fails after half a minute."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        assert process.poll() is None, "Prometheus ended"
        try:
            with urllib.request.urlopen(f"{address}/-/ready", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail("Prometheus was not ready in 30 s")


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
    with pytest.raises(SourceFault, match=r"1 of 2 instances.*none from 127\.0\.0\.1:1.*not zero demand"):
        source(server, targets)(datetime.now(UTC))


def test_a_wrong_query_is_a_fault_with_the_servers_words(server: str, exporters: list[str]) -> None:
    """A refusal by the server is passed on, not taken for an empty answer."""
    targets = (MetricsTarget(instance=exporters[0], model=ModelId("phi-4-14b"), phase=Phase.DECODE),)
    with pytest.raises(SourceFault, match="HTTP 400"):
        source(server, targets)._query("sum(", time.time())
