"""Airflow on one machine: loopback only, secrets private, a taken port is said plainly, one run at a time."""

from __future__ import annotations

import signal
import socket
import stat
import subprocess
import sys

import pytest

from coral_tasks.domain.errors import Unavailable
from coral_tasks.tasks.local_airflow import airflow_environment, exclusive, require_free_port


def test_every_server_address_is_loopback(tmp_path) -> None:
    """Nothing in the environment lets a server bind another interface."""
    environment = airflow_environment(tmp_path, port=9999)
    hosts = {name: value for name, value in environment.items() if name.startswith("AIRFLOW__") and "HOST" in name}
    assert hosts
    assert set(hosts.values()) == {"127.0.0.1"}
    assert environment["AIRFLOW__API__BASE_URL"] == "http://127.0.0.1:9999"


def test_the_signing_secret_is_private_and_stays(tmp_path) -> None:
    """The secret is long, readable by its owner only, and the same at the second start."""
    first = airflow_environment(tmp_path)["AIRFLOW__API_AUTH__JWT_SECRET"]
    assert len(first) >= 64
    assert stat.S_IMODE((tmp_path / "airflow" / "jwt_secret").stat().st_mode) == 0o600
    assert airflow_environment(tmp_path)["AIRFLOW__API_AUTH__JWT_SECRET"] == first


def test_a_port_in_use_is_named() -> None:
    """The message names port and purpose."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"port {port} .* for the page, is in use"):
            require_free_port(port, "the page")
    require_free_port(port, "the page")


def test_a_second_run_in_the_same_home_is_refused(tmp_path) -> None:
    """While one run holds the home another is told so at once; afterwards it may."""
    with exclusive(tmp_path), pytest.raises(Unavailable, match=f"another run works in {tmp_path}"), exclusive(tmp_path):
        pass
    with exclusive(tmp_path):
        pass


CHILD = """
import os, signal, sys, time
from coral_tasks.tasks.local_airflow import end_with_parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)
end_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(100)
"""
PARENT = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}, str(os.getpid())])"


def test_a_killed_run_leaves_no_dag_run_behind() -> None:
    """The process that runs the DAGs ends with the one that started it, even if that is killed."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) != parent.pid
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == b""  # comes only once nobody holds the pipe's other end: the child ended


def test_a_child_whose_parent_ended_before_it_could_ask_ends_itself() -> None:
    """Asking too late must not leave the child running."""
    done = subprocess.run([sys.executable, "-c", CHILD, "1"], stdout=subprocess.PIPE, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""
