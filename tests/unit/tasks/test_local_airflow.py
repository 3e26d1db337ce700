"""Airflow on one machine: loopback only, secrets private, a taken port is said plainly."""

from __future__ import annotations

import socket
import stat

import pytest

from coral_tasks.domain.errors import Unavailable
from coral_tasks.tasks.local_airflow import airflow_environment, require_free_port


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
