"""A real Prometheus on loopback for integration tests; skips where there is none and none can be unpacked."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


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


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_prometheus(folder: Path, targets: Sequence[str]) -> Iterator[str]:
    """Address of a server that scrapes ``targets`` (host:port) every second, and is gone after the block."""
    program = prometheus_binary(folder)
    config = folder / "prometheus.yml"
    listed = ", ".join(f"'{name}'" for name in targets)
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: [{listed}]}}]}}]\n"
    )
    port = free_port()
    command = [str(program), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_ready(address, process)
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
